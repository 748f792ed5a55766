"""What a rank's handlers work with, and the account they keep while they do."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transferd.blocks.footer import Damage
from transferd.blocks.formats import ObjectFormat
from transferd.blocks.layout.base import BlockLayout
from transferd.errors import DeviceLost, InvariantError, TransferError
from transferd.observability.recorder import LONGEST_TEXT, Recorder
from transferd.runtime.clock import Clock
from transferd.runtime.threads import Direction, Threads
from transferd.storage.base import Storage
from transferd.storage.peer.exchange import Exchange
from transferd.storage.tokens import TokenStorage
from transferd.tasks import ErrorInfo, RankOutcome, Stop
from transferd.tiers.base import DeviceTier
from transferd.tiers.pinned import HostPool
from transferd.tiers.staging import Staging
from transferd.workers.job import Job

T = TypeVar("T")


# Checksums of up to this many bytes cost less on the loop than the way to a thread and back.
INLINE_CHECK_BYTES = 256 * 1024


class Background:
    """Work that outlives the task it was begun for: I/O on staging that nobody waits for any more.

    The task was answered; the bytes still move. Each piece is kept here until it has really ended,
    and `settled` waits for all of it before the memory under it is freed.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its waiter heard of it, or nobody was left to; either way it is not lost noise

    async def settled(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    def __len__(self) -> int:
        return len(self._running)


@dataclass(frozen=True, slots=True)
class DirectPath:
    """The way to other daemons: their exchange, shared by all ranks; the only memory that peers write to.

    format: of what goes this way.
    """

    exchange: Exchange
    staging: Staging
    format: ObjectFormat


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank's parts, put together by the daemon and borrowed by the handlers.

    host is None without a host tier, storage without a storage backend (admission refuses tasks for
    them). tokens, where storage is token-indexed, comes before storage, which is then what it keeps its
    bytes in. block_size: tokens. only_flush: write tasks tell the token index and move nothing. staging is
    always there: it is the only memory that storage I/O ever touches. direct is there in pd.mode "direct" only.
    """

    rank: int
    layout: BlockLayout
    device: DeviceTier
    host: HostPool | None
    staging: Staging
    storage: Storage | None
    format: ObjectFormat
    threads: Threads
    clock: Clock
    recorder: Recorder
    background: Background
    direct: DirectPath | None = None
    inline_check_bytes: int = INLINE_CHECK_BYTES
    tokens: TokenStorage | None = None
    block_size: int = 0
    only_flush: bool = False

    def names(self, job: Job, positions: Sequence[int] | None = None) -> list[str]:
        """Object names of the job's keys (or of those at `positions`) on this rank."""
        return self.format.names(job.generation, self.ids(job, positions), self.rank)

    def ids(self, job: Job, positions: Sequence[int] | None = None) -> list[str]:
        """What of those keys goes into names."""
        ids = job.key_ids(self.format)
        return ids if positions is None else [ids[i] for i in positions]

    async def seal(self, slots: Sequence[int], generation: str, ids: Sequence[str]) -> None:
        """Complete staging slots that hold packed blocks: from here they are objects to be stored."""
        views = [self.staging.slot_view(slot, self.staging.object_bytes) for slot in slots]
        work = functools.partial(self.format.seal, views, generation, ids, self.rank)
        await self._over(Direction.OUT, len(slots), work)

    async def check(self, slots: Sequence[int], generation: str, ids: Sequence[str]) -> list[Damage | None]:
        """Which of these staging slots hold what they should."""
        views = [self.staging.slot_view(slot, self.staging.object_bytes) for slot in slots]
        work = functools.partial(self.format.check, views, generation, ids, self.rank)
        return await self._over(Direction.IN, len(slots), work)

    async def _over(self, direction: Direction, blocks: int, work: Callable[[], T]) -> T:
        """Run what goes over the bytes of so many blocks where it is cheapest."""
        if self.format.checked_bytes * blocks <= self.inline_check_bytes:
            return work()
        return await self.threads.run(direction, work, "checksums")


@dataclass(slots=True)
class Account:
    """What one rank has done for one task so far; turns into its RankOutcome."""

    job: Job
    context: RankContext
    moved: list[int] = field(default_factory=list)
    bytes: int = 0
    error: ErrorInfo | None = None
    copy_s: float = 0.0
    storage_s: float = 0.0

    def failed(self, error: TransferError) -> None:
        """Keep the first error; but a lost device is what the others came from, and ends the rank."""
        recorder, task_id, rank = self.context.recorder, self.job.task.task_id, self.context.rank
        recorder.note(task_id, "error", rank, error.reason, str(error)[:LONGEST_TEXT])
        if isinstance(error, InvariantError):
            recorder.failure(task_id, f"rank {rank}: {error}")
        if self.error is None or isinstance(error, DeviceLost):
            self.error = ErrorInfo(error.reason, str(error))

    def done(self, positions: Sequence[int], nbytes: int) -> None:
        self.moved.extend(positions)
        self.bytes += nbytes

    @property
    def stopped(self) -> Stop | None:
        return self.job.stop.reason

    def outcome(self) -> RankOutcome:
        wanted = self.job.task.blocks
        complete = len(self.moved) == wanted
        moved: Sequence[int] = range(wanted) if complete else sorted(self.moved)
        return RankOutcome(
            rank=self.context.rank,
            moved=moved,
            bytes=self.bytes,
            error=None if complete else self.error,
            stop=None if complete else self.stopped,
            queue_s=self.job.queue_s,
            copy_s=self.copy_s,
            storage_s=self.storage_s,
        )


def require(part: T | None) -> T:
    """A part that admission has made sure of."""
    if part is None:
        raise InvariantError("a task was admitted for a tier that this daemon does not have")
    return part
