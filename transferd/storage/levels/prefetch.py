"""Prefetch: brings objects up to a level before a task needs them. A warm-up does so with the newest objects.

It has the lowest priority: all prefetches together run one batch at a time, and wait a moment before each for a pause
between loads and stores. They read through memory of their own, and check each object against its name. Their reads do
not count as uses.

    joined    while an object is being brought, a load of it follows the prefetch's read (joined.py). Before that, a
              load copies the object up itself. So no object is read twice
    kept      a brought object is not evicted until its first use, or the end of the prefetch (`Bringing.release`)
    bounded   at most MOST_KEPT of a level is kept for prefetches; a warm-up keeps nothing and fills only free room
    hanging   a call that does not end ends its prefetch, and no other one (`Carry`)
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from transferd.blocks.formats import FOOTER_BYTES, NotSealed, check, stamp_of_name
from transferd.errors import RequestError, StorageError, StorageFull, StorageUnavailable, TransferError
from transferd.runtime.aio import Background, in_turns
from transferd.runtime.loop_turns import InPieces
from transferd.runtime.threads import Direction
from transferd.storage.base import Found, Item, Outcome
from transferd.storage.keeping import AT_ONCE
from transferd.storage.levels.base import Bringing, Prefetcher
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.loading import StackLoad
from transferd.storage.levels.parts import StackParts
from transferd.storage.levels.write_back import GIVE_WAY_S, HANGS_S, PEEK, Carry
from transferd.storage.lru import Use
from transferd.storage.queues import AWAITED
from transferd.storage.selection import Selection
from transferd.tasks import Warmed

BATCH, BATCH_BYTES = 16, 8 * 1024**2  # of one read: a load waits for no more
MOST_KEPT = 0.25  # of a level's capacity, by all prefetches together


@dataclass(slots=True, eq=False)
class Kept:
    """An object that waits for its first use. by: how many prefetches that have not ended requested it."""

    level: StoreLevel
    nbytes: int
    by: int = 0


class StackBringing(Bringing):
    """One prefetch to a level. free_only: it keeps nothing, and evicts nothing."""

    def __init__(self, prefetches: StackPrefetcher, level: StoreLevel, use: Use, *, free_only: bool = False) -> None:
        self.level = level
        self.use = use
        self.free_only = free_only
        self.brought: dict[str, int] = {}
        self.error: TransferError | None = None
        self.stopped = False
        self._kept: dict[str, Kept] = {}  # by name, what was not evicted because of it
        self._all = prefetches
        self._parts = prefetches.parts

    def bring(self, objects: Sequence[tuple[str, int, int]]) -> asyncio.Future[None]:
        items = [Item(name, nbytes, self.use, depth) for name, nbytes, depth in objects]
        return self._all.running.begin(self._bring(items))

    def stop(self) -> None:
        self.stopped = True

    def there(self, names: Sequence[str]) -> list[bool]:
        return [self._parts.first_with(name, self.level.number + 1) is not None for name in names]

    def release(self) -> None:
        kept, self._kept = self._kept, {}
        self._all.releasing.run(self._all.released(kept, self.use))

    def _keep(self, name: str, level: StoreLevel) -> None:
        if self.free_only or self.stopped or (nbytes := level.index.hold(name, AWAITED)) is None:  # it has just left
            return
        kept = self._all.kept.setdefault(name, Kept(level, 0))
        if kept.level is not level:
            kept.level.index.release(name, self.use, AWAITED)
        self._all.kept_bytes[kept.level] -= kept.nbytes
        self._all.kept_bytes[level] += nbytes
        kept.level, kept.nbytes = level, nbytes
        if self._kept.get(name) is not kept:
            self._kept[name] = kept
            kept.by += 1

    async def _bring(self, items: Sequence[Item]) -> None:
        parts, promotions = self._parts, self._parts.promotions
        promotions.awaited.update([item.name for item in items])
        try:
            if not self.free_only and not self._fits(self.level, sum(item.nbytes for item in items)):
                await self._all.forget_gone(self.use)
            for batch in _batches(items):
                await promotions.coming.without([item.name for item in batch], HANGS_S)  # beside others' turns
                async with self._all.turn:
                    if self.stopped or self._all.closing or isinstance(self.error, StorageFull):
                        return
                    await parts.traffic.quiet(GIVE_WAY_S)
                    await promotions.running.begin(self._batch(batch))
        except TransferError as error:  # Closed, too: a close waits for reads, but not for ever
            self.error = self.error or error
        finally:
            for item in items:
                promotions.awaited[item.name] -= 1
                if not promotions.awaited[item.name]:
                    del promotions.awaited[item.name]

    async def _batch(self, batch: Sequence[Item]) -> None:
        """Raises StorageError."""
        level, todo = self.level, []
        if why := level.out_for_stores:
            raise StorageUnavailable(f"the level {level.name} cannot be used now: {why}")
        for item in batch:
            if (place := self._parts.first_with(item.name, level.number + 1)) is not None:
                if self._fits(place, item.nbytes):
                    self._keep(item.name, place)
            else:
                todo.append(item)
        for _ in self._parts.levels:  # a copy may be damaged, or its level too slow: then the next one
            if fitting := self._fitting(todo):
                todo = await self._round(fitting)

    def _fits(self, level: StoreLevel, nbytes: int) -> bool:
        capacity = level.index.capacity
        if self.free_only:
            return nbytes <= (level.index.free or 0)
        return capacity is None or self._all.kept_bytes[level] + nbytes <= MOST_KEPT * capacity

    def _fitting(self, items: Sequence[Item]) -> list[Item]:
        """The first of these, as many as there is room for."""
        totals = itertools.accumulate(item.nbytes for item in items)
        fitting = [item for item, total in zip(items, totals, strict=True) if self._fits(self.level, total)]
        if len(fitting) < len(items):
            what = f"the level {self.level.name} has no free room left"
            if not self.free_only:
                what = f"prefetches may fill {MOST_KEPT:.0%} of the level {self.level.name}, and wait for their use"
            self.error = self.error or StorageFull(what)
        return fitting

    async def _round(self, items: Sequence[Item]) -> list[Item]:
        """Bring these up from the first level that has each. Returns those to try again. Raises StorageError."""
        parts, level, names = self._parts, self.level, [item.name for item in items]
        sizes, asked = [item.nbytes for item in items], [Item(one.name, one.nbytes, PEEK, one.depth) for one in items]
        born = parts.fences.number

        def load(slots: Sequence[memoryview]) -> Awaitable[list[Outcome]]:
            return StackLoad(parts, asked, None, slots, first=level.number + 1).run()

        with parts.promotions.coming.of(names):
            outcomes, slots = await self._all.carry.filled(sizes, load, parts.late)
            self._note_errors(outcomes)
            found = [i for i, outcome in enumerate(outcomes) if outcome.found is Found.FOUND]
            again = [items[i] for i, outcome in enumerate(outcomes) if outcome.found is Found.LEFT]

            def damages() -> list[int]:
                return [i for i in found if _damaged(items[i].name, slots[i])]

            damaged = await parts.threads.run(Direction.IN, damages, "checks of a prefetch") if found else []
            for i in damaged:
                await asyncio.wait(
                    [parts.late.begin(self._all.quarantine_at(names[i], outcomes[i].level))], timeout=HANGS_S
                )
                again.append(items[i])
            good = [i for i in found if i not in damaged]
            above, own = [items[i] for i in good], [slots[i] for i in good]
            sources = [parts.levels[outcomes[i].level] for i in good]
            bring = parts.promotions.bring(above, sources, own, level, born, "prefetched")
            for item, answer, why in await self._all.carry.stored(bring, sum(sizes), level, parts.late):
                if answer.found in (Found.STORED, Found.EXISTS) and not why:
                    self._keep(item.name, level)
                elif isinstance(answer.error, StorageError):
                    self.error = self.error or answer.error
                if answer.found is Found.STORED and not why:
                    self.brought[item.name] = item.nbytes
            return again

    def _note_errors(self, outcomes: Sequence[Outcome]) -> None:
        """Why some of these did not come up, unless an earlier reason is known."""
        dead = next((below for below in self._parts.levels[self.level.number + 1 :] if below.out), None)
        if dead is not None and any(outcome.found is Found.MISSING for outcome in outcomes):
            self.error = self.error or StorageUnavailable(f"the level {dead.name} cannot be used now: {dead.out}")
        for outcome in outcomes:
            if outcome.found is Found.FAILED and isinstance(outcome.error, StorageError):
                self.error = self.error or outcome.error


class StackPrefetcher(Prefetcher):
    """All prefetches of a stack. quarantine_at: the stack's. Used on one loop."""

    def __init__(self, parts: StackParts, quarantine_at: Callable[[str, int], Awaitable[object]]) -> None:
        self.levels = [level.name for level in parts.levels]
        self.carry = Carry(parts.levels)
        self.warming_bytes = 0  # that running warm-ups have yet to look at
        self.parts = parts
        self.quarantine_at = quarantine_at
        self.turn = asyncio.Lock()
        self.running = Background(awaited=False)
        self.kept: dict[str, Kept] = {}
        self.kept_bytes: Counter[StoreLevel] = Counter()
        self.releasing = InPieces()
        self.closing = False

    # --- from outside -------------------------------------------------------------------------------

    def to(self, name: str, owner: Hashable, *, free_only: bool = False) -> StackBringing:
        """free_only: see StackBringing."""
        level = self.parts.named(name)
        if not level.known:
            what = f"the level {name} does not know its own objects, so nothing can be kept there"
            raise RequestError(f"{what}: name a level above it", code="backend_cannot")
        return StackBringing(self, level, Use(owner=owner), free_only=free_only)

    async def warm(self, selection: Selection, newest: int, to: str, owner: Hashable) -> Warmed:
        one = self.to(to, owner, free_only=True)
        below = [level for level in self.parts.levels[one.level.number + 1 :] if level.known and not level.out]
        if not below:
            what = f"no level below {to} knows which of its objects are the newest"
            raise RequestError(f"{what}: only files and memory do", code="backend_cannot")
        objects: list[tuple[str, int, int]] = []
        room = min(newest, one.level.index.free or 0)
        async for name, nbytes in in_turns(below[0].index.hottest_first()):
            if selection.fits(name) and self.parts.first_with(name, one.level.number + 1) is None:
                if nbytes > room:
                    break
                room -= nbytes
                objects.append((name, nbytes, len(objects)))
        self.warming_bytes += (left := sum(nbytes for _, nbytes, _ in objects))
        try:
            for start in range(0, len(objects), BATCH):
                some = objects[start : start + BATCH]
                await asyncio.shield(one.bring(some))
                left -= (done := sum(nbytes for _, nbytes, _ in some))
                self.warming_bytes -= done
                if one.error is not None:
                    raise one.error
        finally:  # also if the client has gone
            one.stop()
            self.warming_bytes -= left
        there = list(itertools.compress(one.brought, one.there(list(one.brought))))  # some may have left again
        return Warmed(to, len(there), sum(one.brought[name] for name in there))

    async def close(self) -> None:
        """End all. Call it before the levels close."""
        self.closing = True
        await self.running.settled()

    # --- what is kept -------------------------------------------------------------------------------

    def used(self, items: Iterable[Item]) -> None:
        """Note that these were used: from now on they are evicted like others."""
        for item in items:
            if item.use is not None and (kept := self.kept.get(item.name)) is not None:
                self.let_go(item.name, kept, item.use)

    def released(self, objects: Mapping[str, Kept], use: Use) -> Generator[None, None, None]:
        """Note that a prefetch that has requested these has ended."""
        for number, (name, kept) in enumerate(objects.items(), 1):
            kept.by -= 1
            if not kept.by and self.kept.get(name) is kept:
                self.let_go(name, kept, use)
            if number % AT_ONCE == 0:
                yield

    def let_go(self, name: str, kept: Kept, use: Use) -> None:
        del self.kept[name]
        self.kept_bytes[kept.level] -= kept.nbytes
        kept.level.index.release(name, use, AWAITED)

    async def forget_gone(self, use: Use) -> None:
        """Let go of what has left its level: purged, damaged, or with its medium."""
        async for name, kept in in_turns(list(self.kept.items())):
            if self.kept.get(name) is kept and kept.level.has([name]) != [True]:
                self.let_go(name, kept, use)


def _damaged(name: str, slot: memoryview) -> bool:
    """Whether these cannot be the bytes of an object of this name."""
    try:
        stamp = stamp_of_name(name)
    except NotSealed:  # of FastDeploy's schema: nothing proves it
        return False
    return slot.nbytes < FOOTER_BYTES or check(slot, slot.nbytes - FOOTER_BYTES, stamp) is not None


def _batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    for item in items:
        if batch and (len(batch) == BATCH or sum(one.nbytes for one in batch) + item.nbytes > BATCH_BYTES):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
