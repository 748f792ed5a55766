"""Rates and times of the tasks that ended within the last ten seconds and the last minute, by engine and kind.

Each second has a slot: how many tasks ended in it, their bytes, and a histogram of their times. So a rate covers the
time that its name says, whoever asks and however often. A quantile comes from a histogram whose buckets grow by a
fifth; it is within a tenth of the true value.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from transferd.observability.task_log import Ran
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.tasks import Task, TaskResult

SHORT_S, LONG_S = 10, 60
PER_OCTAVE = 4  # buckets between a time and its double
SHORTEST_S = 1e-6


@dataclass(slots=True)
class _Count:
    """Tasks that ended: how many, their bytes, and how many by the bucket of a time."""

    tasks: int = 0
    nbytes: int = 0
    times: dict[int, int] = field(default_factory=dict)  # from admission to answer
    waits: dict[int, int] = field(default_factory=dict)  # that they waited for storage, if they did


class _Lately:
    """The tasks of one engine and kind.

    slots: (second, what ended in it), oldest first. minute: the sum of all slots. It is kept as slots come and go, so
    that a report need not add up a minute of slots on the event loop.
    """

    __slots__ = ("minute", "slots")

    def __init__(self) -> None:
        self.slots: deque[tuple[int, _Count]] = deque()
        self.minute = _Count()

    def slot(self, second: int) -> _Count:
        if not self.slots or self.slots[-1][0] != second:
            self.forget(second - LONG_S)
            self.slots.append((second, _Count()))
        return self.slots[-1][1]

    def forget(self, last: int) -> None:
        """Take away the slots up to this second."""
        minute = self.minute
        while self.slots and self.slots[0][0] <= last:
            _, gone = self.slots.popleft()
            minute.tasks -= gone.tasks
            minute.nbytes -= gone.nbytes
            for counts, lost in ((minute.times, gone.times), (minute.waits, gone.waits)):
                for bucket, number in lost.items():
                    counts[bucket] -= number
                    if not counts[bucket]:
                        del counts[bucket]


@dataclass(frozen=True, slots=True)
class Recent:
    """What ended lately. Rates are per second, over SHORT_S and LONG_S; quantiles over LONG_S, None without tasks."""

    tasks_per_s: float = 0.0
    bytes_per_s: float = 0.0
    tasks_per_s_1min: float = 0.0
    bytes_per_s_1min: float = 0.0
    p50_s: float | None = None
    p99_s: float | None = None
    storage_p99_s: float | None = None  # of the tasks that waited for storage: how long


class Windows:
    """Counts every ended task. An observer of the task log."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._now = clock.monotonic
        self._began = self._now()
        self._forgotten = 0
        self._series: dict[tuple[str, str], _Lately] = {}

    def ended(self, engine: str, task: Task, result: TaskResult, ran: Ran | None = None) -> None:  # noqa: ARG002
        series = self._series.get((engine, task.lane))
        if series is None:
            series = self._series[engine, str(task.lane)] = _Lately()
        waited = 0.0
        for rank in result.ranks:
            if rank.storage_s > waited:
                waited = rank.storage_s
        time = _bucket(result.duration)
        wait = _bucket(waited) if waited else None
        for count in (series.slot(int(self._now())), series.minute):
            count.tasks += 1
            count.nbytes += result.bytes
            count.times[time] = count.times.get(time, 0) + 1
            if wait is not None:
                count.waits[wait] = count.waits.get(wait, 0) + 1

    def recent(self, engine: str | None = None, kind: str | None = None) -> Recent:
        """What ended lately. engine, kind: only of these; None for all together."""
        now = self._now()
        self._forget(int(now) - LONG_S)
        chosen = [
            series for (whose, what), series in self._series.items() if engine in (None, whose) and kind in (None, what)
        ]
        if not chosen:
            return Recent()
        short = [
            count
            for series in chosen
            for second, count in itertools.islice(reversed(series.slots), SHORT_S)
            if second > int(now) - SHORT_S
        ]
        long = [series.minute for series in chosen]
        short_s, long_s = self._covered(now, SHORT_S), self._covered(now, LONG_S)
        times, waits = _together(count.times for count in long), _together(count.waits for count in long)
        return Recent(
            tasks_per_s=sum(count.tasks for count in short) / short_s,
            bytes_per_s=sum(count.nbytes for count in short) / short_s,
            tasks_per_s_1min=sum(count.tasks for count in long) / long_s,
            bytes_per_s_1min=sum(count.nbytes for count in long) / long_s,
            p50_s=quantile(times, 0.5),
            p99_s=quantile(times, 0.99),
            storage_p99_s=quantile(waits, 0.99),
        )

    def _covered(self, now: float, window: int) -> float:
        """Seconds that the slots of a window cover: the running second has only begun. At least one."""
        return max(1.0, min(window - 1 + now - int(now), now - self._began))

    def _forget(self, last: int) -> None:
        """Drop what no window covers any more, such as the tasks of engines that have left. Once a second."""
        if last == self._forgotten:
            return
        self._forgotten = last
        for key, series in list(self._series.items()):
            series.forget(last)
            if not series.slots:
                del self._series[key]


def _bucket(seconds: float) -> int:
    return math.floor(PER_OCTAVE * math.log2(seconds)) if seconds > SHORTEST_S else _FIRST


_FIRST = math.floor(PER_OCTAVE * math.log2(SHORTEST_S))


def _together(each: Iterable[dict[int, int]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for counts in each:
        for bucket, number in counts.items():
            total[bucket] = total.get(bucket, 0) + number
    return total


def quantile(times: Mapping[int, int], share: float) -> float | None:
    """The time that at least `share` of the counted ones do not exceed: the middle of its bucket; None without any."""
    total, below = sum(times.values()), 0
    for bucket in sorted(times):
        below += times[bucket]
        if below >= share * total:
            return float(2 ** ((bucket + 0.5) / PER_OCTAVE))
    return None
