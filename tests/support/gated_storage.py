"""A storage in front of another one whose calls a test holds up, and lets fail: a level that is slow, dead or full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from transferd.config import LevelSection
from transferd.errors import StorageError
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.base import NO_INDEX, Drainer, Fill, Found, FrontStorage, Index, Item, Outcome, Storage
from transferd.storage.keeping import Keeper
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.stack import LevelsStorage


class GatedStorage(FrontStorage):
    """See the module. open_: whether calls go through. error: what calls raise. full: what stores answer each object.

    asks: it does not know what it has without being asked, as a remote one. stores, loads: the names, in the order they
    came.
    """

    def __init__(self, behind: Storage, backend: str = "", *, asks: bool = False) -> None:
        super().__init__(behind)
        self.backend = backend or behind.backend
        self.shared = self.backend in ("mooncake", "object")
        self.asks = asks
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: StorageError | None = None
        self.full: StorageError | None = None
        self.stores: list[str] = []
        self.loads: list[str] = []
        self.asked = 0
        self.waiting = 0

    async def _pass(self) -> None:
        self.waiting += 1
        try:
            await self.gate.wait()
        finally:
            self.waiting -= 1
        if self.error is not None:
            raise self.error

    @property
    def index(self) -> Index:
        return NO_INDEX if self.asks else self._behind.index

    @property
    def keeper(self) -> Keeper | None:
        return None if self.asks else self._behind.keeper

    async def exists(self, names: Sequence[str]) -> list[bool]:
        self.asked += 1
        await self._pass()
        return await self._behind.exists(names)

    async def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        await self._pass()
        self.stores += [item.name for item in items]
        if self.full is not None:
            return [Outcome(Found.FAILED, self.full)] * len(items)
        return await self._behind.store(items, fill, slots)

    async def load(self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        await self._pass()
        self.loads += [item.name for item in items]
        return await self._behind.load(items, drain, slots)


def gated(behind: Storage, backend: str = "", *, asks: bool = False) -> GatedStorage:
    return GatedStorage(behind, backend, asks=asks)  # type: ignore[abstract]


def stack(*storages: Storage, **sections: LevelSection) -> LevelsStorage:
    """These as levels, the fastest first. sections: by backend."""
    levels = [
        StoreLevel(i, one.backend, one, sections.get(one.backend, LevelSection()), SYSTEM_CLOCK.monotonic)
        for i, one in enumerate(storages)
    ]
    return LevelsStorage(levels, SYSTEM_CLOCK)
