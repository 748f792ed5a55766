"""`make gpu-check`: copies between a GPU and pinned memory, against one large DMA of the same number of bytes.

Both sides use random blocks. The benchmark has parts, with rows of one kind each, measured next to large copies in the
same run:

    tier      the tier's own choice (`swap_out`, `swap_in`, both at once), gather and one DMA per block, copies in rows,
              and a kernel that reads or writes pinned memory directly; the tier's choice also with objects of
              FastDeploy's format, whose planes have another order
    calls     one cudaMemcpyAsync for each piece of each block
    batches   cudaMemcpyBatchAsync, one DMA for each piece

The moved bytes are compared. Batches come last, because some drivers hang on them (vLLM #49276); then at least the
other figures are known.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np

from transferd.blocks.copyplan import CopyPlan, plan_copy
from transferd.blocks.formats import RawPlanes
from transferd.blocks.layout import BlockLayout, build_layout
from transferd.cli.bench.harness import RUNS, Row, row
from transferd.config import CacheSection
from transferd.errors import InvariantError, TierError
from transferd.runtime.threads import ThreadPools
from transferd.tiers.base import DeviceHandle
from transferd.tiers.cuda.bindings import open_daemons_driver
from transferd.tiers.cuda.copy_pipeline import CopyPipeline
from transferd.tiers.cuda.costs import CopyPath
from transferd.tiers.cuda.driver import Driver, find_device
from transferd.tiers.cuda.kernel import MAX_BLOCKS, THREADS, Move, cut, tiles_of
from transferd.tiers.cuda.pinning import CudaPinning, boundaries
from transferd.tiers.cuda.tier import CudaDeviceTier
from transferd.tiers.pinned import HostPool

SEED = 1
COUNTS = (1, 4, 16, 64, 256, 1024)
SHORT = 50_000  # copies of more pieces than this are measured less often
# Copies whose way the tier chooses, for the daemon's objects and for FastDeploy's.
DEFAULT_WAYS = ("swap_out", "swap_in", "swap both ways", "FastDeploy's order out", "FastDeploy's order in")
DIRECT_GRID = 264  # thread blocks of the kernel that accesses pinned memory: as many as the device has
LAYOUTS: dict[str, dict[str, object]] = {
    "GQA 80 layers x 16 KiB": {"layers": 80, "kv_heads": 2, "head_dim": 64, "block_size": 64},
    "MLA 61 layers x 72 KiB": {"attention": "mla", "layers": 61, "block_size": 64},
    "DSA 61 layers x 41 + 8 KiB": {"attention": "dsa", "layers": 61, "block_size": 64, "dtype": "uint8"},
    "FP8 80 layers x 8 KiB + scales": {
        "layers": 80,
        "kv_heads": 2,
        "head_dim": 64,
        "block_size": 64,
        "dtype": "block_wise_fp8",
    },
}
Part = Literal["tier", "calls", "batches"]
LIMIT = "GB/s one large copy"
Seconds = Callable[[], Awaitable[None]]


def run(
    device: int = 0,
    *,
    driver: Driver | None = None,
    counts: Sequence[int] = COUNTS,
    layouts: dict[str, dict[str, object]] = LAYOUTS,
    runs: int = RUNS,
    on_rows: Callable[[list[Row]], None] | None = None,
) -> list[Row]:
    """Measure every layout and count. driver: replaces the process's real one. on_rows: called with each count's rows.

    Raises TierError without a GPU.
    """
    driver = driver if driver is not None else open_daemons_driver()
    rows: list[Row] = []
    for part in parts_of(driver):
        for name in layouts:
            found = measure(
                name, part, device, driver=driver, counts=counts, layouts=layouts, runs=runs, on_rows=on_rows
            )
            rows += asyncio.run(found)
    return rows


def parts_of(driver: Driver) -> tuple[Part, ...]:
    """The parts that can be measured on this driver, in order."""
    return ("tier", "calls", "batches") if driver.batches else ("tier", "calls")


def machine(device: int = 0, driver: Driver | None = None) -> dict[str, object]:
    """Facts about the GPU, to add to those of harness.machine()."""
    driver = driver if driver is not None else open_daemons_driver()
    info = find_device(driver, device)
    return {"gpu": info.name, "cuda": driver.version, "batches": driver.batches}


async def measure(
    name: str,
    part: Part,
    device: int = 0,
    *,
    driver: Driver | None = None,
    counts: Sequence[int] = COUNTS,
    layouts: dict[str, dict[str, object]] = LAYOUTS,
    runs: int = RUNS,
    on_rows: Callable[[list[Row]], None] | None = None,
    beside: str = "",
    cache_bytes: int = 0,
    handle: Callable[[dict[str, object]], Awaitable[DeviceHandle]] | None = None,
) -> list[Row]:
    """Measure one part on one layout. beside: where, and what else the GPU does meanwhile, for the rows' names.

    cache_bytes: at least so large a cache. handle: gives an engine's memory for a cache, to map instead of making one.
    """
    driver, threads = driver if driver is not None else open_daemons_driver(), ThreadPools(2)  # as many as a daemon has
    try:
        label = f"{name}, {beside}" if beside else name
        cache = layouts[name]
        return await _measure(
            label, cache, device, driver, counts, runs, threads, on_rows, part, cache_bytes=cache_bytes, handle=handle
        )
    finally:
        threads.close()


async def _measure(
    name: str,
    cache: dict[str, object],
    device: int,
    driver: Driver,
    counts: Sequence[int],
    runs: int,
    threads: ThreadPools,
    on_rows: Callable[[list[Row]], None] | None,
    part: Part,
    *,
    cache_bytes: int,
    handle: Callable[[dict[str, object]], Awaitable[DeviceHandle]] | None,
) -> list[Row]:
    blocks = 2 * max(counts)  # half for each direction when both run at once
    one = build_layout(CacheSection(**cache, device_blocks=1)).block_bytes  # type: ignore[arg-type]
    cache = cache | {"device_blocks": max(blocks, cache_bytes // one), "host_blocks": blocks}
    layout = build_layout(CacheSection(**cache))  # type: ignore[arg-type]
    # With the kernel and staging, even where a copy takes neither by itself.
    tier = CudaDeviceTier(layout, 0, device, threads, driver=driver, copy_path="gather")
    await (tier.open() if handle is None else tier.attach(await handle(cache)))
    host = HostPool(layout, CudaPinning(device, driver))
    try:
        if not host.memory.pinned:
            raise TierError(f"the host memory is not pinned, so the figures would mean nothing: {host.memory.degraded}")
        bench = _Bench(name, tier, layout, host, runs, part)
        rows: list[Row] = []
        for count in counts:
            found = await bench.measure(count)
            if on_rows is not None:
                on_rows(found)
            rows += found
        await bench.verify(min(max(counts), 64))
        bench.close()
        return rows
    finally:
        await tier.close()
        host.close()


class _Bench:
    """One part of the benchmark, on one layout and one GPU."""

    def __init__(
        self, name: str, tier: CudaDeviceTier, layout: BlockLayout, host: HostPool, runs: int, part: Part
    ) -> None:
        self.name = name
        self.part = part
        self.tier = tier
        self.layout = layout
        self.host = host
        self.runs = runs
        self.resources = tier.resources
        self.driver = self.resources.driver
        self.random = random.Random(SEED)
        with self.driver.current(self.resources.context):
            self.streams = [self.driver.create_stream() for _ in range(2)]
            # For large copies: an engine's tensors have no room for one.
            self.room = self.driver.allocate(host.memory.nbytes)

    # --- what is measured -----------------------------------------------------------------------------

    async def measure(self, count: int) -> list[Row]:
        """Measure all ways of moving `count` random blocks, each beside large copies at the same time."""
        device, pool = self.tier.arena.geometry, self.layout.host
        blocks = self.layout.host_blocks
        device_ids, host_ids = (self.random.sample(range(n), 2 * count) for n in (self.layout.device_blocks, blocks))
        out = plan_copy(device, device_ids[:count], pool, host_ids[:count])
        into = plan_copy(pool, host_ids[count:], device, device_ids[count:])
        nbytes = out.nbytes
        ways: dict[str, Seconds] = {
            "large out": lambda: self._plainly(lambda: self._large(nbytes, outward=True)),
            "large in": lambda: self._plainly(lambda: self._large(nbytes, outward=False)),
            "large both": lambda: self._plainly(lambda: self._large_both(nbytes)),
        }
        if self.part == "batches":
            ways["batch out"] = lambda: self._tier(out, None, "straight")
            ways["batch in"] = lambda: self._tier(None, into, "straight")
        elif self.part == "calls":
            ways["call a piece out"] = lambda: self._plainly(lambda: self._runs(out, outward=True))
            ways["call a piece in"] = lambda: self._plainly(lambda: self._runs(into, outward=False))
        else:
            planes = self.layout.packed(blocks, int(pool.strides[0]), RawPlanes(self.layout).offsets)
            planes_out = plan_copy(device, device_ids[:count], planes, host_ids[:count])
            planes_into = plan_copy(planes, host_ids[count:], device, device_ids[count:])
            ways |= {
                "swap_out": lambda: self._tier(out, None),
                "swap_in": lambda: self._tier(None, into),
                "swap both ways": lambda: self._tier(out, into),
                "FastDeploy's order out": lambda: self._tier(planes_out, None),
                "FastDeploy's order in": lambda: self._tier(None, planes_into),
                "direct store": lambda: self._plainly(lambda: self._direct(out)),
                "direct load": lambda: self._plainly(lambda: self._direct(into)),
                "gather out": lambda: self._tier(out, None, "gather"),
                "gather in": lambda: self._tier(None, into, "gather"),
                "rows out": lambda: self._tier(out, None, "rows"),
                "rows in": lambda: self._tier(None, into, "rows"),
                "pairs out": lambda: self._tier(out, None, "pairs"),
                "pairs in": lambda: self._tier(None, into, "pairs"),
            }
        few = self.part == "calls" and len(out.runs) > SHORT
        return await self._timed(count, nbytes, ways, min(2, self.runs) if few else self.runs)

    async def _timed(self, count: int, nbytes: int, ways: dict[str, Seconds], runs: int) -> list[Row]:
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(runs + 2):  # alternating, so that all see the same load; the first two are warm-up
            for way, work in ways.items():
                before = time.perf_counter()
                await work()
                seconds[way].append(time.perf_counter() - before)
        return self._rows(count, nbytes, {way: found[2:] for way, found in seconds.items()})

    def _rows(self, count: int, nbytes: int, seconds: dict[str, list[float]]) -> list[Row]:
        limits = {way: statistics.median(seconds.pop(f"large {way}")) for way in ("out", "in", "both")}
        rows = []
        for way, found in seconds.items():
            both = "both" in way
            direction = "both" if both else "out" if "out" in way or "store" in way else "in"
            moved = nbytes * (2 if both else 1) / 1e9
            label = f"{way}, {self.name}, {count} block{'s' if count > 1 else ''}"
            rows.append(row(label, [moved / s for s in found], "GB/s", moved / limits[direction], LIMIT))
        return rows

    # --- the ways -----------------------------------------------------------------------------------

    async def _tier(self, out: CopyPlan | None, into: CopyPlan | None, path: CopyPath | None = None) -> None:
        with preferring((self.resources.outward, self.resources.inward), path):
            copies = [] if out is None else [self.tier.copy_out(out, self.host.memory)]
            copies += [] if into is None else [self.tier.copy_in(into, self.host.memory)]
            await asyncio.gather(*copies)

    async def _plainly(self, submit: Callable[[], None]) -> None:
        """Submit work to our own streams and wait for it, without the tier."""
        with self.driver.current(self.resources.context):
            submit()
            for stream in self.streams:
                self.driver.synchronize_stream(stream)

    def _large(self, nbytes: int, *, outward: bool, stream: int = 0, offset: int = 0) -> None:
        device, host = self.room + offset, self.host.memory.address + offset
        cuts = [0, *(at - host for at in boundaries(host, nbytes)), nbytes]  # no DMA may cross two registrations
        for start, end in itertools.pairwise(cuts):
            target, source = (host + start, device + start) if outward else (device + start, host + start)
            self.driver.copy(target, source, end - start, self.streams[stream])

    def _large_both(self, nbytes: int) -> None:
        self._large(nbytes, outward=True)
        self._large(nbytes, outward=False, stream=1, offset=nbytes)

    def _runs(self, plan: CopyPlan, *, outward: bool) -> None:
        device, host, stream = self.tier.arena.origin, self.host.memory.address, self.streams[0]
        source, target = (device, host) if outward else (host, device)
        cuts = boundaries(host, self.host.memory.nbytes)
        for at, to, nbytes in cut(plan.runs, 1 if outward else 0, cuts, host).tolist():
            self.driver.copy(target + to, source + at, nbytes, stream)

    def _direct(self, plan: CopyPlan) -> None:
        """The tier's kernel with host memory as its packed side: no staging and no DMA engine."""
        moves, program = plan.moves, self.resources.kernel_table
        assert moves is not None
        gather = moves.source is self.tier.arena.geometry
        host, cache_ids, host_ids = (
            (moves.target, moves.source_ids, moves.target_ids)
            if gather
            else (moves.source, moves.target_ids, moves.source_ids)
        )
        for start in range(0, len(cache_ids), MAX_BLOCKS):
            move = Move(
                segments=program.main.table,
                packed=self.host.memory.address,
                packed_stride=int(host.strides[0]),
                first_segment=0,
                segment_count=len(host.nbytes),
                tiles=tiles_of(host.nbytes),
                gather=gather,
            )
            move.name_blocks(cache_ids[start : start + MAX_BLOCKS], host_ids[start : start + MAX_BLOCKS])
            grid = min(DIRECT_GRID, move.blocks * move.segment_count * move.tiles)
            self.driver.launch(program.function, grid, THREADS, move, self.streams[0])

    # --- what was moved -------------------------------------------------------------------------------

    async def verify(self, count: int) -> None:
        """Copy random bytes in and out by every way. Raises InvariantError if they differ."""
        content = np.frombuffer(self.host.memory.view, dtype=np.uint8)
        stride, payload = int(self.layout.host.strides[0]), self.layout.block_bytes
        rows = content[: self.layout.host_blocks * stride].reshape(-1, stride)[:, :payload]
        device, pool = self.tier.arena.geometry, self.layout.host
        tier: tuple[CopyPath | Literal["direct"] | None, ...] = ("gather", "rows", "pairs", None, "direct")
        for way in tier if self.part == "tier" else ("straight",) if self.part == "batches" else ():
            device_ids = self.random.sample(range(self.layout.device_blocks), count)
            sources, targets = (self.random.sample(range(self.layout.host_blocks), count) for _ in range(2))
            before = np.random.default_rng(SEED).integers(0, 256, (count, payload), dtype=np.uint8)
            rows[sources] = before
            into, out = plan_copy(pool, sources, device, device_ids), plan_copy(device, device_ids, pool, targets)
            if way == "direct":
                await self._plainly(lambda into=into: self._direct(into))  # type: ignore[misc]
            else:
                await self._tier(None, into, way)
            rows[targets] = 0xA5
            if way == "direct":
                await self._plainly(lambda out=out: self._direct(out))  # type: ignore[misc]
            else:
                await self._tier(out, None, way)
            if not np.array_equal(rows[targets], before):
                raise InvariantError(f"{self.name}: {way or 'the tier'} moved wrong bytes")

    def close(self) -> None:
        with self.driver.current(self.resources.context):
            for stream in self.streams:
                self.driver.destroy_stream(stream)
            self.driver.free(self.room)


@contextmanager
def preferring(pipelines: Sequence[CopyPipeline], path: CopyPath | None) -> Iterator[None]:
    """Make these pipelines take one path where possible."""
    for pipeline in pipelines:
        pipeline.submitter.preferred = path
    try:
        yield
    finally:
        for pipeline in pipelines:
            pipeline.submitter.preferred = None
