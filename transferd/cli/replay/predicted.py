"""A predicted daemon: it answers tasks as a healthy one does, from the daemon's own storage over media without bytes.

Time is virtual: it jumps to the next timer of the storage. The copies and uses of a task reach the other levels before
the next task begins, as in a daemon without other work.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from transferd.cli.replay.engine import ReplayEngine, Tiers
from transferd.cli.replay.report import ReplayReport
from transferd.cli.replay.trace import TraceRequest
from transferd.config import LevelSection
from transferd.errors import InvariantError
from transferd.runtime.aio import answered
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.runtime.compat import Runner, count_cancellations
from transferd.runtime.threads import Direction
from transferd.storage.admission import SecondUse
from transferd.storage.base import Found, Item, Storage, Take
from transferd.storage.batch import Answer, StoreBatch, Write
from transferd.storage.indexed import IndexedStorage
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.lru import Use
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, TaskResult, WriteStorageTask

T = TypeVar("T")

SETTLE_S = 2.0  # virtual: more than levels take to copy everything and to pass uses on
BYTE = memoryview(b"\0")


@dataclass(frozen=True, slots=True)
class GivenLevel:
    """One level of a predicted store."""

    capacity: int  # objects of a rank
    promote: int = 0  # as in `storage.level`
    known: bool = True  # whether the daemon knows without asking what the level has


class LevelFigures(NamedTuple):
    """What a level holds, and what it has counted so far: objects of a rank."""

    hits: int  # that loads found here
    written: int
    promoted: int  # of these, copied up from a lower level
    most: int  # at any time
    objects: int  # now


class NoBytes(IndexedStorage):
    """A store whose objects are one byte long and lie nowhere. It does everything at once, on the loop.

    known: False for a store that has to be asked what it has, as a bucket or a pool.
    """

    backend = "predicted"
    lists = True

    def __init__(self, capacity: int, now: Callable[[], float], *, known: bool = True) -> None:
        super().__init__(capacity, AtOnce(), shares=1, inline_bytes=2**62, now=now)
        self.known = self.asks_first = known
        self.most = 0  # objects at any time

    async def open(self) -> None: ...

    def find(self, names: Sequence[str], use: Use | None) -> list[bool] | None:  # type: ignore[override]
        return super().find(names, use) if self.known else None

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return super().find(names, Use())

    def _write_one(self, batch: StoreBatch, write: Write) -> None:  # noqa: ARG002 - nobody makes it
        write.victims.clear()

    def _write(self, write: Write, data: memoryview) -> None: ...

    def _read(self, item: Item, slot: memoryview, take: Take | None) -> Answer:  # noqa: ARG002 - no bytes
        return take is None or take(BYTE)

    def _remove(self, name: str) -> None: ...

    def _wrote(self) -> None:
        self.most = max(self.most, len(self._index))


class _Taken:
    """Takes every object."""

    wanted = True

    def __call__(self, i: int, data: memoryview, /) -> bool:  # noqa: ARG002 - no bytes
        return True


class PredictedDaemon:
    """See the module. Call `open` first, on a loop of virtual time, and `close` at the end.

    levels: of the store, the fastest first; may be empty.
    window_s: of `storage.admit = "second use"`; None admits everything.
    media: for each level, a store that is there already; None for a new one.
    now: seconds of the trace.
    """

    def __init__(
        self, levels: Sequence[GivenLevel], window_s: float | None = None, media: Sequence[NoBytes | None] = ()
    ) -> None:
        clock = replace(SYSTEM_CLOCK, monotonic=asyncio.get_running_loop().time)
        self.now = 0.0
        self.hits: Counter[int] = Counter()  # blocks that loads found, by level
        given = media or [None] * len(levels)
        self.media = [
            medium or NoBytes(level.capacity, clock.monotonic, known=level.known)
            for level, medium in zip(levels, given, strict=True)
        ]
        self.levels = [
            StoreLevel(number, f"l{number}", medium, LevelSection(promote=level.promote), clock.monotonic)
            for number, (level, medium) in enumerate(zip(levels, self.media, strict=True))
        ]
        several = len(levels) > 1
        self.storage: Storage = LevelsStorage(self.levels, clock, AtOnce()) if several else self.media[0]
        self._settle_s = SETTLE_S if several else 0.0
        self._admission = None if window_s is None else SecondUse(window_s, lambda: self.now)

    def figures(self) -> list[LevelFigures]:
        """Of each level."""
        each = [(level, medium.statistics()) for level, medium in zip(self.levels, self.media, strict=True)]
        return [
            LevelFigures(
                self.hits[one.number],
                now["stored"],
                one.counts["promoted"],
                self.media[one.number].most,
                now["objects"],
            )
            for one, now in each
        ]

    async def match(self, keys: Sequence[str]) -> int:
        found = self.storage.index.find(keys, Use())
        return _leading(await self.storage.exists(keys) if found is None else found)

    async def submit(self, task: Task) -> TaskResult:
        match task:
            case WriteStorageTask():
                moved = await self._write(task)
            case ReadStorageTask():
                moved = await self._read(task)
            case SwapOutTask() | SwapInTask():
                moved = list(task.gpu_block_ids)
            case _:
                raise InvariantError(f"a replay sends no {task.kind} tasks")
        status = Status.OK if len(moved) == task.blocks else Status.PARTIAL if moved else Status.MISS
        return TaskResult(task_id=task.task_id, status=status, block_ids=moved)

    async def _write(self, task: WriteStorageTask) -> list[int]:
        """Store like the daemon's writer: one look-up, then each missing object, root first."""
        start = task.start_write_block_idx
        use = Use(start=start, stop=start + len(task.keys))
        there = self.storage.index.stored(task.keys, use)
        if there is None:
            there = await self.storage.exists(task.keys)
        missing = [i for i, one in enumerate(there) if not one]
        if self._admission is not None:
            admitted = self._admission.admits([task.keys[i] for i in missing], use)
            missing = [i for i, good in zip(missing, admitted, strict=True) if good]
        items = [Item(task.keys[i], 1, use, start + i) for i in missing]
        outcomes = await self.storage.store(items, lambda *_: True, ())
        await self._settle()
        kept = {i for i, one in zip(missing, outcomes, strict=True) if one.found in (Found.STORED, Found.EXISTS)}
        return [block for i, block in enumerate(task.gpu_block_ids) if there[i] or i in kept]

    async def _read(self, task: ReadStorageTask) -> list[int]:
        use = Use()
        found = self.storage.index.find(task.keys, use) if self.storage.asks_first else None
        there = task.keys if found is None else task.keys[: _leading(found)]
        items = [Item(key, 1, use, depth) for depth, key in enumerate(there)]
        outcomes = await self.storage.load(items, _Taken(), ())
        await self._settle()
        brought = _leading([outcome.found is Found.FOUND for outcome in outcomes])
        self.hits.update(outcome.level for outcome in outcomes[:brought])
        return list(task.gpu_block_ids[:brought])

    async def _settle(self) -> None:
        if self._settle_s:
            await asyncio.sleep(self._settle_s)


