"""Asyncio helpers: when work begins, and that it ends even if its caller is cancelled or has got its answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, TypeVar

from transferd.errors import InvariantError
from transferd.runtime.compat import timeout

T = TypeVar("T")
U = TypeVar("U")


def answered(value: T) -> asyncio.Future[T]:
    """A future that already has its value, for interfaces that return a future."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


def resolve(future: asyncio.Future[T], value: T) -> None:
    """Give a future its value, unless it is done: its waiter may have been cancelled."""
    if not future.done():
        future.set_result(value)


def then(value: T | asyncio.Future[T], do: Callable[[T], U | asyncio.Future[U]]) -> U | asyncio.Future[U]:
    """What `do` makes of a value: at once, or later if the value comes later."""
    if not isinstance(value, asyncio.Future):
        return do(value)

    async def later(coming: asyncio.Future[T]) -> U:
        made = do(await coming)
        return await made if isinstance(made, asyncio.Future) else made

    return asyncio.ensure_future(later(value))


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits. Raises InvariantError if it does."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    work.close()
    raise InvariantError(f"{work!r} waited, but must not")


def begun(work: Coroutine[Any, Any, T]) -> asyncio.Future[T] | Rest[T]:
    """Run a coroutine now, up to where it waits. Returns a done future; or the rest, which goes on when it is awaited.

    If nobody awaits the rest, it ends there: what outlives that must begin behind another wait (`is_awaited`).
    """
    end: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    try:
        waits_for = work.send(None)
    except StopIteration as stop:
        end.set_result(stop.value)
    except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the result
        end.set_exception(error)
    else:
        return Rest(work, waits_for)
    return end


class Rest(Generic[T]):
    """The rest of a coroutine that waits. Unlike a coroutine, it may be dropped without a warning."""

    def __init__(self, work: Coroutine[Any, Any, T], waits_for: object) -> None:
        self._work, self._waits_for = work, waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        work, waits_for = self._work, self._waits_for
        try:
            while True:
                try:
                    sent = yield waits_for
                except GeneratorExit:
                    work.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - it belongs to the work
                    waits_for = work.throw(error)
                else:
                    waits_for = work.send(sent)
        except StopIteration as end:
            value: T = end.value
            return value


async def is_awaited(call: Awaitable[Any]) -> None:
    """Return only if somebody awaits the caller, which was `begun`. Else it ends here, and the call with it."""
    try:
        await asyncio.sleep(0)
    except GeneratorExit:
        if isinstance(call, Coroutine):
            call.close()
        raise


