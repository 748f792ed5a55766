"""Levels that are taken out at run time, and put back (`transferd level drain`, `use`).

A level that leaves takes nothing more at once. Objects that only it has are copied to the level below it, or above if
there is none below, as far as there is room; loads still find them in it meanwhile. Then it is neither read nor
written, but keeps its objects: once put back, it serves them again. Purges always reach it.
"""

from __future__ import annotations

import asyncio
import functools

from transferd.errors import RequestError
from transferd.runtime.aio import in_turns
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.parts import StackParts
from transferd.storage.levels.prefetch import StackPrefetcher
from transferd.storage.levels.storing import Storing
from transferd.storage.levels.write_back import BATCH
from transferd.storage.lru import Use
from transferd.tasks import LevelChange


class Leaving:
    """See the module. Used on one loop."""

    def __init__(self, parts: StackParts, storing: Storing, prefetcher: StackPrefetcher) -> None:
        self._parts = parts
        self._storing = storing
        self._prefetcher = prefetcher
        self._draining: dict[int, asyncio.Task[None]] = {}  # by the level's number

    async def drain(self, name: str) -> LevelChange:
        """Take a level out. Returns when that is over, or it was put back. Raises RequestError, or why it failed."""
        level = self._level(name)
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
        return await self._change(level)

    async def use(self, name: str) -> LevelChange:
        """Put a level back. Raises RequestError."""
        level = self._level(name)
        if (draining := self._draining.get(level.number)) is not None:
            draining.cancel()
            await asyncio.wait([draining])  # it puts the level back, so that another drain begins only after it
        else:
            level.leaving = level.drained = False
        return await self._change(level)

    async def close(self) -> None:
        for task in self._draining.values():
            task.cancel()
        if self._draining:
            await asyncio.wait(self._draining.values())

    def _level(self, name: str) -> StoreLevel:
        level = next((one for one in self._parts.levels if one.name == name), None)
        if level is None:
            names = ", ".join(one.name for one in self._parts.levels)
            what = f"this daemon has no level {name[:80]!r}; it has {names} (storage.levels)"
            raise RequestError(what, code="unknown_level")
        return level

    async def _change(self, level: StoreLevel) -> LevelChange:
        objects = in_turns(level.storage.index.hottest_first())
        alone = [nbytes async for name, nbytes in objects if not self._elsewhere(level, name)]
        return LevelChange(level.name, level.state, len(alone), sum(alone))

    async def _drain(self, level: StoreLevel) -> None:
        for back in self._parts.write_backs:
            if back.level is level:
                back.withdraw("drained")
                await back.copied()
        await self._parts.promotions.settled()
        await self._copy(level)

    def _drained(self, level: StoreLevel, ended: asyncio.Task[None]) -> None:
        """Take the level out, now that its drain has ended, unless it failed, or `use` has ended it."""
        del self._draining[level.number]
        level.draining_bytes = 0
        level.drained = level.leaving = not ended.cancelled() and ended.exception() is None

    async def _copy(self, level: StoreLevel) -> None:
        """Copy the objects that only this level has."""
        objects = [one async for one in in_turns(level.storage.index.hottest_first())]
        level.draining_bytes = sum(nbytes for _, nbytes in objects)
        use = Use()
        for start in range(0, len(objects), BATCH):
            some = [(*one, depth) for depth, one in enumerate(objects[start : start + BATCH], start)]
            alone = [one for one in some if not self._elsewhere(level, one[0])]
            if any(not one.out_for_stores for one in self._parts.levels[level.number + 1 :]):
                for name, _, depth in alone:
                    self._storing.save(level, name, use, depth)
                for back in self._parts.write_backs:
                    if back.level.number > level.number:
                        await back.idle()
            elif alone and (above := self._parts.promotions.above(level)) is not None:
                bringing = self._prefetcher.to(above.name, None, free_only=True)
                await asyncio.shield(bringing.bring(alone))
            level.draining_bytes -= sum(nbytes for _, nbytes, _ in some)

    def _elsewhere(self, level: StoreLevel, name: str) -> bool:
        return any(one is not level and not one.out and one.seems_to_have(name) for one in self._parts.levels)
