"""The effects of an indexed store (indexed.py) on its medium: runs them in threads, and notes their names and traffic.

Background work yields to loads and stores, and an object that is being read is not overwritten.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from transferd.errors import Closed, StorageError, StorageUnavailable
from transferd.runtime.aio import Background, every
from transferd.runtime.compat import wait_for
from transferd.runtime.native import NativeCall
from transferd.runtime.threads import Direction, SharedItems, Threads, Work
from transferd.storage.batch import PATIENCE_S, Answer, NativeBatch, Read, W, Write, bare
from transferd.storage.running import RunningCalls

S = TypeVar("S")
T = TypeVar("T")
Call = NativeCall | SharedItems[Any, Any]
# A silent medium is waited for in so many parts: while this process itself is stopped, no more than one can pass.
TURNS = 4


class Effects:
    """Runs effects, and notes the names that they change. Used on one event loop.

    threads: borrowed.
    shares: how many threads work on the items of one call.
    unusable: why the store is lost, "" while it is not. Loads and stores are refused while it is.
    quick: run background effects on the loop itself.
    busy: the names with a running effect that changes what is stored, and a future of its end.
    end: waits until no effect is in the background.
    background: begins another one there.
    answered: grows when a call or an order has ended.
    """

    def __init__(
        self, threads: Threads, shares: int, unusable: Callable[[], str] = str, *, quick: bool = False
    ) -> None:
        self.busy: dict[str, asyncio.Future[None]] = {}
        self._names: dict[asyncio.Future[None], list[str]] = {}  # the same the other way round
        self._threads = threads
        self._shares = shares
        self.unusable = unusable
        self._quick = quick
        self.answered = 0
        # The loads and stores that threads were given, and the future of each thread's share.
        self._given: dict[Call, Sequence[asyncio.Future[Any]]] = {}
        self._background = background = Background(awaited=False)
        self._held = set[Any]()  # of those, what has yet to begin: it waits for a call
        self.background, self.end = background.begin, background.settled

    async def ended(self, which: Iterable[asyncio.Future[Any]] | None = None) -> set[asyncio.Future[Any]]:
        """Wait for these effects, or for all that are in the background now.

        Returns those that wait for a call that hangs: nobody knows when they will begin.
        """
        waiting, hanging = self._background.running if which is None else set(which), set[asyncio.Future[Any]]()
        while waiting > hanging:
            _, waiting = await asyncio.wait(waiting, timeout=PATIENCE_S)
            hanging = waiting & self._held
        return hanging

    async def ends(self, effect: asyncio.Future[Any]) -> None:
        """Wait for the end of an effect in the background, or until the store is lost: then it may hang."""
        await asyncio.wait((effect, self.refused), return_when=asyncio.FIRST_COMPLETED)

    def occupy(self, names: Sequence[str], done: asyncio.Future[None]) -> None:
        """Mark an effect on these names as running until `done`."""
        for name in names:
            assert name not in self.busy or self.busy[name] is done, name
            self.busy[name] = done
        self._names.setdefault(done, []).extend(names)

    def vacate(self, done: asyncio.Future[None]) -> None:
        """The effect has ended on all its names, unless it had on some before."""
        for name in self._names.pop(done, ()):
            if self.busy.get(name) is done:
                del self.busy[name]
        done.set_result(None)

    async def run(
        self,
        direction: Direction,
        items: Sequence[S],
        effect: Callable[[S], T],
        *,
        at_once: int = 0,
    ) -> list[T]:
        """Run an effect on every item, in several threads. Returns when all have ended; raises the first bug.

        at_once: on at most so many items at a time; 0 for as many as threads.
        """
        if not items:
            return []
        shared = SharedItems(effect, items, _name_of)
        await self._do(direction, shared, shared.shares(min(self._shares, at_once or self._shares)))
        return cast("list[T]", shared.results)

    async def _do(
        self, direction: Direction, call: Call, shares: Sequence[Callable[[], object]], told: str = ""
    ) -> None:
        """Have threads do their shares of a load or a store. Raises StorageUnavailable if these are refused."""
        if problem := self.unusable():
            raise StorageUnavailable(problem)
        # Only the first can raise: a crew starts all of its threads, or none.
        works = self._given[call] = [self._threads.run(direction, share, told or share) for share in shares]
        try:
            await every(works)
        except StorageUnavailable as error:
            # A work that was refused waits in its queue, perhaps for long, and its error's traceback would hold slots.
            raise copy.copy(bare(error)) from None
        finally:
            self.answered += call.ended
            del self._given[call]

    @property
    def steps(self) -> int:
        """It grows with each answer of the medium: an object, or several, stored or loaded, or an order."""
        return self.answered + sum(call.ended for call in self._given)

    @functools.cached_property
    def refused(self) -> asyncio.Future[None]:
        """Done while the store is lost. Whoever opens it anew deletes this."""
        return asyncio.get_running_loop().create_future()

    def refuse(self) -> None:
        """End the loads and stores of which no thread has begun a share, in the step in which the store is lost."""
        self.refused.set_result(None)
        for works in list(self._given.values()):
            shares = [work for work in works if isinstance(work, Work)]
            if not any(work.begun for work in shares):
                for work in shares:
                    work.refuse(StorageUnavailable(self.unusable()))

    async def run_native(
        self, direction: Direction, native: NativeBatch[W] | None, *, at_once: int = 0
    ) -> dict[int, Answer]:
        """The same for a native call. Returns the answers for the objects that are not left, by position."""
        if native is None:
            return {}
        work, call = native.work, native.call
        call.threads = min(call.items, self._shares, at_once or self._shares)
        shares = [call] * (call.threads if call.calls else 1)
        verb = "store" if direction is Direction.OUT else "load"
        told = f"{verb} of {len(work)} objects, {work[0].item.name} first"
        try:
            await self._do(direction, call, shares, told)
        finally:
            answers = native.ended()
        both = zip(work, answers, strict=True)
        return {one.position: answer for one, answer in both if answer is not None}

    def chore(self, function: Callable[[], object], what: str) -> None:
        """Run a function in a thread that nobody waits for but `end`. Nothing happens once the threads are closed."""
        with contextlib.suppress(Closed):
            self.background(self._threads.run(Direction.OUT, function, what))

    def begin(
        self,
        names: Sequence[str],
        effect: Callable[[str], None],
        ended: Callable[[dict[str, StorageError]], T],
        *,
        after: Awaitable[None] | None = None,
    ) -> asyncio.Future[T]:
        """Run an effect in the background on names that have just left the index. They are busy until it has ended.

        ended: called on the loop with the StorageErrors that the effect raised, by name. What it returns is the result.
        after: awaited before the effect.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.occupy(names, done)

        def attempt(name: str) -> StorageError | None:
            try:
                effect(name)
            except StorageError as error:
                return bare(error)
            return None

        async def leave() -> T:
            try:
                if after is not None:
                    self._held.add(asyncio.current_task())
                    try:
                        await after
                    finally:
                        self._held.discard(asyncio.current_task())
                if self._quick:
                    errors = [attempt(name) for name in names]
                else:
                    shared = SharedItems(attempt, names)
                    shares = shared.shares(self._shares)
                    await every(self._threads.run(Direction.OUT, share, share) for share in shares)
                    errors = shared.results
                return ended({name: error for name, error in zip(names, errors, strict=True) if error is not None})
            finally:
                self.vacate(done)

        return self.background(leave())


def _name_of(run: Any) -> str:
    """The name of the first object of a run."""
    return cast("Sequence[Write | Read]", run)[0].item.name


class Traffic:
    """Counts running calls: wrap each in `with traffic:`. Used on one event loop.

    reads: those that read objects. is_quiet: whether none runs now.
    """

    def __init__(self) -> None:
        self.reads = RunningCalls()
        self._under_way = 0
        self._quiet = asyncio.Event()
        self.is_quiet = self._quiet.is_set
        self._quiet.set()

    def __enter__(self) -> None:
        self._under_way += 1
        self._quiet.clear()

    def __exit__(self, *_: object) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._quiet.set()

    async def quiet(self, patience: float) -> bool:
        """Wait for a moment without traffic, at most `patience` seconds. Returns whether it came."""
        with contextlib.suppress(TimeoutError):
            return self.is_quiet() or await wait_for(self._quiet.wait(), patience)
        return False
