"""Storage in this process's own memory: for tests, and as a second host tier that needs no disk.

It copies objects in and out, within `storage.memory.capacity`; indexed.py makes all decisions. Batches up to
INLINE_BYTES are copied on the event loop, larger ones in threads. What no task lends blocks for, it copies with numpy,
which, unlike `bytes()` and slice assignment, lets other threads run meanwhile.

In a full store a new object takes the memory of an evicted one (docs/files.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transferd.config import Config, StorageSection
from transferd.config.sections import MemoryStorageSection
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import Self
from transferd.runtime.native import NativeCall
from transferd.runtime.threads import STANDS_BACK, ThreadPools
from transferd.storage.base import LEFT, Drainer, Fill, Item, Take
from transferd.storage.batch import Answer, Damaged, NativeBatch, Read, StoreBatch, Write, run_length
from transferd.storage.indexed import IndexedStorage
from transferd.storage.lent import lent_by
from transferd.tiers.base import INLINE_BYTES

try:
    from transferd.runtime import _crew  # noqa: F401
    from transferd.storage import _memory
except ImportError:  # the installation had no compiler
    NATIVE = False
else:
    NATIVE = True

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
            ThreadPools(COPY_THREADS, name="transferd-memory", native=STANDS_BACK),
            shares=COPY_THREADS,
            inline_bytes=INLINE_BYTES,
            now=clock.monotonic,
        )
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

    def _native_store(self, batch: StoreBatch, writes: Sequence[Write]) -> NativeBatch[Write] | None:
        """The blocks that a task lends go to their memory in threads that need no interpreter."""
        lent = lent_by(batch.fill) if NATIVE else None
        if lent is None:
            return None
        memories, numbers = list(map(self._memory_for, writes)), [lent.numbers[write.position] for write in writes]
        call = NativeCall(_memory.prepared(lent.blocks, numbers, memories, True, run_length(writes, COPY_THREADS)))

        def ended() -> list[Answer | None]:  # `fill` says why it makes none of those that are left
            made = _memory.done(call.native)
            for write, memory in itertools.compress(zip(writes, memories, strict=True), made):
                self._keep(write.item.name, memory)
            return [done or None for done in made]

        return NativeBatch(writes, call, ended)

    def _native_load(
        self,
        drain: Drainer | None,
        slots: list[memoryview],  # noqa: ARG002 - none
        reads: Sequence[Read],
    ) -> NativeBatch[Read] | None:
        """Objects go to the blocks that a task lends in threads that need no interpreter."""
        lent = lent_by(drain) if NATIVE else None
        if lent is None or lent.busy:
            return None
        usual, memories = [], []
        for read in reads:
            memory = self._objects[hash(read.item.name) >> TO_PART].get(read.item.name)
            if memory is not None and memory.nbytes == read.entry.nbytes == read.item.nbytes:
                usual.append(read)
                memories.append(memory)
        if not usual:
            return None
        numbers = [lent.numbers[read.position] for read in usual]
        call = NativeCall(_memory.prepared(lent.blocks, numbers, memories, False, run_length(reads, COPY_THREADS)))
        # `drain` says why it takes none of those that are left
        return NativeBatch(usual, call, lambda: [taken or None for taken in _memory.done(call.native)])

    def _make(self, write: Write, fill: Fill, slots: list[memoryview]) -> None:  # noqa: ARG002 - no slots
        """Have the object made in its final place, instead of in a slot."""
        memory = self._memory_for(write)
        if fill(write.position, memory.data, False):
            self._keep(write.item.name, memory)
        else:
            write.withdrawn = True

    def _write(self, write: Write, data: memoryview) -> None:
        memory = self._memory_for(write)
        np.copyto(memory, np.asarray(data))
        self._keep(write.item.name, memory)

    def _memory_for(self, write: Write) -> npt.NDArray[np.uint8]:
        """Removes the victims. The object gets the memory of its one victim, unless that is being read."""
        nbytes, spare, left = write.item.nbytes, write.victims and write.spare(self._traffic.reads.has), None
        while write.victims:
            name = write.victims.pop().name
            left = self._objects[hash(name) >> TO_PART].pop(name, None)
        return left if spare and left is not None and left.nbytes == nbytes else np.empty(nbytes, np.uint8)

    def _keep(self, name: str, memory: npt.NDArray[np.uint8]) -> None:
        self._objects[hash(name) >> TO_PART][name] = memory

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
