"""Limits how often one kind of log line is written: a burst, then a steady rate, with a count of omitted lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from transferd.runtime.bucket import Bucket

RATE = 2.0  # lines a second of one kind
BURST = 20.0
MOST_KINDS = 1000  # kinds are places in code; beyond this bound they share one allowance
_OTHERS = object()


class LogRate:
    """Decides which lines pass. A kind is an event's name, or the place in code that logged it; never its details.

    clock: monotonic seconds. left_out: lines of all kinds that did not pass, since the start.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.left_out = 0
        self._clock = clock
        self._kinds: dict[Hashable, _Counted] = {}
        self._lock = threading.RLock()

    def admit(self, kind: Hashable) -> int | None:
        """How many lines of this kind were left out since the last one that passed. None: leave this one out, too."""
        now = self._clock()
        with self._lock:
            known = self._kinds.get(kind)
            if known is None:
                known = self._kinds.setdefault(kind if len(self._kinds) < MOST_KINDS else _OTHERS, _Counted())
            if not known.bucket.take(now):
                known.left_out += 1
                self.left_out += 1
                return None
            left_out, known.left_out = known.left_out, 0
            return left_out


class _Counted:
    def __init__(self) -> None:
        self.bucket = Bucket(RATE, BURST)
        self.left_out = 0
