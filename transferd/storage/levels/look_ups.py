"""Look-ups in a stack: answers from the indexes of its levels, and timely answers of the others. Copies nothing up."""

from __future__ import annotations

import itertools
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
        each = [level.find(names, use) for level in self._parts.levels if not level.out]
        known = [there for there in each if there is not None]
        found = [any(one) for one in zip(*known, strict=True)] if known else [False] * len(names)
        return None if len(known) < len(each) and not all(found) else found

    async def exists(self, names: Sequence[str], use: Use, *, now: bool = False) -> list[bool]:
        """Ask a level. One that fails, or is too slow, counts as having nothing. now: believe no recent "not there"."""
        found = set[str]()
        for level in self._parts.levels:
            asked = names  # an index notes the use of all
            if not level.known:
                asked = [name for name in names if name not in found and (now or not level.absent(name))]
            found.update(itertools.compress(asked, await self._here(level, asked, use)))
        return [name in found for name in names]

    async def where(self, names: Sequence[str]) -> dict[str, list[bool]]:
        """The answers by level. One that fails, or is too slow, counts as having nothing."""
        each = await every(self._here(level, names, None) for level in self._parts.levels)
        return dict(zip((level.name for level in self._parts.levels), each, strict=True))

    async def _here(self, level: StoreLevel, names: Sequence[str], use: Use | None) -> list[bool]:
        if level.out or level.lookups.out:
            return [False] * len(names)
        there = level.find(names, use)
        return await self._asked(level, names) if there is None else there

    async def _asked(self, level: StoreLevel, names: Sequence[str]) -> list[bool]:
        if not names:
            return []
        limit = level.lookups.limit()
        asking = await level.lookups.wait(level.storage.exists(names), LOOK_UP_S if limit is None else limit)
        if not asking.done():
            self._parts.late.begin(asking)
            return [False] * len(names)
        try:
            there = asking.result()
        except StorageError:
            return [False] * len(names)
        there = [one and name not in level.hidden for name, one in zip(names, there, strict=True)]
        for name, one in zip(names, there, strict=True):
            (level.stored if one else level.missed)(name)
        return there
