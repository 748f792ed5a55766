"""Names that Python 3.10 lacks, for every other module. From 3.12 on these are the standard library's own.

On 3.10 a timer tells a caller's cancellation from its own only in a task that counts its cancellations, as every task
does from 3.11 on. The loops of `Runner` have such tasks, and any other loop has them after `count_cancellations`. Other
tasks (an engine's own) lose a cancellation that comes in the same turn of the loop in which a timer ends.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from transferd.errors import RequestError

__all__ = [
    "UTC",
    "BaseExceptionGroup",
    "Runner",
    "Self",
    "StrEnum",
    "Task",
    "TaskGroup",
    "cancelled_from_outside",
    "convert",
    "converted",
    "count_cancellations",
    "timeout",
    "timeout_at",
    "tomllib",
    "uncancel",
    "wait_for",
]

T = TypeVar("T")

if sys.version_info >= (3, 11):
    from asyncio import Runner, Task, TaskGroup, timeout, timeout_at
    from builtins import BaseExceptionGroup
    from datetime import UTC
    from enum import StrEnum
    from typing import Self

    import tomllib

    def count_cancellations(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
        """Make the tasks of a new loop count their cancellations. Returns the loop."""
        return loop

    def cancelled_from_outside(task: asyncio.Task[object]) -> bool:
        """Whether the task itself was cancelled. False if a CancelledError came only from a future that it awaited."""
        return task.cancelling() > 0

    def uncancel(task: asyncio.Task[object]) -> None:
        """Let a task go on that has caught its cancellation."""
        task.uncancel()

else:
    import enum
    from datetime import timezone
    from types import TracebackType

    import tomli as tomllib
    from exceptiongroup import BaseExceptionGroup
    from taskgroup import Runner, TaskGroup
    from taskgroup.tasks import Task, task_factory
    from typing_extensions import Self

    UTC = timezone.utc

    class StrEnum(str, enum.Enum):
        """An enum whose members are strings, also when they are formatted."""

        __str__ = str.__str__

    def count_cancellations(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
        """Make the tasks of a new loop count their cancellations. Returns the loop."""
        loop.set_task_factory(task_factory)
        return loop

    def cancelled_from_outside(task: asyncio.Task[object]) -> bool:
        """Whether the task itself was cancelled. Always False for a task that does not count."""
        return isinstance(task, Task) and task.cancelling() > 0

    def uncancel(task: asyncio.Task[object]) -> None:
        """Let a task go on that has caught its cancellation."""
        if isinstance(task, Task):
            task.uncancel()

    class timeout_at:  # noqa: N801 - asyncio's own name
        """Asyncio's: cancel what runs in the `async with` block at a time of the loop, and raise TimeoutError then."""

        def __init__(self, when: float | None) -> None:
            self._when = when
            self._expired = False
            self._handle: asyncio.Handle | None = None

        async def __aenter__(self) -> Self:
            task = asyncio.current_task()
            if task is None:
                raise RuntimeError("a timeout needs a task")
            self._task = task
            self._before = task.cancelling() if isinstance(task, Task) else 0
            if self._when is not None:
                loop = asyncio.get_running_loop()
                due = self._when <= loop.time()
                self._handle = loop.call_soon(self._expire) if due else loop.call_at(self._when, self._expire)
            return self

        def _expire(self) -> None:
            self._expired = True
            self._task.cancel()

        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            if self._handle is not None:
                self._handle.cancel()
            left = self._task.uncancel() if self._expired and isinstance(self._task, Task) else self._before
            if self._expired and left <= self._before and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def timeout(delay: float | None) -> timeout_at:
        """`timeout_at` in `delay` seconds from now; never if None."""
        return timeout_at(None if delay is None else asyncio.get_running_loop().time() + delay)


if sys.version_info >= (3, 12):
    from asyncio import wait_for
else:
    # The standard library's loses a cancellation that comes in the turn of the loop in which the result does.
    async def wait_for(awaitable: Awaitable[T], timeout: float | None) -> T:
        """The result of an awaitable, cancelled after `timeout` seconds. Raises the builtin TimeoutError then."""
        async with timeout_at(None if timeout is None else asyncio.get_running_loop().time() + timeout):
            return await awaitable


_known: set[Any] = set()
_first = threading.Lock()


def convert(data: Any, kind: type[T], *, dec_hook: Callable[[type, Any], Any] | None = None, strict: bool = True) -> T:
    """msgspec.convert, for any number of threads. Raises msgspec.ValidationError.

    msgspec publishes what it learns of a Struct before that is complete, so two first uses at the same moment end the
    process (0.22: SIGSEGV). Here one thread makes the first use, and the others wait for it.
    """
    if kind not in _known:
        with _first:
            msgspec.msgpack.Decoder(kind, dec_hook=dec_hook)
            _known.add(kind)
    return msgspec.convert(data, kind, dec_hook=dec_hook, strict=strict)


def converted(data: Any, kind: type[T], what: str, code: str = "bad_value") -> T:
    """`convert` for what a peer has sent. Raises RequestError: what is wrong with it, in the words `what`, and why."""
    try:
        return convert(data, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{what}: {error}", code=code) from None
