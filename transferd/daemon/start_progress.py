"""Reports what a daemon's start is doing: to systemd, and in one changing line on a terminal, or else in the log.

A server's host memory has hundreds of gigabytes and takes minutes to allocate; an engine may offer its memory late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from transferd.daemon.systemd import Notifier
from transferd.observability import logs
from transferd.observability.units import bar, size, span

log = structlog.get_logger(__name__)

EXTEND_S = 120  # how long systemd gives a start after each sign of progress
FIRST_LINE_S = 5.0  # the time until the first log line; the time between lines doubles
LONGEST_SILENCE_S = 600.0


@dataclass(eq=False)
class StartProgress:
    """One start.

    total: bytes of host memory to allocate.
    now: returns seconds.
    show: prints a line on a terminal.
    """

    notifier: Notifier
    total: int
    now: Callable[[], float]
    show: Callable[[str], bool] = logs.show

    def __post_init__(self) -> None:
        self._made = (-1, -1)
        self._began = self.now()
        self._line_after = FIRST_LINE_S

    def making_memory(self, populated: int, pinned: int) -> None:
        """Report how many bytes of host memory are populated and pinned; call this repeatedly.

        We extend systemd's time limit only while these grow. A region is pinned after all of it was populated, which by
        itself takes minutes if the region is large.
        """
        seconds, total = self.now() - self._began, size(self.total)
        if (populated, pinned) != self._made:
            self._made = (populated, pinned)
            made = f"{size(populated)} of {total} of host memory populated, {size(pinned)} pinned"
            self.notifier.notify(f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1_000_000}", f"STATUS=starting: {made}")
        if 0 < populated < self.total:
            rate = populated / seconds if seconds > 0 else 0.0
            left = (self.total - populated) / rate if rate else None
            shown = f"{bar(populated, self.total, 8)} {size(populated)} of {total} of host memory, {size(rate)}/s"
            rates = {"bytes_per_s": round(rate), "left_s": left and round(left)}
            self._report(f"{shown}, {span(left)} left", populated=populated, **rates)
        elif 0 < pinned < self.total:
            shown = f"{bar(pinned, self.total, 8)} {size(pinned)} of {total} of host memory pinned"
            self._report(shown, populated=populated, pinned=pinned)
        else:
            self.show(f"starting, {span(seconds)}")

    def _report(self, shown: str, **figures: float | None) -> None:
        if not self.show(shown) and self._line_due():
            log.info("starting", of=self.total, **figures)

    def waiting(self, why: str) -> None:
        """Report why a daemon that has started is not ready; call this repeatedly."""
        seconds = self.now() - self._began
        if not self.show(f"waiting for {span(seconds)}: {why}") and self._line_due():
            log.info("still waiting", waiting_for=why, waited_s=round(seconds, 1))

    def done(self) -> None:
        """Remove the line from the terminal."""
        self.show("")

    def _line_due(self) -> bool:
        if self.now() - self._began < self._line_after:
            return False
        self._line_after += min(self._line_after, LONGEST_SILENCE_S)
        return True
