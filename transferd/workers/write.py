"""Write: device → staging → a sink, in chunks. The sink of a WriteStorageTask is storage; a peer is another (peer.py).

    until the sink wants no more:  lease slots → copy device → slots → seal (formats.py) → put

Blocks that the CPU can address are copied and checksummed in one pass, if the extension is there (block_memory.py). A
storage that writes objects itself, in threads of its own, collects such blocks there (lent.py).

While chunk k is being put, chunk k+1 is gathered: staging has room for two chunks, and k+1 gets its lease as soon as
slots are free. A put that has begun is never aborted. A stopped task no longer waits for it, and the slots are
released when the put has ended.

Steps that finish at once cost no asyncio task: taking a free slot, a lookup in memory, a put of few bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from transferd.errors import TransferError
from transferd.runtime.threads import Direction
from transferd.storage.base import Blob, Found, Outcome, Storage
from transferd.tasks import RankOutcome, WriteStorageTask
from transferd.tiers.staging import Lease
from transferd.workers.block_memory import AddressableBlocks, BlockMemory
from transferd.workers.context import Account, RankContext, require
from transferd.workers.job import Job
from transferd.workers.lent import BlockLender

LENT_CHUNKS = 2  # chunks lent at a time, so that no thread waits for the event loop

_STORED = frozenset({Found.STORED, Found.EXISTS})


class Sink(Protocol):
    """Where the objects of one job on one rank go.

    names: object names, one for each block of the task. storage: what collects blocks itself, if that is the sink.
    """

    names: Sequence[str]
    storage: Storage | None

    async def wanted(self, account: Account, limit: int) -> Sequence[int]:
        """Positions in the task of the blocks to send next, at most `limit`; [] at the end, or if the task is stopped.

        Raises TransferError.
        """
        ...

    def put(self, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
        """Like Storage.put."""
        ...


class StorageSink:
    """Storage as a sink: it wants the blocks that it does not have. All others count as written at once."""

    def __init__(self, storage: Storage, names: Sequence[str]) -> None:
        self.names = names
        self.put = storage.put
        self.storage = storage if storage.collects else None
        self._storage = storage
        self._missing: Sequence[int] | None = None
        self._next = 0

    async def wanted(self, account: Account, limit: int) -> Sequence[int]:
        if self._missing is None:
            self._missing = await self._look_up(account)
        start, self._next = self._next, self._next + limit
        return self._missing[start : self._next]

    async def _look_up(self, account: Account) -> Sequence[int]:
        job, context = account.job, account.context
        before = context.clock.monotonic()
        asked = context.background.begin(self._storage.look_up(self.names, job.use))
        answered = asked.done() or await job.stop.race(asked)
        account.storage_s += context.clock.monotonic() - before
        if not answered:
            return ()
        stored = asked.result()
        missing = [i for i, there in enumerate(stored) if not there]
        if len(missing) < len(stored):
            account.done([i for i, there in enumerate(stored) if there], 0)
        context.recorder.step(job.task.task_id, "to store", context.rank, len(missing))
        return missing


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Positions of the task that are sent together. put: done when the chunk's put has ended."""

    positions: Sequence[int]
    put: asyncio.Future[list[Outcome]]


