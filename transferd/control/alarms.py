"""Deadlines, soonest first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Alarms(Generic[T]):
    """A heap of (time, subject). Subjects that are `over` never ring.

    Most tasks end long before their deadline, so their alarms are dropped before they outnumber the live ones.
    """

    def __init__(self, over: Callable[[T], bool]) -> None:
        self._over = over
        self._heap: list[tuple[float, int, T]] = []
        self._number = 0  # breaks ties in the order of setting
        self._live_at_last_look = 0

    def set(self, when: float, subject: T) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, subject))
        if len(self._heap) > 64 + 2 * self._live_at_last_look:
            self._heap = [alarm for alarm in self._heap if not self._over(alarm[2])]
            heapq.heapify(self._heap)
            self._live_at_last_look = len(self._heap)

    def due(self, now: float) -> list[T]:
        """Remove and return every subject whose time has come and that is not over, soonest first."""
        subjects: list[T] = []
        while self._heap and self._heap[0][0] <= now:
            subject = heapq.heappop(self._heap)[2]
            if not self._over(subject):
                subjects.append(subject)
        return subjects

    def next(self) -> float:
        """The time of the next alarm; math.inf if there is none."""
        while self._heap and self._over(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def __len__(self) -> int:
        return len(self._heap)
