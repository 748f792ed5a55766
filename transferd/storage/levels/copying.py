"""Copies between levels: write-back, promotion and prefetch read in one level, and commit in another under a fence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from transferd.errors import StorageError
from transferd.runtime.aio import Background, answered
from transferd.storage.base import Found, Item, Outcome, with_slots_back
from transferd.storage.effects import Traffic
from transferd.storage.keeping import Keeper
from transferd.storage.levels.fences import Fences
from transferd.storage.levels.level import StoreLevel
from transferd.storage.selection import Selection


class Copying:
    """What all kinds of copies share. now: monotonic seconds. Used on one loop."""

    def __init__(self, levels: Sequence[StoreLevel], now: Callable[[], float]) -> None:
        self.levels = list(levels)
        self.now = now
        self.fences = Fences()
        self.traffic = Traffic()
        self.late = Background()  # calls that outlive their task, and that a close waits for
        self._withdrawing = Background()

    async def copy(
        self,
        items: Sequence[Item],
        sources: Sequence[StoreLevel],
        slots: Sequence[memoryview],
        level: StoreLevel,
        born: int,
    ) -> list[tuple[Item, Outcome, str]]:
        """Store objects in a level. For each: as the level got it, its answer, and why it must not stay there, or "".

        What must not stay is removed again. The level holds what it has stored and what stays, until `Index.release`.
        sources: where they were read. born: the number of the latest fence when that began. Raises StorageError.
        """
        items = [source.handed_on(item) for source, item in zip(sources, items, strict=True)]
        if not level.known:
            level.overwrite_hidden(items)
        outcomes = await with_slots_back(level.storage.store(items, None, slots))
        copies = []
        for item, source, outcome in zip(items, sources, outcomes, strict=True):
            there = outcome.found in (Found.STORED, Found.EXISTS)
            why = self.fences.forbids(item.name, born, source) if there else ""
            if why and outcome.found is Found.STORED:
                assert item.use is not None
                level.index.release(item.name, item.use)
                # Also a level where a purge removes nothing puts aside what is damaged.
                await (self.put_aside if why == "quarantined" else self.withdraw)(level, item.name)
            copies.append((item, outcome, why))
        return copies

    def withdraw(self, level: StoreLevel, name: str) -> asyncio.Future[Any]:
        """Begin to remove an object that was purged while it came to this level. `withdrawn` waits for it.

        The future raises nothing: an object that cannot be removed is the level's to report (stuck.py).
        """
        level.unsettle(name)
        keeper = level.storage.keeper
        if keeper is None:  # its objects are others' as well
            return answered(None)
        return self._withdrawing.begin(self.late.begin(_removed(keeper, name)))

    async def withdrawn(self) -> None:
        """Wait until all objects that must not stay have gone."""
        await self._withdrawing.settled()

    def put_aside(self, level: StoreLevel, name: str) -> asyncio.Future[object]:
        """Begin a quarantine now: a level with an index has dropped the object when this returns."""
        level.unsettle(name)
        return self.late.begin(level.storage.quarantine(name))


async def _removed(keeper: Keeper, name: str) -> None:
    with contextlib.suppress(StorageError):
        await keeper.purge(Selection(names=frozenset([name])))
