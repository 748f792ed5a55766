"""Look-ups in a stack: answers from the indexes of its levels, and timely answers of the others. Copies nothing up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from transferd.errors import StorageError
from transferd.runtime.aio import every
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.parts import StackParts
from transferd.storage.lru import Use

LOOK_UP_S = 1.0  # how long a look-up waits for a level before any of its calls was measured


class LookUps:
    """See the module. use: the look-up's; None if it does not count as a use."""

    def __init__(self, parts: StackParts) -> None:
        self._parts = parts

    def find(self, names: Sequence[str], use: Use | None) -> list[bool] | None:
        """The answer without I/O; None if a level without an index must be asked."""
        found, unknown = [False] * len(names), False
        for level in self._parts.levels:
            if level.out:
                continue
            there = level.find(names, use)
            if there is None:
                unknown = True
            else:
                found = [one or other for one, other in zip(found, there, strict=True)]
        return None if unknown and not all(found) else found

    async def exists(self, names: Sequence[str], use: Use, *, now: bool = False) -> list[bool]:
        """Ask a level. One that fails, or is too slow, counts as having nothing. now: believe no recent "not there"."""
        found = [False] * len(names)
        for level in self._parts.levels:
            if level.out or level.lookups.out:
                continue
            there = level.find(names, use)
            if there is None:
                which = [i for i, one in enumerate(found) if not one and (now or not level.absent(names[i]))]
                for i, one in zip(which, await self._asked(level, [names[i] for i in which]), strict=True):
                    found[i] = one
            else:
                found = [one or other for one, other in zip(found, there, strict=True)]
        return found

    async def where(self, names: Sequence[str]) -> dict[str, list[bool]]:
        """The answers by level. One that fails, or is too slow, counts as having nothing."""
        each = await every(self._where(level, names) for level in self._parts.levels)
        return dict(zip((level.name for level in self._parts.levels), each, strict=True))

    async def _where(self, level: StoreLevel, names: Sequence[str]) -> list[bool]:
        if level.out or level.lookups.out:
            return [False] * len(names)
        there = level.find(names)
        return await self._asked(level, names) if there is None else there

    async def _asked(self, level: StoreLevel, names: Sequence[str]) -> list[bool]:
        if not names:
            return []
        began = self._parts.now()
        asking = asyncio.ensure_future(level.storage.exists(names))
        limit = level.lookups.limit()
        await asyncio.wait([asking], timeout=LOOK_UP_S if limit is None else limit)
        if not asking.done():
            level.lookups.late()
            self._parts.late.begin(asking)
            asking.add_done_callback(
                lambda done: level.lookups.returned(None if done.exception() else self._parts.now() - began)
            )
            return [False] * len(names)
        try:
            there = asking.result()
        except StorageError:
            return [False] * len(names)
        level.lookups.ended(self._parts.now() - began)
        there = [one and name not in level.hidden for name, one in zip(names, there, strict=True)]
        for name, one in zip(names, there, strict=True):
            (level.stored if one else level.missed)(name)
        return there
