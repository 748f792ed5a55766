"""Read and write tasks with token-indexed storage, and updates of its index alone (flush-only mode).

A write task in flush-only mode moves no bytes. Rank 0 updates the index for the whole node and the other
ranks arrive at once, so the task is answered when rank 0 is done, or at its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from transferd.control.admission import withdraws_the_rest
from transferd.errors import TransferError
from transferd.storage.lru import Use
from transferd.storage.tokens import TokenStorage
from transferd.tasks import RankOutcome, ReadStorageTask, TokenIds, WriteStorageTask
from transferd.workers.context import RankContext
from transferd.workers.job import Job, Share
from transferd.workers.read import Reader, leading
from transferd.workers.write import Writer

MANAGER = 0  # the rank that updates the index for the whole node


class TokenTransfer:
    """A job's share on one rank: implements `Transfer` of storage/tokens.py."""

    def __init__(self, context: RankContext, job: Job, start: int, through: Callable[[Job], Awaitable[RankOutcome]]):
        """through: runs a job through keyed storage."""
        task = job.task
        assert isinstance(task, ReadStorageTask | WriteStorageTask)
        assert task.token_ids is not None  # admission has checked
        self._context = context
        self._job = job
        self._through = through
        self.rank = context.rank
        self.task_id = task.task_id
        self.path: TokenIds = task.token_ids
        self.salt = task.salt
        self.start = start
        self.blocks: Sequence[int] = task.gpu_block_ids[: len(task.keys)]

    @property
    def remaining_s(self) -> float:
        return self._job.admitted_at + self._job.task.timeout - self._context.clock.monotonic()

    @property
    def stopped(self) -> bool:
        return self._job.stop.reason is not None

    async def race(self, future: asyncio.Future[Any]) -> bool:
        return await self._job.stop.race(future)

    async def by_keys(self, keys: Sequence[str]) -> RankOutcome:
        self._job.ids = self._context.format.ids(keys)  # the same on every rank
        return await self._through(self._job)

    def ended(self, moved: int, error: TransferError | None, storage_s: float) -> RankOutcome:
        share = Share(self._job, self._context, storage_s=storage_s)
        share.done(range(moved), moved * self._context.layout.block_bytes)
        if error is not None:
            share.failed(error)
        return share.outcome()


class TokenHandler:
    """Runs ReadStorageTask and WriteStorageTask on one rank. Also the rank's `RankPort`."""

    def __init__(self, context: RankContext, tokens: TokenStorage, reader: Reader, writer: Writer) -> None:
        self.rank = context.rank
        self.device = context.device
        self._context = context
        self._tokens = tokens
        self._reader = reader
        self._writer = writer

    async def match(self, generation: str, keys: Sequence[str]) -> int:
        objects = self._context.format
        names = objects.names(generation, objects.ids(keys), self._context.object_rank)
        return leading(await self._reader.stored(names, Use()))

    async def read(self, job: Job) -> RankOutcome:
        assert isinstance(job.task, ReadStorageTask)
        through = self._reader.load
        return await self._tokens.read(TokenTransfer(self._context, job, job.task.start_read_block_idx, through))

    async def write(self, job: Job) -> RankOutcome:
        assert isinstance(job.task, WriteStorageTask)
        if self._context.only_flush:
            return await self._flush(job, job.task)
        through = self._writer.store
        return await self._tokens.write(TokenTransfer(self._context, job, job.task.start_write_block_idx, through))

    async def _flush(self, job: Job, task: WriteStorageTask) -> RankOutcome:
        share = Share(job, self._context)
        if self.rank != MANAGER or await self._index_updated(task, share):
            share.done(range(task.blocks), 0)
        return share.outcome()

    async def _index_updated(self, task: WriteStorageTask, share: Share) -> bool:
        assert task.token_ids is not None
        start = task.start_write_block_idx
        path = task.token_ids
        if not withdraws_the_rest(task):  # else the whole sequence counts, which may extend past the task's last block
            path = TokenIds(path.array[: (start + task.blocks) * self._context.block_size])
        resident = task.flush_cache_exists is not False  # None after a request's end: its blocks are still here
        updating = asyncio.ensure_future(self._tokens.flush_token_index(path, start, resident=resident, salt=task.salt))
        if not await share.answered(updating):  # the call uses no memory, so it may run on by itself
            updating.cancel()
            return False
        try:
            updating.result()
        except TransferError as error:
            share.failed(error)
            return False
        return True
