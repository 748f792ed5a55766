"""A request on its way: what was asked, who waits for it, and how it ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from transferd.client.seconds import as_seconds
from transferd.errors import RequestError, TransferError
from transferd.tasks import ErrorInfo, Status, Task, TaskResult
from transferd.wire import protocol as wire

if TYPE_CHECKING:
    from transferd.client.session import Link


class Pending:
    """One request that waits for its end. `future` is what the caller holds; it may cancel it at any time."""

    __slots__ = ("ack", "body", "deadline", "future")

    def __init__(self, body: wire.Body, future: asyncio.Future[Any], deadline: float, *, ack: bool = False) -> None:
        self.body = body
        self.future = future
        self.deadline = deadline
        self.ack = ack

    def accepted(self) -> None:
        """The daemon has admitted it; the answer follows."""

    def answer(self, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: TransferError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # somebody who no longer waits need not hear of it


class PendingTask(Pending):
    """A task always ends in a TaskResult. admitted: done when the task is admitted or has ended; None without ack.

    Raises Closed when the link is not open.
    """

    __slots__ = ("admitted", "link")
    body: Task

    def __init__(self, link: Link, task: Task, deadline: float, *, ack: bool) -> None:
        if type(task.timeout) not in (float, int) and (seconds := as_seconds(task.timeout)) is not None:
            task = msgspec.structs.replace(task, timeout=seconds)
        super().__init__(task, link.new_future(), deadline, ack=ack)
        self.link = link
        self.admitted: asyncio.Future[None] | None = link.new_future() if ack else None

    def accepted(self) -> None:
        if self.admitted is not None and not self.admitted.done():
            self.admitted.set_result(None)

    def answer(self, value: TaskResult) -> None:
        super().answer(value)
        self.accepted()

    def fail(self, error: TransferError) -> None:
        result = TaskResult(
            task_id=self.body.task_id,
            status=Status.REJECTED if isinstance(error, RequestError) else Status.FAILED,
            error=ErrorInfo(error.reason, str(error)),
            generation=self.link.session.generation,
            boot_id=self.link.session.boot_id,
        )
        self.answer(result)
