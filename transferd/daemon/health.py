"""The daemon's health: makes its reports, keeps their concerns, and measures how late the event loop is.

It looks when a report is requested, and when a Hello arrives, at most once a second: each client sends Hellos, and a
daemon that has no client runs no timer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from typing import Any

from transferd.daemon.listing import Listing
from transferd.daemon.stats import Parts, report_of
from transferd.observability.concerns import EVERY_S, OLDEST_TASK_S, REMEMBERED_S, Measured, Watch, find
from transferd.observability.history import History
from transferd.observability.report import Report
from transferd.observability.report_memory import ReportMemory
from transferd.runtime.aio import Timer

LAGS_KEPT, LATE = 10, 3  # of so many measurements, so many must be late: a machine stands still now and then


class HealthCheck:
    """One for the daemon. viewed: its reports, for all who look at them."""

    def __init__(self, parts: Parts, listing: Listing) -> None:
        self.viewed = ReportMemory(self.report, parts.engines.shared.clock)
        self._parts, self._listing = parts, listing
        self._now = parts.engines.shared.clock.monotonic
        self._watch = Watch()
        self._history = History(self._now())
        self._looked_at = -EVERY_S
        self._lags: deque[tuple[float, float]] = deque(maxlen=LAGS_KEPT)  # each with the time of its measurement
        self._pulse = Timer()

    def report(self) -> Generator[None, None, Report]:
        """The daemon's report as it is now, with what is wrong, in pieces."""
        now = self._looked_at = self._now()
        report = yield from report_of(self._parts)
        yield
        report.storage.hit_share_1min = self._history.hit_share(report, now)
        self._history.add(report, now)
        self._watch.look(find(report, self._measured()), now)
        report.concerns = self._watch.concerns(now)
        return report

    def history(self, engine: str = "") -> dict[str, list[Any]]:
        """The figures of the last minutes. engine: of this one's tasks; "" for all."""
        return self._history.tree(self._now(), engine)

    def hello_arrived(self) -> None:
        """Look soon, unless that was done within the last second."""
        if self._now() - self._looked_at >= EVERY_S and not self._pulse:
            self._pulse.set(EVERY_S, self._beat, asyncio.get_running_loop().time() + EVERY_S)

    def _beat(self, due: float) -> None:
        self._lags.append((self._now(), asyncio.get_running_loop().time() - due))
        self.viewed.report()

    def close(self) -> None:
        self._pulse.cancel()

    def _measured(self) -> Measured:
        oldest_s, oldest = self._listing.oldest_running(OLDEST_TASK_S)
        since = self._now() - REMEMBERED_S  # without clients nothing newer is measured
        lags = sorted(lag for at, lag in self._lags if at >= since)
        return Measured(
            not_ready=self._parts.not_ready,
            lag_s=lags[-LATE] if len(lags) >= LATE else 0.0,
            storage_p99_s=self._parts.windows.storage_p99_s(),
            oldest_s=oldest_s,
            oldest=oldest,
        )
