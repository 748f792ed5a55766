"""A token bucket: limits a rate and allows bursts up to a bound."""

from __future__ import annotations


class Bucket:
    """Fills with `rate` tokens a second up to `burst`, and starts full. The caller passes the time, in seconds."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._filled_at = 0.0

    def take(self, now: float) -> bool:
        """Take a token; return False if there is none. now: monotonic seconds."""
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
