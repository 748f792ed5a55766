"""An event's state: how often it was recorded, and how far the device has got. Perhaps shared with another process."""

from __future__ import annotations

import itertools
import os

import numpy as np

from transferd.tiers.segment import PREFIX, SharedSegment

_numbers = itertools.count()


class Signal:
    """Two counters, in shared memory for an event that another process can open. Owns them until `close`.

    name: of another's signal, to share it. Raises TierError if that is not there.
    """

    def __init__(self, *, shared: bool = False, name: str = "") -> None:
        self.foreign = shared  # somebody else may move it on
        self._segment: SharedSegment | None = None
        if shared:
            own = name or f"{PREFIX}fake-event.{os.getpid()}.{next(_numbers)}"
            self._segment = SharedSegment(own, 4096, create=not name)
            self._counters = np.frombuffer(self._segment.buffer, dtype=np.int64, count=2)
        else:
            self._counters = np.zeros(2, dtype=np.int64)

    @property
    def name(self) -> str:
        return self._segment.name if self._segment is not None else ""

    @property
    def recorded(self) -> int:
        return int(self._counters[0])

    @property
    def reached(self) -> int:
        return int(self._counters[1])

    def next(self) -> int:
        """A further recording; returns its number."""
        self._counters[0] += 1
        return self.recorded

    def reach(self, number: int) -> None:
        self._counters[1] = max(self.reached, number)

    def close(self) -> None:
        self._counters = self._counters.copy()  # what still waits for it sees its last state
        if self._segment is not None:
            self._segment.close()
