"""Every way to run work off the event loop: copies, checksums, system calls, calls into libraries.

The contract, which tests/runtime/test_threads.py runs over the real threads and the simulated ones:

1. A function runs once or never. If it is refused, withdrawn or still waiting at close, it never runs, so its
   caller may reuse its memory at once.
2. The caller gets the result after the function has ended. Cancelling withdraws a function that waits for a
   thread. Once a thread has taken it, the cancellation is delayed and raised when the function has ended.
3. `open` (or the first `run`) starts all threads or none. Later calls start no thread, so a running daemon is
   unaffected when the host runs out of threads.
4. A thread drops its references to the function, and to the memory it works on, before the result is known.
5. `close` returns in bounded time and names what still runs. Such a function keeps its thread, and its memory
   must not be freed before the process ends. Threads are daemon threads, so they never keep a process alive.

CPython's ThreadPoolExecutor breaks the first rule: it queues the function, then starts a thread, and raises if
that fails. The function runs later, in memory that may by then be in use for something else.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import gc
import queue
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

from transferd.errors import Closed, NoThreads
from transferd.runtime import native
from transferd.runtime.native import NativeCall, NativeThreads

S = TypeVar("S")
T = TypeVar("T")

CLOSE_S = 1.0  # how long a close waits for running functions; callers have already waited for their own work
CLOSE_LOOKS = 20  # how often `closed` looks whether they have ended
# The fewest threads a daemon needs: for copies, set-up, storage (48 past the page cache), log and dumps, and for libzmq
# and libuv, which abort the process if they cannot start a thread.
LEAST = 96


# The engine for which this context runs functions.
whose: ContextVar[str] = ContextVar("whose", default="")
# The functions that this context has given to threads, for a withdrawal.
noted: ContextVar[list[asyncio.Future[Any]] | None] = ContextVar("noted", default=None)


class Direction(enum.Enum):
    """The crew: for stores, for loads, or for memory that is made or freed, which may take minutes."""

    OUT = "out"
    IN = "in"
    SETUP = "setup"


STANDS_BACK = 10  # nice value of native threads that store: nobody waits for them as an engine waits for a load


class Threads(Protocol):
    """Runs plain functions away from the loop, under the module's contract.

    what: names the function in reports of hanging calls; str(what) is called only for a report.
    """

    def open(self) -> None:
        """Start the threads. Raises NoThreads, and then none runs. Idempotent."""

    def run(self, direction: Direction, function: Callable[[], T], what: object = None) -> asyncio.Future[T]:
        """A future of the function's result. Raises NoThreads or Closed, and then the function never runs."""

    def under_way(self) -> list[str]:
        """What runs now: thread, function, for how long, and at which line of code."""

    def close(self, within: float = CLOSE_S) -> list[str]:
        """Accept no more, withdraw what waits (`Closed`), wait for the rest. Returns what still runs."""


class Work(asyncio.Future[T]):
    """One function on its way through a thread, and the future of its result. Created on the running loop."""

    def __init__(self, function: Callable[[], T], what: object = None) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.what = what or getattr(function, "__qualname__", None) or type(function).__name__
        self.owner = ""
        self.begun = False  # a thread has taken it; it may wait again, between two of its items
        self._function = [function]
        self._turn = [True]  # popped once: by the thread that runs the function, or by the caller that withdraws it
        self._returned: list[T] = []
        self._raised: BaseException | None = None

    def cancel(self, msg: object = None) -> bool:
        """Withdraw the function. False once a thread has taken it: its awaiter is then cancelled when it has ended."""
        if not self._take_turn():
            return False
        self._forget()
        return super().cancel(msg)

    def refuse(self, error: Exception) -> None:
        """Withdraw the function with an error, unless a thread has taken it."""
        if self._take_turn():
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """End with an error; no thread will begin it."""
        self._forget()
        self.set_exception(error)
        self.exception()  # mark it retrieved: asyncio must not log it if no caller is left

    def execute(self, give_way: Callable[[], bool] = bool) -> bool:
        """In a thread: run the function, unless it was withdrawn. If True, call `deliver` next, on the loop.

        give_way: called between the items of an ItemShare or a NativeCall. If it returns True, this returns False with
            `begun` set, and the rest of the items needs another call.
        """
        if not self.begun and not self._take_turn():
            return False
        self.begun = True
        try:
            if isinstance(self._function[0], (ItemShare, NativeCall)) and not self._function[0].go_on(give_way):
                return False
            self._returned.append(self._function.pop()())  # no name for it: an error's traceback would keep it alive
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self._raised = error
            self._function.clear()
        self.what = None
        return True

    def deliver(self) -> None:
        """On the loop: set the result or the error."""
        error, self._raised = self._raised, None
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(self._returned.pop())

    def deliver_from_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller is left
            self.get_loop().call_soon_threadsafe(self.deliver)

    def _forget(self) -> None:
        """Let go of the function, and of its name: both hold the caller's buffers, and may wait long in the queue."""
        self._function.clear()
        self.what = None

    def _take_turn(self) -> bool:
        try:
            return self._turn.pop()
        except IndexError:
            return False


