"""Storage in this process's own memory: for tests, and as a second host tier that needs no disk.

It copies objects in and out, within `storage.memory.capacity`; indexed.py makes all decisions. Batches up to
INLINE_BYTES are copied on the event loop, larger ones in threads. What no task lends blocks for, it copies with numpy,
which, unlike `bytes()` and slice assignment, lets other threads run meanwhile.

In a full store a new object takes the memory of an evicted one (docs/files.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transferd.config import Config, StorageSection
from transferd.config.sections import MemoryStorageSection
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import Self
from transferd.runtime.native import NativeCall
from transferd.runtime.threads import STANDS_BACK, Direction, ThreadPools
from transferd.storage.base import LEFT, Drainer, Fill, Item, Take
from transferd.storage.batch import Answer, Damaged, Read, StoreBatch, Write, run_length
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
        memory = self._memory_for(nbytes, self._free(write))
        if fill(write.position, memory.data, False):
            self._objects[hash(name) >> TO_PART][name] = memory
        else:
            write.withdrawn = True

    async def _write_all(self, batch: StoreBatch, writes: Sequence[Write]) -> None:
        """The blocks that a task lends go to their memory in threads that need no interpreter."""
        lent = lent_by(batch.fill) if NATIVE else None
        if lent is None:
            await super()._write_all(batch, writes)
            return
        memories = [self._memory_for(write.item.nbytes, self._free(write)) for write in writes]
        numbers = [lent.numbers[write.position] for write in writes]
        run = run_length(writes, COPY_THREADS)
        call = NativeCall(_memory.prepared(lent.blocks, numbers, memories, True, run))
        await self._effects.run_native(Direction.OUT, call, "store", [write.item.name for write in writes])
        left: list[Write] = []
        for write, memory, made in zip(writes, memories, _memory.done(call.native), strict=True):
            if made:
                write.error = None
                self._objects[hash(write.item.name) >> TO_PART][write.item.name] = memory
            else:
                left.append(write)
        if left:  # `fill` says why it makes none of them
            await super()._write_all(batch, left)

    async def _read_all(
        self, drain: Drainer | None, slots: list[memoryview], reads: Sequence[Read]
    ) -> Sequence[Answer]:
        """Objects go to the blocks that a task lends in threads that need no interpreter."""
        lent = lent_by(drain) if NATIVE else None
        if lent is None or lent.busy:
            return await super()._read_all(drain, slots, reads)
        answers: list[Answer] = [False] * len(reads)
        which, memories = [], []
        for i, read in enumerate(reads):
            memory = self._objects[hash(read.item.name) >> TO_PART].get(read.item.name)
            if memory is not None and memory.nbytes == read.entry.nbytes == read.item.nbytes:
                which.append(i)
                memories.append(memory)
        if which:
            numbers = [lent.numbers[reads[i].position] for i in which]
            run = run_length(reads, COPY_THREADS)
            call = NativeCall(_memory.prepared(lent.blocks, numbers, memories, False, run))
            await self._effects.run_native(Direction.IN, call, "load", [reads[i].item.name for i in which])
            for i, taken in zip(which, _memory.done(call.native), strict=True):
                answers[i] = taken
        left = [i for i, answer in enumerate(answers) if not answer]
        if left:  # `drain` says why it takes none of them
            for i, answer in zip(left, await super()._read_all(drain, slots, [reads[i] for i in left]), strict=True):
                answers[i] = answer
        return answers

    def _memory_for(self, nbytes: int, spare: npt.NDArray[np.uint8] | None) -> npt.NDArray[np.uint8]:
        return np.empty(nbytes, dtype=np.uint8) if spare is None else spare

    def _write(self, name: str, data: memoryview, spare: npt.NDArray[np.uint8] | None) -> None:
        memory = self._memory_for(data.nbytes, spare)
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
