"""How ranks agree: a self-resetting barrier. (Theory of operation and properties: to be written here.)"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from transferd.tasks import Merged, RankOutcome

Merge = Callable[[Sequence[RankOutcome]], Merged]


class Arrival(enum.Enum):
    """What an arrival meant."""

    WAITING = "waiting"  # others are still to come
    COMPLETED = "completed"  # it was the last one
    LATE = "late"  # the round is closed, or never was: counted and dropped


class Round:
    """The meeting of all ranks on one task. A new object per task: nothing to reset."""

    task_id: str
    merged: Merged | None  # None while open

    async def wait(self) -> Merged:
        """Wait for completion; any number of waiters, each may be cancelled without disturbing the others."""
        raise NotImplementedError


class RankBarrier:
    def __init__(self, parties: int) -> None:
        raise NotImplementedError

    def open(self, task_id: str, merge: Merge, on_complete: Callable[[Round], None] | None = None) -> Round:
        """Start a round. Ranks known to be dead have arrived already, with RankDied. InvariantError if one is open."""
        raise NotImplementedError

    def arrive(self, task_id: str, outcome: RankOutcome) -> Arrival:
        """One rank is done, well or badly. InvariantError naming both on a second arrival in an open round."""
        raise NotImplementedError

    def expire(self, task_id: str) -> tuple[int, ...]:
        """Complete the round now; missing ranks get an outcome with code "expired". Returns who was missing."""
        raise NotImplementedError

    def rank_died(self, rank: int, cause: str) -> None:
        """Every open round that this rank has not reached gets its RankDied outcome, now and from now on."""
        raise NotImplementedError
