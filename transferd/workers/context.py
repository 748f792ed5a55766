"""The parts that a rank's handlers work with, and the account that they keep of one task."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transferd.blocks.footer import Damage
from transferd.blocks.formats import ObjectFormat
from transferd.blocks.layout.base import BlockLayout
from transferd.errors import DeviceLost, InvariantError, MemoryLost, RequestError, TransferError
from transferd.observability.recorder import LONGEST_TEXT, Recorder
from transferd.runtime.clock import Clock
from transferd.runtime.threads import Direction, Threads
from transferd.storage.base import Storage
from transferd.storage.peer.transport import PeerTransport
from transferd.storage.tokens import TokenStorage
from transferd.tasks import ErrorInfo, RankOutcome, Stop
from transferd.tiers.base import DeviceTier
from transferd.tiers.claims import Claims
from transferd.tiers.pinned import HostPool, HostRegion
from transferd.tiers.staging import Staging
from transferd.workers.job import Job

T = TypeVar("T")


# Checksums of up to this many bytes cost less on the loop than a round trip to a thread.
INLINE_CHECK_BYTES = 256 * 1024


class Background:
    """Work that may outlive its task: I/O on staging that is still running after the task was answered.

    Each piece stays here until it has really ended. `settled` waits for all of them, so that the memory
    under them can be freed.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def begin(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """Like `spawn`, but return a future that is already done as it is."""
        if isinstance(work, asyncio.Future) and work.done():
            return work
        begun = asyncio.ensure_future(work)
        if not begun.done():
            self._running.add(begun)
            begun.add_done_callback(self._ended)
        return begun

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: its waiter has seen it, or there is no waiter left

    async def settled(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    def __len__(self) -> int:
        return len(self._running)


@dataclass(frozen=True, slots=True)
class PeerPath:
    """How a rank reaches other daemons.

    transport: shared by all ranks. staging: the only memory that peers write to. format: that of the objects sent.
    """

    transport: PeerTransport
    staging: Staging
    format: ObjectFormat


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank's parts. The daemon builds them; the handlers borrow them.

    host: None without a host tier. storage: None without a storage backend. Admission rejects tasks that need a
    missing one. claims: of all ranks of all engines. tokens: set if storage is token-indexed; it then handles reads and
    writes, and keeps its bytes in `storage` if that is set. block_size: in tokens. only_flush: write tasks update the
    token index and move no bytes. staging: always set; storage I/O touches no other memory. peer: set only with pd.mode
    "direct".
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
    peer: PeerPath | None = None
    inline_check_bytes: int = INLINE_CHECK_BYTES
    tokens: TokenStorage | None = None
    block_size: int = 0
    only_flush: bool = False
    engine: str = ""
    claims: Claims = field(default_factory=Claims)
    object_rank: int = -1  # the rank in object names, counted over all nodes of the group; -1: the same as `rank`
    # Reading every byte of up to this many slots costs less on the loop than a round trip to a thread.
    cheap_slots: int = field(init=False)

    def __post_init__(self) -> None:
        if self.object_rank < 0:
            object.__setattr__(self, "object_rank", self.rank)
        nbytes = self.format.checked_bytes
        object.__setattr__(self, "cheap_slots", self.inline_check_bytes // nbytes if nbytes else sys.maxsize)

    @property
    def regions(self) -> dict[str, HostRegion]:
        """The rank's host memory, by what it is used for."""
        regions = {"staging": self.staging.memory}
        if self.host is not None:
            regions["host"] = self.host.memory
        if self.peer is not None:
            regions["peer staging"] = self.peer.staging.memory
        return regions

    def names(self, job: Job) -> list[str]:
        """Object names of the job's keys on this rank."""
        return self.format.names(job.generation, job.ids or job.key_ids(self.format), self.object_rank)

    async def computed(self, job: Job) -> bool:
        """Wait until this rank's engine has reached the point that the task names (`after`). False: stopped first.

        Call it before device blocks are touched. Raises TransferError.
        """
        after = job.task.after
        if not after:
            return True
        if not self.device.timelines:
            problem = f"tasks cannot name timelines on this device tier ({type(self.device).__name__})"
            raise RequestError(problem, code="no_timelines")
        reaching = self.background.begin(self.device.reached(after))
        if await job.stop.race(reaching):
            reaching.result()
            return True
        reaching.cancel()
        return False

    async def seal(self, slots: Sequence[memoryview], job: Job, positions: Sequence[int]) -> None:
        """Turn slots that hold the packed blocks at `positions` into complete objects, ready to be stored."""
        ids = [job.ids[i] for i in positions]
        if len(slots) <= self.cheap_slots:
            self.format.seal(slots, job.generation, ids, self.object_rank)
        else:
            work = functools.partial(self.format.seal, slots, job.generation, ids, self.object_rank)
            await self.threads.run(Direction.OUT, work, "checksums")

    async def check(self, slots: Sequence[memoryview], job: Job, positions: Sequence[int]) -> list[Damage | None]:
        """Verify the objects in these slots, which hold the blocks at `positions`. For each, None or the damage."""
        ids = [job.ids[i] for i in positions]
        if len(slots) <= self.cheap_slots:
            return self.format.check(slots, job.generation, ids, self.object_rank)
        work = functools.partial(self.format.check, slots, job.generation, ids, self.object_rank)
        return await self.threads.run(Direction.IN, work, "checksums")


@dataclass(slots=True)
class Account:
    """What one rank has done for one task so far. `outcome` turns it into a RankOutcome."""

    job: Job
    context: RankContext
    moved: list[int] = field(default_factory=list)
    bytes: int = 0
    error: ErrorInfo | None = None
    lost: bool = False
    copy_s: float = 0.0
    storage_s: float = 0.0

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

    def outcome(self) -> RankOutcome:
        wanted = self.job.blocks
        complete = len(self.moved) == wanted
        moved: Sequence[int] = range(wanted) if complete else sorted(self.moved)
        return RankOutcome(
            rank=self.context.rank,
            moved=moved,
            bytes=self.bytes,
            error=None if complete else self.error,
            lost=self.lost and not complete,
            stop=None if complete else self.stopped,
            queue_s=self.job.queue_s,
            copy_s=self.copy_s,
            storage_s=self.storage_s,
        )


def require(part: T | None) -> T:
    """`part`, which admission has checked to exist. Raises InvariantError if it is None."""
    if part is None:
        raise InvariantError("admission accepted a task that needs a tier this daemon does not have")
    return part
