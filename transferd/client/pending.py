"""A pending request: its body, the future of its caller, and how it ends."""

from __future__ import annotations

import asyncio
import numbers
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec

from transferd.client.settling import Push, Settling
from transferd.errors import ConfigError, OutOfMemory, RequestError, TransferError
from transferd.tasks import ErrorInfo, Status, Task, TaskResult
from transferd.wire import protocol as wire

# Errors after which a task that was sent may still run. The daemon's `internal` and `out_of_memory` do not say how far
# it came.
UNKNOWN = frozenset({"daemon_lost", "no_answer", "closed", "internal", OutOfMemory.code})


class Pending:
    """One pending request. The caller holds `future` and may cancel it at any time."""

    __slots__ = ("ack", "body", "deadline", "future", "push")

    def __init__(self, body: wire.Body, future: asyncio.Future[Any], deadline: float, *, ack: bool = False) -> None:
        self.body = body
        self.future = future
        self.deadline = deadline
        self.ack = ack
        self.push: Push | None = None  # None until it was sent

    def accepted(self) -> None:
        """The daemon has admitted the task; the answer follows."""

    def progressed(self, layers: int) -> None:
        """All blocks of the task have so many layers there."""

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
    result: its end, also if the caller has cancelled the future.
    """

    __slots__ = ("_last", "_new_future", "_settling", "admitted", "on_progress", "result")
    body: Task

    def __init__(
        self,
        task: Task,
        new_future: Callable[[], asyncio.Future[Any]],
        deadline: float,
        *,
        ack: bool,
        settling: Settling,
        last: Callable[[], tuple[str, str]],
    ) -> None:
        """A task with its deadline.

        new_future: makes one for a caller; raises Closed.
        ack: say when the task is admitted.
        last: the generation and boot_id that the daemon named last, for a result that the client gives itself.
        """
        if type(task.timeout) not in (float, int) and (seconds := as_seconds(task.timeout)) is not None:
            task = msgspec.structs.replace(task, timeout=seconds)
        super().__init__(task, new_future(), deadline, ack=ack)
        self.admitted: asyncio.Future[None] | None = new_future() if ack else None
        self._new_future, self._settling, self._last = new_future, settling, last
        self.result: TaskResult | None = None
        self.on_progress: Callable[[int], object] = lambda _: None

    def ended(self) -> asyncio.Future[Any]:
        """A future that is done once the task has ended, even if the caller has cancelled its own."""
        if self.result is None and self.future.done():
            self.future = self._new_future()
        return self.future

    def accepted(self) -> None:
        if self.admitted is not None and not self.admitted.done():
            self.admitted.set_result(None)

    def progressed(self, layers: int) -> None:
        self.on_progress(layers)

    def answer(self, value: TaskResult) -> None:
        if not value.settled and self.push is not None:
            self._settling.gave_up(value.task_id, self.push)
        self.result = value
        super().answer(value)
        self.accepted()

    def _known_settled(self, error: TransferError) -> bool:
        if self.push is None:  # nothing was sent, unless this id was pushed before
            return self.body.task_id not in self._settling
        return self.push.boot.over or error.reason not in UNKNOWN

    def fail(self, error: TransferError) -> None:
        generation, boot_id = self._last()
        result = TaskResult(
            task_id=self.body.task_id,
            status=Status.REJECTED if isinstance(error, RequestError) else Status.FAILED,
            error=ErrorInfo(error.reason, str(error)),
            generation=generation,
            boot_id=boot_id,
            settled=self._known_settled(error),
        )
        self.answer(result)


def as_seconds(value: object) -> float | None:
    """Return the number as a float, or None if it is not a real number or too large. May be NaN or negative."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):
        return None


def seconds_to_wait(name: str, value: object) -> float:
    """Like `as_seconds`, but raise ConfigError for NaN and for anything that is not a number."""
    seconds = as_seconds(value)
    if seconds is None or seconds != seconds:
        raise ConfigError(name, "expected a number of seconds", value)
    return seconds