class Writer:
    """Sends the blocks of one rank's tasks to their sinks."""

    consumer = "write"

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._blocks = AddressableBlocks(context)
        self._chunk_blocks = context.staging.chunk_slots(self.consumer)

    async def store(self, job: Job) -> RankOutcome:
        """Run a WriteStorageTask."""
        account = Account(job, self._context)
        await self.send(account, StorageSink(require(self._context.storage), self._context.names(job)))
        return account.outcome()

    async def send(self, account: Account, sink: Sink) -> None:
        """Send what the sink wants. Returns when the task no longer touches the device nor waits for a put."""
        in_flight: list[_Chunk] = []
        lender = self._lender(account.job, sink)
        limit = self._chunk_blocks if lender is None else lender.chunk_blocks
        try:
            ready = lender is None or not account.job.task.after or await self._context.computed(account.job)
            while ready and (positions := await sink.wanted(account, limit)):
                chunk = await self._begin(account, sink, positions, lender)
                if chunk is None:
                    break
                in_flight.append(chunk)
                if lender is not None and len(in_flight) == LENT_CHUNKS:
                    await account.job.stop.race(in_flight[0].put)
                self._collect(account, in_flight)
                if account.error is not None or (lender is not None and lender.lost is not None):
                    break
        except TransferError as error:
            account.failed(error)
        finally:
            try:
                await self._wait(account, in_flight)
            finally:
                if lender is not None:
                    await lender.end()
                    if lender.lost is not None:
                        account.failed(lender.lost)

    def _lender(self, job: Job, sink: Sink) -> BlockLender | None:
        """None: blocks go to the sink in chunks."""
        context, storage = self._context, sink.storage
        if storage is None or len(sink.names) <= context.cheap_slots:
            return None
        memory = self._blocks.memory(one_pass=True)
        return None if memory is None else BlockLender(context, memory, job, storage, sink.names)

    async def _begin(
        self, account: Account, sink: Sink, positions: Sequence[int], lender: BlockLender | None
    ) -> _Chunk | None:
        """Start the put of one chunk. None: the task was stopped first."""
        context, job = self._context, account.job
        needed = len(positions)
        lease = await self._lease(account, needed if lender is None else min(needed, lender.at_once))
        if lease is None:
            return None
        try:
            slots = context.staging.views(lease)
            if lender is None and not await self._gather(account, positions, lease, slots):
                lease.release()
                return None
            context.recorder.step(job.task.task_id, "put", context.rank, needed)
            putting = (
                sink.put(self._blobs(sink, job, positions, slots)) if lender is None else lender.put(positions, slots)
            )
            put = context.background.begin(putting)
        except BaseException:
            lease.release()
            raise
        # From here the put owns the lease: it is released when the bytes have left the slots.
        if put.done():
            lease.release()
        else:
            put.add_done_callback(lambda _: lease.release())
        return _Chunk(positions, put)

    def _blobs(self, sink: Sink, job: Job, positions: Sequence[int], slots: Sequence[memoryview]) -> list[Blob]:
        return [
            Blob(sink.names[position], slot, job.use, position) for slot, position in zip(slots, positions, strict=True)
        ]

    async def _lease(self, account: Account, slots: int) -> Lease | None:
        """Slots for one chunk, or None if the task is stopped first; a lease granted later is released at once."""
        staging, job = self._context.staging, account.job
        if job.stop.reason is not None:
            return None
        lease = staging.try_acquire(self.consumer, slots, job.task.task_id)
        if lease is not None:
            return lease
        acquiring = self._context.background.begin(staging.acquire(self.consumer, slots, job.task.task_id))
        if await job.stop.race(acquiring):
            return acquiring.result()
        acquiring.add_done_callback(lambda late: late.result().release())
        return None

    async def _gather(
        self, account: Account, positions: Sequence[int], lease: Lease, slots: Sequence[memoryview]
    ) -> bool:
        """Copy blocks to slots and seal them. False: the task was stopped first."""
        context, job = self._context, account.job
        task = job.task
        assert isinstance(task, WriteStorageTask)
        if task.after and not await context.computed(job):
            return False
        staging, device = context.staging, context.device
        context.recorder.step(task.task_id, "copy", context.rank, len(positions))
        before = context.clock.monotonic()
        memory = self._blocks.memory(one_pass=True) if context.format.checked_bytes else None
        try:
            if memory is not None:
                return await job.stop.copied(self._collect_blocks(memory, job, positions, slots))
            blocks = [task.gpu_block_ids[i] for i in positions]
            plan = job.copy_plan(device.arena.geometry, blocks, staging.packed, lease.slots)
            if not await job.stop.copied(device.copy_out(plan, staging.memory)):
                return False
            await context.seal(slots, job, positions)
        finally:
            account.copy_s += context.clock.monotonic() - before
        return True

    async def _collect_blocks(
        self, memory: BlockMemory, job: Job, positions: Sequence[int], slots: Sequence[memoryview]
    ) -> None:
        """Copy and seal in one pass over memory, for blocks that the CPU can address."""
        context, task = self._context, job.task
        assert isinstance(task, WriteStorageTask)
        blocks, ids = task.gpu_block_ids, [job.ids[i] for i in positions]

        def collect() -> None:
            checksums = [memory.collect(blocks[i], slot) for i, slot in zip(positions, slots, strict=True)]
            context.format.seal(slots, job.generation, ids, context.object_rank, checksums)

        if len(slots) <= context.cheap_slots:
            collect()
        else:
            await context.threads.run(Direction.OUT, collect, "copy and checksums")

    def _collect(self, account: Account, in_flight: list[_Chunk]) -> None:
        """Account for the puts that have ended so far."""
        for chunk in [chunk for chunk in in_flight if chunk.put.done()]:
            in_flight.remove(chunk)
            self._take(account, chunk)

    def _take(self, account: Account, chunk: _Chunk) -> None:
        try:
            outcomes = chunk.put.result()
        except TransferError as error:
            account.failed(error)
            return
        stored = [i for i, outcome in zip(chunk.positions, outcomes, strict=True) if outcome.found in _STORED]
        account.done(stored, len(stored) * self._context.layout.block_bytes)
        context = self._context
        context.recorder.step(account.job.task.task_id, "stored", context.rank, len(stored))
        for outcome in outcomes:
            if outcome.error is not None:
                account.failed(outcome.error)

    async def _wait(self, account: Account, in_flight: list[_Chunk]) -> None:
        before = self._context.clock.monotonic()
        for chunk in in_flight:
            if chunk.put.done() or await account.job.stop.race(chunk.put):
                self._take(account, chunk)
        account.storage_s += self._context.clock.monotonic() - before
