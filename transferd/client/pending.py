"""A pending request: its body, the future of its caller, and how it ends."""

from __future__ import annotations

import asyncio
import functools
import math
import numbers
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, Protocol

import msgspec

from transferd.client.settling import Asks, Push, Settling
from transferd.errors import (
    Closed,
    ConfigError,
    DaemonLost,
    DeviceLost,
    EngineGone,
    OutOfMemory,
    ProtocolError,
    RequestError,
    StorageError,
    StorageFull,
    StorageUnavailable,
    TierError,
    TransferError,
)
from transferd.runtime.aio import resolve
from transferd.tasks import ErrorInfo, Status, Task, TaskResult
from transferd.wire import protocol as wire

# Errors after which a task that was sent may still run. The daemon's `internal` and `out_of_memory` do not say how far
# it came.
UNKNOWN = frozenset({"daemon_lost", "no_answer", "closed", "internal", "identity_mismatch", OutOfMemory.code})


class Pending:
    """One pending request. The caller holds `future` and may cancel it at any time."""

    __slots__ = ("body", "complain", "deadline", "future", "push")
    admitted: asyncio.Future[None] | None = None  # of a task whose caller waits for that

    def __init__(
        self,
        body: wire.Body,
        future: asyncio.Future[Any],
        deadline: float,
        complain: Callable[[str], None] | None = None,
    ) -> None:
        """complain: of a repeated request, for which no caller waits: a refusal may be why the engine is not served."""
        self.body = body
        self.future = future
        self.deadline = deadline
        self.complain = complain
        self.push: Push | None = None  # None until it was sent

    def progressed(self, layers: int) -> None:
        """All blocks of the task have so many layers there."""

    def answer(self, value: Any) -> None:
        resolve(self.future, value)

    def fail(self, error: TransferError) -> None:
        if self.complain is not None and not isinstance(error, DaemonLost | Closed):
            self.complain(f"the daemon refused to repeat {type(self.body).__name__.lower()}: {error} ({error.reason})")
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # mark it retrieved: the caller may have stopped waiting


class TaskFuture(asyncio.Future[TaskResult]):
    """What a caller of `submit` waits for. A cancel withdraws the task, and takes effect once the task has ended.

    So a caller that is cancelled is not woken before that: to wake 10,000 of them takes a tenth of a second of the
    loop. A second cancel takes effect at once.
    """

    withdraw: Callable[[], None]
    withdrawn = False
    _why: Any = None

    def cancel(self, msg: Any = None) -> bool:
        if self.withdrawn or self.done():
            return super().cancel(msg)
        self.withdrawn, self._why = True, msg
        self.withdraw()
        return True

    def set_result(self, result: TaskResult) -> None:
        if self.withdrawn:
            super().cancel(self._why)
        else:
            super().set_result(result)


class Pushes(Asks, Protocol):
    """The conversation, as far as a task needs it."""

    settling: Settling
    pushes: dict[str, list[PendingTask]]  # that have not ended, by task_id

    def own_loop(self) -> asyncio.AbstractEventLoop: ...

    def cancel_soon(self, task_id: str) -> None: ...


