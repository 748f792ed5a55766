"""How fast copies out of a device may go: stores are never urgent, and the engine and its loads need the bus, too."""

from __future__ import annotations

import time
from collections.abc import Callable

Rate = Callable[[], int]


class Pace:
    """A rate, in bytes per second, that may change at any time; 0: none. For one thread.

    A turn may go as soon as the turns before it are paid for. So the bound holds over time, and a turn itself goes at
    full speed: splitting a turn would cost the daemon more and the engine nothing, since no DMA is long.
    """

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._owed = 0.0  # bytes of earlier turns that the rate has not covered yet
        self._since = clock()

    def wait_s(self) -> float:
        """Seconds until the next turn may go, at the rate of now; 0: it may go."""
        now, rate = self._clock(), self._rate()
        if not rate:
            self._owed = 0.0
        self._owed = max(0.0, self._owed - (now - self._since) * rate)
        self._since = now
        return self._owed / rate if rate else 0.0

    def took(self, nbytes: int) -> None:
        """A turn of so many bytes goes now."""
        self.wait_s()
        self._owed += nbytes
