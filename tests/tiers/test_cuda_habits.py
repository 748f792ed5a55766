"""What a driver may do that the simulated one did not do before: each habit, and what becomes of it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from tests.machine.gpu import copy_speeds
from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.memory import BLOCK, Handles
from tests.support.cuda.shim import compiler
from tests.support.cuda.tier import as_numpy
from tests.support.waits import until
from transferd.blocks.copyplan import CopyPlan, plan_copy
from transferd.blocks.formats import RawPlanes
from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.errors import Closed, DeviceLost, TierError
from transferd.runtime.compat import wait_for
from transferd.runtime.threads import ThreadPools
from transferd.tiers import pinned
from transferd.tiers.base import DeviceHandle, HostMemory
from transferd.tiers.cuda import CudaDeviceTier, engine
from transferd.tiers.cuda.engine import DeviceArray
from transferd.tiers.cuda.ipc import KIND
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.pinned import HostPool
from transferd.tiers.staging import Staging

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")

LAYOUT = build_layout(CacheSection(layers=2, kv_heads=1, head_dim=8, block_size=4, device_blocks=6, host_blocks=6))


@pytest.fixture
def threads() -> Iterator[ThreadPools]:
    threads = ThreadPools(2, setup=2)
    yield threads
    threads.close()


# --- a copy may not cross two registrations -----------------------------------------------------------


@pytest.mark.parametrize("part", ["tier", "calls", "batches"])
@pytest.mark.parametrize("layout", copy_speeds.LAYOUTS)
async def test_the_benchmark_crosses_no_two_registrations(
    monkeypatch: pytest.MonkeyPatch, layout: str, part: copy_speeds.Part
) -> None:
    monkeypatch.setattr(pinned, "REGISTER_MOST", 1 << 20)  # as 1 GiB is to gigabytes
    gpu = FakeGpu(capacity=4 << 30)
    layouts = {layout: copy_speeds.LAYOUTS[layout] | {"layers": 20}}
    rows = await copy_speeds.measure(layout, part, driver=gpu, counts=(4,), layouts=layouts, runs=1)
    assert rows
    assert gpu.wrong() == []


# --- small allocations share a block ------------------------------------------------------------------


@pytest.mark.parametrize("handles", ["blocks", "allocations"])
@pytest.mark.parametrize("first", [0, 1], ids=["the first of a block", "not the first of a block"])
@pytest.mark.parametrize("pages", [False, True], ids=["arrays", "pages"])
def test_a_small_allocation_is_found_in_the_block_that_it_shares(handles: Handles, first: int, pages: bool) -> None:
    owner, other = FakeGpu(handles=handles), FakeGpu()
    with owner.current(owner.retain(0)):
        addresses = [owner.allocate(1000) for _ in range(3)]
        for number, address in enumerate(addresses):
            owner.fill(address, 10 + number, 1000, 0)
        owner.synchronize_stream(0)
    assert addresses[0] % BLOCK == 0
    assert addresses[2] - addresses[0] < BLOCK
    offered = addresses[first:]
    if pages:
        places = [address + 24 for address in offered]
        data = engine.export_pages(places, [[0, 100, i] for i in range(len(places))], device=0, driver=owner)
        data |= {"arrays": [array(plane, 0, region) for region, plane in enumerate("abc"[: len(places)])]}
        del data["segments"]
    else:
        caches = {
            plane: [DeviceArray(address, (4, 250), "uint8", 0, None)]
            for plane, address in zip("abc", offered, strict=False)
        }
        data = engine.export(caches, device=0, driver=owner)
    attached = engine.attach(data, other)
    found = {plane: set(as_numpy(arrays[0]).ravel().tolist()) for plane, arrays in attached.caches.items()}
    assert found == {plane: {10 + first + i} for i, plane in enumerate("abc"[: len(offered)])}


def array(plane: str, layer: int, region: int) -> dict[str, object]:
    return {"plane": plane, "layer": layer, "offset": 0, "shape": [4, 100], "dtype": "uint8", "region": region}


async def test_a_small_cache_of_the_daemon_shares_its_block_with_nothing_else(threads: ThreadPools) -> None:
    """An engine that maps the cache would map staging and segment tables along with it."""
    gpu = FakeGpu()
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu)
    await tier.open()
    start = tier.arena.origin
    assert [at for at in gpu.memory.owned if start // BLOCK == at // BLOCK] == [start]
    await tier.close()
    assert gpu.leaks() == []


# --- loading and allocating wait for what other ranks wait for ----------------------------------------


@asynccontextmanager
async def waiting_rank(gpu: FakeGpu, threads: ThreadPools) -> AsyncIterator[CudaDeviceTier]:
    """A rank with a task that waits for a timeline which its engine has not advanced, on the GPU's own queue."""
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu)
    await tier.open()
    waiting = asyncio.ensure_future(tier.reached((0, 5)))
    await until(lambda: gpu.count("wait_value") == 1, "the wait is on the stream")
    yield tier
    assert not waiting.done()
    await tier.close()  # ends the wait
    with pytest.raises(Closed):
        await waiting
    assert gpu.wrong() == []


