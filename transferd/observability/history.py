"""The tasks that ended last, and those that failed last, for `transferd tasks`.

The flight recorder has the steps of each task; this is the list of tasks. Both rings are bounded, and a task costs
one tuple, which keeps none of the task's arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from transferd.config import DEFAULT_ENGINE
from transferd.tasks import ErrorInfo, RankResult, Status, Task, TaskResult

RECENT = 1024
FAILED = 256  # in a ring of their own, so that a busy hour of good tasks does not push failures out
_BAD = frozenset({Status.FAILED, Status.EXPIRED})


class Ended(NamedTuple):
    """One admitted task that was answered. at: monotonic seconds; seconds: from admission to answer."""

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
    """Both rings. The daemon adds each admitted task once, when it is answered; daemon/listing.py reads them."""

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
