"""A Storage in front of another one that makes a block of several objects look like one object.

A name stands for the objects name + suffix, one for each ObjectPart of the format, and each object uses its range of
the buffer. The answer for a block is the worst answer of its objects:

    exists   all of them
    store    FAILED if one failed; else STORED if one was new; else EXISTS
    load     FAILED if one failed; else MISSING if one is; else FOUND

If only some of a block's objects are stored, the block is missing, and a store completes it. A read that comes between
two objects of a store misses the block.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from transferd.blocks.formats import ObjectPart
from transferd.errors import StorageError
from transferd.runtime.aio import every
from transferd.storage.base import Drainer, Fill, Found, FrontStorage, Index, Item, Outcome, Outcomes, Storage
from transferd.storage.levels.base import Levels, Prefetcher, Proof
from transferd.storage.lru import Use
from transferd.tasks import LevelChange

_WORST_FIRST = (Found.FAILED, Found.MISSING, Found.LEFT, Found.STORED, Found.EXISTS, Found.FOUND)
_BADNESS = {found: rank for rank, found in enumerate(reversed(_WORST_FIRST))}


def divided(storage: Storage, parts: Sequence[ObjectPart]) -> Storage:
    """`storage` for blocks of these parts; `storage` itself if a block is one object under its own name."""
    return storage if [part.suffix for part in parts] == [""] else DividedStorage(storage, parts)  # type: ignore[abstract]


class _Blocks:
    """Translates between names of blocks and names of their objects."""

    def __init__(self, parts: Sequence[ObjectPart]) -> None:
        self.parts = tuple(parts)

    def objects(self, names: Sequence[str]) -> list[str]:
        """The objects of each block, next to each other, so that a pool can answer for a whole block at one moment."""
        return [name + part.suffix for name in names for part in self.parts]

    def whole(self, found: Sequence[bool]) -> list[bool]:
        """For each block, whether all of its objects are there."""
        each = len(self.parts)
        return [all(found[i : i + each]) for i in range(0, len(found), each)]


def of_blocks(left: Callable[[str], None], parts: Sequence[ObjectPart]) -> Callable[[str], None]:
    """A listener for departures of objects. It calls `left` with the name of the block that is incomplete now."""
    suffixes = tuple(part.suffix for part in parts)

    def object_left(name: str) -> None:
        suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
        if suffix is not None:
            left(name.removesuffix(suffix))

    return object_left


class DividedLevels(Levels):
    """A block is in a level that has all of its objects."""

    def __init__(self, behind: Levels, blocks: _Blocks) -> None:
        self._behind, self._blocks = behind, blocks
        self.names = behind.names

    @property
    def out(self) -> list[str]:
        return self._behind.out

    def having(self, name: str) -> int:
        return functools.reduce(operator.and_, map(self._behind.having, self._blocks.objects([name])))

    def tell(self, changed: Callable[[str], None]) -> None:
        self._behind.tell(of_blocks(changed, self._blocks.parts))

    async def where(self, names: Sequence[str]) -> dict[str, list[bool]]:
        found = await self._behind.where(self._blocks.objects(names))
        return {level: self._blocks.whole(there) for level, there in found.items()}

    async def exists_now(self, names: Sequence[str]) -> list[bool]:
        return self._blocks.whole(await self._behind.exists_now(self._blocks.objects(names)))

    def owes(self, use: Use) -> bool:
        return self._behind.owes(use)

    async def prove(
        self, objects: Sequence[tuple[str, int, int]], use: Use, since: float
    ) -> list[Proof | StorageError]:
        each = len(self._blocks.parts)
        parts = [
            (name + part.suffix, part.stop - part.start, depth * each + i)
            for name, _, depth in objects
            for i, part in enumerate(self._blocks.parts)
        ]
        answers = await self._behind.prove(parts, use, since)
        blocks = [answers[i : i + each] for i in range(0, len(answers), each)]
        return [next((one for one in block if isinstance(one, StorageError)), block[0]) for block in blocks]

    def slots_for(self, names: Sequence[str]) -> int:
        return self._behind.slots_for(self._blocks.objects(names))

    def quarantine_at(self, name: str, level: int) -> Awaitable[object]:
        return every([self._behind.quarantine_at(one, level) for one in self._blocks.objects([name])])

    @property
    def prefetcher(self) -> Prefetcher:
        return self._behind.prefetcher

    async def change(self, name: str, *, leaves: bool) -> LevelChange:
        return await self._behind.change(name, leaves=leaves)

    async def flush(self, within_s: float) -> None:
        await self._behind.flush(within_s)


class DividedStorage(FrontStorage, Index):
    """See the module. Borrows the storage behind it: `open` and `close` do nothing, because its owner calls them.

    As an index it has whole blocks. The storage behind keeps order and holds, for single objects.
    """

    def __init__(self, storage: Storage, parts: Sequence[ObjectPart]) -> None:
        super().__init__(storage)
        self.slots_at_once = None
        self._blocks = _Blocks(parts)
        self._levels = None if storage.levels is None else DividedLevels(storage.levels, self._blocks)

    async def open(self) -> None:
        """Does nothing: the owner opens the storage behind."""

    async def close(self) -> None:
        """Does nothing: the owner closes the storage behind."""

    @property
    def index(self) -> Index:
        return self

    def find(self, names: Sequence[str], use: Use | None) -> list[bool] | None:
        found = self._behind.index.find(self._blocks.objects(names), use)
        return None if found is None else self._blocks.whole(found)

    def stored(self, names: Sequence[str], use: Use | None) -> list[bool] | None:
        found = self._behind.index.stored(self._blocks.objects(names), use)
        return None if found is None else self._blocks.whole(found)

    def look(self, names: Sequence[str]) -> Coroutine[Any, Any, list[bool]] | None:
        looked = self._behind.index.look(self._blocks.objects(names))
        return None if looked is None else self._whole_of(looked)

    async def _whole_of(self, looked: Awaitable[list[bool]]) -> list[bool]:
        return self._blocks.whole(await looked)

    def tell_departures(self, left: Callable[[str], None]) -> bool:
        """Reports a block when any of its objects leaves."""
        return self._behind.index.tell_departures(of_blocks(left, self._blocks.parts))

    @property
    def levels(self) -> Levels | None:
        return self._levels

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return await self._whole_of(self._behind.exists(self._blocks.objects(names)))

    async def store(self, items: Sequence[Item], _: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        return self._joined(await self._behind.store(self._items(items), None, self._cut(slots)))

    async def load(self, items: Sequence[Item], _: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        return self._joined(await self._behind.load(self._items(items), None, self._cut(slots)))

    def quarantine(self, name: str) -> Awaitable[object]:
        return every([self._behind.quarantine(one) for one in self._blocks.objects([name])])

    def _items(self, items: Sequence[Item]) -> list[Item]:
        each = len(self._blocks.parts)
        return [
            Item(item.name + part.suffix, part.stop - part.start, item.use, item.depth * each + i)
            for item in items
            for i, part in enumerate(self._blocks.parts)  # depths as `find` counts them
        ]

    def _cut(self, slots: Sequence[memoryview]) -> list[memoryview]:
        return [slot[part.start : part.stop] for slot in slots for part in self._blocks.parts]

    def _joined(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        each = len(self._blocks.parts)
        joined = [
            max(outcomes[i : i + each], key=lambda outcome: _BADNESS[outcome.found])
            for i in range(0, len(outcomes), each)
        ]
        return Outcomes(joined, outcomes.returned) if isinstance(outcomes, Outcomes) else joined
