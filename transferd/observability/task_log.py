"""The task log: every admitted task that was answered, once. Metrics, rates and traces are its observers.

    coordinator ─ ended(engine, task, result, times) ─▶ TaskLog ─▶ the tasks that ended last and those that failed last
                                                               ─▶ observers: metrics, rates, traces

The flight recorder (recorder.py) has the steps of each task; this is the list of tasks, for `transferd tasks`. Both
name a task by its engine and its id, because ids are an engine's own. Results that answer a repeated push are kept by
the dispatcher (control/admission.py), which decides with them: docs/adr/0075.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transferd.config import DEFAULT_ENGINE
from transferd.observability.report import KindReport
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.tasks import NOT_ADMITTED, ErrorInfo, Lane, RankResult, Status, Task, TaskResult

RECENT = 1024
FAILED = 256  # in a ring of their own, so that a busy hour of good tasks does not push failures out
_BAD = frozenset({Status.FAILED, Status.EXPIRED})
_LOOKED_UP = frozenset({Status.OK, Status.PARTIAL, Status.MISS})

LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
ENDED = (Status.OK, Status.PARTIAL, Status.MISS, Status.FAILED, Status.EXPIRED, Status.CANCELLED)
STAGES = ("queue", "copy", "storage")  # of a rank: waiting for its turn, moving bytes on this node, waiting for storage
# The stage that took most of the time of a task that missed its deadline; absent_rank: a rank did not arrive in time.
MISSED = ("queue", "copy", "storage", "absent_rank")


class Ran(NamedTuple):
    """The times of one task on its ranks, in monotonic seconds. arrivals: (rank, when it was done), in order."""

    admitted: float
    started: float
    arrivals: Sequence[tuple[int, float]]


class Ended(NamedTuple):
    """One admitted task that was answered. at: monotonic seconds; seconds: from admission to answer.

    Keeps none of the task's arguments.
    """

    at: float
    task_id: str
    kind: Lane
    status: Status
    blocks: int  # how many the task names
    done: int  # moved on every rank
    nbytes: int
    seconds: float
    error: ErrorInfo | None
    ranks: Sequence[RankResult]
    engine: str = DEFAULT_ENGINE


Observer = Callable[[Ended, Task, Ran | None], None]  # Ran: None if no rank began it


@dataclass(eq=False, repr=False)
class TaskLog:
    """Two bounded rings of ended tasks, newest last, and the observers of each task. One log for all engines.

    observers: called in order for each ended task, on the event loop; they must not raise.
    leaving: called with the name of an engine that has left.
    errors: how many ended with an error, by engine and code; "" has those of engines that have left.
    found, missing: blocks of look-ups by engine; "" has those of engines that have left. An engine that asks no
    look-ups looks its blocks up by reading them.
    asking: the engines that have ever looked up before they read.
    """

    clock: Clock = SYSTEM_CLOCK
    observers: Sequence[Observer] = ()
    leaving: Sequence[Callable[[str], None]] = ()

    def __post_init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        self.asking: set[str] = set()
        self.recent: deque[Ended] = deque(maxlen=RECENT)
        self.failed: deque[Ended] = deque(maxlen=FAILED)
        self.errors: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def ended(self, engine: str, task: Task, result: TaskResult, ran: Ran | None = None) -> None:
        """Take up a task of this engine: once, when it is answered. ran: None if no rank began it."""
        blocks, done = task.blocks, len(result.block_ids)
        entry = Ended(
            self.clock.monotonic(),
            task.task_id,
            task.lane,
            result.status,
            blocks,
            done,
            result.bytes,
            result.duration,
            result.error,
            result.ranks,
            engine,
        )
        self.recent.append(entry)
        failed = result.error is not None and result.error.code != NOT_ADMITTED
        if result.status in _BAD or failed:
            self.failed.append(entry)
        if failed and result.error is not None:
            self.errors[engine][result.error.code] += 1
        if task.lane is Lane.READ and engine not in self.asking and result.status in _LOOKED_UP:
            self._count(engine, blocks, done)
        for observer in self.observers:
            observer(entry, task, ran)

    def looked_up(self, engine: str, blocks: int, found: int) -> None:
        """Count one look-up of so many blocks."""
        self.asking.add(engine)
        self._count(engine, blocks, found)

    def _count(self, engine: str, blocks: int, found: int) -> None:
        self.found[engine] += found
        self.missing[engine] += blocks - found

    def left(self, engine: str) -> None:
        """Add the counts of an engine that has left to those of all others that have: names come and go for months."""
        self.asking.discard(engine)
        for counts in (self.found, self.missing):
            counts[""] += counts.pop(engine, 0)
        self.errors[""] += self.errors.pop(engine, Counter())
        for leaves in self.leaving:
            leaves(engine)


# Of one engine and kind: how many tasks took how long, ("took", status, place in LATENCY_BUCKETS_S), their ("seconds",
# status), what ranks have ("spent", stage), and how many deadlines were ("missed", cause). What is absent is 0.
Counts = Mapping[tuple[str | int, ...], float]


class TaskMetrics:
    """How long tasks took, where the time went, and missed deadlines, by engine; "" has those that have left.

    An observer of the task log. A task costs one histogram step and a few additions, so that eight ranks at thousands
    of tasks a second are no burden. metrics.py makes the text.
    """

    def __init__(self, *engines: str) -> None:
        """engines: those that are there from the start."""
        self._engines = defaultdict(_no_tasks, {name: _no_tasks() for name in engines})

    def ended(self, one: Ended, task: Task, ran: Ran | None) -> None:  # noqa: ARG002
        counts = self._engines[one.engine][one.kind]
        counts["took", one.status, bisect_left(LATENCY_BUCKETS_S, one.seconds)] += 1
        counts["seconds", one.status] += one.seconds
        queue = copy = storage = 0.0  # summed first: each look-up costs as much as several additions
        for rank in one.ranks:
            queue += rank.queue_s
            copy += rank.copy_s
            storage += rank.storage_s
        counts["spent", "queue"] += queue
        counts["spent", "copy"] += copy
        counts["spent", "storage"] += storage
        if one.error is not None and one.error.code == Status.EXPIRED:
            counts["missed", _cause(one.ranks)] += 1

    def left(self, engine: str) -> None:
        for kind, counts in self._engines.pop(engine, {}).items():
            everybody = self._engines[""][kind]
            for what, number in counts.items():
                everybody[what] += number

    def counted(self) -> Mapping[str, Mapping[Lane, Counts]]:
        """A copy, for another thread. Without kinds that an engine has had no task of."""
        each = self._engines.items()
        return {engine: {lane: one.copy() for lane, one in kinds.items()} for engine, kinds in each}


def _no_tasks() -> defaultdict[Lane, defaultdict[tuple[str | int, ...], float]]:
    return defaultdict(lambda: defaultdict(int))


def _cause(ranks: Sequence[RankResult]) -> str:
    """Why a task missed its deadline: one of MISSED. A rank that was left behind has reported no times."""
    times = [(rank.queue_s, rank.copy_s, rank.storage_s) for rank in ranks]
    if not times:
        return "queue"  # it never ran
    if (0.0, 0.0, 0.0) in times:
        return "absent_rank"
    longest = [max(stage) for stage in zip(*times, strict=True)]
    return STAGES[longest.index(max(longest))]


# --- the last seconds -----------------------------------------------------------------------------

SHORT_S, LONG_S = 10, 60
PER_OCTAVE = 4  # buckets between a time and its double
SHORTEST_S = 1e-6


@dataclass(slots=True)
class _Count:
    """Tasks that ended: their bytes, and how many by the bucket of a time."""

    nbytes: int = 0
    times: Counter[int] = field(default_factory=Counter)  # from admission to answer
    waits: Counter[int] = field(default_factory=Counter)  # of those that waited for storage: their waits


class _Lately:
    """The tasks of one engine and kind.

    slots: (second, the tasks that ended in it), oldest first.
    minute: the sum of all slots, kept as slots come and go: a report need not add up a minute of slots on the loop.
    """

    __slots__ = ("minute", "slots")

    def __init__(self) -> None:
        self.slots: deque[tuple[int, _Count]] = deque()
        self.minute = _Count()

    def forget(self, last: int) -> None:
        """Take away the slots up to this second."""
        minute = self.minute
        while self.slots and self.slots[0][0] <= last:
            _, gone = self.slots.popleft()
            minute.nbytes -= gone.nbytes
            minute.times -= gone.times
            minute.waits -= gone.waits


class Windows:
    """Rates and times of the tasks that ended lately, by engine and kind. An observer of the task log.

    Each second has a slot: how many tasks ended in it, their bytes, and a histogram of their times. So a rate covers
    the time in its name, however often it is read. A quantile comes from a histogram with buckets that grow by a
    fifth; it is within a tenth of the true value.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._now = clock.monotonic
        self._began = self._now()
        self._forgotten = 0
        self._series: defaultdict[str, defaultdict[str, _Lately]] = defaultdict(lambda: defaultdict(_Lately))

    def ended(self, one: Ended, task: Task, ran: Ran | None) -> None:  # noqa: ARG002
        series = self._series[one.engine][one.kind]
        waited = 0.0
        for rank in one.ranks:
            if rank.storage_s > waited:
                waited = rank.storage_s
        time = _bucket(one.seconds)
        wait = _bucket(waited) if waited else None
        second, slots = int(self._now()), series.slots
        if not slots or slots[-1][0] != second:
            series.forget(second - LONG_S)
            slots.append((second, _Count()))
        for count in (slots[-1][1], series.minute):
            count.nbytes += one.nbytes
            count.times[time] = count.times.get(time, 0) + 1  # faster than +=
            if wait is not None:
                count.waits[wait] = count.waits.get(wait, 0) + 1

    def recent(self, report: KindReport, engine: str | None = None, kind: str | None = None) -> KindReport:
        """The report, to which the rates and times of the tasks that ended lately are added; it has none yet.

        engine, kind: of these; None: of all.
        """
        now = self._now()
        self._forget(int(now) - LONG_S)
        each: Iterable[Mapping[str, _Lately]] = (
            self._series.values() if engine is None else [self._series.get(engine, {})]
        )
        chosen = [series for kinds in each for what, series in kinds.items() if kind in (None, what)]
        if not chosen:
            return report
        tasks = nbytes = 0
        for series in chosen:
            for second, count in itertools.islice(reversed(series.slots), SHORT_S):
                if second > int(now) - SHORT_S:
                    tasks += count.times.total()
                    nbytes += count.nbytes
        minutes = [series.minute for series in chosen]
        short_s, long_s = self._covered(now, SHORT_S), self._covered(now, LONG_S)
        times = _together([minute.times for minute in minutes])
        report.tasks_per_s, report.bytes_per_s = tasks / short_s, nbytes / short_s
        report.tasks_per_s_1min = times.total() / long_s
        report.bytes_per_s_1min = sum([minute.nbytes for minute in minutes]) / long_s
        report.p50_s, report.p99_s = quantile(times, 0.5), quantile(times, 0.99)
        return report

    def storage_p99_s(self) -> float | None:
        """The waits of 99 of 100 of the last minute's tasks that waited for storage; None without any."""
        self._forget(int(self._now()) - LONG_S)
        each = [series.minute.waits for kinds in self._series.values() for series in kinds.values()]
        return quantile(_together(each), 0.99)

    def _covered(self, now: float, window: int) -> float:
        """Seconds that the slots of a window cover: the running second has only begun. At least one."""
        return max(1.0, min(window - 1 + now - int(now), now - self._began))

    def _forget(self, last: int) -> None:
        """Drop slots that no window covers any more, such as those of engines that have left. Once a second."""
        if last == self._forgotten:
            return
        self._forgotten = last
        for engine, kinds in list(self._series.items()):
            for kind, series in list(kinds.items()):
                series.forget(last)
                if not series.slots:
                    del kinds[kind]
            if not kinds:
                del self._series[engine]


def _bucket(seconds: float) -> int:
    return math.floor(PER_OCTAVE * math.log2(seconds)) if seconds > SHORTEST_S else _FIRST


_FIRST = math.floor(PER_OCTAVE * math.log2(SHORTEST_S))


def _together(each: Sequence[Counter[int]]) -> Counter[int]:
    if len(each) == 1:
        return each[0]
    total: Counter[int] = Counter()
    for counts in each:
        total.update(counts)
    return total


def quantile(times: Mapping[int, int], share: float) -> float | None:
    """The time that at least `share` of the counted times do not exceed: its bucket's middle; None without any."""
    total, below = sum(times.values()), 0
    for bucket in sorted(times):
        below += times[bucket]
        if below >= share * total:
            return float(2 ** ((bucket + 0.5) / PER_OCTAVE))
    return None
