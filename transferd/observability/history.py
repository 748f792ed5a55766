"""The figures of the last five minutes, kept whenever a report is made: the page's sparklines, and the hit rate of now.

A daemon makes a report once a second while it has clients. Without clients it moves no bytes: no figure is missed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from transferd.observability.report import KindReport, Report

EVERY_S, KEPT_S = 5.0, 300.0
HITS_S = 60.0  # the current hit rate covers the lookups of so many seconds


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    hit_share: float | None
    hits: int  # look-ups since the start
    looked_up: int
    totals: dict[str, KindReport]  # by engine; "" for all together


class History:
    """One for the daemon."""

    def __init__(self, now: float) -> None:
        """now: the daemon's start, when all counts were 0."""
        self._samples: deque[_Sample] = deque([_Sample(now, None, 0, 0, {})])

    def add(self, report: Report, now: float) -> None:
        """Keep the figures of a report, in place of the last one's if that came between two. now: monotonic seconds."""
        if len(self._samples) > 1:
            before, last = self._samples[-2], self._samples[-1]
            if max(last.at - before.at, now - last.at) < EVERY_S:
                self._samples.pop()
        totals = {"": report.totals} | {name: engine.totals for name, engine in report.engines.items()}
        share, looked_up = self.hit_share(report, now), report.hits + report.misses
        self._samples.append(_Sample(now, share, report.hits, looked_up, totals))
        while self._samples[0].at < now - KEPT_S:
            self._samples.popleft()

    def hit_share(self, report: Report, now: float) -> float | None:
        """The share of the last minute's lookups that hit; None without lookups."""
        before = next((one for one in reversed(self._samples) if one.at <= now - HITS_S), self._samples[0])
        looked_up = report.hits + report.misses - before.looked_up
        return (report.hits - before.hits) / looked_up if looked_up > 0 else None

    def tree(self, now: float, engine: str = "") -> dict[str, list[Any]]:
        """The samples as columns, the oldest first; 0 and None where there were no tasks. engine: "" for all."""
        none = KindReport()
        totals = [one.totals.get(engine, none) for one in self._samples]
        return {
            "ago_s": [round(now - one.at, 1) for one in self._samples],
            "tasks_per_s": [one.tasks_per_s for one in totals],
            "bytes_per_s": [one.bytes_per_s for one in totals],
            "p99_s": [one.p99_s for one in totals],
            "hit_share": [one.hit_share for one in self._samples],
        }
