"""Places and load: how many tasks run at once in each lane, in which order, and what is too much.

A lane is one direction. Lanes do not share places, so loads never wait behind stores. Within one, tasks
run in the order in which they became ready: when the tasks before them on their blocks had ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from transferd.control.admission import Limits, Prepared
from transferd.control.task_state import AT_WORK, State, TaskState
from transferd.tasks import ErrorInfo, Lane

RETRY_AFTER_S = (0.005, 5.0)  # the shortest and the longest hint given with `busy`


@dataclass(slots=True)
class LaneLoad:
    """What one lane has to do."""

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

    @property
    def running(self) -> int:
        return sum(load.running for load in self.loads.values())

    def too_much(self, prepared: Prepared, held: int) -> tuple[ErrorInfo, float] | None:
        """Why one more task is not admitted now, and after how many seconds to ask again.

        held: bytes of the arguments of tasks that are admitted.
        """
        load, arguments = self.loads[prepared.lane], prepared.arguments
        if self.queued >= self._limits.max_queued:
            return ErrorInfo("queue_full", f"the queue is full: {self.queued} tasks are waiting"), self._hint(load)
        # An index that hangs holds up every flush until its deadline, and an engine that evicts has many of them.
        waiting = load.tasks - load.running
        if prepared.flush and waiting >= (self._limits.max_queued + 1) // 2:
            return ErrorInfo("queue_full", f"flushes fill half of the queue: {waiting} are waiting"), self._hint(load)
        # One task alone may be larger than a bound: refusing it for ever would not be "retry later".
        if held and held + arguments > self._limits.max_queued_bytes:
            told = f"admitted tasks hold {held} bytes of keys, ids and token_ids, and this one would add {arguments}"
            return ErrorInfo("queue_full", told), self._hint(load)
        if load.tasks and load.nbytes + prepared.nbytes > self._limits.max_bytes:
            told = f"{load.nbytes} bytes are in flight in this lane"
            return ErrorInfo("bytes_in_flight", told), self._hint(load)
        return None

    def hint(self, lane: Lane) -> float:
        """After how many seconds to ask again for a place in a lane."""
        return self._hint(self.loads[lane])

    def _hint(self, load: LaneLoad) -> float:
        """How long this lane takes to work off a quarter of what waits: early enough, not a stampede."""
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

    def startable(self) -> Iterator[TaskState]:
        """Tasks that run now, one by one; each must have been moved to running, or have ended, before the next."""
        for load in self.loads.values():
            while load.ready and load.running < self._limits.lane_depth:
                record = load.ready.popleft()
                if record.state is State.QUEUED:  # else it was cancelled while it waited for a place
                    yield record

    def moved(self, record: TaskState, old: State) -> None:
        """A task has another state."""
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
