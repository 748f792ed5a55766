"""Predicts a replay without a daemon: the same engine, the storage tier's own decisions, and no bytes at all.

The engine of engine.py makes every choice that it makes in a real replay. `PredictedDaemon` answers its tasks like a
healthy daemon: swaps succeed, and storage holds what the daemon's own LruIndex says. So with one request in flight the
hits are those of a real replay with the same sizes, block by block. With more requests in flight, a real replay
interleaves them by chance, and the prediction is one of the possible orders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from transferd.cli.replay.engine import ReplayEngine, Tiers
from transferd.cli.replay.report import ReplayReport
from transferd.cli.replay.trace import TraceRequest
from transferd.errors import InvariantError
from transferd.runtime.aio import answered
from transferd.runtime.threads import Direction
from transferd.storage.admission import SecondUse
from transferd.storage.lru import LruIndex, NoRoom, Use
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, TaskResult, WriteStorageTask

T = TypeVar("T")


class PredictedDaemon:
    """Answers tasks like a healthy daemon whose storage holds `capacity` objects per rank; None: no storage.

    window_s: of `storage.admit = "second use"`; None: everything is admitted. now: in the trace, seconds.
    """

    def __init__(self, capacity: int | None, window_s: float | None = None) -> None:
        self._index = LruIndex(capacity or 0)  # in objects, not bytes: all have one size
        self.now = 0.0
        self._admission = None if window_s is None else SecondUse(window_s, lambda: self.now)
        self.most_stored = 0  # objects of a rank, at any time
        self.written = 0  # objects of a rank, in total

    async def match(self, keys: Sequence[str]) -> int:
        return _leading(self._index.find(keys, Use()))

    async def submit(self, task: Task) -> TaskResult:
        match task:
            case WriteStorageTask():
                moved = self._write(task)
            case ReadStorageTask():
                moved = self._read(task)
            case SwapOutTask() | SwapInTask():
                moved = list(task.gpu_block_ids)
            case _:
                raise InvariantError(f"a replay sends no {task.kind} tasks")
        status = Status.OK if len(moved) == task.blocks else Status.PARTIAL if moved else Status.MISS
        return TaskResult(task_id=task.task_id, status=status, block_ids=moved)

    def _write(self, task: WriteStorageTask) -> list[int]:
        """Store like the daemon's writer: one lookup, then each missing object in order."""
        use, moved = Use(), []
        missing = [key for key, there in zip(task.keys, self._index.find(task.keys, use), strict=True) if not there]
        admitted = set(missing)
        if self._admission is not None:
            admitted = {key for key, good in zip(missing, self._admission.admits(missing, use), strict=True) if good}
        for depth, (key, block) in enumerate(zip(task.keys, task.gpu_block_ids, strict=True)):
            if key not in self._index:
                if key not in admitted:
                    continue
                room = self._index.capacity > 0 and self._index.reserve(key, 1, use, depth)
                if room is False or isinstance(room, NoRoom):
                    continue
                self._index.commit(key)
                self.written += 1
            moved.append(block)
        self.most_stored = max(self.most_stored, len(self._index))
        return moved

    def _read(self, task: ReadStorageTask) -> list[int]:
        return list(task.gpu_block_ids[: _leading(self._index.find(task.keys, Use()))])


class _NoBytes:
    """Blocks without content: nothing to fill, so nothing that could be wrong."""

    def fill(self, block: int, content: int) -> None:
        pass

    def poison(self, blocks: Sequence[int]) -> None:
        pass

    def verify(self, block: int, content: int) -> None:
        pass

    def untouched(self, block: int, content: int) -> None:
        pass


class _AtOnce:
    """Threads that run each function at once, in the caller."""

    def open(self) -> None:
        pass

    def run(self, direction: Direction, function: Callable[[], T], what: object = None) -> asyncio.Future[T]:  # noqa: ARG002
        return answered(function())

    def under_way(self) -> list[str]:
        return []

    def close(self, within: float = 0.0) -> list[str]:  # noqa: ARG002
        return []


def predict(
    requests: Sequence[TraceRequest], tiers: Tiers, capacity: int | None, window_s: float | None = None
) -> tuple[ReplayReport, PredictedDaemon]:
    """Predict where every block of these requests would come from. Returns the report, and the daemon as it is then.

    tiers: device and host blocks per rank. capacity: objects of one rank that storage holds; None: no storage.
    window_s: see PredictedDaemon.
    """
    report = ReplayReport()
    daemon = PredictedDaemon(capacity, window_s)
    arrivals = iter([request.timestamp / 1000 for request in requests])

    def next_one() -> None:
        daemon.now = next(arrivals, daemon.now)

    async def play() -> None:
        engine = ReplayEngine(daemon, _NoBytes(), tiers, report, _AtOnce())
        next_one()
        await engine.play(requests, concurrency=1, progress=next_one)

    asyncio.run(play())
    return report, daemon


def _leading(found: Sequence[bool]) -> int:
    return next((i for i, there in enumerate(found) if not there), len(found))
