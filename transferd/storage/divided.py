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
from typing import Any, TypeVar

from transferd.blocks.formats import ObjectPart
from transferd.errors import StorageError
from transferd.runtime.aio import every
from transferd.storage.base import Drainer, Fill, Found, FrontStorage, Index, Item, Outcome, Outcomes, Storage
from transferd.storage.levels.base import Levels, Proof
from transferd.storage.lru import Use

T = TypeVar("T")

_WORST_FIRST = (Found.FAILED, Found.MISSING, Found.LEFT, Found.STORED, Found.EXISTS, Found.FOUND)
_BADNESS = {found: rank for rank, found in enumerate(reversed(_WORST_FIRST))}


def divided(storage: Storage, parts: Sequence[ObjectPart]) -> Storage:
    """`storage` for blocks of these parts; `storage` itself if a block is one object under its own name."""
    return storage if [part.suffix for part in parts] == [""] else DividedStorage(storage, parts)  # type: ignore[abstract]


def of_blocks(left: Callable[[str], None], parts: Sequence[ObjectPart]) -> Callable[[str], None]:
    """A listener for departures of objects. It calls `left` with the name of the block that is incomplete now."""
    suffixes = tuple(part.suffix for part in parts)

    def object_left(name: str) -> None:
        suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
        if suffix is not None:
            left(name.removesuffix(suffix))

    return object_left


def _behind_levels(member: str) -> property:
    return property(operator.attrgetter(f"_behind.levels.{member}"))


class DividedStorage(FrontStorage, Index, Levels):
    """See the module. Borrows the storage behind it: `open` and `close` do nothing, because its owner calls them.

    As an index it has whole blocks, and a level has a block if it has all of its objects. The storage behind keeps
    order and holds, for single objects.
    """

    def __init__(self, storage: Storage, parts: Sequence[ObjectPart]) -> None:
        super().__init__(storage)
        self.slots_at_once = None
        self._parts = tuple(parts)

    def _objects(self, names: Sequence[str]) -> list[str]:
        """The objects of each block, next to each other, so that a pool can answer for a whole block at one moment."""
        return [name + part.suffix for name in names for part in self._parts]

    def _blocks(self, of_objects: Sequence[T]) -> list[Sequence[T]]:
        """What there is for each object, by block."""
        each = len(self._parts)
        return [of_objects[i : i + each] for i in range(0, len(of_objects), each)]

    def _whole(self, found: Sequence[bool]) -> list[bool]:
        """For each block, whether all of its objects are there."""
        return [all(block) for block in self._blocks(found)]

    async def open(self) -> None:
        """Does nothing: the owner opens the storage behind."""

    async def close(self) -> None:
        """Does nothing: the owner closes the storage behind."""

    @property
    def index(self) -> Index:
        return self

    @property
    def levels(self) -> Levels | None:
        return None if self._behind.levels is None else self

    # --- look-ups -----------------------------------------------------------------------------------

    def find(self, names: Sequence[str], use: Use | None) -> list[bool] | None:
        found = self._behind.index.find(self._objects(names), use)
        return None if found is None else self._whole(found)

    def stored(self, names: Sequence[str], use: Use | None) -> list[bool] | None:
        found = self._behind.index.stored(self._objects(names), use)
        return None if found is None else self._whole(found)

    def look(self, names: Sequence[str]) -> Coroutine[Any, Any, list[bool]] | None:
        looked = self._behind.index.look(self._objects(names))
        return None if looked is None else self._whole_of(looked)

    async def _whole_of(self, looked: Awaitable[list[bool]]) -> list[bool]:
        return self._whole(await looked)

    def tell_departures(self, left: Callable[[str], None]) -> bool:
        """Reports a block when any of its objects leaves."""
        return self._behind.index.tell_departures(of_blocks(left, self._parts))

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return await self._whole_of(self._behind.exists(self._objects(names)))

    # --- objects ------------------------------------------------------------------------------------

    async def store(self, items: Sequence[Item], _: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        return self._joined(await self._behind.store(self._items(items), None, self._cut(slots)))

    async def load(self, items: Sequence[Item], _: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        return self._joined(await self._behind.load(self._items(items), None, self._cut(slots)))

    def quarantine(self, name: str) -> Awaitable[object]:
        return every([self._behind.quarantine(one) for one in self._objects([name])])

    def _items(self, items: Sequence[Item]) -> list[Item]:
        each = len(self._parts)
        return [
            Item(item.name + part.suffix, part.stop - part.start, item.use, item.depth * each + i)
            for item in items
            for i, part in enumerate(self._parts)  # depths as `find` counts them
        ]

    def _cut(self, slots: Sequence[memoryview]) -> list[memoryview]:
        return [slot[part.start : part.stop] for slot in slots for part in self._parts]

    def _joined(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        joined = [max(block, key=lambda outcome: _BADNESS[outcome.found]) for block in self._blocks(outcomes)]
        return Outcomes(joined, outcomes.returned) if isinstance(outcomes, Outcomes) else joined

    # --- levels, if the storage behind has them -----------------------------------------------------

    names = _behind_levels("names")
    out = _behind_levels("out")
    prefetcher = _behind_levels("prefetcher")
    owes = _behind_levels("owes")
    change = _behind_levels("change")
    flush = _behind_levels("flush")

    def having(self, name: str) -> int:
        return functools.reduce(operator.and_, map(self._stack.having, self._objects([name])))

    def tell(self, changed: Callable[[str], None]) -> None:
        self._stack.tell(of_blocks(changed, self._parts))

    async def where(self, names: Sequence[str]) -> dict[str, list[bool]]:
        found = await self._stack.where(self._objects(names))
        return {level: self._whole(there) for level, there in found.items()}

    async def exists_now(self, names: Sequence[str]) -> list[bool]:
        return await self._whole_of(self._stack.exists_now(self._objects(names)))

    async def prove(
        self, objects: Sequence[tuple[str, int, int]], use: Use, since: float
    ) -> list[Proof | StorageError]:
        parts = self._items([Item(name, nbytes, use, depth) for name, nbytes, depth in objects])
        answers = await self._stack.prove([(part.name, part.nbytes, part.depth) for part in parts], use, since)
        return [
            next((one for one in block if isinstance(one, StorageError)), block[0]) for block in self._blocks(answers)
        ]

    def slots_for(self, names: Sequence[str]) -> int:
        return self._stack.slots_for(self._objects(names))

    def quarantine_at(self, name: str, level: int) -> Awaitable[object]:
        return every([self._stack.quarantine_at(one, level) for one in self._objects([name])])

    @property
    def _stack(self) -> Levels:
        assert self._behind.levels is not None
        return self._behind.levels
