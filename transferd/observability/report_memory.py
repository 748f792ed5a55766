"""The newest report, and what was made of it, for all viewers: looking costs the daemon a share of its time at most.

While reports are cheap and few are asked for, each viewer gets a new one, at once. Beyond that all get the same one,
which is at most EVERY_S old. One that costs much, of many engines, is made in pieces, in several turns of the event
loop: whoever comes meanwhile waits for it. `clock.cpu` measures what they cost, so a busy machine makes none older.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator
from typing import Any, TypeVar, cast

from transferd.observability.report import Report
from transferd.runtime.aio import then
from transferd.runtime.clock import Clock
from transferd.runtime.loop_turns import PIECE_S, finished

T = TypeVar("T")

EVERY_S = 1.0
CHEAP_S = 0.005  # of CPU; a report that costs more (of many engines) is made once in EVERY_S
SHARE, BURST_S = 0.1, 0.2  # of CPU for all others


class ReportMemory:
    """One for the daemon. make: makes a new report in pieces."""

    def __init__(self, make: Callable[[], Generator[None, None, Report]], clock: Clock) -> None:
        self._make = make
        self._now, self._cpu = clock.monotonic, clock.cpu
        self._report: Report  # the newest
        self._making: asyncio.Task[Report] | None = None
        self._made: dict[Callable[[Report], Any], Any] = {}
        self._at, self._cost = -math.inf, 0.0
        self._left, self._filled_at = BURST_S, self._now()

    def report(self) -> Report | asyncio.Future[Report]:
        """A report that is new, or at most EVERY_S old; one that costs much comes later."""
        now = self._now()
        self._left = min(BURST_S, self._left + (now - self._filled_at) * SHARE)
        self._filled_at = now
        old, costly = now - self._at >= EVERY_S, self._cost >= CHEAP_S
        if costly and old:
            if self._making is None or self._making.done():
                self._making = asyncio.ensure_future(self._in_turns())
            return asyncio.shield(self._making)
        if old or (self._left > 0 and not costly):
            self.now()
        return self._report

    def now(self) -> Report:
        """A new report, at once."""
        began, at = self._cpu(), self._now()
        report = finished(self._make())
        self._keep(report, at, self._cpu() - began)
        return report

    async def _in_turns(self) -> Report:
        made, at, cost = self._make(), self._now(), 0.0
        while True:
            began = self._cpu()
            try:
                next(made)
                while self._cpu() - began < PIECE_S:
                    next(made)
            except StopIteration as end:
                report = cast("Report", end.value)
                self._keep(report, at, cost + self._cpu() - began)
                return report
            cost += self._cpu() - began
            await asyncio.sleep(0)

    def _keep(self, report: Report, at: float, cost: float) -> None:
        self._made.clear()
        self._report, self._at, self._cost = report, at, cost
        self.spend(cost)

    def made(self, render: Callable[[Report], T]) -> T | asyncio.Future[T]:
        """What `render` makes of a report; once for each report."""
        return then(self.report(), lambda report: self._of(report, render))

    def _of(self, report: Report, render: Callable[[Report], T]) -> T:
        if report is not self._report:  # a newer one has come since
            return render(report)
        if render not in self._made:
            began = self._cpu()
            self._made[render] = render(report)
            self.spend(self._cpu() - began)
        made: T = self._made[render]
        return made

    def spend(self, seconds: float) -> None:
        """Note CPU time that a viewer has cost elsewhere."""
        self._left -= seconds
