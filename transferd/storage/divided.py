"""A Storage in front of another one that makes a block of several objects look like one object.

A name stands for the objects name + suffix, one for each ObjectPart of the format, and each object uses its range of
the buffer. The answer for a block is the worst answer of its objects:

    exists   all of them
    put      FAILED if one failed; else STORED if one was new; else EXISTS
    get      FAILED if one failed; else MISSING if one is; else FOUND

If only some of a block's objects are stored, the block is missing, and a put completes it. A read that comes between
two objects of a put misses the block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from transferd.blocks.formats import ObjectPart
from transferd.config import StorageSection
from transferd.runtime.aio import every
from transferd.storage.base import Blob, Found, Outcome, Storage
from transferd.storage.lru import Use
from transferd.tiers.base import HostMemory

_WORST_FIRST = (Found.FAILED, Found.MISSING, Found.STORED, Found.EXISTS, Found.FOUND)
_BADNESS = {found: rank for rank, found in enumerate(reversed(_WORST_FIRST))}


def divided(storage: Storage, parts: Sequence[ObjectPart]) -> Storage:
    """`storage` for blocks of these parts: `storage` itself if a block is one object under its own name."""
    return storage if [part.suffix for part in parts] == [""] else DividedStorage(storage, parts)


def of_blocks(left: Callable[[str], None], parts: Sequence[ObjectPart]) -> Callable[[str], None]:
    """A listener for departures of objects. It calls `left` with the name of the block that is incomplete now."""
    suffixes = tuple(part.suffix for part in parts)

    def object_left(name: str) -> None:
        suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
        if suffix is not None:
            left(name.removesuffix(suffix))

    return object_left


class DividedStorage(Storage):
    """See the module. Borrows the storage behind it: `open` and `close` do nothing, because its owner calls them."""

    def __init__(self, storage: Storage, parts: Sequence[ObjectPart]) -> None:
        self.backend = storage.backend
        self.chunk_bytes = storage.chunk_bytes
        self._storage = storage
        self._parts = tuple(parts)

    async def open(self) -> None:
        """Does nothing: the owner opens the storage behind."""

    async def close(self) -> None:
        """Does nothing: the owner closes the storage behind."""

    def register(self, memory: HostMemory) -> None:
        self._storage.register(memory)

    def unregister(self, memory: HostMemory) -> None:
        self._storage.unregister(memory)

    def reconfigure(self, storage: StorageSection) -> None:
        self._storage.reconfigure(storage)

    def statistics(self) -> dict[str, Any]:
        return self._storage.statistics()

    def tell_departures(self, left: Callable[[str], None]) -> bool:
        """Reports a block when any of its objects leaves."""
        return self._storage.tell_departures(of_blocks(left, self._parts))

    def holds(self, name: str) -> bool:
        return all(self._storage.holds(name + part.suffix) for part in self._parts)

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return self._whole(await self._storage.exists(self._objects(names)))

    async def look_up(self, names: Sequence[str], use: Use) -> list[bool]:
        return self._whole(await self._storage.look_up(self._objects(names), use))

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        return self._joined(await self._storage.put(self._cut(blobs)))

    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        return self._joined(await self._storage.get(self._cut(blobs)))

    def quarantine(self, name: str) -> Awaitable[None]:
        return self._all([self._storage.quarantine(name + part.suffix) for part in self._parts])

    async def _all(self, works: Sequence[Awaitable[None]]) -> None:
        await every(works)

    def _objects(self, names: Sequence[str]) -> list[str]:
        """The objects of each block, next to each other, so that a pool can answer for a whole block at one moment."""
        return [name + part.suffix for name in names for part in self._parts]

    def _whole(self, found: Sequence[bool]) -> list[bool]:
        each = len(self._parts)
        return [all(found[i : i + each]) for i in range(0, len(found), each)]

    def _cut(self, blobs: Sequence[Blob]) -> list[Blob]:
        each = len(self._parts)
        return [
            Blob(blob.name + part.suffix, blob.data[part.start : part.stop], blob.use, blob.depth * each + i)
            for blob in blobs
            for i, part in enumerate(self._parts)  # depths as `look_up` counts them
        ]

    def _joined(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        each = len(self._parts)
        return [
            max(outcomes[i : i + each], key=lambda outcome: _BADNESS[outcome.found])
            for i in range(0, len(outcomes), each)
        ]
