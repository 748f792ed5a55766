"""The order of tasks: which of them wait for others, which start when, how many may wait, and until when.

**Hazards.** Two tasks that touch the same block of the same tier, at least one of them writing, run in the order
of their submission; all others may overlap. Each task enters the table once with its footprint and
becomes a `Claim`. A claim waits for

* the last claim that writes a block it reads or writes (read after write, write after write);
* every claim that reads a block it writes, since that block's last writer (write after read).

A claim waits only for earlier claims, so there is no cycle and no deadlock.

A claim may leave before its turn: its task is cancelled while queued, and earlier tasks still run. The
waiter gets an answer at once, but the claim stays in the table as an abandoned one until its own
blockers have left, because later claims were ordered behind it instead of behind them. Then it
leaves by itself.

Windows are device blocks that may share bytes, also with those of other engines. Where an engine has windows, its
claims on the device are ordered by bytes, among those of all engines (byte_ranges.py): everything else stays the same.

A storage block never changes under its key, so a write need not wait for a read of the same key. A write
waits for an earlier write (it then finds the object stored, so one transfer serves both), and a read waits
for an earlier write (which will store the block that the read asks for).

**Lanes.** There is one for each kind of task. They do not share places, so loads never wait behind stores. Within a
lane, tasks start in the order in which they became ready, that is, in which the earlier tasks on their blocks ended.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from transferd.config import ServerSection
from transferd.control.byte_ranges import ByteRanges, WindowGrid
from transferd.errors import RequestError
from transferd.runtime.compat import StrEnum
from transferd.tasks import DEVICE, HOST, PATHS, STORAGE, ErrorInfo, Footprint, Lane, Stop, Task

T = TypeVar("T")
RETRY_AFTER_S = (0.005, 5.0)  # the shortest and the longest hint given with `busy`
EDGE_BYTES = 8  # memory of one claim that another one waits for


class Claim(msgspec.Struct, eq=False):
    """One task's place in the order. `owner` is any value of the caller's; `ready` once nothing blocks the claim.

    table: the one that it has entered.
    grids: where its device blocks lie, if they are windows.
    """

    owner: object
    footprint: Footprint
    nbytes: int
    table: HazardTable
    grids: Sequence[WindowGrid]
    blockers: int = 0  # claims before this one that have not left
    dependents: list[Claim] = []  # claims that count this one among their blockers
    abandoned: bool = False

    @property
    def ready(self) -> bool:
        return not self.blockers


class _BlockUse(msgspec.Struct, eq=False):
    """The claims on one block that a new claim may have to wait for: the last writer and the readers since.

    sole: the only claim so far; None once there was a second one. All blocks that only this claim uses share the
        object.
    """

    sole: Claim | None
    writer: Claim | None
    readers: dict[Claim, None]  # a dict for its order: same blockers order in every run


class HazardTable:
    """All claims that have not left. Mutated by `enter` and `leave` only; cost is linear in blocks.

    grids: where each rank's device blocks lie, if they are windows. Change it only while no task is admitted.
    notify: called by the user of another table when a claim of this one has become ready there.
    """

    def __init__(self, ranges: ByteRanges[Claim] | None = None) -> None:
        """ranges: shared with other tables, whose claims are on the same memory."""
        self.grids: Sequence[WindowGrid] = ()
        self.notify: Callable[[Claim], None] | None = None
        self._ranges: ByteRanges[Claim] = ByteRanges() if ranges is None else ranges
        self._uses: dict[str, dict[Hashable, _BlockUse]] = {DEVICE: {}, HOST: {}, STORAGE: {}, PATHS: {}}
        self.nbytes = 0  # of all claims, abandoned ones included

    def enter(self, owner: object, footprint: Footprint, nbytes: int = 0) -> Claim:
        """Add a claim behind all claims that it conflicts with. nbytes: counted by the table until the claim leaves."""
        claim = Claim(owner, footprint, nbytes, self, self.grids)
        blockers: dict[Claim, None] = {}
        # Reads come before writes: a task that reads and writes one block does not wait for itself.
        for named, writes in ((footprint.reads, False), (footprint.writes, True)):
            for place, ids in named.items():
                if place == DEVICE and claim.grids:
                    before = self._ranges.enter(claim, claim.grids, ids, writes=writes) if ids else ()
                    blockers.update(dict.fromkeys(before))
                    claim.nbytes += EDGE_BYTES * len(before)  # one window may be in the way of any number of others
                    continue
                uses = self._uses[place]
                use = _BlockUse(claim, claim if writes else None, {} if writes else {claim: None})
                # The usual case: no block is in use. One object for all of them saves most of the cost of a long task.
                if uses.keys().isdisjoint(ids):
                    uses.update(dict.fromkeys(ids, use))
                else:
                    self._enter_behind(use, place, ids, blockers)
        blockers.pop(claim, None)  # a task that names a block twice
        claim.blockers = len(blockers)
        for blocker in blockers:
            blocker.dependents.append(claim)
        self.nbytes += claim.nbytes
        return claim

    def _enter_behind(self, new: _BlockUse, place: str, ids: Sequence[Hashable], blockers: dict[Claim, None]) -> None:
        """Note a new use of these blocks, and add to `blockers` the claims of earlier uses that it has to wait for."""
        uses = self._uses[place]
        for block in ids:
            use = uses.setdefault(block, new)
            if use is new:
                continue
            # The first claim's object stands for all of its blocks: this block needs its own from now on.
            if use.sole is not None:
                use = uses[block] = _BlockUse(None, use.writer, dict(use.readers))
            if use.writer is not None:
                blockers[use.writer] = None
            if new.writer is None:
                use.readers.update(new.readers)
                continue
            # A stored object never changes under its key, so its readers do not delay a writer.
            if place != STORAGE:
                blockers.update(use.readers)
                use.readers = {}
            use.writer = new.writer

    def leave(self, claim: Claim) -> list[Claim]:
        """The task is over, or was cancelled while queued. Returns the claims that became ready, in order.

        Some may be another table's: see `notify`.
        """
        # Later claims are ordered behind this one instead of behind its blockers, so it must outlive them.
        if claim.blockers:
            claim.abandoned = True
            return []
        became_ready: list[Claim] = []
        leaving = [claim]
        while leaving:
            gone = leaving.pop()
            gone.table.forget(gone)
            for dependent in gone.dependents:
                dependent.blockers -= 1
                if dependent.blockers == 0:
                    # An abandoned claim has no task to start: it leaves as well, and may release others.
                    (leaving if dependent.abandoned else became_ready).append(dependent)
            gone.dependents = []
        return became_ready

    def host_writer(self, block: int) -> Claim | None:
        """The last claim that writes this host block, if it has not left."""
        use = self._uses[HOST].get(block)
        return None if use is None else use.writer

    def check_targets(self, footprint: Footprint) -> None:
        """Raise RequestError if two device blocks to write share a byte: both would be written, in either order."""
        for grid in self.grids:
            if (both := grid.overlapping(footprint.writes.get(DEVICE, ()))) is not None:
                what = f"blocks {both[0]} and {both[1]} share bytes: windows of {grid.nbytes}, {grid.stride} apart"
                raise RequestError(f"gpu_block_ids: {what}", code="duplicate_id")

    def forget(self, claim: Claim) -> None:
        """Take out a claim of this table whose blockers have left. Only `leave` calls it, of any table."""
        if claim.grids:
            self._ranges.leave(claim, claim.grids)
        for place, ids in (*claim.footprint.reads.items(), *claim.footprint.writes.items()):
            uses = self._uses[place]
            for block in ids:
                use = uses.get(block)
                if use is None:  # the footprint names the block twice, or it is a window
                    continue
                if use.sole is claim:
                    del uses[block]
                    continue
                if use.writer is claim:  # else a later writer has come: it keeps the entry
                    use.writer = None
                use.readers.pop(claim, None)
                if use.writer is None and not use.readers:
                    del uses[block]
        self.nbytes -= claim.nbytes


# --- lanes ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class LaneLoad:
    """The tasks of one lane."""

    ready: deque[TaskState] = field(default_factory=deque)  # in the order in which they became ready
    running: int = 0
    tasks: int = 0  # queued and running
    nbytes: int = 0  # of those
    seconds: float = 0.0  # moving average of a task's time from admission to its end; feeds retry_after


class Lanes:
    """All lanes of one dispatcher."""

    def __init__(self, server: ServerSection, hazards: HazardTable) -> None:
        self._server = server
        self.hazards = hazards  # the claims of these tasks
        self.loads = {lane: LaneLoad() for lane in Lane}
        self.queued = 0  # in all lanes
        self.ready_tasks = 0  # in all lanes; some may have been cancelled since

    @property
    def running(self) -> int:
        return sum(load.running for load in self.loads.values())

    def too_much(self, record: TaskState) -> ErrorInfo | None:
        """Why this task is not admitted now; None if it may be. `hint` says when to retry."""
        load, arguments, held = self.loads[record.lane], record.arguments, self.hazards.nbytes
        if self.queued >= self._server.max_queued_tasks:
            return ErrorInfo("queue_full", f"the queue is full: {self.queued} tasks are waiting")
        # An index that hangs delays every flush until its deadline, and an engine that evicts sends many flushes.
        waiting = load.tasks - load.running
        if record.flush and waiting >= (self._server.max_queued_tasks + 1) // 2:
            return ErrorInfo("queue_full", f"flushes fill half of the queue: {waiting} are waiting")
        # A task that is alone may exceed a bound: no retry would ever succeed otherwise.
        if held and held + arguments > self._server.max_queued_bytes:
            message = f"admitted tasks hold {held} bytes of keys, ids and token_ids, and this one would add {arguments}"
            return ErrorInfo("queue_full", message)
        if load.tasks and load.nbytes + record.nbytes > self._server.max_inflight_bytes:
            return ErrorInfo("bytes_in_flight", f"{load.nbytes} bytes are in flight in this lane")
        return None

    def hint(self, lane: Lane) -> float:
        """After how many seconds to retry a push into this lane.

        The time in which it finishes a quarter of its queue: soon, but not so soon that all retry in vain.
        """
        load = self.loads[lane]
        waiting = max(1, load.tasks - load.running)
        estimate = load.seconds * waiting / self._server.lane_depth / 4
        return min(max(estimate, RETRY_AFTER_S[0]), RETRY_AFTER_S[1])

    def enter(self, record: TaskState) -> None:
        """A task was admitted."""
        load = self.loads[record.lane]
        load.tasks += 1
        load.nbytes += record.nbytes
        self.queued += 1

    def ready(self, record: TaskState) -> None:
        """Its blocks are free: it may run when there is a place."""
        self.loads[record.lane].ready.append(record)
        self.ready_tasks += 1

    def next_startable(self) -> TaskState | None:
        """The next task to start now. The caller must start or end it before the next call."""
        for load in self.loads.values():
            while load.ready and load.running < self._server.lane_depth:
                record = load.ready.popleft()
                self.ready_tasks -= 1
                if record.state is State.QUEUED:  # else it was cancelled while it waited for a place
                    return record
        return None

    def moved(self, record: TaskState, old: State, now: float) -> None:
        """A task's state has changed from `old`."""
        load = self.loads[record.lane]
        if old is State.QUEUED:
            self.queued -= 1
        load.running += (record.state in AT_WORK) - (old in AT_WORK)
        if record.state is State.DONE:
            load.tasks -= 1
            load.nbytes -= record.nbytes
            if old in AT_WORK:
                spent = now - record.admitted_at
                load.seconds = spent if not load.seconds else 0.9 * load.seconds + 0.1 * spent

    @property
    def waiting(self) -> dict[Lane, int]:
        """How many tasks are queued, by lane."""
        return {lane: load.tasks - load.running for lane, load in self.loads.items()}


