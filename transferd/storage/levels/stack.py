"""Several levels as one storage, the fastest first (docs/levels.md, docs/adr/0130).

The levels are inclusive: each object of a level is also in the levels below, or will be soon (write_back.py). Evicting
from a level drops a copy and writes nothing.

    store   to the first level that takes the object; then to those below, in the background or before the answer
    load    each object from the first level that has it (loading.py); a block of a lower level may be copied up
    look-up from the indexes of levels, and the quick answers of levels without one; never waits for a slow level

Each level keeps its own order of eviction: a use has a part in each (`Use.levels`), and an object that is used in one
level counts as used in those below it, or the hottest objects would leave them first.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog

from transferd.config import LevelSection, StorageSection
from transferd.errors import Closed, StillRunning, StorageError
from transferd.runtime.aio import Later, Paced, begun, every, uncancelled
from transferd.runtime.clock import Clock
from transferd.runtime.threads import ThreadPools, Threads, closed
from transferd.storage.base import (
    FOUND,
    Drainer,
    Fill,
    Found,
    Index,
    Item,
    Outcome,
    PoolNode,
    Storage,
    added,
    as_chain,
)
from transferd.storage.levels.base import Levels, Proof
from transferd.storage.levels.keeping import LevelsKeeper
from transferd.storage.levels.leaving import Leaving
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.loading import StackLoad
from transferd.storage.levels.parts import StackParts
from transferd.storage.levels.prefetch import StackPrefetcher
from transferd.storage.levels.proving import Proving
from transferd.storage.levels.storing import StackStore
from transferd.storage.levels.sweep import Sweep
from transferd.storage.levels.whole_slots import WholeSlots
from transferd.storage.lru import Use
from transferd.storage.queues import Noted
from transferd.storage.selection import Selection
from transferd.tasks import LevelChange
from transferd.tiers.base import HostMemory
from transferd.wire.answers import Purged, StoreDirectory

log = structlog.get_logger(__name__)

THREADS = 2
TOUCH_S = 0.1  # how long uses are collected before they are passed to the levels below
MOST_TOUCHES = 16384
LOOK_UP_S = 1.0  # how long a look-up waits for a level before any of its calls was measured
CLOSE_S = 10.0  # how long a close waits for calls to levels that do not end


class LevelsStorage(Storage, Index, Levels):
    """See the module. Owns its levels. All state is mutated on the event loop only."""

    def __init__(self, levels: Sequence[StoreLevel], clock: Clock, threads: Threads | None = None) -> None:
        threads = threads or ThreadPools(THREADS, name="transferd-levels")
        self._parts = parts = StackParts(levels, clock.monotonic, threads)
        self.all_levels, self.unsaved, self.write_backs = parts.levels, parts.unsaved, parts.write_backs
        self._threads, self._now, self._promotions = threads, clock.monotonic, parts.promotions
        for level in self.all_levels:
            level.index.be_level(level.number, holds=level is not self.all_levels[-1])
            if level.storage.slots_at_once is None:
                level.storage = WholeSlots(level.storage, self._threads)  # type: ignore[abstract]
        self.names = [level.name for level in self.all_levels]
        self.backend = ">".join(self.names)
        self.slots_at_once = max(level.storage.slots_at_once or 0 for level in self.all_levels)
        self.asks_first = all(level.storage.asks_first for level in self.all_levels)
        self.tries = sum(level.storage.tries for level in self.all_levels)
        self.chunk_bytes = max(level.storage.chunk_bytes for level in self.all_levels)
        self.shared = any(level.shared for level in self.all_levels)
        first = self.all_levels[0]
        self._sweep = Sweep(parts)
        self._proving = Proving(parts)
        self._first = first
        self._prefetcher = StackPrefetcher(parts, self.quarantine_at)
        self._leaving = Leaving(parts, self._prefetcher, self._proving, self._sweep)
        self._touches: list[Item] = []
        self._touching = Paced(self._touch_below, TOUCH_S)
        self._hits = self._misses = 0  # objects of loads
        self._open = False
        self._closed = False

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open all levels. Raises StorageError or ConfigError; then none is open."""
        opened: list[StoreLevel] = []
        self._threads.open()
        try:
            for level in self.all_levels:
                await level.storage.open()
                opened.append(level)
                level.opened()
            self._promotions.buffers.open()
        except BaseException:
            for level in opened:
                await level.storage.close()
            self._threads.close()
            raise
        self._open = True
        self._sweep.open()

    def register(self, memory: HostMemory) -> None:
        for level in self.all_levels:
            level.storage.register(memory)

    def unregister(self, memory: HostMemory) -> None:
        for level in self.all_levels:
            level.storage.unregister(memory)

    def join(self, wrap: Callable[[Storage], Storage]) -> Storage:
        """Each level for itself, so that objects in memory cost nothing more."""
        for level in self.all_levels:
            level.storage = level.storage.join(wrap)
        return self

    def expect(self, possible: Callable[[str, int], bool]) -> None:
        for level in self.all_levels:
            level.index.expect(possible)

    def reconfigure(self, storage: StorageSection) -> None:
        for level in self.all_levels:
            level.storage.reconfigure(storage)
            level.configure(storage.level.get(level.name, LevelSection()))
        self._parts.configured()

    @functools.cached_property
    def keeper(self) -> LevelsKeeper:
        return LevelsKeeper(self._parts, self._proving, self._touch_now)

    @property
    def levels(self) -> Levels:
        return self

    @property
    def pool(self) -> PoolNode | None:
        return next((pool for level in self.all_levels if (pool := level.storage.pool) is not None), None)

    @property
    def prefetcher(self) -> StackPrefetcher:
        return self._prefetcher

    async def change(self, name: str, *, leaves: bool) -> LevelChange:
        return await (self._leaving.drain(name) if leaves else self._leaving.use(name))

    async def only_here(self) -> tuple[int, int]:
        return await self._leaving.only_here()

    def tell_departures(self, left: Callable[[str], None]) -> bool:
        """Report an object when its last copy leaves, as far as that is known without I/O."""

        def gone(level: StoreLevel, name: str) -> None:
            level.missed(name)
            if not any(one.seems_to_have(name) for one in self.all_levels):
                left(name)
            if self._first.changed is not None:
                self._first.changed(name)

        each = [level.index.tell_departures(functools.partial(gone, level)) for level in self.all_levels]
        return all(each)

    def trace(self, noted: Callable[[str], Noted], place: str) -> None:  # noqa: ARG002 - each level has a name
        for level in self.all_levels:
            level.index.trace(noted, level.name)

    @property
    def out(self) -> list[str]:
        return [level.name for level in self.all_levels if level.out]

    def tell(self, changed: Callable[[str], None]) -> None:
        for level in self.all_levels:
            level.changed = changed

    def unusable(self) -> str:
        problems = [level.storage.unusable() for level in self.all_levels]
        return problems[0] if all(problems) else ""

    async def flush(self, within_s: float) -> None:
        if self._open and not self._closed:
            await every(one.flush(within_s) for one in self.write_backs)

    async def close(self) -> None:
        if self._closed or not self._open:
            self._closed = True
            return
        self._closed = True
        await self._leaving.close()
        await self._touching.close()
        prefetched = self._prefetcher.close()
        errors: list[BaseException] = []
        ends = [
            *(one.close() for one in self.write_backs),
            self._promotions.running.ended(),
            self._parts.late.settled(),
        ]
        closing = asyncio.ensure_future(every([*ends, prefetched, self._sweep.close()]))
        _, hanging = await asyncio.wait({closing}, timeout=CLOSE_S)
        if hanging:
            closing.cancel()
            errors.append(StillRunning(f"calls to the levels {self.backend} do not end"))
        else:
            for one in self.write_backs:
                one.carry.close()
            self._prefetcher.carry.close()
            self._promotions.buffers.close()
        errors += await self._close_levels(0.0 if hanging else CLOSE_S)
        if still := await closed(self._threads):
            errors.append(StillRunning(f"{self.backend} storage: {'; '.join(still)}"))
        if errors:
            raise errors[0]

    async def _close_levels(self, within_s: float) -> list[BaseException]:
        """All at once, so that none waits for one that hangs; a pool last, as its close stops the process for seconds.

        within_s: how long a pool waits for the others. Returns their errors.
        """
        each = [level.storage for level in self.all_levels]
        closing = [asyncio.ensure_future(one.close()) for one in each if one.pool is None]
        if closing:
            await asyncio.wait(closing, timeout=within_s)
        closing += [asyncio.ensure_future(one.close()) for one in each if one.pool is not None]
        ended = await asyncio.gather(*closing, return_exceptions=True)
        return [one for one in ended if one is not None]

    def abandon(self) -> list[str]:
        return [call for level in self.all_levels for call in level.storage.abandon()] + self._threads.under_way()

    # --- uses ---------------------------------------------------------------------------------------

    def touch(self, items: Sequence[Item]) -> None:
        for level in self.all_levels:
            level.index.touch(items)

    def _used(self, items: Sequence[Item]) -> None:
        """Note that these were loaded from a level: they also count as used in the levels below it."""
        self._touches += items
        if len(self._touches) > MOST_TOUCHES:
            self._touch_now()
        else:
            self._touching.soon()
        if self._prefetcher.kept:
            self._prefetcher.used(items)
        if self.unsaved:
            for item in items:
                for one in self.unsaved.get(item.name, {}).values():
                    if item.use is not None:
                        one.use, one.depth = item.use, item.depth

    async def _touch_below(self) -> None:
        self._touch_now()

    def _touch_now(self) -> None:
        items, self._touches = self._touches, []
        for level in self.all_levels[1:]:
            if not level.out:
                level.index.touch(items)
        self._sweep.used(items)

    # --- look-ups -----------------------------------------------------------------------------------

    # They copy nothing up. A level that fails, or does not answer in time, counts as having nothing.

    def find(self, names: Sequence[str], use: Use | None) -> list[bool] | None:
        each = [level.find(names, use) for level in self.all_levels if not level.out]
        known = [there for there in each if there is not None]
        found = [any(one) for one in zip(*known, strict=True)] if known else [False] * len(names)
        return None if len(known) < len(each) and not all(found) else found

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return await self._look_up(names, now=False)

    async def exists_now(self, names: Sequence[str]) -> list[bool]:
        return await self._look_up(names, now=True)

    async def _look_up(self, names: Sequence[str], *, now: bool) -> list[bool]:
        """now: believe no recent "not there"."""
        found, use = set[str](), Use()
        for level in self.all_levels:
            asked = names  # an index notes the use of all
            if not level.known:
                asked = [name for name in names if name not in found and (now or not level.absent(name))]
            found.update(itertools.compress(asked, await self._here(level, asked, use)))
        return [name in found for name in names]

    async def where(self, names: Sequence[str]) -> dict[str, list[bool]]:
        return dict(zip(self.names, await every(self._here(level, names) for level in self.all_levels), strict=True))

    async def _here(self, level: StoreLevel, names: Sequence[str], use: Use | None = None) -> list[bool]:
        """The answers of one level."""
        if level.out or level.lookups.out or not names:
            return [False] * len(names)
        if (there := level.find(names, use)) is not None:
            return there
        limit = level.lookups.limit()
        asking = await level.lookups.wait(level.storage.exists(names), LOOK_UP_S if limit is None else limit)
        if not asking.done():
            self._parts.late.begin(asking)
        if not asking.done() or isinstance(asking.exception(), StorageError):
            return [False] * len(names)
        return level.said(names, asking.result())

    def having(self, name: str) -> int:
        return sum(1 << level.number for level in self.all_levels if level.seems_to_have(name))

    def stored(self, names: Sequence[str], use: Use | None) -> list[bool]:
        """Whether the first working level with an index has each object. Queues copies that lower levels seem to lack.

        What the task owes to those levels is `prove`'s.
        """
        for level in self.all_levels:
            if level.known and not level.out:
                try:
                    there = level.index.stored(names, use)
                except StorageError:  # a class of another package may say so only here
                    break
                assert there is not None
                if use is not None and any(there):
                    here = itertools.compress(enumerate(names, use.start), there)
                    used = [Item(name, 0, use, depth) for depth, name in here]
                    for item, back in itertools.product(used, self.write_backs[level.number :]):
                        back.offer(item.name, use, item.depth, level)
                    self._used(used)
                return there
        return [False] * len(names)

    def owes(self, use: Use) -> bool:
        return bool(self._parts.urgent(use))

    async def prove(
        self, objects: Sequence[tuple[str, int, int]], use: Use, since: float
    ) -> list[Proof | StorageError]:
        return await self._proving.prove(objects, use, since)

    def slots_for(self, names: Sequence[str]) -> int:
        return 0 if self._in_memory(names) else self.slots_at_once or 0

    def _in_memory(self, names: Sequence[str]) -> bool:
        """Whether the first level has all of these, in memory."""
        first = self._first
        return first.in_memory and not first.out and all(first.index.find(names, None) or ())

    def place_of(self, name: str) -> StoreDirectory | None:
        """Also if a faster level has the object: who reads the file takes only what the page cache has."""
        places = (level.index.place_of(name) for level in self.all_levels if not level.out)
        return next((place for place in places if place is not None), None)

    def look(self, names: Sequence[str]) -> Coroutine[Any, Any, list[bool]] | None:
        level = next((one for one in self.all_levels if one.known and not one.out), None)
        return None if level is None else level.index.look(names)

    # --- loads --------------------------------------------------------------------------------------

    def load(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> Awaitable[list[Outcome]]:
        """Loads a few bytes that are in the first level's memory at once, and returns a done future."""
        if self._closed:
            raise Closed(f"{self.backend} storage is closed")
        items = as_chain(items)
        load = StackLoad(self._parts, items, drain, slots)
        if self._in_memory([item.name for item in items]):
            answer = self._first.storage.load(items, drain, slots)
            if isinstance(answer, asyncio.Future) and answer.done():
                if all(outcome is FOUND for outcome in answer.result()):
                    if items and items[0].counted:
                        self._hits += len(items)
                    self._used(items)
                    return answer
                load.sort(self._first, range(len(items)), answer.result())
            elif isinstance(answer, Coroutine):
                answer.close()  # it has not begun
        return Later(functools.partial(self._load, items, load))

    async def _load(self, items: Sequence[Item], load: StackLoad) -> list[Outcome]:
        with self._parts.traffic:
            outcomes = await load.run()
        if items and items[0].counted:
            self._hits += sum(outcome.found is Found.FOUND for outcome in outcomes)
            self._misses += sum(outcome.found is Found.MISSING for outcome in outcomes)
        self._used([item for item, outcome in zip(items, outcomes, strict=True) if outcome.found is Found.FOUND])
        return outcomes

    # --- stores -------------------------------------------------------------------------------------

    def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> Awaitable[list[Outcome]]:
        """Stores a few bytes in the first level's memory at once, and returns a done future."""
        storing = begun(self._store(as_chain(items), fill, slots))
        return storing if isinstance(storing, asyncio.Future) else uncancelled(storing)

    async def _store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        outcomes = await StackStore(self._parts, items, fill, slots).run()
        there = (Found.STORED, Found.EXISTS)
        self._used([item for item, outcome in zip(items, outcomes, strict=True) if outcome.found in there])
        return outcomes

    # --- damage -------------------------------------------------------------------------------------

    def quarantine(self, name: str) -> Awaitable[object]:
        """In all levels, because the damaged copy's level is not known. Its end waits for copies of it that run."""
        works = [self.quarantine_at(name, level.number) for level in self.all_levels]
        return every([*works, self._parts.settled([back for back in self.write_backs if name in back.running])])

    def quarantine_at(self, name: str, level: int) -> Awaitable[object]:
        """Only in this level, and in the level with a copy of its copy."""
        at = self.all_levels[level]
        self._parts.fences.damaged(name, level)
        works = [self._parts.put_aside(at, name)]
        if (above := self._promotions.damaged(name, at)) is not None:
            works.append(self._parts.put_aside(above, name))
        return every(works)

    async def purge_shared(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        return await self.keeper.purge_shared(selection, dry_run=dry_run)

    # --- reports ------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        return sum(level.storage.memory_bytes for level in self.all_levels)

    @property
    def carried_bytes(self) -> int:
        """Memory for copies between levels, besides the levels' own memory."""
        carries = [self._prefetcher.carry, self._promotions.buffers.carry, *(one.carry for one in self.write_backs)]
        return sum(carry.nbytes + carry.hanging_bytes for carry in carries)

    def statistics(self) -> dict[str, Any]:
        """The sums over all levels, and each level's own figures. It answers if a level does.

        Objects and bytes: of the level with the most. Capacity: of the lowest level that has one.
        """
        kept = self._prefetcher.kept_bytes
        backs = {one.level.number: (one.pending_bytes, kept[one.level], one.refuses) for one in self.write_backs}
        each = [level.storage.statistics() for level in self.all_levels]
        rows = [
            level.statistics(found, *backs.get(level.number, (0, kept[level], "")))
            for level, found in zip(self.all_levels, each, strict=True)
        ]
        report = functools.reduce(added, each)
        report |= {key: max((one.get(key) or 0 for one in each), default=0) for key in ("objects", "bytes")}
        report |= next(({"capacity": one["capacity"]} for one in each[::-1] if one.get("capacity")), {})
        if "breaker" in report and any(row["available"] for row in rows):
            report["breaker"] = "closed"
        own = {"backend": self.backend, "hits": self._hits, "misses": self._misses, "levels": rows}
        return report | own | {"warming_bytes": self._prefetcher.warming_bytes}

    def __repr__(self) -> str:
        return f"LevelsStorage({self.backend})"
