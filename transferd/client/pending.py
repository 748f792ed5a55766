"""A pending request: its body, the future of its caller, and how it ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from transferd.client.seconds import as_seconds
from transferd.errors import RequestError, TransferError
from transferd.tasks import ErrorInfo, Status, Task, TaskResult
from transferd.wire import protocol as wire

if TYPE_CHECKING:
    from transferd.client.session import Conversation


class Pending:
    """One pending request. The caller holds `future` and may cancel it at any time."""

    __slots__ = ("ack", "body", "deadline", "future")

    def __init__(self, body: wire.Body, future: asyncio.Future[Any], deadline: float, *, ack: bool = False) -> None:
        self.body = body
        self.future = future
        self.deadline = deadline
        self.ack = ack

    def accepted(self) -> None:
        """The daemon has admitted the task; the answer follows."""

    def answer(self, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: TransferError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # mark it retrieved: the caller may have stopped waiting


class PendingTask(Pending):
    """A pending task; it always ends in a TaskResult.

    admitted: done once the task is admitted or has ended; None without ack.
    """

    __slots__ = ("admitted", "conversation")
    body: Task

    def __init__(
        self,
        conversation: Conversation,
        task: Task,
        future: asyncio.Future[Any],
        deadline: float,
        admitted: asyncio.Future[None] | None,
    ) -> None:
        if type(task.timeout) not in (float, int) and (seconds := as_seconds(task.timeout)) is not None:
            task = msgspec.structs.replace(task, timeout=seconds)
        super().__init__(task, future, deadline, ack=admitted is not None)
        self.conversation = conversation
        self.admitted = admitted

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
            generation=self.conversation.session.generation,
            boot_id=self.conversation.session.boot_id,
        )
        self.answer(result)
