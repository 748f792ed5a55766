"""Copies between a device and host memory, compared with one plain memcpy of the same number of bytes.

On a GPU the limit is one large copy between device and pinned memory instead. (`make gpu-check` measures a GPU's other
ways to copy.) The first rows measure the tier alone, in this process. For the shm device, further rows push swap tasks
to a daemon in its own process, so the difference is the cost of the round trip.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from transferd.blocks.copyplan import CopyPlan, plan_copy
from transferd.blocks.layout import BlockLayout, build_layout
from transferd.cli.bench.harness import RUNS, Row, Rows, row, timed
from transferd.cli.replay.kvdata import KvData
from transferd.client.client import Client
from transferd.client.launch import running
from transferd.config import from_tree
from transferd.errors import InvariantError
from transferd.runtime.threads import ThreadPools
from transferd.tasks import Status, SwapInTask, SwapOutTask
from transferd.tiers.base import DeviceTier
from transferd.tiers.cuda.bindings import open_daemons_driver
from transferd.tiers.cuda.driver import find_device
from transferd.tiers.hostcopy import NATIVE
from transferd.tiers.pinned import HostPool
from transferd.tiers.registry import create_device_tier, create_pinning

BLOCKS = 64  # moved per task
SEED = 1
_GQA = {"attention": "gqa", "kv_heads": 2, "head_dim": 64, "block_size": 64}
LAYOUTS: dict[str, dict[str, object]] = {
    "GQA 4 layers x 16 KiB": _GQA | {"layers": 4},
    "GQA 80 layers x 16 KiB": _GQA | {"layers": 80},
    "GQA 8 layers x 64 KiB": _GQA | {"layers": 8, "kv_heads": 8},
    "MLA 61 layers x 72 KiB": {"attention": "mla", "layers": 61, "block_size": 64},
    "DSA 61 layers x 41 + 8 KiB": {"attention": "dsa", "layers": 61, "block_size": 64, "dtype": "uint8"},
}
END_TO_END = ("GQA 4 layers x 16 KiB", "GQA 80 layers x 16 KiB", "MLA 61 layers x 72 KiB")


def run(device: str = "shm") -> Rows:
    """Measure both directions of every layout with random block ids, and compare every byte afterwards."""
    for name, cache in LAYOUTS.items():
        yield from asyncio.run(_layout(name, cache, device))
    if device == "shm":  # another process can attach it
        for name in END_TO_END:
            with tempfile.TemporaryDirectory(prefix="transferd-bench-") as directory:
                tree = {"cache": LAYOUTS[name] | _pool(device), "storage": {"backend": "none"}}
                with running(tree, Path(directory)) as daemon:
                    new = asyncio.run(_tasks(name, daemon.endpoint))
            yield from new


def gpu() -> dict[str, object]:
    """Facts about the GPU, for a report. Raises TierError without one."""
    driver = open_daemons_driver()
    return {"gpu": find_device(driver, 0).name, "cuda": driver.version, "batches": driver.batches}


def _pool(device: str) -> dict[str, object]:
    return {"ranks": 1, "device": device, "device_blocks": 2 * BLOCKS, "host_blocks": 2 * BLOCKS}


async def _tasks(name: str, endpoint: str) -> list[Row]:
    """Measure swap tasks from push to result."""
    rng = random.Random(SEED)
    device_ids, host_ids, others = (rng.sample(range(2 * BLOCKS), BLOCKS) for _ in range(3))
    number = itertools.count()

    async def swap(kind: type[SwapOutTask | SwapInTask], blocks: list[int]) -> None:
        task = kind(task_id=f"t{next(number)}", gpu_block_ids=blocks, cpu_block_ids=host_ids)
        result = await client.submit(task)
        if result.status is not Status.OK:
            raise RuntimeError(f"a benchmark task ended badly: {result}")

    async with Client(endpoint) as client:
        data = KvData([await client.attach(0)])
        for content, block in enumerate(device_ids):
            data.fill(block, content)
        nbytes = BLOCKS * data.block_bytes
        source = np.random.default_rng(SEED).integers(0, 256, nbytes, dtype=np.uint8)
        target = np.zeros_like(source)
        memcpy, ins, outs = [], [], []
        for _ in range(RUNS + 2):
            memcpy.append(timed(lambda: np.copyto(target, source)))
            outs.append(await _seconds_of(lambda: swap(SwapOutTask, device_ids)))
            ins.append(await _seconds_of(lambda: swap(SwapInTask, device_ids)))
        data.poison(others)
        await swap(SwapInTask, others)
        wrong = [data.verify(block, content) for content, block in enumerate(others)]
        if any(wrong):
            raise InvariantError(f"a swap moved wrong bytes: {next(filter(None, wrong))}")
        del data
    return _rows(f"{name}, task to a daemon", nbytes, memcpy, outs, ins)


def _rows(
    name: str, nbytes: int, limits: list[float], outs: list[float], ins: list[float], limit_name: str = "GB/s memcpy"
) -> list[Row]:
    """The rows of one layout. The first two runs are warm-up and do not count."""
    limit = nbytes / statistics.median(limits[2:]) / 1e9
    return [
        row(f"{way}, {name}", [nbytes / s / 1e9 for s in seconds[2:]], "GB/s", limit, limit_name)
        for way, seconds in (("swap_out", outs), ("swap_in", ins))
    ]


async def _layout(name: str, cache: dict[str, object], device: str) -> list[Row]:
    config = from_tree({"cache": cache | _pool(device)})
    layout = build_layout(config.geometry)
    threads = ThreadPools(1)
    tier = create_device_tier(config, layout, 0, threads)
    await tier.open()
    host = HostPool(layout, create_pinning(config, 0))
    try:
        return await _measure(name, layout, tier, host, large=device == "cuda")
    finally:
        await tier.close()
        host.close()
        threads.close()


async def _measure(name: str, layout: BlockLayout, tier: DeviceTier, host: HostPool, *, large: bool) -> list[Row]:
    """large: the limit is one large copy by the tier."""
    rng = random.Random(SEED)
    device_ids = rng.sample(range(layout.device_blocks), BLOCKS)
    host_ids = rng.sample(range(layout.host_blocks), BLOCKS)
    nbytes = BLOCKS * layout.block_bytes
    source = np.random.default_rng(SEED).integers(0, 256, nbytes, dtype=np.uint8)
    target = np.zeros_like(source)
    content = np.frombuffer(host.memory.view, dtype=np.uint8)
    content[:] = np.resize(source, content.shape)
    before = content.copy()
    device, pool = layout.device, layout.host
    inward = plan_copy(pool, host_ids, device, device_ids)
    outward = plan_copy(device, device_ids, pool, host_ids)

    async def swap_in() -> None:
        await tier.copy_in(inward, host.memory)

    async def swap_out() -> None:
        await tier.copy_out(outward, host.memory)

    whole = CopyPlan(nbytes, runs=np.array([[0, 0, nbytes]], dtype=np.int64))
    limits, ins, outs = [], [], []
    for number in range(RUNS + 2):  # alternating, so that all three see the same load; the first two are warm-up
        if large:
            limits.append(await _seconds_of(lambda: tier.copy_in(whole, host.memory)))
        else:
            limits.append(timed(lambda: np.copyto(target, source)))
        ins.append(await _seconds_of(swap_in))
        if number == 0:  # clear it, so that all later content must come from the device
            content[:] = 0
        outs.append(await _seconds_of(swap_out))
    _check(before, content, layout, host_ids)
    del content
    if large:
        return _rows(name, nbytes, limits, outs, ins, "GB/s one large copy")
    return _rows(name if NATIVE else f"{name} (no native copy)", nbytes, limits, outs, ins)


def _check(
    before: np.typing.NDArray[np.uint8], after: np.typing.NDArray[np.uint8], layout: BlockLayout, ids: list[int]
) -> None:
    """Check that every moved block is intact, and that every other byte is still zero."""
    expected = np.zeros_like(before)
    geometry = layout.host
    for offset, stride, size in zip(geometry.offsets, geometry.strides, geometry.nbytes, strict=True):
        for block in ids:
            start = int(offset + block * stride)
            expected[start : start + size] = before[start : start + size]
    if not np.array_equal(expected, after):
        raise InvariantError("a copy moved wrong bytes")


async def _seconds_of(work: Callable[[], Awaitable[None]]) -> float:
    before = time.perf_counter()
    await work()
    return time.perf_counter() - before
