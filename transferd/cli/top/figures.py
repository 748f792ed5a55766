"""Turns polled reports into rates and percentiles. Pure: no clock, no terminal."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any

from transferd.observability.concerns import concerns
from transferd.observability.figures import MAIN_LANES, busy, lane_totals
from transferd.observability.report import LaneReport, Report

WINDOW = 60  # samples in a sparkline
RECENT_S = 60.0  # percentiles cover the tasks that ended within this time


@dataclass(slots=True)
class KindFigures:
    """One kind of task. p50 and p99 are in seconds, None if no such task ended in the last minute."""

    queued: int
    running: int
    tasks_per_s: float
    bytes_per_s: float
    p50: float | None
    p99: float | None
    history: list[float] = field(default_factory=list)  # tasks a second, the newest last


@dataclass(slots=True)
class Figures:
    """What one screen shows. rows: tasks in the form of transferd/daemon/listing.py, unordered."""

    report: Report
    kinds: dict[str, KindFigures]
    tasks_per_s: list[float]  # the newest last, as in all histories
    bytes_per_s: list[float]
    hit_share: float | None  # the share of lookups within the window that hit
    waits: list[str]  # for each rank, how many tasks wait for it and what it is doing
    concerns: list[str]
    rows: list[dict[str, Any]]

    def tree(self) -> dict[str, Any]:
        """The figures as plain data, without the report."""
        tree = asdict(self)
        del tree["report"]
        return tree


@dataclass(slots=True)
class _Sample:
    at: float
    lanes: dict[str, LaneReport]
    hits: int
    looked: int


class Samples:
    """The last minute of one daemon. A new boot_id starts over."""

    def __init__(self) -> None:
        self._boot_id = ""
        self._samples: deque[_Sample] = deque(maxlen=WINDOW + 1)

    def add(self, at: float, report: Report, rows: list[dict[str, Any]]) -> Figures:
        """Add a report polled at monotonic time `at`. Returns the figures to show now."""
        if report.boot_id != self._boot_id:
            self._boot_id = report.boot_id
            self._samples.clear()
        hits = report.storage.hits
        self._samples.append(_Sample(at, lane_totals(report), hits, hits + report.storage.misses))
        lanes = self._samples[-1].lanes
        shown = [name for name, lane in lanes.items() if name in MAIN_LANES or busy(lane)]
        looked = self._samples[-1].looked - self._samples[0].looked
        return Figures(
            report=report,
            kinds={name: self._kind(name, rows) for name in shown},
            tasks_per_s=self._rates(shown, ("done", "failed")),
            bytes_per_s=self._rates(shown, ("bytes",)),
            hit_share=(hits - self._samples[0].hits) / looked if looked else None,
            waits=waits_by_rank(rows),
            concerns=concerns(report),
            rows=rows,
        )

    def _kind(self, name: str, rows: list[dict[str, Any]]) -> KindFigures:
        tasks = self._rates([name], ("done", "failed"))
        moved = self._rates([name], ("bytes",))
        recent = [row for row in rows if row["kind"] == name and row["ended_s"] is not None]
        seconds = sorted(row["seconds"] for row in recent if row["ended_s"] <= RECENT_S)
        return KindFigures(
            queued=self._samples[-1].lanes[name].queued,
            running=self._samples[-1].lanes[name].running,
            tasks_per_s=tasks[-1] if tasks else 0.0,
            bytes_per_s=moved[-1] if moved else 0.0,
            p50=percentile(seconds, 0.5),
            p99=percentile(seconds, 0.99),
            history=tasks,
        )

    def _rates(self, lanes: list[str], keys: tuple[str, ...]) -> list[float]:
        """Rates per second between consecutive samples."""
        sums = [(one.at, sum(getattr(one.lanes[name], key) for name in lanes for key in keys)) for one in self._samples]
        pairs = zip(sums, list(sums)[1:], strict=False)
        return [(after - before) / max(later - earlier, 1e-6) for (earlier, before), (later, after) in pairs]


def percentile(ordered: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of all values do not exceed; None if there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def waits_by_rank(rows: list[dict[str, Any]]) -> list[str]:
    """The ranks that open rounds wait for, and what each is doing."""
    ranks: dict[int, Counter[str]] = {}
    for row in rows:
        for one in row["ranks"]:
            ranks.setdefault(one["rank"], Counter())[one["step"] or "no step yet"] += 1
    told = []
    for rank, steps in sorted(ranks.items(), key=lambda item: -item[1].total()):
        doing = ", ".join(f"{step} {number}" for step, number in steps.most_common(3))
        told.append(f"rank {rank}: {steps.total()} ({doing})")
    return told