class PendingTask(Pending):
    """A pending task; it always ends in a TaskResult.

    admitted: done once the task is admitted or has ended; None without ack.
    result: its end, also if the caller has cancelled the future.
    """

    __slots__ = ("_conversation", "_waiting", "admitted", "on_progress", "result")
    body: Task

    def __init__(
        self,
        task: Task,
        conversation: Pushes,
        deadline: float,
        *,
        ack: bool,
        on_progress: Callable[[int], object] | None = None,
    ) -> None:
        """A task that waits to be asked. ack: its caller waits until it is admitted. Raises Closed."""
        loop = conversation.own_loop()
        if type(task.timeout) not in (float, int) and (seconds := as_seconds(task.timeout)) is not None:
            task = msgspec.structs.replace(task, timeout=seconds)
        future: asyncio.Future[TaskResult]
        if ack:
            future, self.admitted = loop.create_future(), loop.create_future()
        else:
            future, self.admitted = TaskFuture(loop=loop), None
            future.withdraw = functools.partial(conversation.cancel_soon, task.task_id)
        super().__init__(task, future, deadline)
        self._conversation = conversation
        self.on_progress = on_progress
        self.result: TaskResult | None = None
        self._waiting = [] if self.admitted is None else [self.admitted]  # for its end
        conversation.pushes.setdefault(task.task_id, []).append(self)

    def ended(self) -> asyncio.Future[None]:
        """A future of the caller's own that is done once the task has ended."""
        future = self._conversation.own_loop().create_future()
        if self.result is None:
            self._waiting.append(future)
        else:
            future.set_result(None)
        return future

    def progressed(self, layers: int) -> None:
        if self.on_progress is not None:
            self.on_progress(layers)

    def answer(self, value: TaskResult) -> None:
        if not value.settled and self.push is not None:
            self._conversation.settling.gave_up(value.task_id, self.push)
        pushes = self._conversation.pushes[self.body.task_id]
        pushes.remove(self)
        if not pushes:
            del self._conversation.pushes[self.body.task_id]
        self.result = value
        if not self.future.done():  # as Pending does: two calls less for each task
            self.future.set_result(value)
        for future in self._waiting:
            resolve(future, None)

    def _known_settled(self, error: TransferError) -> bool:
        if self.push is None:  # nothing was sent, unless this id was pushed before
            return self.body.task_id not in self._conversation.settling
        return self.push.boot.over or error.reason not in UNKNOWN

    def fail(self, error: TransferError) -> None:
        last = self._conversation.session
        result = TaskResult(
            task_id=self.body.task_id,
            status=Status.REJECTED if isinstance(error, RequestError) else Status.FAILED,
            error=ErrorInfo(error.reason, str(error)),
            generation=last.generation,
            boot_id=last.boot_id,
            settled=self._known_settled(error),
        )
        self.answer(result)


def keys_list(keys: Iterable[str], name: str = "keys") -> list[str]:
    """The keys as a list. Raises RequestError for one text, which would be as many keys as it has characters."""
    if isinstance(keys, str | bytes):
        raise RequestError(f"{name} must be a list of keys, not {keys[:80]!r}", code="bad_value")
    return list(keys)


# These errors keep their type across the wire.
_KEPT = (
    *(ProtocolError, TierError, DeviceLost, EngineGone, OutOfMemory),
    *(StorageError, StorageFull, StorageUnavailable),
)
_BY_CODE: dict[str, type[TransferError]] = {kind.code: kind for kind in _KEPT}


def error_of(refused: wire.Refused) -> TransferError:
    """The error that a refusal stands for."""
    default = RequestError if refused.permanent else TransferError
    return _BY_CODE.get(refused.error.code, default)(refused.error.message, code=refused.error.code)


def changed_nothing(error: BaseException | None) -> bool:
    """Whether a request with this end had no effect: it was refused. After a lost answer nobody knows."""
    busy = isinstance(error, TransferError) and error.reason == "too_many_requests"
    return busy or isinstance(error, RequestError | TierError)


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


def after_waiting(result: TaskResult, endpoint: str, timeout: float | None, settled: bool) -> TaskResult:
    """The result after a wait to be settled: settled, or else failed, because its blocks cannot be used."""
    if settled:
        return msgspec.structs.replace(result, settled=True)
    why = "" if result.error is None else f" ({result.error.code}: {result.error.message})"
    after = "" if timeout is None else f"after {timeout:g} s "
    what = f"{endpoint}: {after}it is not known whether the daemon still touches the blocks{why}"
    return msgspec.structs.replace(result, status=Status.FAILED, block_ids=[], error=ErrorInfo("unsettled", what))


def seconds_of(task: Task) -> float:
    """The task's timeout; 0 for one that the daemon will reject."""
    timeout = task.timeout if type(task.timeout) is float else as_seconds(task.timeout) or 0.0
    return timeout if 0.0 < timeout < math.inf else 0.0