class Alarms(Generic[T]):
    """Deadlines, soonest first: a heap of (time, subject). A subject that is `over` never rings.

    Most tasks end long before their deadline, so their alarms are dropped before they outnumber the live ones.
    """

    def __init__(self, over: Callable[[T], bool]) -> None:
        self._over = over
        self._heap: list[tuple[float, int, T]] = []
        self._number = 0  # breaks ties in the order of setting
        self._live_at_last_look = 0

    def set(self, when: float, subject: T) -> bool:
        """Returns False if an alarm for that time, or an earlier one, was set before: its caller wakes up then."""
        soonest = not self._heap or when < self._heap[0][0]
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, subject))
        if len(self._heap) > 64 + 2 * self._live_at_last_look:
            self._heap = [alarm for alarm in self._heap if not self._over(alarm[2])]
            heapq.heapify(self._heap)
            self._live_at_last_look = len(self._heap)
        return soonest

    def due(self, now: float, most: int) -> list[T]:
        """Remove and return at most so many subjects whose time has come and that are not over, soonest first."""
        subjects: list[T] = []
        while self._heap and self._heap[0][0] <= now and len(subjects) < most:
            subject = heapq.heappop(self._heap)[2]
            if not self._over(subject):
                subjects.append(subject)
        return subjects

    def next(self) -> float:
        """The time of the next alarm; math.inf if there is none."""
        while self._heap and self._over(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf


class State(StrEnum):
    """Where an admitted task is."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    DONE = "done"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.DONE}),
    State.RUNNING: frozenset({State.CANCELLING, State.DONE}),
    State.CANCELLING: frozenset({State.DONE}),
    State.DONE: frozenset(),
}

AT_WORK = frozenset({State.RUNNING, State.CANCELLING})


class TaskState(msgspec.Struct, eq=False):
    """One task that passed the checks. Only the dispatcher changes it."""

    task: Task | None  # None once done: alarms keep the record, and keys and token ids may be large
    task_id: str
    lane: Lane
    content: int  # content_hash of the task; a repeated push must have the same
    generation: str
    memory_epoch: int  # how often the memory had been taken away at its admission
    admitted_at: float
    nbytes: int  # counted against the lane's bytes in flight
    arguments: int  # bytes of memory that the task itself takes while it is admitted
    flush: bool  # it moves nothing and updates the token index
    waiters: list[tuple[bytes, int]]  # (client, seq) to answer; empty when all clients are gone
    claim: Claim | None = None  # None before the blocks are claimed and after they are released
    state: State = State.QUEUED
    stop: Stop | None = None  # why it must stop, while cancelling
    withdrawn: ErrorInfo | None = None  # why its memory was taken away while it ran, which stops it
    forsaken_at: float = math.inf  # while cancelling: when ranks that have not arrived are left behind
    straggling: AbstractSet[int] = frozenset()  # once done: the ranks left behind