def _leading(found: Sequence[bool]) -> int:
    return next((i for i, there in enumerate(found) if not there), len(found))


class BlocksWithoutBytes:
    """Blocks without content: nothing to fill, so nothing that could be wrong."""

    def fill(self, *_: object) -> None: ...
    def poison(self, *_: object) -> None: ...
    def verify(self, *_: object) -> None: ...
    def untouched(self, *_: object) -> None: ...


class AtOnce:
    """Threads that run each function at once, in the caller."""

    def open(self) -> None: ...

    def run(self, direction: Direction, function: Callable[[], T], what: object = None) -> asyncio.Future[T]:  # noqa: ARG002
        return answered(function())

    def under_way(self) -> list[str]:
        return []

    def close(self, within: float = 0.0) -> list[str]:  # noqa: ARG002
        return []


class _NoIO(selectors.SelectSelector):
    """Instead of waiting for a descriptor, it lets the time pass."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise InvariantError("a prediction waits for what never comes")
        self.now += max(0.0, timeout)
        return []


def _virtual_loop() -> asyncio.AbstractEventLoop:
    selector = _NoIO()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    return count_cancellations(loop)


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run this on a loop whose time jumps to the next timer when nothing is ready, and which does no I/O."""
    with Runner(loop_factory=_virtual_loop) as runner:
        return runner.run(work)


def predict(
    requests: Sequence[TraceRequest], tiers: Tiers, levels: Sequence[GivenLevel], window_s: float | None = None
) -> tuple[ReplayReport, PredictedDaemon]:
    """Predict where every block of these requests would come from. Returns the report, and the daemon as it is then.

    tiers: device and host blocks per rank.
    levels, window_s: see PredictedDaemon.
    """
    report = ReplayReport()
    arrivals = iter([request.timestamp / 1000 for request in requests])

    async def play() -> PredictedDaemon:
        daemon = PredictedDaemon(levels or [GivenLevel(0)], window_s)

        def next_one() -> None:
            daemon.now = next(arrivals, daemon.now)

        await daemon.storage.open()
        next_one()
        engine = ReplayEngine(daemon, BlocksWithoutBytes(), tiers, report, AtOnce())
        await engine.play(requests, concurrency=1, progress=next_one)
        await daemon.storage.close()
        return daemon

    return report, virtually(play())
