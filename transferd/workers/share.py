"""One rank's share of a task: what it has done so far, and the steps that reads, writes and swaps have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transferd.blocks.layout.base import Arena
from transferd.errors import DeviceLost, InvariantError, MemoryLost, RequestError, TransferError
from transferd.observability.recorder import LONGEST_TEXT
from transferd.storage.base import Item, Outcome, Outcomes
from transferd.tasks import NOT_ADMITTED, ErrorInfo, RankOutcome, Stop
from transferd.tiers.staging import Lease
from transferd.workers.context import RankContext, require
from transferd.workers.job import Job


@dataclass(slots=True)
class Share:
    """A job on one rank. `outcome` turns what it has done into a RankOutcome.

    moved: the positions of blocks that have moved. bytes: how many. error: the first one. lost: whether it is that of a
    lost device. copy_s, storage_s: how long it waited for copies and for storage, in seconds. Blocks that storage's own
    threads copy count as storage.
    """

    job: Job
    context: RankContext
    moved: list[int] = field(default_factory=list)
    bytes: int = 0
    error: ErrorInfo | None = None
    lost: bool = False
    copy_s: float = 0.0
    storage_s: float = 0.0
    not_admitted: int = 0  # blocks that storage did not choose to store
    _names: list[str] | None = None

    @property
    def on_host(self) -> bool:
        """Whether the task's blocks are host blocks. Not for swaps, which have both."""
        return bool(getattr(self.job.task, "cpu_block_ids", ()))

    @property
    def arena(self) -> Arena:
        """Where this rank's blocks of the task are. Not for swaps."""
        return require(self.context.host).arena if self.on_host else self.context.device.arena

    @property
    def names(self) -> list[str]:
        """The object names of the job's keys on this rank."""
        if self._names is None:
            context = self.context
            self._names = context.format.names(self.job.generation, self._all_ids, context.object_rank)
        return self._names

    def items(self, positions: Sequence[int]) -> list[Item]:
        """The objects of the blocks at these positions."""
        names, nbytes, use = self.names, self.context.format.slot_bytes, self.job.use
        return [Item(names[i], nbytes, use, use.start + i) for i in positions]

    def ids(self, positions: Sequence[int]) -> list[str]:
        """The ids of the blocks at these positions, for the object format."""
        ids = self._all_ids
        return [ids[i] for i in positions]

    @property
    def _all_ids(self) -> Sequence[str]:
        return self.job.ids or self.job.key_ids(self.context.format)

    def step(self, what: str, count: int) -> None:
        """Note a step of the task for this rank."""
        self.context.recorder.step(self.job.task.task_id, what, self.context.rank, count)

    def failed(self, error: TransferError) -> None:
        """Keep the first error, but let DeviceLost replace it: that caused the others, and it ends the rank."""
        if isinstance(error, MemoryLost):
            error = MemoryLost(f"the memory of rank {self.context.rank} of the engine {self.context.engine!r}: {error}")
        recorder, task_id, rank = self.context.recorder, self.job.task.task_id, self.context.rank
        recorder.note(task_id, "error", rank, error.reason, str(error)[:LONGEST_TEXT])
        if isinstance(error, InvariantError):
            recorder.failure(task_id, f"rank {rank}: {error}")
        if self.error is None or isinstance(error, DeviceLost):
            self.error = ErrorInfo(error.reason, str(error))
            self.lost = isinstance(error, DeviceLost)

    def done(self, positions: Sequence[int], nbytes: int) -> None:
        self.moved.extend(positions)
        self.bytes += nbytes

    @property
    def stopped(self) -> Stop | None:
        return self.job.stop.reason

    async def answered(self, asked: asyncio.Future[Any]) -> bool:
        """Wait for storage. False: the task was stopped first, and no longer waits."""
        if asked.done():
            return True
        before = self.context.clock.monotonic()
        answered = await self.job.stop.race(asked)
        self.storage_s += self.context.clock.monotonic() - before
        return answered

    async def computed(self) -> bool:
        """Wait until this rank's engine has reached the point that the task names (`after`). False: stopped first.

        Call it before device blocks are touched. Raises TransferError.
        """
        after, device = self.job.task.after, self.context.device
        if not after:
            return True
        if not device.timelines:
            problem = f"tasks cannot name timelines on this device tier ({type(device).__name__})"
            raise RequestError(problem, code="no_timelines")
        reaching = self.context.background.begin(device.reached(after))
        if await self.job.stop.race(reaching):
            reaching.result()
            return True
        reaching.cancel()
        return False

    async def lease(self, consumer: str, slots: int) -> Lease | None:
        """Slots of staging. None: the task was stopped first; a lease that is granted later is released at once."""
        staging, stop, holder = self.context.staging, self.job.stop, self.job.task.task_id
        if stop.reason is not None:
            return None
        lease = staging.try_acquire(consumer, slots, holder)
        if lease is not None:
            return lease
        acquiring = self.context.background.begin(staging.acquire(consumer, slots, holder))
        if await stop.race(acquiring):
            return acquiring.result()
        acquiring.add_done_callback(lambda late: late.result().release())
        return None

    def begin(self, call: Awaitable[list[Outcome]], lease: Lease | None) -> asyncio.Future[list[Outcome]]:
        """Begin a call to storage, which owns the lease from here: it ends when the bytes have left the slots."""
        before = self.context.clock.monotonic()
        try:
            begun = self.context.background.begin(call)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        if begun.done():  # a small call, which has done its work before it returned
            self.storage_s += self.context.clock.monotonic() - before
        if lease is not None:
            self.release_after(begun, lease)
        return begun

    def release_after(self, call: asyncio.Future[list[Outcome]], lease: Lease) -> None:
        """Release slots when a call, and what it has left behind, no longer touches them."""
        if not call.done():
            call.add_done_callback(lambda _: self.release_after(call, lease))
            return
        outcomes = () if call.cancelled() or call.exception() else call.result()
        if isinstance(outcomes, Outcomes) and not outcomes.returned.done():
            self.context.background.begin(outcomes.returned)
            outcomes.returned.add_done_callback(lambda _: lease.release())
        else:
            lease.release()

    def outcome(self) -> RankOutcome:
        wanted = self.job.blocks
        complete = len(self.moved) == wanted
        moved: Sequence[int] = range(wanted) if complete else sorted(self.moved)
        return RankOutcome(
            rank=self.context.rank,
            moved=moved,
            bytes=self.bytes,
            error=None if complete else self.error or self._why_not_admitted,
            lost=self.lost and not complete,
            stop=None if complete else self.stopped,
            queue_s=self.job.queue_s,
            copy_s=self.copy_s,
            storage_s=self.storage_s,
            not_admitted=self.not_admitted,
        )

    @property
    def _why_not_admitted(self) -> ErrorInfo | None:
        if not self.not_admitted:
            return None
        what = f"{self.not_admitted} blocks were asked to be stored for the first time"
        return ErrorInfo(NOT_ADMITTED, f'{what} (storage.admit = "second use"); nothing failed')
