"""Metrics of each task that ends: how long it took, where the time went, and missed deadlines.

A task costs one histogram step and a few additions, so that eight ranks at thousands of tasks a second are no burden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from transferd.tasks import Lane, Status, Task, TaskResult

LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
ENDED = (Status.OK, Status.PARTIAL, Status.MISS, Status.FAILED, Status.EXPIRED, Status.CANCELLED)
STAGES = ("queue", "copy", "storage")  # of a rank: waiting for its turn, moving bytes on this node, waiting for storage
# The stage that took most of the time of a task that missed its deadline; absent_rank: a rank did not arrive in time.
MISSED = ("queue", "copy", "storage", "absent_rank")


@dataclass(slots=True)
class _Series:
    """The tasks of one kind."""

    durations: dict[Status, Histogram]
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    missed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISSED, 0))


class TaskMetrics:
    """Updated once for each admitted task, when it is answered. Every label value exists from the start, at 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = Histogram(
            "transferd_task_duration_seconds",
            "From a task's admission to its answer",
            ["kind", "status"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._lanes = {lane: _Series({one: histogram.labels(str(lane), str(one)) for one in ENDED}) for lane in Lane}
        registry.register(self)

    def observe_result(self, task: Task, result: TaskResult) -> None:
        lane = self._lanes[task.lane]
        lane.durations[result.status].observe(result.duration)
        queue = copy = storage = 0.0  # summed first: each lookup by an enum costs as much as several additions
        for rank in result.ranks:
            queue += rank.queue_s
            copy += rank.copy_s
            storage += rank.storage_s
        lane.stages["queue"] += queue
        lane.stages["copy"] += copy
        lane.stages["storage"] += storage
        if result.error is not None and result.error.code == Status.EXPIRED:
            lane.missed[_cause(result)] += 1

    def collect(self) -> Iterator[Metric]:
        text = "Seconds that ranks have spent on tasks, all ranks together"
        stages = CounterMetricFamily("transferd_stage_seconds", text, labels=["kind", "stage"])
        for name, lane in self._lanes.items():
            for stage, seconds in lane.stages.items():
                stages.add_metric([str(name), stage], seconds)
        text = "Tasks that missed their deadline, by the stage that took most of their time"
        missed = CounterMetricFamily("transferd_deadlines_missed", text, labels=["kind", "cause"])
        for name, lane in self._lanes.items():
            for cause, count in lane.missed.items():
                missed.add_metric([str(name), cause], count)
        yield from (stages, missed)


def _cause(result: TaskResult) -> str:
    """Why a task missed its deadline: one of MISSED. A rank that was left behind has reported no times."""
    times = [(rank.queue_s, rank.copy_s, rank.storage_s) for rank in result.ranks]
    if not times:
        return "queue"  # it never ran
    if (0.0, 0.0, 0.0) in times:
        return "absent_rank"
    longest = [max(stage) for stage in zip(*times, strict=True)]
    return STAGES[longest.index(max(longest))]