async def test_a_rank_opens_while_another_waits_and_loads_no_kernel_of_its_own(threads: ThreadPools) -> None:
    gpu = FakeGpu(seed=4, waiting=frozenset({"load", "function"}))
    async with waiting_rank(gpu, threads) as first:
        second = CudaDeviceTier(LAYOUT, 1, 0, threads, driver=gpu)
        await wait_for(second.open(), 20)
        assert gpu.count("load") == 1
        await wait_for(first.copy_out(*moved(first)), 20)
    assert gpu.count("unload") == 0, "the second rank uses it"
    await wait_for(second.copy_out(*moved(second)), 20)
    await second.close()
    assert gpu.count("unload") == 1
    assert gpu.leaks() == []


async def test_allocating_beside_a_wait_ends_with_it_and_stops_no_copy(threads: ThreadPools) -> None:
    gpu = FakeGpu(seed=5)
    second = CudaDeviceTier(LAYOUT, 1, 0, threads, driver=gpu)
    async with waiting_rank(gpu, threads) as first:
        before = gpu.count("allocate")
        opening = asyncio.ensure_future(second.open())
        await until(lambda: gpu.count("allocate") > before, "the second rank allocates")
        await wait_for(first.copy_out(*moved(first)), 20)
        assert not opening.done(), "this driver's allocation waits"
    await wait_for(opening, 20)
    await second.close()
    assert gpu.leaks() == []


async def test_a_copy_in_a_new_order_beside_a_wait_allocates_nothing(threads: ThreadPools) -> None:
    """Objects of FastDeploy have another order of segments, whose table is made with their first copy."""
    gpu = FakeGpu(seed=6)
    async with waiting_rank(gpu, threads) as first:
        objects = RawPlanes(LAYOUT)
        pinning = CudaPinning(0, gpu)
        staging = Staging(LAYOUT, 1 << 20, objects.slot_bytes, objects.offsets, pinning=pinning)
        before = gpu.count("allocate")
        plan = plan_copy(first.arena.geometry, [1, 3], staging.packed, [0, 1])
        await wait_for(first.copy_out(plan, staging.memory), 20)
        assert gpu.count("allocate") == before
        assert first.statistics()["copies"]["out"]["gather"] == 1
    staging.close()
    assert gpu.leaks() == []


_pools: list[HostPool] = []


def moved(tier: CudaDeviceTier) -> tuple[CopyPlan, HostMemory]:
    _pools.append(HostPool(LAYOUT))
    return plan_copy(tier.arena.geometry, [0, 2], LAYOUT.host, [1, 2]), _pools[-1].memory


@pytest.fixture(autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    while _pools:
        _pools.pop().close()


# --- an unknown error of a call that shares -----------------------------------------------------------


async def test_an_event_that_cannot_be_opened_for_an_unknown_reason_is_done_without(threads: ThreadPools) -> None:
    gpu, other = FakeGpu(seed=1), FakeGpu(seed=2)
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu)
    await tier.open()
    other.refuse("open_event", "CUDA_ERROR_UNKNOWN")
    with capture_logs() as logs:
        attached = engine.attach(tier.handle().data, other)
    assert attached.ready is None
    assert attached.timelines is not None
    assert "CUDA_ERROR_UNKNOWN" in logs[0]["reason"]
    del attached
    await tier.close()


@pytest.mark.parametrize("call", ["export_event", "export_memory"])
async def test_a_rank_opens_without_what_cannot_be_shared_for_an_unknown_reason(
    threads: ThreadPools, call: str
) -> None:
    gpu = FakeGpu(seed=1)
    gpu.refuse(call, "CUDA_ERROR_UNKNOWN")
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu)
    await tier.open()
    assert (tier.resources.event == 0) == (call == "export_event")
    assert (tier.resources.timelines is None) == (call == "export_memory")
    await tier.copy_out(*moved(tier))
    await tier.close()
    assert gpu.leaks() == []


async def test_memory_that_cannot_be_opened_for_an_unknown_reason_is_refused_and_the_rank_lives(
    threads: ThreadPools,
) -> None:
    gpu, other = FakeGpu(seed=1), FakeGpu(seed=2)
    with other.current(other.retain(0)):
        address = other.allocate(4 << 20)
    planes = {part.plane.name for part in LAYOUT.segments}
    shape = (LAYOUT.device_blocks, *LAYOUT.segments[0].plane.shape)
    caches = {
        plane: [DeviceArray(address + (2 * i + j) * 65536, shape, "uint16", 0, None) for j in range(2)]
        for i, plane in enumerate(sorted(planes))
    }
    handle = DeviceHandle(KIND, engine.export(caches, device=0, driver=other))
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu)
    gpu.refuse("open_memory", "CUDA_ERROR_UNKNOWN")
    with pytest.raises(TierError, match="CUDA_ERROR_UNKNOWN") as caught:
        await tier.attach(handle)
    assert not isinstance(caught.value, DeviceLost)
    await tier.attach(handle)  # the device is well
    await tier.close()
    assert gpu.leaks() == []


def test_an_unknown_error_of_work_still_means_that_the_device_is_lost() -> None:
    gpu = FakeGpu()
    gpu.refuse("record", "CUDA_ERROR_UNKNOWN")
    with pytest.raises(DeviceLost), gpu.current(gpu.retain(0)):
        gpu.record(gpu.create_event(), gpu.create_stream())


# --- addresses that no process has --------------------------------------------------------------------


def test_a_dma_of_an_address_that_no_process_has_ends_the_process() -> None:
    code = """
import numpy as np
from tests.support.cuda.gpu import FakeGpu
gpu = FakeGpu()
with gpu.current(gpu.retain(0)):
    gpu.copy(gpu.allocate(8), 1 << 47, 8, 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "no process has" in done.stderr
