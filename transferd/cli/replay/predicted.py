"""A predicted daemon: it answers tasks as a healthy one does, moves nothing, and counts what its storage would do.

Each level is the daemon's own LruIndex, and the rules between levels are those of storage/levels (docs/levels.md), in
the order in which a daemon without other work applies them: the copies and uses of a task reach the lower levels, and
what it has read reaches the upper ones, before the next task begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from transferd.cli.replay.engine import ReplayEngine, Tiers
from transferd.cli.replay.report import ReplayReport
from transferd.cli.replay.trace import TraceRequest
from transferd.errors import InvariantError
from transferd.runtime.aio import answered
from transferd.runtime.threads import Direction
from transferd.storage.admission import SecondUse
from transferd.storage.levels.level import Names
from transferd.storage.levels.promotion import FEWEST, TIMES
from transferd.storage.lru import LruIndex, NoRoom, Use
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, TaskResult, WriteStorageTask

T = TypeVar("T")
Blocks = list[tuple[int, str]]  # (depth, key)


@dataclass(frozen=True, slots=True)
class GivenLevel:
    """One level of a predicted store."""

    capacity: int  # objects of a rank
    promote: int = 0  # as in `storage.level`
    known: bool = True  # whether the daemon knows without asking what the level has


class PredictedLevel:
    """What a level holds, and what it has counted so far: objects of a rank."""

    def __init__(self, number: int, level: GivenLevel) -> None:
        self.number = number
        self.level = level
        self.index = LruIndex(level.capacity)  # in objects, not bytes: all have one size
        self.hits = 0  # that loads found here
        self.written = 0
        self.promoted = 0  # of these, copied up from a lower level
        self.most = 0  # at any time

    def store(self, key: str, use: Use, depth: int) -> bool:
        """Store it, if there is room. Returns whether it is here now."""
        entry = self.index.get(key)
        if entry is not None:
            self.index.touch_one(entry, use, depth)
            return True
        room = self.index.capacity > 0 and self.index.reserve(key, 1, use, depth)
        if room is False or isinstance(room, NoRoom):
            return False
        self.index.commit(key)
        self.written += 1
        self.most = max(self.most, len(self.index))
        return key in self.index

    def touch(self, chain: Iterable[tuple[int, str]], use: Use) -> None:
        for depth, key in chain:
            if (entry := self.index.get(key)) is not None:
                self.index.touch_one(entry, use, depth)


class PredictedDaemon:
    """See the module. With one request in flight, each block comes from where a real replay finds it.

    levels: of the store, the fastest first; may be empty.
    window_s: of `storage.admit = "second use"`; None admits everything.
    ranks: how many ranks share the daemon's memory of uses.
    now: seconds of the trace.
    """

    def __init__(self, levels: Sequence[GivenLevel], window_s: float | None = None, ranks: int = 1) -> None:
        self.levels = [PredictedLevel(number, level) for number, level in enumerate(levels)]
        self.now = 0.0
        self._admission = None if window_s is None else SecondUse(window_s, lambda: self.now)
        self._fewest = FEWEST // ranks
        self._uses = Names(self._fewest)  # how often blocks were loaded from lower levels

    async def match(self, keys: Sequence[str]) -> int:
        return self._leading(keys, self._parts())

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

    def _parts(self, start: int = 0, stop: int = 0) -> list[Use]:
        """One use, once for each level."""
        return [Use(start=start, stop=stop) for _ in self.levels]

    def _leading(self, keys: Sequence[str], parts: Sequence[Use]) -> int:
        """Look up a chain. Returns how many leading blocks are in some level."""
        found = [level.index.find(keys, part) for level, part in zip(self.levels, parts, strict=True)]
        return next((i for i, there in enumerate(zip(*found, strict=True)) if not any(there)), len(keys) * bool(found))

    # --- writes -------------------------------------------------------------------------------------

    def _write(self, task: WriteStorageTask) -> list[int]:
        """Store like the daemon's writer: one lookup in the first level, then each missing object in order."""
        if not self.levels:
            return []
        start = task.start_write_block_idx
        parts = self._parts(start, start + len(task.keys))
        chain = list(enumerate(task.keys, start))
        first = self.levels[0]
        there = [one for one, found in zip(chain, first.index.find(task.keys, parts[0]), strict=True) if found]
        self._touch_below(first, there, parts)
        missing = self._admitted([one for one in chain if one not in set(there)], parts[0])
        stored = self._store(there, missing, parts)
        self._touch_below(first, stored, parts)
        done = {depth for depth, _ in (*there, *stored)}
        return [block for depth, block in enumerate(task.gpu_block_ids, start) if depth in done]

    def _store(self, there: Blocks, missing: Blocks, parts: Sequence[Use]) -> Blocks:
        """Each missing block goes to the first level that takes it, and all go down. Returns which were taken."""
        taken, rest = Blocks(), missing
        for level in self.levels:
            took = [(depth, key) for depth, key in rest if level.store(key, parts[level.number], depth)]
            taken += took
            rest = [one for one in rest if one not in set(took)]
        self._copy_down([*there, *taken], parts)
        return taken

    def _copy_down(self, used: Blocks, parts: Sequence[Use]) -> None:
        """What was used goes to each level that lacks it, if a level above has it."""
        for level in self.levels[1:]:
            for depth, key in used:
                if key not in level.index and any(key in above.index for above in self.levels[: level.number]):
                    level.store(key, parts[level.number], depth)

    def _admitted(self, missing: Blocks, use: Use) -> Blocks:
        if self._admission is None:
            return missing
        good = self._admission.admits([key for _, key in missing], use)
        return [one for one, admitted in zip(missing, good, strict=True) if admitted]

    def _touch_below(self, top: PredictedLevel, chain: Blocks, parts: Sequence[Use]) -> None:
        for level in self.levels[top.number + 1 :]:
            if level.level.known:
                level.touch(chain, parts[level.number])

    # --- reads --------------------------------------------------------------------------------------

    def _read(self, task: ReadStorageTask) -> list[int]:
        parts = self._parts()
        brought = self._leading(task.keys, parts)
        promoted: dict[PredictedLevel, list[tuple[int, str]]] = {}
        for depth, key in enumerate(task.keys[:brought]):
            level = next(level for level in self.levels if key in level.index)
            level.hits += 1
            if level.number and level.level.promote and self._uses.count(key) >= level.level.promote:
                promoted.setdefault(level, []).append((depth, key))
        for level, chain in promoted.items():
            self._uses.set_most(max(self._fewest, TIMES * len(self.levels[0].index)))
            above = next(one for one in reversed(self.levels[: level.number]) if one.level.known)
            for depth, key in chain:
                above.promoted += above.store(key, parts[above.number], depth)
        self._copy_down(list(enumerate(task.keys[:brought])), parts)
        return list(task.gpu_block_ids[:brought])


class _NoBytes:
    """Blocks without content: nothing to fill, so nothing that could be wrong."""

    def fill(self, *_: object) -> None: ...
    def poison(self, *_: object) -> None: ...
    def verify(self, *_: object) -> None: ...
    def untouched(self, *_: object) -> None: ...


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
    requests: Sequence[TraceRequest],
    tiers: Tiers,
    levels: Sequence[GivenLevel],
    window_s: float | None = None,
    ranks: int = 1,
) -> tuple[ReplayReport, PredictedDaemon]:
    """Predict where every block of these requests would come from. Returns the report, and the daemon as it is then.

    tiers: device and host blocks per rank.
    levels, window_s, ranks: see PredictedDaemon.
    """
    report = ReplayReport()
    daemon = PredictedDaemon(levels, window_s, ranks)
    arrivals = iter([request.timestamp / 1000 for request in requests])

    def next_one() -> None:
        daemon.now = next(arrivals, daemon.now)

    async def play() -> None:
        engine = ReplayEngine(daemon, _NoBytes(), tiers, report, _AtOnce())
        next_one()
        await engine.play(requests, concurrency=1, progress=next_one)

    asyncio.run(play())
    return report, daemon
