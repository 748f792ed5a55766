"""The state that parts of a stack share: levels, objects on their way between them, calls that outlive their task."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from transferd.errors import RequestError, StorageError
from transferd.runtime.aio import Background, answered
from transferd.runtime.compat import wait_for
from transferd.runtime.threads import Threads
from transferd.storage.base import Item
from transferd.storage.effects import Traffic
from transferd.storage.keeping import Keeper
from transferd.storage.levels.fences import Fences
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.promotion import Promotions
from transferd.storage.levels.write_back import Unsaved, WriteBack
from transferd.storage.selection import Selection

SETTLE_S = 10.0  # how long a purge or a drain waits for copies between levels


class StackParts:
    """See the module.

    unsaved: by name, objects that some levels lack.
    write_backs: one for each level but the first.
    now: monotonic seconds.

    Used on one loop.
    """

    def __init__(self, levels: Sequence[StoreLevel], now: Callable[[], float], threads: Threads) -> None:
        self.levels = list(levels)
        self.now = now
        self.threads = threads
        self.fences = Fences()
        self.promotions = Promotions(self.levels, self.fences, self.withdraw)
        self.traffic = Traffic()
        self.unsaved: dict[str, Unsaved] = {}
        self.write_backs: list[WriteBack] = []
        self.storing: set[asyncio.Future[None]] = set()  # the ends of stores that run
        self.late = Background()  # calls that outlive their task, and that a close waits for
        self._withdrawing: set[asyncio.Future[Any]] = set()

    def named(self, name: str) -> StoreLevel:
        """Raises RequestError."""
        level = next((one for one in self.levels if one.name == name), None)
        if level is None:
            names = ", ".join(one.name for one in self.levels)
            what = f"this daemon has no level {name[:80]!r}; it has {names} (storage.levels)"
            raise RequestError(what, code="unknown_level")
        return level

    def source(self, level: StoreLevel, name: str) -> StoreLevel | None:
        """The first level above this one from which an object can be copied there."""
        above = self.levels[: level.number]
        return next((one for one in above if one.known and not one.out and one.has([name]) == [True]), None)

    def lost(self, level: StoreLevel, item: Item) -> None:
        """A level has no object of this length: a copy of another length, on its way from there, must not stay."""
        one = self.unsaved.get(item.name)
        if one is not None and one.source is level and one.nbytes != item.nbytes:
            self.fences.damaged(item.name, level.number)

    def withdraw(self, level: StoreLevel, name: str) -> asyncio.Future[Any]:
        """Begin to remove an object that was purged while it came to this level. `withdrawn` waits for it.

        The future raises nothing: an object that cannot be removed is the level's to report (stuck.py).
        """
        level.unsettle(name)
        keeper = level.storage.keeper
        if keeper is None:  # its objects are others' as well
            return answered(None)
        removing = self.late.begin(_removed(keeper, name))
        self._withdrawing.add(removing)
        removing.add_done_callback(self._withdrawing.discard)
        return removing

    async def settled(self, backs: Sequence[WriteBack]) -> None:
        """Wait for the copies that run now, those to these levels and those up, for a while: a call may hang.

        If it ends later, what it has read before a purge commits nothing (fences.py).
        """

        async def ended() -> None:
            for back in backs:
                await back.copied()
            await self.promotions.settled()
            await self.withdrawn()

        with contextlib.suppress(TimeoutError):
            await wait_for(ended(), SETTLE_S)

    async def withdrawn(self) -> None:
        """Wait until all objects that must not stay have gone."""
        if self._withdrawing:
            await asyncio.wait(set(self._withdrawing))

    def put_aside(self, level: StoreLevel, name: str) -> asyncio.Future[object]:
        """Begin a quarantine now: a level with an index has dropped the object when this returns."""
        level.unsettle(name)
        return self.late.begin(level.storage.quarantine(name))


async def _removed(keeper: Keeper, name: str) -> None:
    with contextlib.suppress(StorageError):
        await keeper.purge(Selection(names=frozenset([name])))
