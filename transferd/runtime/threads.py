"""Every way to run work off the event loop: copies, checksums, system calls, calls into libraries.

The contract, which tests/runtime/test_threads_contract.py runs over the real threads and the simulated ones:

1. A function runs once or never. Refused, withdrawn or still waiting at close means never: whoever was told
   that it failed may use its memory again at once.
2. Its caller hears of it after its end. Cancelling withdraws a function that waits for a thread; once a thread
   has taken it, the cancellation is held back and raised when the function has ended.
3. All threads are started together by `open` (or by the first `run`), all or none. Later calls start no
   thread, so a host that has run out of threads changes nothing for a daemon that is up.
4. A thread lets go of the function, and of the memory it works on, before the result is known.
5. `close` returns in bounded time and names what still runs. Such a function keeps its thread, and its memory
   must not be freed before the process ends. Threads are daemons: none keeps a process from ending.

CPython's ThreadPoolExecutor breaks the first rule: it queues the function, then starts a thread, and raises when
that fails; the function runs later, in memory that belongs to somebody else by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from transferd.errors import Closed, NoThreads

S = TypeVar("S")
T = TypeVar("T")

CLOSE_S = 1.0  # that a close waits for what runs; callers have waited for their own work before
# What a daemon needs at the least: its copies, its storage, its log and dumps, and those of libzmq and libuv,
# which end the process when they cannot start a thread.
LEAST = 32


# Where the functions given to threads from this context are noted, for whoever may want to withdraw them.
noted: ContextVar[list[asyncio.Future[Any]] | None] = ContextVar("noted", default=None)


class Direction(enum.Enum):
    """Out of the device (stores) or into it (loads)."""

    OUT = "out"
    IN = "in"


class Threads(Protocol):
    """Runs plain functions away from the loop, under the module's contract.

    what: names the function in reports of what hangs; str() of it is taken only then.
    """

    def open(self) -> None:
        """Start the threads. Raises NoThreads; then none runs. Again: nothing."""

    def run(self, direction: Direction, function: Callable[[], T], what: object = None) -> asyncio.Future[T]:
        """The future of its end. Raises NoThreads or Closed; then the function never runs."""

    def under_way(self) -> list[str]:
        """What runs now: thread, what, for how long, and the line of code it is at."""

    def close(self, within: float = CLOSE_S) -> list[str]:
        """Take nothing more, withdraw what waits (`Closed`), wait for the rest. Returns what still runs."""


class Work(asyncio.Future[T]):
    """One function on its way through a thread; also the future of its end, made on the running loop."""

    def __init__(self, function: Callable[[], T], what: object = None) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.what = what or getattr(function, "__qualname__", None) or type(function).__name__
        self._function = [function]
        self._turn = [True]  # whoever pops it decides: a thread runs the function, or its caller withdraws it
        self._returned: list[T] = []
        self._raised: BaseException | None = None

    def cancel(self, msg: object = None) -> bool:
        """Withdraw the function. False once a thread has taken it; who awaits it is then cancelled at its end."""
        return self._take_turn() and super().cancel(msg)

    def refuse(self, error: Exception) -> None:
        """Withdraw the function with an error, unless a thread has taken it."""
        if self._take_turn():
            self._function.clear()
            self.set_exception(error)
            self.exception()  # somebody who has lost interest must not make asyncio log it

    def execute(self) -> bool:
        """In a thread: run the function, unless it was withdrawn. True: `deliver` comes next, on the loop."""
        if not self._take_turn():
            return False
        try:
            self._returned.append(self._function.pop()())  # no name for it: an error's traceback would keep it alive
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever gave the function
            self._raised = error
        self.what = None
        return True

    def deliver(self) -> None:
        """On the loop: tell the caller how it ended."""
        error, self._raised = self._raised, None
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(self._returned.pop())

    def deliver_from_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.get_loop().call_soon_threadsafe(self.deliver)

    def _take_turn(self) -> bool:
        try:
            return self._turn.pop()
        except IndexError:
            return False


class Crew:
    """A fixed number of threads that take functions first come, first served. Owns them until `close`.

    most_waiting: functions that may wait for a thread; None for any number.
    """

    def __init__(self, name: str, size: int, *, most_waiting: int | None = None) -> None:
        self.name = name
        self._size = size
        self._most_waiting = most_waiting
        self._queue: queue.SimpleQueue[Work[object] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: dict[str, tuple[object, float]] = {}  # by a thread's name: what, and since when
        self._closed = False

    def open(self) -> None:
        """Start every thread now. Raises NoThreads (then none runs) or Closed. Again: nothing."""
        if self._closed:
            raise Closed(f"{self.name}: these threads are closed")
        try:
            while len(self._threads) < self._size:
                self._threads.append(self._start(f"{self.name}-{len(self._threads)}"))
        except NoThreads:
            self._dismiss()
            self._threads.clear()
            raise

    def run(self, function: Callable[[], T], what: object = None) -> Work[T]:
        """The future of its end. Raises NoThreads, Closed, queue.Full; then the function never runs."""
        self.open()
        if self._most_waiting is not None and self._queue.qsize() >= self._most_waiting:
            raise queue.Full
        work = Work(function, what)
        if (notes := noted.get()) is not None:
            notes.append(work)
        self._queue.put(work)  # type: ignore[arg-type] # works of different types wait in one queue
        return work

    def under_way(self) -> list[str]:
        """What runs now: thread, what, for how long, and where in the code."""
        now, frames = time.monotonic(), sys._current_frames()  # noqa: SLF001 - the only way to ask
        idents = {thread.name: thread.ident for thread in self._threads}
        told = []
        for name, (what, since) in list(self._running.items()):
            frame = frames.get(idents.get(name) or 0)
            where = "" if frame is None else f" at {_line(traceback.extract_stack(frame, 1)[0])}"
            told.append(f"{name}: {what}, {now - since:.1f} s{where}")
        return told

    def close(self, within: float = CLOSE_S) -> list[str]:
        """Take nothing more, withdraw what waits, wait for what runs. Returns what still does. Idempotent."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting = self._queue.get_nowait()
                    if waiting is not None:
                        waiting.refuse(Closed(f"{self.name}: closed before its turn came"))
            self._dismiss()
        end = time.monotonic() + within
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return self.under_way()

    def _dismiss(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _start(self, name: str) -> threading.Thread:
        return start_thread(name, lambda: self._serve(name))

    def _serve(self, name: str) -> None:
        """A thread's life."""
        while (work := self._queue.get()) is not None:
            self._running[name] = work.what, time.monotonic()
            ended = work.execute()
            del self._running[name]
            if ended:
                work.deliver_from_thread()
            del work  # nothing of it is kept alive while the thread waits


class ThreadPools:
    """Threads as two crews, one per direction, so that a burst of stores never keeps a load waiting for a thread."""

    def __init__(self, threads_per_direction: int, *, name: str = "transferd") -> None:
        self._crews = {
            direction: self._crew(f"{name}-{direction.value}", threads_per_direction) for direction in Direction
        }

    def _crew(self, name: str, size: int) -> Crew:
        return Crew(name, size)

    def open(self) -> None:
        for crew in self._crews.values():
            crew.open()

    def run(self, direction: Direction, function: Callable[[], T], what: object = None) -> asyncio.Future[T]:
        return self._crews[direction].run(function, what)

    def under_way(self) -> list[str]:
        return [told for crew in self._crews.values() for told in crew.under_way()]

    def close(self, within: float = CLOSE_S) -> list[str]:
        end = time.monotonic() + within
        return [told for crew in self._crews.values() for told in crew.close(max(0.0, end - time.monotonic()))]


class Stripe(Generic[S, T]):
    """One thread's part of a batch: `effect` of each item. str() says what it does, and to which item just now."""

    def __init__(self, effect: Callable[[S], T], items: Sequence[S], name_of: Callable[[S], str] = str) -> None:
        self._effect = effect
        self._items = items
        self._name_of = name_of
        self._done: list[T] = []

    def __call__(self) -> list[T]:
        for item in self._items:
            self._done.append(self._effect(item))
        return self._done

    def __str__(self) -> str:
        item = self._items[min(len(self._done), len(self._items) - 1)]
        return f"{getattr(self._effect, '__name__', 'effect').strip('_')} {self._name_of(item)}"


def start_thread(name: str, target: Callable[[], object]) -> threading.Thread:
    """A running daemon thread. Raises NoThreads, and then `target` is never called."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        what = "allow more (TasksMax= in the unit, pids.max of the cgroup, ulimit -u)"
        raise NoThreads(f"cannot start the thread {name}: {error}; {what}") from error
    return thread


def require_threads(least: int = LEAST) -> None:
    """Make sure that so many threads can be started now, before a library that cannot say so needs one.

    Raises NoThreads.
    """
    over = threading.Event()
    probes: list[threading.Thread] = []
    try:
        for number in range(least):
            probes.append(start_thread(f"transferd-probe-{number}", over.wait))  # noqa: PERF401 - kept when one fails
    except NoThreads as error:
        raise NoThreads(f"at least {least} threads are needed, {len(probes)} can be started: {error}") from error
    finally:
        over.set()
        for probe in probes:
            probe.join()


def _line(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
