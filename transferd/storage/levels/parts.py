"""The state that parts of a stack share: levels, objects on their way between them, calls that outlive their task."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from transferd.errors import RequestError
from transferd.runtime.compat import wait_for
from transferd.runtime.threads import Threads
from transferd.storage.base import Item
from transferd.storage.levels.copying import Copying
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.promotion import Promotions
from transferd.storage.levels.write_back import WriteBack
from transferd.storage.running import RunningCalls

SETTLE_S = 10.0  # how long a purge or a drain waits for copies between levels


class StackParts(Copying):
    """See the module. write_backs: the copies to each level but the first."""

    def __init__(self, levels: Sequence[StoreLevel], now: Callable[[], float], threads: Threads) -> None:
        super().__init__(levels, now)
        self.threads = threads
        self.promotions = Promotions(self)
        self.write_backs = [WriteBack(level, self) for level in levels[1:]]
        self.stores = RunningCalls()

    def named(self, name: str) -> StoreLevel:
        """Raises RequestError."""
        level = next((one for one in self.levels if one.name == name), None)
        if level is None:
            names = ", ".join(one.name for one in self.levels)
            what = f"this daemon has no level {name[:80]!r}; it has {names} (storage.levels)"
            raise RequestError(what, code="unknown_level")
        return level

    def lost(self, level: StoreLevel, item: Item) -> None:
        """A level has no object of this length: a copy of another length, on its way from there, must not stay."""
        copies = self.unsaved.get(item.name, {}).values()
        if any(one.source is level and one.nbytes != item.nbytes for one in copies):
            self.fences.damaged(item.name, level.number)

    async def settled(self, backs: Sequence[WriteBack]) -> None:
        """Wait for the copies that run now, those to these levels and those up, for a while: a call may hang.

        If it ends later, what it has read before a purge commits nothing (fences.py).
        """

        async def ended() -> None:
            for back in backs:
                await back.copied()
            await self.promotions.running.ended()
            await self.withdrawn()

        with contextlib.suppress(TimeoutError):
            await wait_for(ended(), SETTLE_S)
