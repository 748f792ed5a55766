"""Blocks that a write lends to storage, which collects each one in the thread that writes it.

For blocks that the CPU can address, if the extension is there. A thread copies a block to a slot of staging, seals the
object and writes it at once. So the bytes are still in its caches, and a few slots that stay there are enough. Through
chunks (write.py) they would go to memory and come back. See docs/adr/0060. With direct I/O a device reads the slot, so
the copy goes past the caches (docs/adr/0064).

A thread touches a block only while it copies it, never during I/O (loan.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from transferd.errors import MemoryLost
from transferd.storage.base import Lent, Outcome, Storage
from transferd.tasks import WriteStorageTask
from transferd.workers.block_memory import BlockMemory
from transferd.workers.context import RankContext
from transferd.workers.job import Job
from transferd.workers.loan import Loan

# The size of one call: enough bytes to hide its fixed cost (waking two threads, and hearing from them), and few enough
# that a task which is stopped can report most of what it has stored.
CHUNK_BYTES, CHUNK_BLOCKS = 128 * 1024**2, 64


class BlockToStore:
    """One block of a BlockLender, in a chunk. See `storage.base.LentBlock`.

    slots: those of the chunk that no thread uses now. There is one for each thread, and the last one used comes first.
    """

    __slots__ = ("_lender", "_position", "_slot", "_slots", "nbytes")

    def __init__(self, lender: BlockLender, position: int, slots: list[memoryview]) -> None:
        self.nbytes = slots[0].nbytes
        self._lender = lender
        self._position = position
        self._slots = slots
        self._slot: memoryview | None = None

    def collect(self) -> memoryview | None:
        self._slot = slot = self._slots.pop()
        try:
            if self._lender.lost is None and self._lender.collect(self._position, slot):
                return slot
        except MemoryLost as error:  # of the block, so storage must not take it for an error of its own
            self._lender.lost = error
        self.give_back()
        return None

    def give_back(self) -> None:
        assert self._slot is not None
        self._slots.append(self._slot)


class BlockLender:
    """Lends the blocks of one job on one rank to storage.

    names: of the objects. chunk_blocks: how many blocks to put in one call. at_once: how many slots such a call needs.
    lost: why a block could not be read; then no further one is stored.
    """

    def __init__(
        self, context: RankContext, memory: BlockMemory, job: Job, storage: Storage, names: Sequence[str]
    ) -> None:
        self.chunk_blocks = max(1, min(CHUNK_BYTES // context.layout.block_bytes, CHUNK_BLOCKS))
        self.at_once = context.staging.slots_at_once("write", storage.collects)
        self._storage = storage
        self._names = names
        self._context = context
        self._memory = memory
        self._job = job
        self._loan = Loan()
        self.lost: MemoryLost | None = None

    def put(self, positions: Sequence[int], slots: Sequence[memoryview]) -> Awaitable[list[Outcome]]:
        """Store the blocks at these positions of the task. slots: of as many threads; borrowed until it is done."""
        free, names, use = list(slots), self._names, self._job.use
        return self._storage.put_lent(
            [Lent(names[i], BlockToStore(self, i, free), use, i) for i in positions], len(slots)
        )

    def collect(self, position: int, slot: memoryview) -> bool:
        """In a thread: copy a block to a slot and seal it. False: the loan has ended. Raises MemoryLost."""
        context, job = self._context, self._job
        task = job.task
        assert isinstance(task, WriteStorageTask)
        kept = not self._storage.direct_io
        checksum = self._memory.collect(task.gpu_block_ids[position], slot, self._loan, kept=kept)
        if checksum is not None:
            context.format.seal([slot], job.generation, [job.ids[position]], context.object_rank, [checksum])
        return checksum is not None

    async def end(self) -> None:
        """End the loan. Returns when no thread touches a block any more."""
        if (returned := self._loan.end()) is not None:
            await returned
