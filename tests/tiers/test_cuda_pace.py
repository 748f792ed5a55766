"""Stores keep to their rate and loads do not wait for it; what is urgent, stopped or being closed does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from tests.support.cuda.tier import FakeCudaTier
from tests.tiers.test_cuda import BLOCKS, LAYOUT, Slow, rig
from transferd.config import load
from transferd.config.sections import CudaSection
from transferd.config.size import Size
from transferd.runtime.compat import wait_for
from transferd.runtime.threads import ThreadPools
from transferd.tasks import Stop
from transferd.tiers.cuda import copy_pipeline, tuning
from transferd.tiers.cuda.copy_pipeline import Pace
from transferd.tiers.cuda.costs import Costs
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.cuda.tuning import Tuning
from transferd.tiers.pinned import HostPool
from transferd.tiers.registry import create_device_tier
from transferd.workers.job import StopSignal

on_a_cpu = pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")
NEVER = CudaSection(store_rate=Size(1))  # a byte a second: in a test, the second turn never comes


@pytest.fixture
def threads() -> Iterator[ThreadPools]:
    threads = ThreadPools(2)
    yield threads
    threads.close()


def test_a_turn_goes_when_the_turns_before_it_are_paid_for() -> None:
    now, rate = [100.0], [10]
    pace = Pace(lambda: rate[0], lambda: now[0])
    assert pace.wait_s() == 0
    pace.took(200)
    assert pace.wait_s() == 20
    now[0] += 15
    assert pace.wait_s() == 5
    rate[0] = 25
    assert pace.wait_s() == 2, "a new rate holds at once"
    now[0] += 1000
    assert pace.wait_s() == 0
    pace.took(50)
    assert pace.wait_s() == 2, "idle time saves up nothing"


def test_without_a_rate_nothing_waits_and_nothing_is_owed_later() -> None:
    rate = [0]
    pace = Pace(lambda: rate[0], lambda: 0.0)
    pace.took(1 << 40)
    assert pace.wait_s() == 0
    rate[0] = 1
    assert pace.wait_s() == 0


@on_a_cpu
async def test_a_store_waits_for_its_rate_while_loads_and_urgent_copies_go(
    threads: ThreadPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_pipeline, "TURN_BYTES", 1)
    gpu = FakeGpu()
    async with rig(gpu, threads, settings=NEVER) as made:
        before = [made.block(i) for i in BLOCKS]
        await made.tier.copy_in(made.inward(BLOCKS, BLOCKS), made.pool.memory)
        stop, loaded = StopSignal(), gpu.count("launch")
        store = made.tier.copy_out(made.outward(BLOCKS, [8 + i for i in BLOCKS]), made.pool.memory)
        storing = asyncio.ensure_future(stop.copied(store))
        await asyncio.sleep(0)
        urgent = HostPool(LAYOUT, CudaPinning(0, gpu))
        urgent.memory.urgent = True
        await made.tier.copy_out(made.outward([0, 1], [0, 1]), urgent.memory)
        await made.tier.copy_in(made.inward([0, 1], [10, 11]), made.pool.memory)
        assert gpu.count("launch") == loaded + (1 + 2 + 2) * loaded // 8, "one turn of the store, and all of the others"
        assert not storing.done()
        assert made.block(9) != before[1]
        urgent.close()
        stop.set(Stop.EXPIRED)
        assert not await wait_for(storing, 30), "a store that is stopped does not wait for its next turn"


@on_a_cpu
async def test_closing_waits_for_no_rate(threads: ThreadPools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pipeline, "TURN_BYTES", 1)
    async with rig(FakeGpu(), threads, settings=NEVER) as made:
        before = [made.block(i) for i in BLOCKS]
        await made.tier.copy_in(made.inward(BLOCKS, BLOCKS), made.pool.memory)
        storing = asyncio.ensure_future(
            made.tier.copy_out(made.outward(BLOCKS, [8 + i for i in BLOCKS]), made.pool.memory)
        )
        await asyncio.sleep(0)
        await made.tier.close()
        await wait_for(storing, 30)
        assert [made.block(8 + i) for i in BLOCKS] == before


@on_a_cpu
async def test_the_rate_beside_loads_holds_while_a_load_is_under_way(threads: ThreadPools) -> None:
    gpu = Slow()
    settings = CudaSection(store_rate=Size(1 << 40), store_rate_beside_loads=Size(1 << 39))
    async with rig(gpu, threads, settings=settings) as made:
        rate = made.tier.resources._store_rate
        assert rate() == 1 << 40
        gpu.go.clear()
        gpu.asked.clear()
        loading = asyncio.ensure_future(made.tier.copy_in(made.inward(BLOCKS, BLOCKS), made.pool.memory))
        await asyncio.to_thread(gpu.asked.wait, 30)
        assert rate() == 1 << 39
        gpu.go.set()
        await loading
        assert await made.there_and_back()


@on_a_cpu
async def test_configured_rates_reach_the_device(threads: ThreadPools) -> None:
    said = ["batches=false", "store_rate=1TiB", "store_rate_beside_loads=1GiB"]
    device = "cache.device=tests.support.cuda.tier:FakeCudaTier"
    config = load(overrides=[device, *(f"cuda.{key}" for key in said)], env={})
    tier = create_device_tier(config, LAYOUT, 0, threads)
    assert isinstance(tier, FakeCudaTier)
    await tier.open()
    assert not tier.resources.kernel_table.batches
    assert tier.resources._store_rate() == 1 << 40
    await tier.close()


@on_a_cpu
async def test_the_figures_of_this_kind_of_gpu_reach_its_copies(
    threads: ThreadPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = Tuning(grid=5, dma_most=4096, slots=3, costs=Costs(bus=1e9, gather=9e9))
    monkeypatch.setitem(tuning.MEASURED, (FakeGpu().describe(0).capability, False), figures)
    async with rig(FakeGpu(), threads) as made:
        table = made.tier.resources.kernel_table
        assert table.tuning == figures
        assert made.tier.statistics()["staging"] == 2 * 3 * table.slot_bytes
        assert await made.there_and_back()
