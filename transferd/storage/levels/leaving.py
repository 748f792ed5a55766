"""Levels that are taken out at run time, and put back (`transferd level drain`, `use`).

A level that leaves takes nothing more at once. Objects that only it has are copied to the level below it, or above if
there is none below, as far as there is room; loads still find them in it meanwhile. Then it is neither read nor
written, but keeps its objects. Purges always reach it. A level that is put back is opened anew: its medium may be
another one.

Who drains a level removes its medium next. So only what another level proves to have (proving.py) counts as not alone:
a bucket is asked for each object, files are looked at, and a level that does not answer has nothing.
"""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Sequence

from transferd.errors import RequestError, StorageError
from transferd.runtime.aio import in_turns
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.parts import StackParts
from transferd.storage.levels.prefetch import StackPrefetcher
from transferd.storage.levels.proving import Proving
from transferd.storage.levels.sweep import Sweep
from transferd.storage.levels.write_back import BATCH
from transferd.storage.lru import Use
from transferd.tasks import LevelChange


class Leaving:
    """See the module. Used on one loop."""

    def __init__(self, parts: StackParts, prefetcher: StackPrefetcher, proving: Proving, sweep: Sweep) -> None:
        self._parts = parts
        self._prefetcher = prefetcher
        self._proving = proving
        self._sweep = sweep
        self._draining: dict[int, asyncio.Task[dict[str, int]]] = {}  # by the level's number
        self._opening = defaultdict[int, asyncio.Lock](asyncio.Lock)  # held while a level, put back, looks for objects

    async def drain(self, name: str) -> LevelChange:
        """Take a level out. Returns when that is over, or it was put back. Raises RequestError, or why it failed."""
        level = self._parts.named(name)
        async with self._opening[level.number]:  # else nothing would be there, and nothing alone
            pass
        if not level.leaving:
            if all(one.leaving for one in self._parts.levels if one is not level):
                what = f"{name} is the only level that is in use"
                raise RequestError(f"{what}: put another one back first (transferd level use)", code="bad_value")
            level.leaving = True
            draining = self._draining[level.number] = asyncio.get_running_loop().create_task(self._drain(level))
            draining.add_done_callback(functools.partial(self._drained, level))  # runs before waiting callers go on
        if (running := self._draining.get(level.number)) is not None:
            await asyncio.wait([running])
            if not running.cancelled() and (error := running.exception()) is not None:
                raise error
            if not running.cancelled():
                return self._changed(level, running.result())
        async with self._opening[level.number]:
            return self._changed(level, await self._alone_of(level, {}) if level.drained else {})

    async def use(self, name: str) -> LevelChange:
        """Put a level back. What a bucket or pool once had is not believed any more. Raises RequestError."""
        level = self._parts.named(name)
        if (draining := self._draining.get(level.number)) is not None:
            draining.cancel()
            await asyncio.wait([draining])  # it puts the level back, so that another drain begins only after it
        elif level.leaving:
            async with self._opening[level.number]:
                if level.leaving:
                    await level.storage.open_anew()
                level.leaving = level.drained = False
        level.forget_hints()
        self._sweep.open_anew(level)
        return self._changed(level, {})

    async def only_here(self) -> tuple[int, int]:
        """Objects and bytes of levels in memory that no level which outlives the process proves to have.

        A pool outlives it, but for the objects that this process alone lends memory.
        """
        alone: dict[str, int] = {}
        for level in self._parts.levels:
            if level.in_memory:
                alone |= await self._alone_of(level, {}, outlives=True)
            elif (pool := level.storage.pool) is not None:
                own = await pool.alone()
                names = list(own)
                async for start in in_turns(range(0, len(names), BATCH), 1):
                    some = names[start : start + BATCH]
                    found = await self._elsewhere(level, some, outlives=True)
                    alone |= {name: own[name] for name in some if name not in found}
        return len(alone), sum(alone.values())

    async def close(self) -> None:
        for task in self._draining.values():
            task.cancel()
        if self._draining:
            await asyncio.wait(self._draining.values())

    def _changed(self, level: StoreLevel, alone: dict[str, int]) -> LevelChange:
        """alone: the lengths of objects that no other level has, by name."""
        return LevelChange(level.name, level.state, len(alone), sum(alone.values()))

    async def _drain(self, level: StoreLevel) -> dict[str, int]:
        """Copy what only this level has. Returns the lengths of objects that it still has alone, by name."""
        backs = [back for back in self._parts.write_backs if back.level is level]
        for back in backs:
            await back.withdraw("drained")
        if ends := self._parts.stores.ends:  # those that began before store there still
            await asyncio.wait(set(ends))
        await self._parts.settled(backs)
        return await self._alone_of(level, await self._copy(level))

    def _drained(self, level: StoreLevel, ended: asyncio.Task[dict[str, int]]) -> None:
        """Take the level out, now that its drain has ended, unless it failed, or `use` has ended it."""
        del self._draining[level.number]
        level.draining_bytes = 0
        level.drained = level.leaving = not ended.cancelled() and ended.exception() is None

    async def _copy(self, level: StoreLevel) -> dict[str, StoreLevel]:
        """Copy the objects that only this level has. Returns the level that has each of the others, by name."""
        objects = [one async for one in in_turns(level.index.hottest_first())]
        level.draining_bytes = sum(nbytes for _, nbytes in objects)
        use, proven = Use(), dict[str, StoreLevel]()
        async for start in in_turns(range(0, len(objects), BATCH), 1):
            some = [(*one, depth) for depth, one in enumerate(objects[start : start + BATCH], start)]
            found = await self._elsewhere(level, [name for name, _, _ in some])
            alone = [one for one in some if one[0] not in found]
            proven |= found
            if any(not one.out_for_stores for one in self._parts.levels[level.number + 1 :]):
                below = self._parts.write_backs[level.number :]
                for name, nbytes, depth in alone:
                    for back in below:
                        if not back.fits(nbytes):
                            await back.emptied()
                        back.offer(name, use, depth, level)
                for back in below:
                    await back.emptied()
            elif alone and (above := self._parts.promotions.above(level)) is not None:
                bringing = self._prefetcher.to(above.name, None, free_only=True)
                await asyncio.shield(bringing.bring(alone))
            level.draining_bytes -= sum(nbytes for _, nbytes, _ in some)
        return proven

    async def _alone_of(
        self, level: StoreLevel, proven: dict[str, StoreLevel], *, outlives: bool = False
    ) -> dict[str, int]:
        """The lengths of objects that no other level proves to have, by name.

        proven: by this drain, and where. outlives: other levels in memory do not count.
        """
        alone = {}
        objects = [one async for one in in_turns(level.index.hottest_first())]
        async for start in in_turns(range(0, len(objects), BATCH), 1):
            some = objects[start : start + BATCH]
            open_ = [name for name, _ in some if not self._still(proven.get(name), name)]
            found = await self._elsewhere(level, open_, outlives=outlives) if open_ else {}
            alone.update({name: nbytes for name, nbytes in some if name in open_ and name not in found})
        return {name: nbytes async for name, nbytes in in_turns(alone.items()) if level.has([name]) == [True]}

    def _still(self, where: StoreLevel | None, name: str) -> bool:
        """Whether a level that has proven to have an object has not lost it since, as far as that can be noticed."""
        return where is not None and not where.out and where.seems_to_have(name)

    async def _elsewhere(
        self, level: StoreLevel, names: Sequence[str], *, outlives: bool = False
    ) -> dict[str, StoreLevel]:
        """Which other level proves to have each of these, for those that one has."""
        found: dict[str, StoreLevel] = {}
        for one in self._parts.levels:
            open_ = [name for name in names if name not in found]
            if one is level or one.leaving or (outlives and one.in_memory) or not open_:
                continue
            try:
                said = await self._proving.ask(one, open_)
            except StorageError:
                continue
            found.update({name: one for name, proof in zip(open_, said, strict=True) if proof is not None})
        return found
