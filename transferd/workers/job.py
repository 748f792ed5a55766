"""A running task: what its ranks have in common, the signal that stops them, and each rank's share of it."""

from __future__ import annotations

import asyncio
import bisect
import operator
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from transferd.blocks.copyplan import CopyPlan, plan_copy
from transferd.blocks.formats import ObjectFormat
from transferd.blocks.layout.base import Arena, Geometry
from transferd.errors import DeviceLost, InvariantError, MemoryLost, RequestError, TransferError
from transferd.observability.recorder import LONGEST_TEXT
from transferd.runtime.aio import Steady, resolve
from transferd.runtime.compat import cancelled_from_outside
from transferd.runtime.threads import noted
from transferd.storage.base import Item, Outcome, Outcomes
from transferd.storage.lru import Use
from transferd.tasks import NOT_ADMITTED, ErrorInfo, RankOutcome, ReadStorageTask, Stop, Task, WriteStorageTask
from transferd.tiers.staging import Lease
from transferd.workers.context import RankContext

T = TypeVar("T")
Call = Callable[[Sequence[Item], T, Sequence[memoryview]], Awaitable[list[Outcome]]]

MOST_PLANS = 16  # plans kept per task: its ranks are rarely further apart


class StopSignal(msgspec.Struct, eq=False):
    """Makes every rank of one task end early, and wakes those that are waiting.

    Set once and never cleared. It does not abort bytes in flight: a waiter stops waiting for them, and the
    memory they use stays leased until they have ended.
    """

    reason: Stop | None = None
    _waiters: set[asyncio.Future[None]] = set()
    # futures of each running copy; keyed by id() because lists do not hash
    _copies: dict[int, list[asyncio.Future[Any]]] = {}

    def set(self, reason: Stop) -> None:
        if self.reason is None:
            self.reason = reason
            for waiter in self._waiters:
                resolve(waiter, None)
            for works in self._copies.values():
                for work in works:
                    work.cancel()  # does nothing once a thread has taken it (runtime/threads.py)

    async def copied(self, copying: Coroutine[Any, Any, None]) -> bool:
        """Await a copy. Returns False if the signal was set before every byte had moved; no byte moves from then on.

        So a copy that queues behind a hung one never runs after its task was answered. A copy that has begun
        runs to its end, or to where its tier can stop it.
        """
        if self.reason is not None:
            copying.close()
            return False
        works: list[asyncio.Future[Any]] = []
        before = noted.get()
        noted.set(works)
        self._copies[id(works)] = works
        try:
            await copying
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.reason is None or task is None or cancelled_from_outside(task):  # not our cancellation
                raise
            return False
        finally:
            if noted.get() is works:  # not if its task abandoned it, and it is collected in another context
                noted.set(before)
            del self._copies[id(works)]
        return True

    async def race(self, future: asyncio.Future[Any]) -> bool:
        """Wait until `future` is done (True) or the signal is set first (False). Never cancels `future`."""
        if future.done() or self.reason is not None:
            return future.done()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_: object) -> None:
            resolve(waiter, None)

        if isinstance(future, Steady):
            future.told.append(wake)
        else:
            future.add_done_callback(wake)
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            future.remove_done_callback(wake)
        return future.done()


