"""The newest report, and what was made of it, for all viewers: looking costs the daemon a share of its time at most.

While reports are cheap and few are asked for, each viewer gets a new one. Beyond that all get the same one, which is at
most EVERY_S old. `clock.cpu` measures what they cost, so a busy machine makes none older.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from transferd.observability.report import Report
from transferd.runtime.clock import Clock

T = TypeVar("T")

EVERY_S = 1.0
CHEAP_S = 0.005  # of CPU; a report that costs more (of many engines) is made once in EVERY_S
SHARE, BURST_S = 0.1, 0.2  # of CPU for all others


class ReportMemory:
    """One for the daemon. make: returns a new report."""

    def __init__(self, make: Callable[[], Report], clock: Clock) -> None:
        self._make = make
        self._now, self._cpu = clock.monotonic, clock.cpu
        self._report: Report | None = None
        self._made: dict[Callable[[Report], Any], Any] = {}
        self._at = self._cost = 0.0
        self._left, self._filled_at = BURST_S, self._now()

    def report(self) -> Report:
        """A report that is new, or at most EVERY_S old."""
        now = self._now()
        self._left = min(BURST_S, self._left + (now - self._filled_at) * SHARE)
        self._filled_at = now
        old = self._report is None or now - self._at >= EVERY_S
        if old or (self._left > 0 and self._cost < CHEAP_S):
            self._made.clear()
            began = self._cpu()
            self._report, self._at = self._make(), now
            self._cost = self._cpu() - began
            self.spend(self._cost)
        assert self._report is not None
        return self._report

    def made(self, render: Callable[[Report], T]) -> T:
        """What `render` makes of a report; once for each report."""
        report = self.report()
        if render not in self._made:
            began = self._cpu()
            self._made[render] = render(report)
            self.spend(self._cpu() - began)
        made: T = self._made[render]
        return made

    def spend(self, seconds: float) -> None:
        """Note CPU time that a viewer has cost elsewhere."""
        self._left -= seconds
