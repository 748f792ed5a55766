"""Write: device → staging → storage, for the keys that storage does not have yet.

    look up ─ skip what is stored
    for each chunk:  lease slots → copy device → slots → seal (formats.py) → put, in background

While chunk k is being put, chunk k+1 is gathered: staging has room for two chunks, and k+1 gets its lease
as soon as slots are free. A put that has begun is never aborted. When the task is stopped, it stops waiting,
and its slots are released when the put has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transferd.blocks.copyplan import plan_copy
from transferd.errors import TransferError
from transferd.storage.base import Blob, Found, Outcome
from transferd.tasks import RankOutcome, WriteStorageTask
from transferd.tiers.staging import Lease
from transferd.workers.context import Account, RankContext, require
from transferd.workers.job import Job


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Positions of the task that are put together."""

    positions: Sequence[int]
    put: asyncio.Task[list[Outcome]]


class Writer:
    """Runs WriteStorageTask on one rank."""

    consumer = "write"

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._chunk_blocks = context.staging.chunk_slots(self.consumer)

    async def run(self, job: Job) -> RankOutcome:
        account = Account(job, self._context)
        in_flight: list[_Chunk] = []
        try:
            missing = await self._missing(job, account)
            for positions in _chunks(missing, self._chunk_blocks):
                chunk = await self._send(job, account, positions)
                if chunk is None:
                    break
                in_flight.append(chunk)
                self._collect(account, in_flight)
                if account.error is not None:
                    break
        except TransferError as error:
            account.failed(error)
        finally:
            await self._wait(job, account, in_flight)
        return account.outcome()

    async def _missing(self, job: Job, account: Account) -> list[int]:
        """Positions of the keys that storage does not have. Counts the others as written."""
        storage = require(self._context.storage)
        before = self._context.clock.monotonic()
        asked = self._context.background.spawn(storage.look_up(self._context.names(job), job.use))
        answered = await job.stop.race(asked)
        account.storage_s += self._context.clock.monotonic() - before
        if not answered:
            return []
        stored = asked.result()
        account.done([i for i, there in enumerate(stored) if there], 0)
        missing = [i for i, there in enumerate(stored) if not there]
        self._context.recorder.step(job.task.task_id, "to store", self._context.rank, len(missing))
        return missing

    async def _send(self, job: Job, account: Account, positions: Sequence[int]) -> _Chunk | None:
        """Copy and seal one chunk and start its put. None: the task was stopped before."""
        lease = await self._lease(job, len(positions))
        if lease is None:
            return None
        try:
            if await self._gather(job, account, positions, lease):
                blobs = self._blobs(job, positions, lease)
                self._context.recorder.step(job.task.task_id, "put", self._context.rank, len(blobs))
                put = self._context.background.spawn(self._put(blobs))
                # From here the put owns the lease: it is released when the bytes have left the slots.
                put.add_done_callback(lambda _: lease.release())
                return _Chunk(positions, put)
        except BaseException:
            lease.release()
            raise
        lease.release()
        return None

    async def _lease(self, job: Job, slots: int) -> Lease | None:
        """Slots for one chunk, or None if the task is stopped first; a lease granted later is released at once."""
        acquiring = self._context.background.spawn(
            self._context.staging.acquire(self.consumer, slots, job.task.task_id)
        )
        if await job.stop.race(acquiring):
            return acquiring.result()
        acquiring.add_done_callback(lambda late: late.result().release())
        return None

    async def _gather(self, job: Job, account: Account, positions: Sequence[int], lease: Lease) -> bool:
        """Copy blocks to slots and seal them. False: the task was stopped before the copy began."""
        context, task = self._context, job.task
        assert isinstance(task, WriteStorageTask)
        staging, device = context.staging, context.device.arena.geometry
        blocks = [task.gpu_block_ids[i] for i in positions]
        plan = plan_copy(device, blocks, staging.packed, lease.slots)
        context.recorder.step(task.task_id, "copy", context.rank, len(positions))
        before = context.clock.monotonic()
        try:
            if not await job.stop.copied(context.device.copy_out(plan, staging.memory)):
                return False
            await context.seal(lease.slots, job.generation, context.ids(job, positions))
        finally:
            account.copy_s += context.clock.monotonic() - before
        return True

    def _blobs(self, job: Job, positions: Sequence[int], lease: Lease) -> list[Blob]:
        staging = self._context.staging
        names = self._context.names(job, positions)
        return [
            Blob(name, staging.slot_view(slot, staging.object_bytes), job.use, position)
            for name, slot, position in zip(names, lease.slots, positions, strict=True)
        ]

    def _put(self, blobs: Sequence[Blob]) -> Coroutine[Any, Any, list[Outcome]]:
        """Store sealed objects."""
        return require(self._context.storage).put(blobs)

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
        stored = [i for i, outcome in zip(chunk.positions, outcomes, strict=True) if outcome.found is not Found.FAILED]
        account.done(stored, len(stored) * self._context.layout.block_bytes)
        context = self._context
        context.recorder.step(account.job.task.task_id, "stored", context.rank, len(stored))
        for outcome in outcomes:
            if outcome.error is not None:
                account.failed(outcome.error)

    async def _wait(self, job: Job, account: Account, in_flight: list[_Chunk]) -> None:
        before = self._context.clock.monotonic()
        for chunk in in_flight:
            if await job.stop.race(chunk.put):
                self._take(account, chunk)
        account.storage_s += self._context.clock.monotonic() - before


def _chunks(positions: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(positions), size):
        yield positions[start : start + size]