class Job(msgspec.Struct, eq=False):
    """A started task, shared by all its ranks. It caches what is the same for each rank."""

    task: Task
    blocks: int  # how many the task names
    generation: str
    admitted_at: float  # monotonic seconds
    started_at: float  # monotonic seconds
    queue_s: float  # how long the task waited for its start
    arrivals: list[tuple[int, float]] = []  # (rank, when it arrived), in order
    stop: StopSignal = msgspec.field(default_factory=StopSignal)
    use: Use = msgspec.field(default_factory=Use)  # groups every rank's storage accesses as one use (storage/lru.py)
    # of a task with keys: where each chain of blocks begins among these, and its use; the first is `use`
    runs: list[tuple[int, Use]] = []
    # the part of each key that goes into its object name, in order; empty before `key_ids`, and for swaps
    ids: Sequence[str] = ()
    # called with the job, a rank and a number of layers, when all of the task's blocks have these first layers there
    part_there: Callable[[Job, int, int], None] = lambda job, rank, layers: None  # noqa: ARG005
    parts: dict[int, set[int]] = {}  # by number of layers, the ranks that have these layers
    _plans: dict[Hashable, CopyPlan] = {}

    def __post_init__(self) -> None:
        task, use = self.task, self.use
        use.until = self.admitted_at + task.timeout
        if not isinstance(task, WriteStorageTask | ReadStorageTask):
            return
        start = task.start_write_block_idx if isinstance(task, WriteStorageTask) else task.start_read_block_idx
        end = self.blocks
        for at, depth, _ in reversed(task.chains or [(0, start, "")]):
            one = Use(owner=use.owner) if at else use
            one.start, one.until = depth, use.until
            if isinstance(task, WriteStorageTask):
                one.stop, one.shared, end = depth + end - at, task.shared is True, at
            self.runs.append((at, one))
        self.runs.reverse()

    def key_ids(self, objects: ObjectFormat) -> Sequence[str]:
        """The `ids`. Only the first rank computes them: all ranks use the same format for object names."""
        if self.ids:
            return self.ids
        self.ids = objects.ids(getattr(self.task, "keys", ()))
        chains = getattr(self.task, "chains", None) or ()
        for (_, use), (at, _, parent) in zip(self.runs if chains else (), chains, strict=True):
            use.parent = objects.ids([parent])[0] if parent else ""
            use.last = self.ids[at + use.stop - use.start - 1] if use.stop else ""
        return self.ids

    @property
    def shrunk(self) -> bool:
        """Whether an object of one of its uses was evicted, or found no room."""
        return self.use.shrunk if len(self.runs) == 1 else any(use.shrunk for _, use in self.runs)

    def by_run(self, names: Sequence[str], ask: Callable[[Sequence[str], Use], list[bool] | None]) -> list[bool] | None:
        """Ask about the names of all blocks, those of each chain with its use. None if one answer is None."""
        if len(self.runs) == 1:
            return ask(names, self.use)
        answers: list[bool] = []
        ends = [*(at for at, _ in self.runs[1:]), len(names)]
        for (at, use), end in zip(self.runs, ends, strict=True):
            if (answer := ask(names[at:end], use)) is None:
                return None
            answers += answer
        return answers

    def copy_plan(
        self, source: Geometry, source_ids: Sequence[int], target: Geometry, target_ids: Sequence[int]
    ) -> CopyPlan:
        """See `plan_copy`. Ranks with the same geometries and the same blocks and slots share a plan."""
        key = source, tuple(source_ids), target, tuple(target_ids)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = plan_copy(source, source_ids, target, target_ids)
        return plan