class NativeWork(Work[None]):
    """A call on its way through threads that need no interpreter."""

    def __init__(self, call: NativeCall, what: object, threads: NativeThreads) -> None:
        super().__init__(call, what)
        self._threads = threads

    def deliver(self) -> None:
        self._function.clear()
        self.what = None
        self.set_result(None)

    def _take_turn(self) -> bool:
        return self._threads.withdraw(self)


class Turns:
    """A crew's queue. Owners (`whose`) take turns; each owner's functions keep their order.

    So each function of an owner waits for at most one turn of every other owner, however much the others submit. A
    turn is one function, or one item of SharedItems: an ItemShare yields after each and continues in its owner's next
    turn.
    """

    def __init__(self) -> None:
        self._ready: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one True a function, one False a dismissal
        self._waiting: OrderedDict[str, deque[Work[object]]] = OrderedDict()  # by owner, the next one first
        self._lock = threading.Lock()
        self._closed = False

    def put(self, work: Work[object] | None) -> None:
        """Queue a function, or None to end one thread."""
        if work is not None:
            work.owner = whose.get()
            with self._lock:
                self._waiting.setdefault(work.owner, deque()).append(work)
        self._ready.put(work is not None)

    def put_back(self, work: Work[object]) -> bool:
        """Queue a function that gave way, as its owner's next. Returns False after `close`: then run it to its end."""
        with self._lock:
            if self._closed:
                return False
            self._waiting.setdefault(work.owner, deque()).appendleft(work)
            self._waiting.move_to_end(work.owner)
            self._ready.put(True)
        return True

    def others_wait(self, work: Work[object]) -> bool:
        """Whether another owner waits for a thread."""
        with self._lock:
            return len(self._waiting) > (work.owner in self._waiting)

    def close(self) -> list[Work[object]]:
        """Take everything out of the queue. From now on `put_back` accepts nothing."""
        with self._lock:
            self._closed = True
        waiting: list[Work[object]] = []
        with contextlib.suppress(queue.Empty):
            while self._ready.get_nowait():
                waiting.append(self._next())
        return waiting

    def get(self) -> Work[object] | None:
        """Wait for the next function; None ends the thread."""
        return self._next() if self._ready.get() else None

    def _next(self) -> Work[object]:
        with self._lock:
            owner, works = self._waiting.popitem(last=False)
            work = works.popleft()
            if works:
                self._waiting[owner] = works
        return work

    def qsize(self) -> int:
        return self._ready.qsize()


