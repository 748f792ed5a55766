"""The tasks that ended last, and those that failed last: what `transferd tasks` lists.

The flight recorder knows the steps of each; this knows which there are. Both rings are bounded, and a task costs
one tuple. Nothing of a task's arguments is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from transferd.config import DEFAULT_ENGINE
from transferd.tasks import ErrorInfo, RankResult, Status, Task, TaskResult

RECENT = 1024
FAILED = 256  # kept apart, so that a busy hour of good tasks does not push a failure out
_BAD = frozenset({Status.FAILED, Status.EXPIRED})


class Ended(NamedTuple):
    """One task that was admitted and has been answered. at: monotonic seconds; seconds: from admission to answer."""

    at: float
    task_id: str
    kind: str
    status: str
    blocks: int  # asked for
    done: int  # moved on every rank
    nbytes: int
    seconds: float
    error: ErrorInfo | None
    ranks: Sequence[RankResult]
    engine: str = DEFAULT_ENGINE


class TaskHistory:
    """Fed by the daemon, once for each admitted task; read by listing.py."""

    def __init__(self) -> None:
        self.recent: deque[Ended] = deque(maxlen=RECENT)
        self.failed: deque[Ended] = deque(maxlen=FAILED)

    def ended(self, task: Task, result: TaskResult, now: float, engine: str = DEFAULT_ENGINE) -> None:
        entry = Ended(
            now,
            task.task_id,
            task.lane,
            result.status,
            task.blocks,
            len(result.block_ids),
            result.bytes,
            result.duration,
            result.error,
            result.ranks,
            engine,
        )
        self.recent.append(entry)
        if result.status in _BAD or result.error is not None:
            self.failed.append(entry)