class Share(msgspec.Struct, eq=False):
    """A job on one rank. `outcome` turns what it has done into a RankOutcome."""

    job: Job
    context: RankContext
    moved: list[int] = []  # the positions of blocks that have moved
    bytes: int = 0  # that have moved
    error: ErrorInfo | None = None  # the first one
    lost: bool = False  # whether `error` is the loss of the device
    copy_s: float = 0.0  # seconds of waiting for copies, without those that storage's own threads make
    storage_s: float = 0.0  # seconds of waiting for storage, its own threads' copies included
    not_admitted: int = 0  # blocks that storage did not choose to store
    _names: list[str] | None = None

    @property
    def on_host(self) -> bool:
        """Whether the task's blocks are host blocks. Meaningless for swaps, which have both kinds."""
        return bool(getattr(self.job.task, "cpu_block_ids", ()))

    @property
    def prefix(self) -> bool:
        """Whether a block is useless without those before it: not to a sparse read."""
        return getattr(self.job.task, "prefix", True)

    @property
    def arena(self) -> Arena:
        """Where this rank's blocks of the task are. Meaningless for swaps."""
        return require(self.context.host).arena if self.on_host else self.context.device.arena

    @property
    def names(self) -> list[str]:
        """The object names of the job's keys on this rank."""
        if self._names is None:
            context, job = self.context, self.job
            self._names = context.format.names(job.generation, job.key_ids(context.format), context.object_rank)
        return self._names

    def items(self, positions: Sequence[int]) -> list[Item]:
        """The objects of the blocks at these positions."""
        names, nbytes, use, runs = self.names, self.context.format.slot_bytes, self.job.use, self.job.runs
        if len(runs) == 1:
            return [Item(names[i], nbytes, use, use.start + i) for i in positions]
        its = [runs[bisect.bisect_right(runs, i, key=operator.itemgetter(0)) - 1] for i in positions]
        return [Item(names[i], nbytes, use, use.start + i - at) for i, (at, use) in zip(positions, its, strict=True)]

    def ids(self, positions: Sequence[int]) -> list[str]:
        """The ids of the blocks at these positions, for the object format."""
        ids = self.job.key_ids(self.context.format)
        return [ids[i] for i in positions]

    def step(self, what: str, count: int) -> None:
        """Note a step of the task for this rank."""
        self.context.recorder.step(self.job.task.task_id, what, self.context.rank, count)

    def failed(self, error: TransferError) -> None:
        """Keep the first error, but let DeviceLost replace it: it has caused the others, and ends the rank."""
        if isinstance(error, MemoryLost):
            error = MemoryLost(f"the memory of rank {self.context.rank} of the engine {self.context.engine!r}: {error}")
        recorder, task_id, rank = self.context.recorder, self.job.task.task_id, self.context.rank
        recorder.note(task_id, "error", rank, error.reason, str(error)[:LONGEST_TEXT])
        if isinstance(error, InvariantError):
            recorder.failure(task_id, f"rank {rank}: {error}")
        if self.error is None or isinstance(error, DeviceLost):
            self.error = ErrorInfo(error.reason, str(error))
            self.lost = isinstance(error, DeviceLost)

    def loaded(self, outcomes: Sequence[Outcome]) -> None:
        """Note the errors of a load. If all of its objects failed, more loads are useless: raise the last error."""
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        useless = len(errors) == len(outcomes)
        for error in errors[:-1] if useless else errors:
            self.failed(error)
        if useless:
            raise errors[-1]

    def done(self, positions: Sequence[int], nbytes: int) -> None:
        self.moved.extend(positions)
        self.bytes += nbytes

    @property
    def stopped(self) -> Stop | None:
        return self.job.stop.reason

    async def copied(self, copying: Coroutine[Any, Any, None], blocks: int) -> bool:
        """Await a copy of so many blocks. Returns False if the task was stopped before every byte had moved."""
        self.step("copy", blocks)
        before = self.context.clock.monotonic()
        try:
            return await self.job.stop.copied(copying)
        finally:
            self.copy_s += self.context.clock.monotonic() - before

    async def answered(self, asked: asyncio.Future[Any]) -> bool:
        """Wait for storage. Returns False if the task was stopped first."""
        if asked.done():
            return True
        before = self.context.clock.monotonic()
        answered = await self.job.stop.race(asked)
        self.storage_s += self.context.clock.monotonic() - before
        return answered

    async def computed(self) -> bool:
        """Wait until this rank's engine has reached the point that the task names (`after`).

        Returns False if the task was stopped first. Call it before device blocks are touched. Raises TransferError.
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
        """Lease slots of staging. Returns None if the task was stopped first; a late lease is released at once."""
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

    async def called(
        self, call: Call[T], items: Sequence[Item], copier: T, *, consumer: str, step: str, needed: int
    ) -> asyncio.Future[list[Outcome]] | None:
        """Begin a call to storage whose threads copy the blocks themselves. Returns None if the task was stopped first.

        needed: the most slots that the call can use at a time; 0 for objects in storage's own memory.
        """
        lease, staging = None, self.context.staging
        if needed:
            lease = await self.lease(consumer, staging.slots_at_once(consumer, min(len(items), needed)))
        if self.stopped is not None:
            if lease is not None:
                lease.release()
            return None
        self.step(step, len(items))
        return self.begin(call, items, copier, () if lease is None else staging.views(lease.slots), lease)

    async def overlapped(self, works: Iterable[Coroutine[Any, Any, bool]], most: int) -> None:
        """Run works, `most` at a time, until one returns that more are useless, or the task is stopped.

        When this returns or raises, none of them runs any more. So a stop waits for at most so many.
        """
        under_way: deque[asyncio.Future[bool]] = deque()
        try:
            for work in works:
                under_way.append(self.context.background.begin(work))
                if (len(under_way) == most and not await under_way.popleft()) or self.stopped is not None:
                    break
            while under_way:
                await under_way.popleft()
        finally:  # after an error
            if under_way:
                await asyncio.wait(under_way)

    def begin(
        self, call: Call[T], items: Sequence[Item], copier: T, slots: Sequence[memoryview], lease: Lease | None = None
    ) -> asyncio.Future[list[Outcome]]:
        """Begin a call to storage.

        lease: that of the slots, to release once the call no longer touches them; None if the caller does that.
        """
        before = self.context.clock.monotonic()
        try:
            begun = self.context.background.begin(call(items, copier, slots))
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
        """Release slots once the call, and reads that it has left running, no longer touch them."""
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


def require(part: T | None) -> T:
    """`part`, which admission has checked to exist. Raises InvariantError if it is None."""
    if part is None:
        raise InvariantError("admission accepted a task that needs a tier this daemon does not have")
    return part
