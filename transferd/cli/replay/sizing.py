"""How much memory is worth having: predicts a trace for several sizes of host memory and storage.

An id of a trace stands for TRACE_BLOCK_TOKENS tokens. So the blocks counted here have that many tokens, whatever
`cache.block_size` is, and sizes in bytes are those of the whole daemon: all ranks together.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from transferd.cli.replay.engine import Tiers
from transferd.cli.replay.predicted import GivenLevel, predict
from transferd.cli.replay.trace import TraceRequest
from transferd.config import Config, LevelSection
from transferd.config.size import Reserve
from transferd.daemon.preflight import build_engine
from transferd.errors import ConfigError
from transferd.storage.base import Storage
from transferd.storage.registry import backends_of
from transferd.storage.room import disk_for
from transferd.tasks import TRACE_BLOCK_TOKENS

R = TypeVar("R")

DISK_BLOCK = 4096  # bytes; what a file system allocates at a time, usually
SHARES = (64, 32, 16, 8, 4, 2, 1)  # default storage sizes: what the trace would fill, divided by these


@dataclass(frozen=True, slots=True)
class LevelSizes:
    """One level of the configured store."""

    name: str
    stored: int  # bytes of one trace block on all ranks, with its footer; on a disk, in whole disk blocks
    capacity: int | None = None  # bytes, as configured; None if unknown, because others share it
    reserve: Reserve | None = None  # what it leaves free on its disk; None if it has no disk of its own
    promote: int = 0  # as in `storage.level`
    known: bool = False  # the daemon knows every object of it
    lent: int | None = None  # bytes of memory that each node lends to it; None unless it is all nodes'


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Bytes of one trace block, all ranks together, the daemon's capacities, and how it chooses what to keep."""

    host: int
    levels: tuple[LevelSizes, ...]  # of the store, the fastest first
    device_blocks: int
    host_pool: int  # bytes of the configured host pool
    window_s: float | None = None  # of `storage.admit = "second use"`; None admits everything
    share: float = 0.0  # `engines.storage_share`
    keys: float = 1.0  # of a trace block: blocks of the cache
    ranks: int = 1  # each has an object of a key

    @classmethod
    def of(cls, config: Config) -> BlockSizes:
        """From a daemon's configuration. Raises ConfigError."""
        plan, cache, storage = build_engine(config), config.geometry, config.storage
        parts = TRACE_BLOCK_TOKENS / cache.block_size  # cache blocks per trace block

        def nbytes(of_block: int) -> int:
            return max(1, round(of_block * cache.ranks * parts))

        blocks = int(plan.layout.device_blocks / parts)
        if blocks < 1:
            tokens = plan.layout.device_blocks * cache.block_size
            problem = f"the device holds {tokens} tokens, which is less than one block of the trace"
            raise ConfigError("cache.device_blocks", problem, plan.layout.device_blocks)
        slot = plan.objects.slot_bytes

        def level(name: str, kind: type[Storage]) -> LevelSizes:
            chosen, disks = storage.level.get(name, LevelSection()).promote, kind.directories(storage)
            promote = kind.promotes_at if chosen is None else chosen
            if disks:
                stored, whole = nbytes(-(-slot // DISK_BLOCK) * DISK_BLOCK), sum(int(disk.capacity) for disk in disks)
                return LevelSizes(name, stored, whole, disks[0].reserve, promote, known=kind.lists)
            capacity = kind.memory_of(config) if kind.slots_at_once == 0 else None
            lent = kind.memory_of(config) if kind.shared else None
            return LevelSizes(name, nbytes(slot), capacity, None, promote, known=kind.lists, lent=lent)

        kinds = backends_of(config)
        window = storage.admit_window if storage.admit == "second use" else None
        return cls(
            nbytes(plan.layout.block_bytes),
            tuple(level(*one) for one in zip(storage.backends, kinds, strict=True))
            if kinds
            else (LevelSizes(storage.title, nbytes(slot), promote=Storage.promotes_at),),
            blocks,
            plan.sizes.host,
            window,
            config.engines.storage_share,
            parts,
            cache.ranks,
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of each way to get a block: bytes per second of a tier, tokens per second of the engine's prefill.

    storage: of each of its levels, the fastest first.
    """

    host: float
    storage: tuple[float, ...]
    prefill: float | None = None


@dataclass(frozen=True, slots=True)
class LevelPoint:
    """What one level of storage would do."""

    name: str
    nbytes: int  # its size
    hit_rate: float  # the share of all blocks that come from it
    loaded: int
    used: int  # the most at any time
    written: int  # in total
    promoted: int  # of these, copied up from a lower level
    load_s: float


@dataclass(frozen=True, slots=True)
class SizePoint:
    """What one pair of sizes would do for the trace. Sizes and bytes are of the whole daemon.

    Those of storage are sums over its levels: a block counts in each level that has it.
    """

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
    levels: tuple[LevelPoint, ...] = ()

    @property
    def hits(self) -> float:
        """The share of blocks that need no prefill."""
        return 1.0 - self.hit_rate["none"]


Sizes = tuple[int, ...]  # bytes of each level of a store


def default_storage_sizes(requests: Sequence[TraceRequest], footprint: BlockSizes) -> list[Sizes]:
    """No storage, then doubling sizes up to everything that the trace would store.

    With several levels, these are sizes of the last one; the others keep their configured sizes.
    """
    distinct = len({content for request in requests for content in request.hash_ids})
    *upper, last = footprint.levels
    above = [distinct * level.stored if level.capacity is None else level.capacity for level in upper]
    sizes = dict.fromkeys(max(1, distinct // share) * last.stored for share in SHARES)
    return [(0,) * len(footprint.levels), *((*above, size) for size in [*[0] * bool(above), *sizes])]


def size_points(
    requests: Sequence[TraceRequest],
    footprint: BlockSizes,
    rates: Rates,
    hosts: Sequence[int],
    storages: Sequence[Sizes],
    *,
    quiet: bool = True,
) -> list[SizePoint]:
    """Predict every pair of sizes, on all cores. Returns them by host size, then by storage size.

    hosts, storages: bytes, of storage for each level.
    quiet: no progress bar.
    """
    by_size = sorted(set(storages), key=lambda sizes: (sum(sizes), sizes))
    pairs = [(host, sizes) for host in sorted(set(hosts)) for sizes in by_size]
    return in_processes(size_point, pairs, (requests, footprint, rates), quiet=quiet)


def in_processes(
    work: Callable[..., R], jobs: Sequence[Sequence[Any]], given: tuple[Any, ...], *, quiet: bool
) -> list[R]:
    """`work(*given, *job)` for each job, on all cores. quiet: no progress bar."""
    from transferd.cli.replay.command import progress_bar  # not needed in the processes

    workers = min(len(jobs), os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")  # a fork would take the caller's threads' locks with it
    bar = progress_bar(Console(file=sys.stderr, quiet=quiet), "predicting")
    with bar, ProcessPoolExecutor(workers, context, initializer=_take, initargs=given) as pool:
        futures = [pool.submit(_run, work, job) for job in jobs]
        try:
            for future in bar.track(as_completed(futures), len(futures)):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


_given: list[Any] = []  # in a worker process: what all jobs share


def _take(*given: Any) -> None:
    """In a new worker process. A method of the list would be sent with the list, and change that copy."""
    _given.extend(given)


def _run(work: Callable[..., R], job: Sequence[Any]) -> R:
    return work(*_given, *job)


def size_point(
    requests: Sequence[TraceRequest], footprint: BlockSizes, rates: Rates, host: int, storage: Sizes
) -> SizePoint:
    """Predict one pair of sizes, in bytes."""

    def levels(share: float = 1.0) -> list[GivenLevel]:
        """What the levels hold, or a share of it."""
        most = [nbytes // level.stored for nbytes, level in zip(storage, footprint.levels, strict=True)]
        if share < 1.0:
            most = [max(1, int(share * one)) if one else 0 for one in most]
        each = zip(most, footprint.levels, strict=True)
        return [GivenLevel(one, level.promote, known=level.known) for one, level in each]

    stored = any(level.capacity for level in levels())
    tiers = Tiers(footprint.device_blocks, host // footprint.host, storage=stored)
    report, daemon = predict(requests, tiers, levels(), footprint.window_s)
    within_share = None
    if footprint.share and stored:
        least, _ = predict(requests, tiers, levels(footprint.share), footprint.window_s)
        within_share = 1.0 - least.hits["none"] / (least.hits.total() or 1)
    total = report.hits.total() or 1
    each = tuple(
        LevelPoint(
            name=sizes.name,
            nbytes=nbytes,
            hit_rate=level.hits / total,
            loaded=level.hits * sizes.stored,
            used=level.most * sizes.stored,
            written=level.written * sizes.stored,
            promoted=level.promoted * sizes.stored,
            load_s=level.hits * sizes.stored / rate,
        )
        for nbytes, sizes, level, rate in zip(storage, footprint.levels, daemon.figures(), rates.storage, strict=True)
    )
    host_loaded = report.hits["host"] * footprint.host
    load_s = host_loaded / rates.host + sum(level.load_s for level in each)
    spared = (report.hits["host"] + report.hits["storage"]) * TRACE_BLOCK_TOKENS
    disks = [
        disk_for(nbytes, sizes.reserve)
        for nbytes, sizes in zip(storage, footprint.levels, strict=True)
        if sizes.reserve is not None
    ]
    return SizePoint(
        host_bytes=host,
        storage_bytes=sum(storage),
        disk_bytes=sum(disks),
        hit_rate={tier: report.hits[tier] / total for tier in ("device", "host", "storage", "none")},
        host_loaded=host_loaded,
        storage_loaded=sum(level.loaded for level in each),
        storage_used=sum(level.used for level in each),
        storage_written=sum(level.written for level in each),
        storage_share_hits=within_share,
        truncated=report.truncated,
        load_s=load_s,
        saved_s=None if rates.prefill is None else spared / rates.prefill - load_s,
        levels=each,
    )


def knee(points: Sequence[SizePoint]) -> SizePoint | None:
    """Where more storage begins to pay less: the point farthest above the line from the first to the last.

    That is the "Kneedle" of Satopaa et al., 2011. Returns None if the points lie on a straight line.

    points: of one host size, by storage size.
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
    """The result as plain data. The rate of storage is a number, or one for each of its levels."""
    names = [level.name for level in points[0].levels]
    storage = rates.storage[0] if len(names) == 1 else dict(zip(names, rates.storage, strict=True))
    return {
        "rates": asdict(rates) | {"storage": storage},
        "points": [asdict(point) for point in points],
        "knees": [asdict(point) for point in knees(points)],
    }


def _columns(names: Sequence[str], on_disk: bool) -> list[str]:
    """names: of the levels of storage."""
    several = len(names) > 1
    shown = names if several else ["storage"]
    written = [f"written to {name}" for name in names] if several else ["written"]
    columns = ["host", *shown, *["disk"] * on_disk, "on device", "from host", *(f"from {name}" for name in shown)]
    return [*columns, "computed", "used", *written, "loaded"]


def _cells(point: SizePoint, on_disk: bool, shared: bool) -> list[str]:
    row = [_number(point.host_bytes), *(_number(level.nbytes) for level in point.levels)]
    row += [_number(point.disk_bytes)] * on_disk
    row += [f"{point.hit_rate[tier]:.1%}" for tier in ("device", "host")]
    row += [f"{share:.1%}" for share in [*(level.hit_rate for level in point.levels), point.hit_rate["none"]]]
    row += [_number(point.storage_used), *(_number(level.written) for level in point.levels)]
    row.append(_number(point.host_loaded + point.storage_loaded))
    if point.saved_s is not None:
        row.append(f"{point.saved_s:,.0f} s")
    if shared:
        row.append("" if point.storage_share_hits is None else f"{point.storage_share_hits:.1%}")
    return row


def print_points(points: Sequence[SizePoint], rates: Rates, console: Console) -> None:
    """Print the result as text."""
    table = Table(title="where blocks come from, by size (GB)")
    names = [level.name for level in points[0].levels]
    on_disk = any(point.disk_bytes for point in points)
    shared = any(point.storage_share_hits is not None for point in points)
    for column in [*_columns(names, on_disk), *["saved"] * (rates.prefill is not None), *["within share"] * shared]:
        table.add_column(column, justify="right")
    at_knee = knees(points)
    for point in points:
        table.add_row(*_cells(point, on_disk, shared), style="bold" if point in at_knee else None)
    console.print(table)
    speeds = zip(names if len(names) > 1 else ["storage"], rates.storage, strict=True)
    from_levels = ", ".join(f"{rate / 1e9:.2f} GB/s from {name}" for name, rate in speeds)
    console.print(f"loads at {rates.host / 1e9:.2f} GB/s from host memory, {from_levels}")
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
