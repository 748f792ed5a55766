"""Says what a daemon's start is doing: to systemd, on a terminal in one line that changes, elsewhere in the log.

A server's host memory has hundreds of gigabytes and takes minutes to make; an engine's memory may be offered late.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from transferd.daemon.systemd import Notifier
from transferd.observability import logs
from transferd.observability.units import bar, size, span

log = structlog.get_logger(__name__)

EXTEND_S = 120  # how long systemd gives a start after each sign of progress
FIRST_LINE_S = 5.0  # until the first log line; the time between lines doubles
LONGEST_SILENCE_S = 600.0


class StartProgress:
    """One start. total: bytes of host memory that it makes. now: seconds. show: puts a line on a terminal, if any."""

    def __init__(
        self, notifier: Notifier, total: int, now: Callable[[], float], show: Callable[[str], bool] = logs.show
    ) -> None:
        self._notifier = notifier
        self._total = total
        self._now = now
        self._show = show
        self._populated = -1
        self._began = now()
        self._line_after = FIRST_LINE_S

    def populating(self, nbytes: int) -> None:
        """Report how much host memory is made; call it now and then. systemd extends a start only while it grows."""
        seconds = self._now() - self._began
        made = f"{size(nbytes)} of {size(self._total)} of host memory populated"
        if nbytes != self._populated:
            self._populated = nbytes
            self._notifier.notify(f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1_000_000}", f"STATUS=starting: {made}")
        if not 0 < nbytes < self._total:
            self._show(f"starting, {span(seconds)}")
            return
        rate = nbytes / seconds if seconds > 0 else 0.0
        left = (self._total - nbytes) / rate if rate else None
        shown = f"{bar(nbytes, self._total, 8)} {size(nbytes)} of {size(self._total)} of host memory, {size(rate)}/s"
        if not self._show(f"{shown}, {span(left)} left") and self._line_due():
            log.info("starting", populated=nbytes, of=self._total, bytes_per_s=round(rate), left_s=left and round(left))

    def waiting(self, why: str) -> None:
        """Report why a daemon that has started is not ready; call it now and then."""
        seconds = self._now() - self._began
        if not self._show(f"waiting for {span(seconds)}: {why}") and self._line_due():
            log.info("still waiting", waiting_for=why, waited_s=round(seconds, 1))

    def done(self) -> None:
        """Remove the line from the terminal."""
        self._show("")

    def _line_due(self) -> bool:
        if self._now() - self._began < self._line_after:
            return False
        self._line_after += min(self._line_after, LONGEST_SILENCE_S)
        return True
