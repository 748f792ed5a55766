"""A pending request: its body, the future of its caller, and how it ends."""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any

import msgspec

from transferd.client.settling import Push, Settling
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
        resolve(self.future, value)

    def fail(self, error: TransferError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # mark it retrieved: the caller may have stopped waiting


class Repeated(Pending):
    """A request that no caller waits for. A refusal is logged: it may be why the engine is not served."""

    __slots__ = ("_complain",)

    def __init__(
        self, body: wire.ControlRequest, future: asyncio.Future[Any], deadline: float, complain: Callable[[str], None]
    ) -> None:
        super().__init__(body, future, deadline)
        self._complain = complain

    def fail(self, error: TransferError) -> None:
        if not isinstance(error, DaemonLost | Closed):
            said = f"the daemon refused to repeat {type(self.body).__name__.lower()}: {error} ({error.reason})"
            self._complain(said)
        super().fail(error)


class TaskFuture(asyncio.Future[TaskResult]):
    """What a caller of `submit` waits for. A cancel withdraws the task, and takes effect once the task has ended.

    So a caller that is cancelled is not woken before that: to wake 10,000 of them takes a tenth of a second of the
    loop. A second cancel takes effect at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, withdraw: Callable[[], None]) -> None:
        super().__init__(loop=loop)
        self._withdraw = withdraw
        self.withdrawn = False
        self._why: Any = None

    def cancel(self, msg: Any = None) -> bool:
        if self.withdrawn or self.done():
            return super().cancel(msg)
        self.withdrawn, self._why = True, msg
        self._withdraw()
        return True

    def set_result(self, result: TaskResult) -> None:
        if self.withdrawn:
            super().cancel(self._why)
        else:
            super().set_result(result)


class PendingTask(Pending):
    """A pending task; it always ends in a TaskResult.

    admitted: done once the task is admitted or has ended; None without ack.
    result: its end, also if the caller has cancelled the future.
    """

    __slots__ = ("_last", "_new_future", "_settling", "_watching", "admitted", "on_progress", "result")
    body: Task

    def __init__(
        self,
        task: Task,
        future: asyncio.Future[TaskResult],
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
        super().__init__(task, future, deadline, ack=ack)
        self.admitted: asyncio.Future[None] | None = new_future() if ack else None
        self._new_future, self._settling, self._last = new_future, settling, last
        self.result: TaskResult | None = None
        self._watching: list[asyncio.Future[None]] = []
        self.on_progress: Callable[[int], object] = lambda _: None

    def ended(self) -> asyncio.Future[None]:
        """A future of the caller's own that is done once the task has ended."""
        future = self._new_future()
        if self.result is None:
            self._watching.append(future)
        else:
            future.set_result(None)
        return future

    def accepted(self) -> None:
        if self.admitted is not None:
            resolve(self.admitted, None)

    def progressed(self, layers: int) -> None:
        self.on_progress(layers)

    def answer(self, value: TaskResult) -> None:
        if not value.settled and self.push is not None:
            self._settling.gave_up(value.task_id, self.push)
        self.result = value
        if not self.future.done():  # as Pending does: two calls less for each task
            self.future.set_result(value)
        for future in self._watching:
            resolve(future, None)
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


class Outstanding:
    """The pending requests of a conversation, in the order of the calls, by number and by task."""

    def __init__(self) -> None:
        self._by_seq: dict[int, Pending] = {}
        self._pushes: dict[str, dict[int, PendingTask]] = {}  # by task_id, then by seq
        self.get = self._by_seq.get

    def __contains__(self, seq: int) -> bool:
        return seq in self._by_seq

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_seq)

    def items(self) -> list[tuple[int, Pending]]:
        return list(self._by_seq.items())

    def pushes(self, task_id: str) -> list[PendingTask]:
        """The pushes of this id."""
        return list(self._pushes.get(task_id, {}).values())

    def add(self, seq: int, pending: Pending) -> None:
        self._by_seq[seq] = pending
        if isinstance(pending, PendingTask):
            self._pushes.setdefault(pending.body.task_id, {})[seq] = pending

    def pop(self, seq: int) -> Pending | None:
        pending = self._by_seq.pop(seq, None)
        if pending is not None:
            self.ended(seq, pending)
        return pending

    def ended(self, seq: int, pending: Pending) -> None:
        """The caller ends it now. So long, the push of a task is known by its id."""
        if isinstance(pending, PendingTask):
            task_id = pending.body.task_id
            del self._pushes[task_id][seq]
            if not self._pushes[task_id]:
                del self._pushes[task_id]

    def pop_all(self) -> list[tuple[int, Pending]]:
        """Remove and return them. Call `ended` for each."""
        everything = self.items()
        self._by_seq.clear()
        return everything


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
