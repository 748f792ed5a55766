"""What one screen of `transferd top` shows. Pure: no clock, no terminal.

The daemon's report has the figures. What is kept here is their history: one value for each poll.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Any

from transferd.observability.concerns import concerns
from transferd.observability.figures import shown, tasks_of
from transferd.observability.report import KindReport, Report

WINDOW = 60  # polls in a sparkline


@dataclass(slots=True)
class Figures:
    """What one screen shows. rows: tasks in the form of transferd/daemon/listing.py, unordered."""

    report: Report
    kinds: dict[str, KindReport]
    histories: dict[str, list[float]]  # of each kind: tasks a second, the newest last, as in all histories
    tasks_per_s: list[float]
    bytes_per_s: list[float]
    hit_share: float | None  # the share of the last minute's lookups that hit
    waits: list[str]  # for each rank, how many tasks wait for it and what it is doing
    concerns: list[str]
    rows: list[dict[str, Any]]

    def tree(self) -> dict[str, Any]:
        """The figures as plain data, without the report."""
        kinds = {
            name: {field: getattr(kind, field) for field in ("queued", "running", "tasks_per_s", "bytes_per_s")}
            | {"p50": kind.p50_s, "p99": kind.p99_s, "history": self.histories[name]}
            for name, kind in self.kinds.items()
        }
        plain = ("tasks_per_s", "bytes_per_s", "hit_share", "waits", "concerns", "rows")
        return {"kinds": kinds} | {name: getattr(self, name) for name in plain}


class Samples:
    """The last polls of one daemon. A new boot_id starts over. engine: only its tasks; "" for those of all."""

    def __init__(self, engine: str = "") -> None:
        self._engine = engine
        self._boot_id = ""
        self._clear()

    def _clear(self) -> None:
        self._tasks: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))  # by kind; "": all
        self._bytes: deque[float] = deque(maxlen=WINDOW)

    def add(self, report: Report, rows: list[dict[str, Any]]) -> Figures:
        """Add a report. Returns the figures to show now."""
        if report.boot_id != self._boot_id:
            self._boot_id = report.boot_id
            self._clear()
        kinds = shown(report, self._engine)
        totals = tasks_of(report, self._engine).totals
        self._tasks[""].append(totals.tasks_per_s)
        self._bytes.append(totals.bytes_per_s)
        for name, kind in kinds.items():
            self._tasks[name].append(kind.tasks_per_s)
        return Figures(
            report=report,
            kinds=kinds,
            histories={name: list(self._tasks[name]) for name in kinds},
            tasks_per_s=list(self._tasks[""]),
            bytes_per_s=list(self._bytes),
            hit_share=report.storage.hit_share_1min,
            waits=waits_by_rank(rows),
            concerns=concerns(report),
            rows=rows,
        )


def waits_by_rank(rows: list[dict[str, Any]]) -> list[str]:
    """The ranks that open rounds wait for, and what each is doing; with several engines, also whose rank it is."""
    ranks: dict[tuple[str, int], Counter[str]] = {}
    for row in rows:
        for one in row["ranks"]:
            ranks.setdefault((str(row["engine"]), one["rank"]), Counter())[one["step"] or "no step yet"] += 1
    several = len({engine for engine, _ in ranks}) > 1
    found = []
    for (engine, rank), steps in sorted(ranks.items(), key=lambda item: -item[1].total()):
        doing = ", ".join(f"{step} {number}" for step, number in steps.most_common(3))
        whose = f"{engine} rank" if several else "rank"
        found.append(f"{whose} {rank}: {steps.total()} ({doing})")
    return found
