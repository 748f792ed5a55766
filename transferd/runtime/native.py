"""Threads that never need the interpreter, and what they do: calls that an extension has prepared, without the GIL.

A thread of Python's that copies a block waits for the event loop before its copy and behind it, and the event loop
waits for it. These threads (_crew.c) take what waits, do it, and wake the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from transferd.errors import NoThreads

try:
    from transferd.runtime import _crew
except ImportError:  # the installation had no compiler; then no extension prepares calls
    NATIVE = False
else:
    NATIVE = True


LEAST_S = 0.05  # for threads that have nothing to do to end


class NativeCall:
    """A call that an extension has prepared: a function for Threads.run. Its extension has the results then.

    native: the capsule of a Native (_native.h), which owns what the call needs.
    threads: how many native ones do items of it, until none is left; set before it is given.
    calls: whether it calls Python functions. Then threads of Python's do it, one for each time it is given: native ones
        may have to wait for a processor, and all others would wait with them for the interpreter.
    """

    __slots__ = ("calls", "native", "threads")

    def __init__(self, native: Any, *, calls: bool = False) -> None:
        self.native = native
        self.threads = 1
        self.calls = calls

    @property
    def items(self) -> int:
        """How many items it has, done or not."""
        return _crew.items(self.native)

    @property
    def ended(self) -> int:
        """How many of them have been done."""
        return _crew.ended(self.native)

    def __call__(self) -> None:
        """Do all items that are left, in this thread."""
        self.go_on(bool)

    def go_on(self, give_way: Callable[[], bool]) -> bool:
        """Do items in this thread until none is left. Returns False as soon as `give_way` is True after an item."""
        try:
            while self.step():
                if give_way():
                    return False
            return True
        finally:
            _crew.leave(self.native)

    def step(self) -> bool:
        """Do the next item in this thread, if one is left. Returns whether more are left."""
        return _crew.step(self.native)


class Delivered(Protocol):
    """What waits for the end of a call."""

    what: object

    def get_loop(self) -> asyncio.AbstractEventLoop: ...

    def deliver(self) -> None:
        """On the loop: the call has ended."""


class NativeThreads:
    """A fixed number of threads, from the start to `close`. Used on the event loop."""

    def __init__(self, name: str, size: int, nice: int) -> None:
        """Start all of them. Raises NoThreads, and then none runs.

        nice: how far they stand back behind other threads where processors are short. No thread that holds the
            interpreter's lock could: all others would wait for it.
        """
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = -1
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._crew = _crew.start(size, self._wake, nice)
        except OSError as error:
            if self._wake >= 0:
                os.close(self._wake)
            what = "allow more (TasksMax= in the unit, pids.max of the cgroup, ulimit -u)"
            raise NoThreads(f"cannot start the threads {name}: {error.strerror}; {what}") from error

    def put(self, work: Delivered, call: NativeCall, owner: str) -> None:
        """Queue a call; owners take turns. `work.deliver` is called when it has ended."""
        loop = work.get_loop()
        if loop is not self._loop:
            loop.add_reader(self._wake, self._deliver)
            self._loop = loop
        _crew.put(self._crew, work, call.native, call.threads, hash(owner) & 0xFFFF_FFFF_FFFF_FFFF)

    def withdraw(self, work: Delivered) -> bool:
        """Whether no thread has taken this work; then none will."""
        return _crew.withdraw(self._crew, work)

    def _deliver(self) -> None:
        for work in _crew.finished(self._crew):
            with contextlib.suppress(RuntimeError):  # its loop is closed, so no caller is left
                work.deliver()

    def under_way(self) -> list[str]:
        """What runs now: thread, call, for how long."""
        now, running = time.monotonic(), _crew.running(self._crew)
        return [f"{self._name}-c{number}: {work.what}, {now - since:.1f} s" for number, work, since in running]

    def dismiss(self) -> list[Any]:
        """Accept nothing more, and let the threads end. Returns the works that no thread will begin."""
        return _crew.dismiss(self._crew)

    def join(self, within: float) -> None:
        """Wait for the threads, after `dismiss`. What hangs keeps its thread. Idempotent."""
        if self._wake < 0 or not _crew.join(self._crew, max(LEAST_S, within)):
            return
        self._deliver()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._wake)
        os.close(self._wake)
        self._wake = -1