class Crew:
    """A fixed number of threads that serve functions in turns of their owners. Owns them until `close`."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self._size = size
        self._nice: int | None = None
        self._native: NativeThreads | None = None
        self._queue = Turns()
        self._threads: list[threading.Thread] = []
        self._running: dict[str, tuple[object, float]] = {}  # by a thread's name: what, and since when
        self._closed = False

    def with_native(self, nice: int) -> None:
        """Have as many threads for native calls, too, with this nice value. Before `open`."""
        self._nice = nice if native.NATIVE else None

    def open(self) -> None:
        """Start every thread now. Raises NoThreads (and then none runs) or Closed. Idempotent."""
        if self._closed:
            raise Closed(f"{self.name}: these threads are closed")
        try:
            while len(self._threads) < self._size:
                self._threads.append(self._start(f"{self.name}-{len(self._threads)}"))
            if self._nice is not None and self._native is None:
                self._native = NativeThreads(self.name, self._size, self._nice)
        except NoThreads:
            self._dismiss()
            self._threads.clear()
            raise

    def run(self, function: Callable[[], T], what: object = None) -> Work[T]:
        """A future of the function's result. Raises NoThreads or Closed, and then the function never runs."""
        if self._closed or not self._threads:
            self.open()
        if self._native is not None and isinstance(function, NativeCall) and not function.calls:
            work: Work[Any] = NativeWork(function, what, self._native)
            self._native.put(work, function, whose.get())
        else:
            work = Work(function, what)
            self._queue.put(work)
        if (notes := noted.get()) is not None:
            notes.append(work)
        return work

    def under_way(self) -> list[str]:
        """What runs now: thread, function, for how long, and at which line of code."""
        now = time.monotonic()
        idents = {thread.name: thread.ident for thread in self._threads}
        running = list(self._running.items())
        own = [f"{name}: {what}, {now - since:.1f} s{_where(idents.get(name))}" for name, (what, since) in running]
        return own if self._native is None else own + self._native.under_way()

    def close(self, within: float = CLOSE_S) -> list[str]:
        """Accept no more, withdraw what waits, wait for what runs. Returns what still runs. Idempotent."""
        if not self._closed:
            self._closed = True
            for waiting in self._queue.close():
                if waiting.begun:  # some of its items were done
                    self._queue.put(waiting)
                else:
                    waiting.refuse(Closed(f"{self.name}: closed before its turn came"))
            self._dismiss()
            for unbegun in self._native.dismiss() if self._native else ():
                unbegun.give_up(Closed(f"{self.name}: closed before its turn came"))
        end = time.monotonic() + within
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if self._native is not None:
            self._native.join(end - time.monotonic())
        return self.under_way()

    def _dismiss(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _start(self, name: str) -> threading.Thread:
        return start_thread(name, lambda: self._serve(name))

    def _serve(self, name: str) -> None:
        """The body of one thread."""
        while (work := self._queue.get()) is not None:
            self._running[name] = work.what, time.monotonic()
            ended = work.execute(functools.partial(self._queue.others_wait, work))
            if not ended and work.begun and not self._queue.put_back(work):
                ended = work.execute()
            del self._running[name]
            if ended:
                work.deliver_from_thread()
            del work  # so that the waiting thread keeps no reference to it


class ThreadPools:
    """A crew of threads per direction, so that a load never waits behind a burst of stores, or behind set-up.

    setup: how many threads make and free memory. With 0 the IN threads do that, for owners without copies at that time.
    native: have as many threads for native calls, too; those of OUT with this nice value.
    """

    def __init__(
        self, threads_per_direction: int, *, setup: int = 0, name: str = "transferd", native: int | None = None
    ) -> None:
        sizes = dict.fromkeys((Direction.OUT, Direction.IN), threads_per_direction)
        if setup:
            sizes[Direction.SETUP] = setup
        self._crews = {direction: self._crew(f"{name}-{direction.value}", size) for direction, size in sizes.items()}
        if native is not None:
            self._crews[Direction.OUT].with_native(native)
            self._crews[Direction.IN].with_native(0)

    def _crew(self, name: str, size: int) -> Crew:
        return Crew(name, size)

    def open(self) -> None:
        for crew in self._crews.values():
            crew.open()

    def run(self, direction: Direction, function: Callable[[], T], what: object = None) -> asyncio.Future[T]:
        return self._crews.get(direction, self._crews[Direction.IN]).run(function, what)

    def under_way(self) -> list[str]:
        return [call for crew in self._crews.values() for call in crew.under_way()]

    def close(self, within: float = CLOSE_S) -> list[str]:
        end = time.monotonic() + within
        return [call for crew in self._crews.values() for call in crew.close(max(0.0, end - time.monotonic()))]


async def closed(threads: Threads, within: float | None = None) -> list[str]:
    """Close them, and wait for what runs; the loop goes on meanwhile. Returns what still runs after `within` seconds.

    Many can be closed at once: each `close` alone would keep the loop for as long as one of its functions hangs.
    """
    threads.close(0.0)
    for _ in range(CLOSE_LOOKS):
        if not threads.under_way():
            return threads.close()
        await asyncio.sleep((CLOSE_S if within is None else within) / CLOSE_LOOKS)
    return threads.under_way()


@dataclass(eq=False, repr=False)
class SharedItems(Generic[S, T]):
    """Items for several threads. Each thread takes the next waiting item, so a slow thread delays only its own item.

    effect: called with each item.
    results: what `effect` returned, in the order of the items; complete when every share has ended without an error.
    """

    effect: Callable[[S], T]
    items: Sequence[S]
    name_of: Callable[[S], str] = str

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.items)))  # positions of items that no thread has taken
        self.results: list[T | None] = [None] * len(self.items)
        self._ended: list[int] = []  # positions

    @property
    def ended(self) -> int:
        """How many items have been done."""
        return len(self._ended)

    def done(self, position: int, result: T) -> None:
        self.results[position] = result
        self._ended.append(position)  # in one step, for several threads

    def shares(self, most: int) -> list[ItemShare]:
        """Functions to run, each in a thread: `most` of them, or one for each item."""
        return [ItemShare(self) for _ in range(min(most, len(self.items)))]


