"""Rates and times of the tasks that ended within the last ten seconds and the last minute, by engine and kind.

Each second has a slot: how many tasks ended in it, their bytes, and a histogram of their times. So a rate covers the
time that its name says, whoever asks and however often. A quantile comes from a histogram whose buckets grow by a
fifth; it is within a tenth of the true value.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from transferd.observability.task_log import Ran
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.tasks import Task, TaskResult

SHORT_S, LONG_S = 10, 60
PER_OCTAVE = 4  # buckets between a time and its double
SHORTEST_S = 1e-6


@dataclass(slots=True)
class _Slot:
    second: int
    tasks: int = 0
    nbytes: int = 0
    times: dict[int, int] = field(default_factory=dict)  # how many tasks, by bucket
    waits: dict[int, int] = field(default_factory=dict)  # the same for the time that they waited for storage, if any


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
        self._series: dict[tuple[str, str], deque[_Slot]] = {}

    def ended(self, engine: str, task: Task, result: TaskResult, ran: Ran | None = None) -> None:  # noqa: ARG002
        slots = self._series.get((engine, task.lane))
        if slots is None:
            slots = self._series[engine, str(task.lane)] = deque(maxlen=LONG_S)
        second = int(self._now())
        if not slots or slots[-1].second != second:
            slots.append(_Slot(second))
        slot = slots[-1]
        slot.tasks += 1
        slot.nbytes += result.bytes
        bucket = _bucket(result.duration)
        slot.times[bucket] = slot.times.get(bucket, 0) + 1
        waited = 0.0
        for rank in result.ranks:
            waited = max(waited, rank.storage_s)
        if waited:
            bucket = _bucket(waited)
            slot.waits[bucket] = slot.waits.get(bucket, 0) + 1

    def recent(self, engine: str | None = None, kind: str | None = None) -> Recent:
        """What ended lately. engine, kind: only of these; None for all together."""
        now = self._now()
        self._forget(int(now) - LONG_S)
        chosen = [
            slots for (whose, what), slots in self._series.items() if engine in (None, whose) and kind in (None, what)
        ]
        long = [slot for slots in chosen for slot in slots if slot.second > int(now) - LONG_S]
        short = [slot for slot in long if slot.second > int(now) - SHORT_S]
        short_s, long_s = self._covered(now, SHORT_S), self._covered(now, LONG_S)
        times, waits = Counter[int](), Counter[int]()
        for slot in long:
            times.update(slot.times)
            waits.update(slot.waits)
        return Recent(
            tasks_per_s=sum(slot.tasks for slot in short) / short_s,
            bytes_per_s=sum(slot.nbytes for slot in short) / short_s,
            tasks_per_s_1min=sum(slot.tasks for slot in long) / long_s,
            bytes_per_s_1min=sum(slot.nbytes for slot in long) / long_s,
            p50_s=quantile(times, 0.5),
            p99_s=quantile(times, 0.99),
            storage_p99_s=quantile(waits, 0.99),
        )

    def _covered(self, now: float, window: int) -> float:
        """Seconds that the slots of a window cover: the running second has only begun. At least one."""
        return max(1.0, min(window - 1 + now - int(now), now - self._began))

    def _forget(self, before: int) -> None:
        """Drop what no window covers any more, such as the tasks of engines that have left."""
        for key in [key for key, slots in self._series.items() if slots[-1].second <= before]:
            del self._series[key]


def _bucket(seconds: float) -> int:
    return math.floor(PER_OCTAVE * math.log2(max(seconds, SHORTEST_S)))


def quantile(times: Counter[int], share: float) -> float | None:
    """The time that at least `share` of the counted ones do not exceed: the middle of its bucket; None without any."""
    total, below = times.total(), 0
    for bucket in sorted(times):
        below += times[bucket]
        if below >= share * total:
            return float(2 ** ((bucket + 0.5) / PER_OCTAVE))
    return None
