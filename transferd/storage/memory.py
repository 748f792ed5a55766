"""Storage in this process's own memory: for tests, and as a second host tier that needs no disk.

It copies objects in and out, within `storage.memory.capacity`; indexed.py makes all decisions. Batches up to
INLINE_BYTES are copied on the event loop, larger ones in threads. It copies with numpy, which, unlike `bytes()` and
slice assignment, lets other threads run meanwhile; for a few bytes an assignment is faster.

In a full store a new object takes the memory of an evicted one (docs/files.md).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from transferd.config import Config, StorageSection
from transferd.config.sections import MemoryStorageSection
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import Self
from transferd.runtime.threads import ThreadPools
from transferd.storage.base import LEFT, Fill, Item, Take
from transferd.storage.batch import Answer, Damaged, Write
from transferd.storage.indexed import IndexedStorage
from transferd.tiers.base import INLINE_BYTES

COPY_THREADS = 2  # two saturate the memory bus of most machines
# The upper bits of a name's hash, -8 to 7, choose its dict: the lower ones choose the place in it. One dict of all
# objects would grow together with the index's, in one step of the loop: 65 ms at 700,000 objects.
TO_PART = 60


class MemoryStorage(IndexedStorage):
    """Arrays by name with an LRU bound. Owns its copies, which do not outlive it."""

    backend = "memory"
    slots_at_once = 0
    lists = True

    def __init__(self, section: MemoryStorageSection, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(
            section.capacity,
            ThreadPools(COPY_THREADS, name="transferd-memory"),
            shares=COPY_THREADS,
            inline_bytes=INLINE_BYTES,
            now=clock.monotonic,
        )
        self.slots_at_once = 0
        self.ranges = True
        self._objects: list[dict[str, npt.NDArray[np.uint8]]] = [{} for _ in range(16)]

    @classmethod
    def from_config(cls, config: Config, *, clock: Clock) -> Self:
        return cls(config.storage.memory, clock)

    @classmethod
    def memory_of(cls, config: Config) -> int:
        return config.storage.memory.capacity

    async def open(self) -> None:
        """Start the threads. Raises NoThreads."""
        self._threads.open()

    async def only_here(self) -> tuple[int, int]:
        return len(self._index), self._index.bytes

    def reconfigure(self, storage: StorageSection) -> None:
        """Apply `storage.memory.capacity`."""
        self.set_capacity(storage.memory.capacity)

    def _make(self, write: Write, fill: Fill, slots: list[memoryview]) -> None:  # noqa: ARG002 - no slots
        """Have the object made in its final place, instead of in a slot."""
        name, nbytes = write.item.name, write.item.nbytes
        spare = self._free(write)
        memory = np.empty(nbytes, dtype=np.uint8) if spare is None else spare
        if fill(write.position, memory.data, False):
            self._objects[hash(name) >> TO_PART][name] = memory
        else:
            write.withdrawn = True

    def _write(self, name: str, data: memoryview, spare: npt.NDArray[np.uint8] | None) -> None:
        memory = np.empty(data.nbytes, dtype=np.uint8) if spare is None else spare
        np.copyto(memory, np.asarray(data))
        self._objects[hash(name) >> TO_PART][name] = memory

    def _retire(self, name: str, nbytes: int) -> npt.NDArray[np.uint8] | None:
        memory = self._objects[hash(name) >> TO_PART].pop(name, None)
        return memory if memory is not None and memory.nbytes == nbytes else None

    def _read(self, item: Item, slot: memoryview, take: Take | None) -> Answer:
        stored = self._objects[hash(item.name) >> TO_PART].get(item.name)  # which keeps it alive if it is evicted
        if stored is None:
            return False
        if stored.nbytes != item.nbytes:
            raise Damaged
        if take is not None:
            return take(stored.data) or LEFT
        np.copyto(np.asarray(slot), stored)
        return True

    def _remove(self, name: str) -> None:
        self._objects[hash(name) >> TO_PART].pop(name, None)

    async def _release(self) -> None:
        for part in self._objects:
            part.clear()