class ItemShare:
    """One thread's share of the items. str() names the call and the current item."""

    def __init__(self, shared: SharedItems[Any, Any]) -> None:
        self._shared = shared
        self._position = 0

    def __call__(self) -> None:
        self.go_on(bool)

    def go_on(self, give_way: Callable[[], bool]) -> bool:
        """Do items until none waits. Returns False as soon as `give_way` returns True after an item, else True."""
        while self._step():
            if give_way():
                return False
        return True

    def _step(self) -> bool:
        """Do the next item, if one waits. Returns whether more wait."""
        shared = self._shared
        try:
            position = self._position = shared.waiting.popleft()
        except IndexError:
            return False
        shared.done(position, shared.effect(shared.items[position]))
        return bool(shared.waiting)

    def __str__(self) -> str:
        shared = self._shared
        effect = getattr(shared.effect, "__name__", "effect").strip("_")
        return f"{effect} {shared.name_of(shared.items[self._position])}"


def start_thread(name: str, target: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread. Raises NoThreads, and then `target` is never called."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        what = "allow more (TasksMax= in the unit, pids.max of the cgroup, ulimit -u)"
        raise NoThreads(f"cannot start the thread {name}: {error}; {what}") from error
    return thread


def require_threads(least: int = LEAST) -> None:
    """Check that `least` threads can be started now, before a library needs one and aborts without it.

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


def _where(ident: int | None) -> str:
    """The line that a thread is at."""
    frames = current_frames()
    try:
        if ident not in frames:
            return ""
        place = traceback.extract_stack(frames[ident], 1)[0]
    finally:
        frames.clear()  # our own frame is among them: the cycle would keep every thread's locals alive
    return f" at {Path(place.filename).name}:{place.lineno} {place.name}"


_one_at_a_time = threading.Lock()


def current_frames() -> dict[int, FrameType]:
    """`sys._current_frames()`: {thread: innermost frame}. Clear the dict when done: it keeps all locals alive.

    CPython before 3.11.8 and 3.12.2 allocates while it holds the lock on the list of threads. If that starts a garbage
    collection, and a finalizer lets another thread run that starts or ends a thread, the process deadlocks
    (python/cpython#106883). So we disable the collector meanwhile.
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()  # noqa: SLF001 - the only way to ask
        finally:
            if collects:
                gc.enable()