class Background:
    """Work that may outlive its task: I/O on staging that is still running after the task was answered.

    Each piece stays here until it has really ended. `settled` waits for all of them, so that the memory
    under them can be freed.

    awaited: somebody waits for each piece, or has stopped doing so. Else the loop reports an error that nobody awaits.
    """

    def __init__(self, *, awaited: bool = True) -> None:
        self._awaited = awaited
        self._running: set[asyncio.Future[Any]] = set()

    def begin(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """Begin a piece. Returns a future that is already done as it is."""
        if isinstance(work, asyncio.Future) and work.done():
            return work
        begun = work.begin() if isinstance(work, Later) else asyncio.ensure_future(work)
        if not begun.done():
            self._running.add(begun)
            begun.add_done_callback(self._ended)
        return begun

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if self._awaited and not task.cancelled():
            task.exception()  # mark it as retrieved: its waiter has seen it, or there is no waiter left

    async def settled(self, within: float | None = None) -> bool:
        """Wait until none runs, at most `within` seconds. Returns whether that is so."""
        with contextlib.suppress(TimeoutError):
            async with timeout(within):
                while self._running:
                    await asyncio.wait(self._running)
        return not self._running

    async def stop(self) -> None:
        """Cancel all pieces, and wait until they have ended."""
        for piece in list(self._running):
            piece.cancel()
        await self.settled()

    @property
    def running(self) -> set[asyncio.Future[Any]]:
        """Those that run now."""
        return self._running.copy()

    async def ended(self) -> None:
        """Wait for those that run now."""
        if self._running:
            await asyncio.wait(self.running)

    def __len__(self) -> int:
        return len(self._running)


class Steady(asyncio.Future[T]):
    """The end of work that runs to its end in a task of its own. A cancellation of whoever awaits it is delayed.

    That way a storage call keeps the caller's buffers for as long as a thread may touch them. The work must bound its
    own time.

    told: called with this future in the step in which the work ends; done callbacks wait for a turn of the loop.
    """

    def __init__(self, work: Awaitable[T]) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.told: list[Callable[[asyncio.Future[T]], object]] = []
        self._running = self.get_loop().create_task(self._run(work))

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002 - a future's
        """Returns False: asyncio then cancels the waiter when the work has ended, and drops its result."""
        return False

    async def _run(self, work: Awaitable[T]) -> None:
        try:
            value = await work
        except asyncio.CancelledError:  # of the task, when the loop ends
            super().cancel()
        except Exception as error:  # noqa: BLE001 - the waiter's
            self.set_exception(error)
        else:
            self.set_result(value)
        for call in self.told:
            call(self)
        del self  # an error's traceback has this frame: a cycle would keep the work's buffers


class Later(Generic[T]):
    """Work that begins once somebody awaits it, or calls `begin`, and then runs to its end (`Steady`).

    It may be dropped before. now: its first part runs in the step that begins it, which is a step of the caller's task:
    a `timeout` that it enters there would cancel the caller.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]], *, now: bool = False) -> None:
        self._work, self._now = work, now

    def begin(self) -> asyncio.Future[T]:
        work = begun(self._work()) if self._now else self._work()
        return work if isinstance(work, asyncio.Future) else Steady(work)

    def __await__(self) -> Generator[Any, Any, T]:
        return self.begin().__await__()


async def uncancelled(work: Awaitable[T]) -> T:
    """Run `work` to its end, and return its result. A cancellation of the caller is delayed (`Steady`)."""
    return await Steady(work)


async def every(works: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all works; return their results in order, or raise the first error in that order.

    asyncio.gather alone raises at the first error or cancellation and leaves the other works running, on memory
    that its caller believes to be free. If the iterable itself raises, the works that it had started end first.
    A cancellation of the caller cancels all works and is raised when all of them have ended.
    """
    begun: list[Awaitable[T]] = []
    refused: Exception | None = None
    try:
        for work in works:
            begun.append(work)  # noqa: PERF402 - keep those before one that raises
    except Exception as error:  # noqa: BLE001 - raised below
        refused = error
    if len(begun) == 1 and refused is None:  # the usual case: each step between takes a turn of the loop
        return [await begun[0]]
    results: list[T] = []
    for ended in await asyncio.gather(*begun, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
        results.append(ended)
    if refused is not None:
        raise refused
    return results


async def in_turns(items: Iterable[T], each: int = 1000) -> AsyncIterator[T]:
    """All items, `each` of them in a turn of the event loop, so that a long list stalls nobody."""
    for number, item in enumerate(items, 1):
        yield item
        if number % each == 0:
            await asyncio.sleep(0)


class Timer:
    """At most one call that the running loop makes later. True while it waits, as long as there is a `handle`."""

    __slots__ = ("handle",)

    def __init__(self) -> None:
        self.handle: asyncio.TimerHandle | None = None

    def __bool__(self) -> bool:
        return self.handle is not None

    def set(self, seconds: float, do: Callable[..., object], *args: object) -> None:
        """Call it so much later, in place of the call that waits."""
        if self.handle is not None:
            self.handle.cancel()
        self.handle = asyncio.get_running_loop().call_later(seconds, self._ring, do, *args)

    def cancel(self) -> None:
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None

    def _ring(self, do: Callable[..., object], *args: object) -> None:
        self.handle = None
        do(*args)


class Paced:
    """Runs a coroutine on request, at most once in an interval, on one event loop. Runs never overlap.

    It has a timer or a task only while a request waits.

    do: raises nothing. interval: seconds from the begin of a run to the begin of the next one.
    """

    def __init__(self, do: Callable[[], Awaitable[None]], interval: float) -> None:
        self._do = do
        self._interval = interval
        self._began: float | None = None
        self._timer = Timer()  # its handle is looked at, because each task does that
        self._running: asyncio.Task[None] | None = None
        self._again: bool | None = None  # another run was requested during this one; True: regardless of the interval
        self._closed = False

    @property
    def running(self) -> bool:
        return self._running is not None

    def soon(self, *, at_once: bool = False) -> None:
        """Request a run: now, or as soon as the interval permits. at_once: regardless of the interval."""
        if self._closed or (self._timer.handle is not None and not at_once):
            return
        if self._running is not None:
            self._again = self._again or at_once
            return
        loop = asyncio.get_running_loop()
        wait = 0.0 if self._began is None or at_once else self._began + self._interval - loop.time()
        if wait <= 0:
            self._start()
        else:
            self._timer.set(wait, self._start)

    async def close(self) -> None:
        """Begin no further run, and wait for the running one. Idempotent."""
        self._closed = True
        self._timer.cancel()
        if self._running is not None:
            await asyncio.wait([self._running])

    def _start(self) -> None:
        self._timer.cancel()
        if not self._closed and self._running is None:
            loop = asyncio.get_running_loop()
            self._began = loop.time()
            self._running = loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._do()
        except GeneratorExit:  # the loop was closed with this task in it, so there are no further runs
            self._closed = True
            raise
        finally:
            self._running = None
            again, self._again = self._again, None
            if again is not None:
                self.soon(at_once=again)


def run_until_stopped(loop: asyncio.AbstractEventLoop, ending_s: float = 0.0) -> None:
    """Run a loop in this thread until somebody stops it; then end the tasks that are left, and close it.

    ending_s: how long they may take to end by themselves; then they are cancelled.
    """
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_end(asyncio.all_tasks(loop), ending_s))
    finally:
        loop.close()


async def _end(tasks: set[asyncio.Task[Any]], within: float) -> None:
    await asyncio.sleep(0)  # let callbacks of ended tasks run
    _, stuck = await asyncio.wait(tasks, timeout=within) if tasks else (tasks, tasks)
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
