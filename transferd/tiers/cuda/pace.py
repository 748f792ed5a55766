"""Limits the rate of copies out of a device: stores are never urgent, and the engine and its loads need the bus."""

from __future__ import annotations

import time
from collections.abc import Callable

Rate = Callable[[], int]


class Pace:
    """A limit in bytes per second, which may change at any time; 0: no limit. For one thread.

    A turn may go once the rate has covered all earlier turns. So the limit holds over time, while each turn goes at
    full speed: splitting turns would cost the daemon more and gain the engine nothing, since no DMA is long.
    """

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._owed = 0.0  # bytes of earlier turns that the rate has not covered yet
        self._since = clock()

    def wait_s(self) -> float:
        """Seconds until the next turn may go, at the current rate; 0 if it may go now."""
        now, rate = self._clock(), self._rate()
        if not rate:
            self._owed = 0.0
        self._owed = max(0.0, self._owed - (now - self._since) * rate)
        self._since = now
        return self._owed / rate if rate else 0.0

    def took(self, nbytes: int) -> None:
        """Report a turn of this many bytes, which goes now."""
        self.wait_s()
        self._owed += nbytes
