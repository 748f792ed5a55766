"""Results that are kept for a while, so that pushing a task again answers instead of running again."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from transferd.tasks import TaskResult


class Kept(NamedTuple):
    """A result, the content hash of the task it answered, which memory it speaks of, and until when it is kept
    (monotonic seconds)."""

    result: TaskResult
    content: int
    memory: int
    expires: float


class ResultMemory:
    """Bounded twice: by age (`ttl` seconds) and by number (`most`). All results live equally long, so
    they leave in the order in which they came."""

    def __init__(self, ttl: float, most: int) -> None:
        self._ttl = ttl
        self._most = most
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def keep(self, result: TaskResult, content: int, memory: int, now: float) -> None:
        self._kept[result.task_id] = Kept(result, content, memory, now + self._ttl)
        self.forget(now)

    def get(self, task_id: str) -> Kept | None:
        return self._kept.get(task_id)

    def forget(self, now: float) -> None:
        """Drop what is too old or too many."""
        while self._kept:
            task_id, kept = next(iter(self._kept.items()))
            if kept.expires > now and len(self._kept) <= self._most:
                return
            del self._kept[task_id]

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._kept

    def __len__(self) -> int:
        return len(self._kept)
