"""The contract of a device tier, run over every implementation. A new tier is one line in TIERS."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from tests.support.cuda.tier import FakeCudaTier
from tests.support.simulation.blocks import Bytes
from tests.support.simulation.device import SimDevice
from transferd.blocks.copyplan import plan_copy
from transferd.blocks.layout import BlockLayout, build_layout
from transferd.config import CacheSection
from transferd.errors import TierError
from transferd.runtime.threads import ThreadPools, Threads
from transferd.tiers.base import DeviceTier
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.paddle import PaddleDeviceTier
from transferd.tiers.pinned import MEMORY_LOCK, HostPool, HostRegion
from transferd.tiers.shm import ShmDeviceTier

TIERS: dict[str, Callable[[BlockLayout, Threads], DeviceTier]] = {
    "shm": lambda layout, threads: ShmDeviceTier(layout, 0, 0, threads),
    "paddle": lambda layout, threads: PaddleDeviceTier(layout, 0, 0, threads),
    "cuda": lambda layout, threads: FakeCudaTier(layout, 0, 0, threads, gpu=FakeGpu(seed=1), slot_bytes=1 << 18),
    "cuda, small slots": lambda layout, threads: FakeCudaTier(
        layout, 0, 0, threads, gpu=FakeGpu(seed=2, batches=False), slot_bytes=1
    ),
    "cuda, straight": lambda layout, threads: FakeCudaTier(
        layout, 0, 0, threads, gpu=FakeGpu(seed=3), copy_path="straight", slot_bytes=1
    ),
    "cuda, nothing pinned": lambda layout, threads: FakeCudaTier(
        layout, 0, 0, threads, gpu=FakeGpu(seed=4, pins=False, shares=False), slot_bytes=1 << 18
    ),
    "simulated": lambda layout, threads: SimDevice(layout, 0, 0, threads),
}
SIZES: dict[str, Any] = {"layers": 3, "device_blocks": 24, "host_blocks": 40}
LAYOUTS = {
    "gqa": CacheSection(**SIZES, kv_heads=2, head_dim=64, block_size=16),
    "gqa odd": CacheSection(**SIZES, kv_heads=1, head_dim=5, block_size=3),
    "fp8": CacheSection(**SIZES, kv_heads=3, head_dim=7, block_size=5, dtype="block_wise_fp8", scale_dtype="float32"),
    "mla": CacheSection(**SIZES, attention="mla", kv_lora_rank=512, qk_rope_head_dim=64, block_size=16),
    "dsa": CacheSection(**SIZES, attention="dsa", kv_lora_rank=128, qk_rope_head_dim=3, block_size=7),
    "mtp": CacheSection(**SIZES, kv_heads=1, head_dim=9, block_size=4, mtp_layers=2, mtp_blocks=31),
    "large": CacheSection(**SIZES, kv_heads=8, head_dim=128, block_size=64),  # beyond what is copied on the loop
}


@pytest.fixture(params=TIERS, ids=str)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("paddle"):
        pytest.importorskip("paddle", reason="the paddle extra is not installed")
    if request.param.startswith("cuda") and compiler() is None:
        pytest.skip("there is no C compiler to run kernels on the CPU with")
    return str(request.param)


@pytest.fixture(params=LAYOUTS, ids=str)
def layout(request: pytest.FixtureRequest) -> BlockLayout:
    return build_layout(LAYOUTS[request.param])


@pytest.fixture
async def tier(kind: str, layout: BlockLayout) -> AsyncIterator[DeviceTier]:
    threads = ThreadPools(2)
    made = TIERS[kind](layout, threads)
    await made.open()
    yield made
    await made.close()
    threads.close()
    if isinstance(made, FakeCudaTier):
        assert not made.gpu.leaks()


@pytest.fixture
def pool(layout: BlockLayout, tier: DeviceTier) -> Iterator[HostPool]:
    pinning = CudaPinning(0, tier.gpu) if isinstance(tier, FakeCudaTier) else MEMORY_LOCK
    made = HostPool(layout, pinning)
    yield made
    made.close()


def content(region: HostRegion) -> Bytes:
    return np.frombuffer(region.view, dtype=np.uint8)


def blocks_of(memory: Bytes, layout: BlockLayout, ids: list[int]) -> bytes:
    where, parts = layout.host, []
    for block in ids:
        for offset, stride, nbytes in zip(where.offsets, where.strides, where.nbytes, strict=True):
            start = int(offset + block * stride)
            parts.append(memory[start : start + int(nbytes)].tobytes())
    return b"".join(parts)


async def test_blocks_go_in_and_come_out_into_other_places_byte_for_byte(
    tier: DeviceTier, layout: BlockLayout, pool: HostPool
) -> None:
    rng = random.Random(1)
    device = rng.sample(range(layout.device_blocks), 9)
    source, target = rng.sample(range(20), 9), rng.sample(range(20, 40), 9)
    memory = content(pool.memory)
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.shape, dtype=np.uint8)
    before = memory.copy()
    await tier.copy_in(plan_copy(layout.host, source, layout.device, device), pool.memory)
    memory[:] = 0xA5
    await tier.copy_out(plan_copy(layout.device, device, layout.host, target), pool.memory)
    assert blocks_of(memory, layout, target) == blocks_of(before, layout, source)
    untouched = [block for block in range(40) if block not in target]
    assert set(blocks_of(memory, layout, untouched)) == {0xA5}, "nothing outside the plan is written"
    del memory


async def test_device_blocks_outside_a_plan_keep_what_they_held(
    tier: DeviceTier, layout: BlockLayout, pool: HostPool
) -> None:
    everything = list(range(layout.device_blocks))
    memory = content(pool.memory)
    memory[:] = 0x11
    await tier.copy_in(plan_copy(layout.host, everything, layout.device, everything), pool.memory)
    memory[:] = 0x22
    await tier.copy_in(plan_copy(layout.host, [0, 1], layout.device, [5, 23]), pool.memory)
    memory[:] = 0
    await tier.copy_out(plan_copy(layout.device, everything, layout.host, everything), pool.memory)
    changed = [block for block in everything if set(blocks_of(memory, layout, [block])) == {0x22}]
    kept = [block for block in everything if set(blocks_of(memory, layout, [block])) == {0x11}]
    assert (changed, kept) == ([5, 23], [block for block in everything if block not in (5, 23)])
    del memory


async def test_many_copies_both_ways_at_once_do_not_disturb_each_other(
    tier: DeviceTier, layout: BlockLayout, pool: HostPool
) -> None:
    memory = content(pool.memory)
    memory[:] = np.random.default_rng(2).integers(0, 256, memory.shape, dtype=np.uint8)
    before = memory.copy()
    first = list(range(6))
    await tier.copy_in(plan_copy(layout.host, first, layout.device, first), pool.memory)
    outs = [plan_copy(layout.device, [i], layout.host, [20 + i]) for i in first]
    ins = [plan_copy(layout.host, [6 + i], layout.device, [6 + i]) for i in first]
    await asyncio.gather(
        *(tier.copy_out(plan, pool.memory) for plan in outs), *(tier.copy_in(plan, pool.memory) for plan in ins)
    )
    assert blocks_of(memory, layout, [20 + i for i in first]) == blocks_of(before, layout, first)
    await tier.copy_out(plan_copy(layout.device, [6, 7], layout.host, [30, 31]), pool.memory)
    assert blocks_of(memory, layout, [30, 31]) == blocks_of(before, layout, [6, 7])
    del memory


async def test_an_empty_plan_is_nothing(tier: DeviceTier, layout: BlockLayout, pool: HostPool) -> None:
    await tier.copy_in(plan_copy(layout.host, [], layout.device, []), pool.memory)
    await tier.copy_out(plan_copy(layout.device, [], layout.host, []), pool.memory)


async def test_opening_twice_is_refused_and_closing_twice_is_nothing(kind: str) -> None:
    threads = ThreadPools(1)
    made = TIERS[kind](build_layout(LAYOUTS["gqa odd"]), threads)
    await made.open()
    with pytest.raises(TierError):
        await made.open()
    await made.close()
    await made.close()
    threads.close()


async def test_a_tier_that_is_not_open_says_so(kind: str) -> None:
    threads = ThreadPools(1)
    made = TIERS[kind](build_layout(LAYOUTS["gqa odd"]), threads)
    with pytest.raises(TierError):
        _ = made.arena
    threads.close()
