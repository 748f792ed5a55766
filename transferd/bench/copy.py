"""Copies between the shm device and host memory, against one plain memcpy of the same number of bytes."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from transferd.bench.harness import RUNS, Row, row
from transferd.config import from_tree
from transferd.copyplan import plan_copy
from transferd.errors import InvariantError
from transferd.layout import BlockLayout, build_layout
from transferd.offload import ThreadOffload
from transferd.tiers.base import DeviceTier
from transferd.tiers.hostcopy import NATIVE
from transferd.tiers.pinned import HostPool
from transferd.tiers.registry import create_device_tier

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


def run(device: str = "shm") -> list[Row]:
    """Both directions of every layout; random block ids; every byte compared afterwards."""
    return [item for name, cache in LAYOUTS.items() for item in asyncio.run(_layout(name, cache, device))]


async def _layout(name: str, cache: dict[str, object], device: str) -> list[Row]:
    pool = {"ranks": 1, "device": device, "device_blocks": 2 * BLOCKS, "host_blocks": 2 * BLOCKS}
    config = from_tree({"cache": cache | pool})
    layout = build_layout(config.cache)
    offload = ThreadOffload(1)
    tier = create_device_tier(config, layout, 0, offload)
    await tier.open()
    host = HostPool(layout, 0)
    try:
        return await _measure(name, layout, tier, host)
    finally:
        await tier.close()
        host.close()
        offload.close()


async def _measure(name: str, layout: BlockLayout, tier: DeviceTier, host: HostPool) -> list[Row]:
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

    memcpy, ins, outs = [], [], []
    for number in range(RUNS + 2):  # in turn, so that all three see the same machine; the first two are warm-up
        memcpy.append(_seconds(lambda: np.copyto(target, source)))
        ins.append(await _seconds_of(swap_in))
        if number == 0:  # poison, then everything that counts has to come back from the device
            content[:] = 0
        outs.append(await _seconds_of(swap_out))
    _check(before, content, layout, host_ids)
    del content
    limit = nbytes / statistics.median(memcpy[2:]) / 1e9
    kind = "" if NATIVE else " (no native copy)"
    return [
        row(f"{way}, {name}{kind}", [nbytes / s / 1e9 for s in seconds[2:]], "GB/s", limit, "GB/s memcpy")
        for way, seconds in (("swap_out", outs), ("swap_in", ins))
    ]


def _check(
    before: np.typing.NDArray[np.uint8], after: np.typing.NDArray[np.uint8], layout: BlockLayout, ids: list[int]
) -> None:
    """Every moved block is what it was, every other byte is still zero."""
    expected = np.zeros_like(before)
    geometry = layout.host
    for offset, stride, size in zip(geometry.offsets, geometry.strides, geometry.nbytes, strict=True):
        for block in ids:
            start = int(offset + block * stride)
            expected[start : start + size] = before[start : start + size]
    if not np.array_equal(expected, after):
        raise InvariantError("a copy moved wrong bytes")


def _seconds(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


async def _seconds_of(work: Callable[[], asyncio.Future[None] | object]) -> float:
    before = time.perf_counter()
    await work()  # type: ignore[misc]
    return time.perf_counter() - before
