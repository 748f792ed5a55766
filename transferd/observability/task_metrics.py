"""What is counted of each task that ends: how long it took, where the time went, and missed deadlines.

A task costs one histogram step and a few additions, so that eight ranks at thousands of tasks a second are no burden.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from transferd.tasks import Lane, Status, Task, TaskResult

LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
ENDED = (Status.OK, Status.PARTIAL, Status.MISS, Status.FAILED, Status.EXPIRED, Status.CANCELLED)
STAGES = ("queue", "copy", "storage")  # of a rank: waiting for its turn, moving bytes on this node, waiting for storage
MISSED = ("queued", "running")  # where a task was at its deadline


class TaskMetrics:
    """Fed by the daemon, once for each admitted task. Every label value is there from the start, at 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = Histogram(
            "transferd_task_duration_seconds",
            "From a task's admission to its answer",
            ["kind", "status"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        pairs = [(lane, status) for lane in Lane for status in ENDED]
        self._durations = {pair: histogram.labels(*map(str, pair)) for pair in pairs}
        self._stages = {(lane, stage): 0.0 for lane in Lane for stage in STAGES}
        self._missed = {(lane, where): 0 for lane in Lane for where in MISSED}
        registry.register(self)

    def observe_result(self, task: Task, result: TaskResult) -> None:
        lane = Lane(task.lane)
        self._durations[lane, result.status].observe(result.duration)
        stages = self._stages
        for rank in result.ranks:
            stages[lane, "queue"] += rank.queue_s
            stages[lane, "copy"] += rank.copy_s
            stages[lane, "storage"] += rank.storage_s
        if result.error is not None and result.error.code == Status.EXPIRED:
            self._missed[lane, "running" if result.ranks else "queued"] += 1

    def collect(self) -> Iterator[Metric]:
        text = "Seconds that ranks have spent on tasks, all ranks together"
        stages = CounterMetricFamily("transferd_stage_seconds", text, labels=["kind", "stage"])
        for (lane, stage), seconds in self._stages.items():
            stages.add_metric([str(lane), stage], seconds)
        text = "Tasks that were not done at their deadline, by where they were then"
        missed = CounterMetricFamily("transferd_deadlines_missed", text, labels=["kind", "where"])
        for (lane, where), count in self._missed.items():
            missed.add_metric([str(lane), where], count)
        yield from (stages, missed)
