"""How much memory is worth having: predicts a trace for several sizes of host memory and storage.

An id of a trace stands for TRACE_BLOCK_TOKENS tokens. So the blocks counted here have that many tokens, whatever
`cache.block_size` is, and sizes in bytes are those of the whole daemon: all ranks together.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from transferd.cli.replay.engine import ReplayEngine, Tiers
from transferd.cli.replay.report import ReplayReport
from transferd.cli.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest
from transferd.config import Config, Reserve
from transferd.daemon.preflight import build_engine
from transferd.errors import ConfigError, InvariantError
from transferd.runtime.aio import answered
from transferd.runtime.threads import Direction
from transferd.storage.admission import SecondUse
from transferd.storage.lru import LruIndex, NoRoom, Use
from transferd.storage.room import disk_for
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, TaskResult, WriteStorageTask

DISK_BLOCK = 4096  # bytes; what a file system allocates at a time, usually
SHARES = (64, 32, 16, 8, 4, 2, 1)  # default storage sizes: what the trace would fill, divided by these


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Bytes of one trace block, all ranks together, the daemon's capacities, and how it chooses what to keep.

    window_s: of `storage.admit = "second use"`; None: everything is admitted. share: `engines.storage_share`.
    """

    host: int
    stored: int  # with its footer; on a disk, in whole blocks of it
    device_blocks: int
    host_pool: int  # bytes of the configured host pool
    reserve: Reserve | None = None  # of a file store: what it leaves free on its disk
    window_s: float | None = None
    share: float = 0.0

    @classmethod
    def of(cls, config: Config) -> BlockSizes:
        """From a daemon's configuration. Raises ConfigError."""
        plan, cache = build_engine(config), config.geometry
        parts = TRACE_BLOCK_TOKENS / cache.block_size  # cache blocks per trace block

        def nbytes(of_block: int) -> int:
            return max(1, round(of_block * cache.ranks * parts))

        blocks = int(plan.layout.device_blocks / parts)
        if blocks < 1:
            tokens = plan.layout.device_blocks * cache.block_size
            problem = f"the device holds {tokens} tokens, which is less than one block of the trace"
            raise ConfigError("cache.device_blocks", problem, plan.layout.device_blocks)
        on_disk = "file" in config.storage.backends
        slot = plan.objects.slot_bytes
        stored = nbytes(-(-slot // DISK_BLOCK) * DISK_BLOCK if on_disk else slot)
        reserve = config.storage.file.reserve if on_disk else None
        return cls(
            nbytes(plan.layout.block_bytes),
            stored,
            blocks,
            plan.sizes.host,
            reserve,
            config.storage.admit_window if config.storage.admit == "second use" else None,
            config.engines.storage_share,
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of each way to get a block: bytes per second of a tier, tokens per second of the engine's prefill."""

    host: float
    storage: float
    prefill: float | None = None


@dataclass(frozen=True, slots=True)
class SizePoint:
    """What one pair of sizes would do for the trace. Sizes and bytes are of the whole daemon."""

    host_bytes: int
    storage_bytes: int
    disk_bytes: int  # of the file system that such a store needs, with its reserve; 0 for other backends
    hit_rate: dict[str, float]  # by tier; "none": computed
    host_loaded: int
    storage_loaded: int
    storage_used: int  # the most at any time
    truncated: int  # requests longer than the device
    load_s: float  # the time for loads
    saved_s: float | None  # the prefill time that the loads save, minus load_s
    storage_written: int = 0  # in total
    storage_share_hits: float | None = None  # the share of blocks without prefill while others fill the store

    @property
    def hits(self) -> float:
        """The share of blocks that need no prefill."""
        return 1.0 - self.hit_rate["none"]


def default_storage_sizes(requests: Sequence[TraceRequest], footprint: BlockSizes) -> list[int]:
    """No storage, then doubling sizes up to all that the trace would ever store."""
    distinct = len({content for request in requests for content in request.hash_ids})
    return [0, *dict.fromkeys(max(1, distinct // share) * footprint.stored for share in SHARES)]


def size_points(
    requests: Sequence[TraceRequest],
    footprint: BlockSizes,
    rates: Rates,
    hosts: Sequence[int],
    storages: Sequence[int],
    done: Callable[[], None] = lambda: None,
) -> list[SizePoint]:
    """Predict every pair of sizes, on all cores. Returns them by host size, then by storage size.

    hosts, storages: bytes. done: called after each pair, in the caller's thread.
    """
    pairs = [(host, storage) for host in sorted(set(hosts)) for storage in sorted(set(storages))]
    workers = min(len(pairs), os.cpu_count() or 1)
    points: dict[tuple[int, int], SizePoint] = {}
    context = multiprocessing.get_context("spawn")  # a fork would take the caller's threads' locks with it
    shared = (requests, footprint, rates)
    with ProcessPoolExecutor(workers, context, initializer=_take, initargs=shared) as pool:
        futures = {pool.submit(_size_point, *pair): pair for pair in pairs}
        try:
            for future in as_completed(futures):
                points[futures[future]] = future.result()
                done()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [points[pair] for pair in pairs]


_given: list[tuple[Sequence[TraceRequest], BlockSizes, Rates]] = []  # in a worker process: what all pairs share


def _take(requests: Sequence[TraceRequest], footprint: BlockSizes, rates: Rates) -> None:
    """In a new worker process. A method of the list would be sent with the list, and change that copy."""
    _given.append((requests, footprint, rates))


def _size_point(host: int, storage: int) -> SizePoint:
    return size_point(*_given[0], host, storage)


def size_point(
    requests: Sequence[TraceRequest], footprint: BlockSizes, rates: Rates, host: int, storage: int
) -> SizePoint:
    """Predict one pair of sizes, in bytes."""
    capacity = storage // footprint.stored
    tiers = Tiers(footprint.device_blocks, host // footprint.host, storage=capacity > 0)
    report, daemon = predict(requests, tiers, capacity, footprint.window_s)
    within_share = None
    if footprint.share and capacity:
        least, _ = predict(requests, tiers, max(1, int(footprint.share * capacity)), footprint.window_s)
        within_share = 1.0 - least.hits["none"] / (least.hits.total() or 1)
    total = report.hits.total() or 1
    host_loaded = report.hits["host"] * footprint.host
    storage_loaded = report.hits["storage"] * footprint.stored
    load_s = host_loaded / rates.host + storage_loaded / rates.storage
    spared = (report.hits["host"] + report.hits["storage"]) * TRACE_BLOCK_TOKENS
    return SizePoint(
        host_bytes=host,
        storage_bytes=storage,
        disk_bytes=0 if footprint.reserve is None else disk_for(storage, footprint.reserve),
        hit_rate={tier: report.hits[tier] / total for tier in ("device", "host", "storage", "none")},
        host_loaded=host_loaded,
        storage_loaded=storage_loaded,
        storage_used=daemon.most_stored * footprint.stored,
        storage_written=daemon.written * footprint.stored,
        storage_share_hits=within_share,
        truncated=report.truncated,
        load_s=load_s,
        saved_s=None if rates.prefill is None else spared / rates.prefill - load_s,
    )


def knee(points: Sequence[SizePoint]) -> SizePoint | None:
    """Where more storage begins to pay less: the point farthest above the line from the first to the last.

    That is the "Kneedle" of Satopaa et al., 2011. points: of one host size, by storage size. None: a straight line.
    """
    if len(points) < 3:
        return None
    first, last = points[0], points[-1]
    width, height = last.storage_bytes - first.storage_bytes, last.hits - first.hits
    if width <= 0 or height <= 0:
        return None

    def above(point: SizePoint) -> float:
        return (point.hits - first.hits) / height - (point.storage_bytes - first.storage_bytes) / width

    best = max(points, key=above)
    return best if above(best) > 0 else None


def knees(points: Sequence[SizePoint]) -> list[SizePoint]:
    """The knee of each host size that has one."""
    hosts = sorted({point.host_bytes for point in points})
    found = (knee([point for point in points if point.host_bytes == host]) for host in hosts)
    return [point for point in found if point is not None]


def tree(points: Sequence[SizePoint], rates: Rates) -> dict[str, Any]:
    """The result as plain data."""
    return {
        "rates": asdict(rates),
        "points": [asdict(point) for point in points],
        "knees": [asdict(point) for point in knees(points)],
    }


def print_points(points: Sequence[SizePoint], rates: Rates, console: Console) -> None:
    """Print the result as text."""
    table = Table(title="where blocks come from, by size (GB)")
    on_disk = any(point.disk_bytes for point in points)
    columns = [
        "host",
        "storage",
        *["disk"] * on_disk,
        "on device",
        "from host",
        "from storage",
        "computed",
        "used",
        "written",
        "loaded",
    ]
    shared = any(point.storage_share_hits is not None for point in points)
    for column in columns + ["saved"] * (rates.prefill is not None) + ["within share"] * shared:
        table.add_column(column, justify="right")
    at_knee = knees(points)
    for point in points:
        loaded = point.host_loaded + point.storage_loaded
        row = [_number(point.host_bytes), _number(point.storage_bytes)]
        row += [_number(point.disk_bytes)] * on_disk
        row += [f"{point.hit_rate[tier]:.1%}" for tier in ("device", "host", "storage", "none")]
        row += [_number(point.storage_used), _number(point.storage_written), _number(loaded)]
        if point.saved_s is not None:
            row.append(f"{point.saved_s:,.0f} s")
        if shared:
            row.append("" if point.storage_share_hits is None else f"{point.storage_share_hits:.1%}")
        table.add_row(*row, style="bold" if point in at_knee else None)
    console.print(table)
    console.print(f"loads at {rates.host / 1e9:.2f} GB/s from host memory, {rates.storage / 1e9:.2f} GB/s from storage")
    if points[0].truncated:
        console.print(f"{points[0].truncated:,} requests are longer than the device; only what fits there was counted")
    for point in at_knee:
        with_host = f" (with {gigabytes(point.host_bytes)} of host memory)" if point.host_bytes else ""
        console.print(
            f"[bold]the knee[/] is at {gigabytes(point.storage_bytes)} of storage{with_host}: "
            f"{point.hits:.1%} of all blocks need no prefill"
        )


def gigabytes(nbytes: int) -> str:
    """A size for people, with about three digits."""
    return f"{_number(nbytes)} GB"


def _number(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g}" if nbytes < 1e12 else f"{nbytes / 1e9:,.0f}"


T = TypeVar("T")


class PredictedDaemon:
    """Answers tasks like a healthy daemon whose storage holds `capacity` objects per rank; None: no storage.

    Storage holds what the daemon's own LruIndex says. So with one request in flight the hits are those of a real replay
    with the same sizes, block by block.

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
        start, moved = task.start_write_block_idx, []
        use = Use(start=start, stop=start + len(task.keys))
        missing = [key for key, there in zip(task.keys, self._index.find(task.keys, use), strict=True) if not there]
        admitted = set(missing)
        if self._admission is not None:
            admitted = {key for key, good in zip(missing, self._admission.admits(missing, use), strict=True) if good}
        for depth, (key, block) in enumerate(zip(task.keys, task.gpu_block_ids, strict=True), start):
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
