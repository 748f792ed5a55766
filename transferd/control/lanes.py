"""Lanes: how many tasks of each kind run at once, in which order, how many may wait, and until when.

Lanes do not share places, so loads never wait behind stores. Within a lane, tasks start in the order in
which they became ready, that is, in which the earlier tasks on their blocks ended.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from transferd.control.admission import Limits, Prepared
from transferd.control.hazards import Claim
from transferd.runtime.compat import StrEnum
from transferd.tasks import ErrorInfo, Lane, Stop, Task

T = TypeVar("T")
RETRY_AFTER_S = (0.005, 5.0)  # the shortest and the longest hint given with `busy`


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

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.loads = {lane: LaneLoad() for lane in Lane}
        self.queued = 0  # in all lanes
        self.ready_tasks = 0  # in all lanes; some may have been cancelled since

    @property
    def running(self) -> int:
        return sum(load.running for load in self.loads.values())

    def too_much(self, prepared: Prepared, held: int) -> tuple[ErrorInfo, float] | None:
        """Why this task is not admitted now, and after how many seconds to retry; None if it may be admitted.

        held: bytes of the arguments of tasks that are admitted.
        """
        load, arguments = self.loads[prepared.lane], prepared.arguments
        if self.queued >= self._limits.max_queued:
            return ErrorInfo("queue_full", f"the queue is full: {self.queued} tasks are waiting"), self._hint(load)
        # An index that hangs delays every flush until its deadline, and an engine that evicts sends many flushes.
        waiting = load.tasks - load.running
        if prepared.flush and waiting >= (self._limits.max_queued + 1) // 2:
            return ErrorInfo("queue_full", f"flushes fill half of the queue: {waiting} are waiting"), self._hint(load)
        # A task that is alone may exceed a bound: no retry would ever succeed otherwise.
        if held and held + arguments > self._limits.max_queued_bytes:
            message = f"admitted tasks hold {held} bytes of keys, ids and token_ids, and this one would add {arguments}"
            return ErrorInfo("queue_full", message), self._hint(load)
        if load.tasks and load.nbytes + prepared.nbytes > self._limits.max_bytes:
            message = f"{load.nbytes} bytes are in flight in this lane"
            return ErrorInfo("bytes_in_flight", message), self._hint(load)
        return None

    def hint(self, lane: Lane) -> float:
        """After how many seconds to retry a push into this lane."""
        return self._hint(self.loads[lane])

    def _hint(self, load: LaneLoad) -> float:
        """The time in which this lane finishes a quarter of its queue: soon, but not so soon that all retry in vain."""
        waiting = max(1, load.tasks - load.running)
        estimate = load.seconds * waiting / self._limits.lane_depth / 4
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
        """The next task to start now. The caller must start or end it before it asks for another."""
        for load in self.loads.values():
            while load.ready and load.running < self._limits.lane_depth:
                record = load.ready.popleft()
                self.ready_tasks -= 1
                if record.state is State.QUEUED:  # else it was cancelled while it waited for a place
                    return record
        return None

    def moved(self, record: TaskState, old: State) -> None:
        """A task's state has changed from `old`."""
        load = self.loads[record.lane]
        if old is State.QUEUED:
            self.queued -= 1
        load.running += (record.state in AT_WORK) - (old in AT_WORK)

    def spent(self, record: TaskState, now: float) -> None:
        """A round of a task has ended."""
        load, spent = self.loads[record.lane], now - record.admitted_at
        load.seconds = spent if not load.seconds else 0.9 * load.seconds + 0.1 * spent

    def leave(self, record: TaskState) -> None:
        """A task was answered."""
        load = self.loads[record.lane]
        load.tasks -= 1
        load.nbytes -= record.nbytes

    def statistics(self) -> dict[str, dict[str, int]]:
        return {
            str(name): {"queued": load.tasks - load.running, "running": load.running, "bytes": load.nbytes}
            for name, load in self.loads.items()
        }


class Alarms(Generic[T]):
    """Deadlines, soonest first: a heap of (time, subject). A subject that is `over` never rings.

    Most tasks end long before their deadline, so their alarms are dropped before they outnumber the live ones.
    """

    def __init__(self, over: Callable[[T], bool]) -> None:
        self._over = over
        self._heap: list[tuple[float, int, T]] = []
        self._number = 0  # breaks ties in the order of setting
        self._live_at_last_look = 0

    def set(self, when: float, subject: T) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, subject))
        if len(self._heap) > 64 + 2 * self._live_at_last_look:
            self._heap = [alarm for alarm in self._heap if not self._over(alarm[2])]
            heapq.heapify(self._heap)
            self._live_at_last_look = len(self._heap)

    def due(self, now: float) -> list[T]:
        """Remove and return every subject whose time has come and that is not over, soonest first."""
        subjects: list[T] = []
        while self._heap and self._heap[0][0] <= now:
            subject = heapq.heappop(self._heap)[2]
            if not self._over(subject):
                subjects.append(subject)
        return subjects

    def next(self) -> float:
        """The time of the next alarm; math.inf if there is none."""
        while self._heap and self._over(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def __len__(self) -> int:
        return len(self._heap)


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


@dataclass(slots=True, eq=False)
class TaskState:
    """One admitted task. Only the dispatcher changes it."""

    task: Task | None  # None once done: alarms keep the record, and keys and token ids may be large
    task_id: str
    lane: Lane
    content: int  # content_hash of the task; a repeated push must have the same
    generation: str
    memory_epoch: int  # how often the memory had been taken away at its admission
    admitted_at: float
    deadline: float
    nbytes: int  # counted against the lane's bytes in flight
    waiters: list[tuple[bytes, int]]  # (client, seq) to answer; empty when all clients are gone
    claim: Claim | None = None  # None before the blocks are claimed and after they are released
    state: State = State.QUEUED
    stop: Stop | None = None  # why it must stop, while cancelling
    withdrawn: ErrorInfo | None = None  # it must stop because its memory was taken away, and nobody has cancelled it
    forsaken_at: float = math.inf  # while cancelling: when ranks that have not arrived are left behind
    straggling: set[int] = field(default_factory=set)  # once done: the ranks left behind
