"""The CUDA tier on a GPU that watches: order, ends, failures, and nothing left behind."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from transferd.blocks.copyplan import CopyPlan, plan_copy
from transferd.blocks.formats import RawPlanes
from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.errors import Closed, DeviceLost, TierError
from transferd.runtime.compat import timeout, wait_for
from transferd.runtime.threads import ThreadPools
from transferd.tasks import Stop
from transferd.tiers import pinned
from transferd.tiers.cuda import CudaDeviceTier, copy_pipeline, submitter
from transferd.tiers.cuda import tier as device_resources
from transferd.tiers.cuda.costs import Costs
from transferd.tiers.cuda.driver import OUT_OF_MEMORY
from transferd.tiers.cuda.pinning import CudaPinning, is_registered
from transferd.tiers.cuda.tuning import Tuning
from transferd.tiers.hostcopy import copy_runs
from transferd.tiers.pinned import HostPool, HostRegion
from transferd.tiers.staging import Staging
from transferd.workers.job import StopSignal

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")

CACHE = CacheSection(layers=2, kv_heads=1, head_dim=8, block_size=4, device_blocks=12, host_blocks=24)
LAYOUT = build_layout(CACHE)
ONE_BLOCK = 1  # a slot too small for two blocks: each chunk is one, or a part of one
BLOCKS = list(range(8))
APART = BLOCKS[::-1]  # host blocks that no DMA can join


@pytest.fixture
def threads() -> Iterator[ThreadPools]:
    threads = ThreadPools(2)
    yield threads
    threads.close()


class Rig:
    """An open tier on its GPU, and a registered pool with random bytes in it."""

    def __init__(self, gpu: FakeGpu, tier: CudaDeviceTier, pool: HostPool) -> None:
        self.gpu = gpu
        self.tier = tier
        self.pool = pool
        self.memory = np.frombuffer(pool.memory.view, dtype=np.uint8)
        self.memory[:] = np.random.default_rng(7).integers(0, 256, self.memory.shape, dtype=np.uint8)

    def inward(self, host: list[int], device: list[int]) -> CopyPlan:
        return plan_copy(LAYOUT.host, host, self.tier.arena.geometry, device)

    def outward(self, device: list[int], host: list[int]) -> CopyPlan:
        return plan_copy(self.tier.arena.geometry, device, LAYOUT.host, host)

    def block(self, host: int) -> bytes:
        start = host * int(LAYOUT.host.strides[0])
        return self.memory[start : start + LAYOUT.block_bytes].tobytes()

    async def there_and_back(self) -> bool:
        """Eight blocks to the device and back to other places. True if they are the same."""
        before = [self.block(i) for i in BLOCKS]
        await self.tier.copy_in(self.inward(BLOCKS, BLOCKS[::-1]), self.pool.memory)
        await self.tier.copy_out(self.outward(BLOCKS[::-1], [8 + i for i in BLOCKS]), self.pool.memory)
        return [self.block(8 + i) for i in BLOCKS] == before


@asynccontextmanager
async def rig(gpu: FakeGpu, threads: ThreadPools, *, clean: bool = True, **options: object) -> AsyncIterator[Rig]:
    """clean: what is wrong on the GPU, or left on it at the end, fails the test."""
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu, **({"slot_bytes": ONE_BLOCK} | options))  # type: ignore[arg-type]
    await tier.open()
    pool = HostPool(LAYOUT, CudaPinning(0, gpu))
    made = Rig(gpu, tier, pool)
    try:
        yield made
    finally:
        del made.memory
        await tier.close()
        pool.close()
    if clean:
        assert gpu.wrong() == []
        assert gpu.leaks() == []


# --- order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
async def test_streams_may_run_in_any_order_that_the_events_allow(threads: ThreadPools, seed: int) -> None:
    async with rig(FakeGpu(seed=seed, batches=seed % 2 == 0), threads) as made:
        assert await made.there_and_back()


class Deaf(FakeGpu):
    """A GPU on which one call of a name, by its number, is forgotten: a bug as the tier might have it."""

    def __init__(self, forget: str, number: int) -> None:
        super().__init__(seed=number, batches=False)
        self.forget = forget
        self.left = number
        self.forgotten = False

    def _forgets(self, call: str) -> bool:
        if call != self.forget:
            return False
        self.left -= 1
        self.forgotten |= self.left == -1
        return self.left == -1

    def wait(self, stream: int, event: int) -> None:
        meaning = bool(self._signal(event).recorded)  # waiting for what was never recorded is no wait
        if not (meaning and self._forgets("wait")):
            super().wait(stream, event)

    def synchronize(self, event: int) -> None:
        if not self._forgets("synchronize"):
            super().synchronize(event)


@pytest.mark.parametrize(
    ("forget", "number"), [*(("wait", n) for n in range(28)), ("synchronize", 0), ("synchronize", 1)]
)
async def test_a_wait_that_is_missing_is_seen(threads: ThreadPools, forget: str, number: int) -> None:
    gpu = Deaf(forget, number)
    async with rig(gpu, threads, clean=False) as made:
        same = await made.there_and_back()
    assert gpu.forgotten
    assert not same or gpu.wrong(), "each wait is needed, and the fake would notice"


async def test_a_copy_has_ended_when_it_returns(threads: ThreadPools) -> None:
    async with rig(FakeGpu(), threads) as made:
        await made.tier.copy_in(made.inward(BLOCKS, BLOCKS), made.pool.memory)
        made.memory[:] = 0  # the engine may do so
        await made.tier.copy_out(made.outward(BLOCKS, BLOCKS), made.pool.memory)
        assert made.block(0) != bytes(LAYOUT.block_bytes)
        assert made.gpu.count("synchronize") == 2


async def test_copies_wait_for_what_the_engine_has_recorded(threads: ThreadPools) -> None:
    """The engine pushes a task while its kernels still write the blocks (docs/adr/0012; FastDeploy #6144)."""
    daemon, engine = FakeGpu(seed=1), FakeGpu(seed=2)
    async with rig(daemon, threads) as made:
        handle = made.tier.handle().data
        context = engine.retain(0)
        with engine.current(context):
            event = engine.open_event(bytes.fromhex(handle["event"]))
            cache = engine.open_memory(bytes.fromhex(handle["regions"][0]["handle"]))
            stream = engine.create_stream()
            engine.fill(cache, 0x5A, LAYOUT.device.extent, stream)  # the engine's compute, not done yet
            engine.record(event, stream)
            copying = asyncio.ensure_future(made.tier.copy_out(made.outward([3], [0]), made.pool.memory))
            await asyncio.wait({copying}, timeout=0.05)
            assert not copying.done()
            engine.synchronize_stream(stream)  # now it is done
            await wait_for(copying, 60)
            assert made.block(0) == b"\x5a" * LAYOUT.block_bytes
            engine.fill(cache, 0x11, LAYOUT.device.extent, stream)  # reads and writes of the next step
            engine.record(event, stream)
            loading = asyncio.ensure_future(made.tier.copy_in(made.inward([1], [5]), made.pool.memory))
            await asyncio.wait({loading}, timeout=0.05)
            assert not loading.done(), "a load overwrites nothing that is still in use"
            engine.synchronize_stream(stream)
            await wait_for(loading, 60)
            await made.tier.copy_out(made.outward([5, 6], [7, 8]), made.pool.memory)
            assert made.block(7) == made.block(1)
            assert made.block(8) == b"\x11" * LAYOUT.block_bytes
            engine.destroy_stream(stream)
            engine.destroy_event(event)
            engine.close_memory(cache)
        engine.release(0)
    assert engine.leaks() == []


class Slow(FakeGpu):
    """A GPU that ends nothing before `go` is set. asked: the host waits for the end of something."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.asked = threading.Event()
        self.go.set()

    def synchronize(self, event: int) -> None:
        self.asked.set()
        assert self.go.wait(30)
        super().synchronize(event)


async def test_a_copy_that_is_all_under_way_runs_to_its_end_when_nobody_waits_for_it_any_more(
    threads: ThreadPools,
) -> None:
    gpu = Slow()
    async with rig(gpu, threads) as made:
        await made.tier.copy_in(made.inward([0], [0]), made.pool.memory)
        gpu.asked.clear()
        gpu.go.clear()
        copying = asyncio.ensure_future(made.tier.copy_out(made.outward([0], [9]), made.pool.memory))
        await asyncio.to_thread(gpu.asked.wait, 30)
        copying.cancel()
        await asyncio.sleep(0)
        assert not copying.done(), "its end is waited for"
        gpu.go.set()
        with pytest.raises(asyncio.CancelledError):
            await copying
        await made.tier.copy_out(made.outward([0], [10]), made.pool.memory)
        assert made.block(9) == made.block(10) == made.block(0)


async def test_an_idle_tier_calls_nothing_and_its_threads_sleep(threads: ThreadPools) -> None:
    gpu, before = FakeGpu(), set(threading.enumerate())  # of earlier tests, some of which leave a device open

    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread not in before}

    async with rig(gpu, threads) as made:
        await made.there_and_back()
        calls = len(gpu.calls)
        await asyncio.sleep(0.05)
        assert len(gpu.calls) == calls
        assert {"transferd-cuda-out", "transferd-cuda-in"} <= names()
    assert not [name for name in names() if name.startswith("transferd-cuda")]


# --- which way ------------------------------------------------------------------------------------------


async def test_short_segments_are_gathered_and_long_ones_go_in_rows_or_straight(threads: ThreadPools) -> None:
    no_rows = Tuning(grid=48, costs=Costs(row_call_s=1.0))
    long = build_layout(
        CacheSection(layers=8, kv_heads=16, head_dim=128, block_size=64, device_blocks=2, host_blocks=2)
    )
    for layout, way, tuning in ((LAYOUT, "gather", None), (long, "rows", None), (long, "straight", no_rows)):
        gpu = FakeGpu()
        tier = CudaDeviceTier(layout, 0, 0, threads, driver=gpu, tuning=tuning)
        await tier.open()
        pool = HostPool(layout, CudaPinning(0, gpu))
        await tier.copy_in(plan_copy(layout.host, [1, 0], layout.device, [1, 0]), pool.memory)
        assert tier.statistics()["copies"]["in"] == {"gather": 0, "rows": 0, "pairs": 0, "straight": 0} | {way: 1}
        assert gpu.count("copy_batch") == (way != "rows")
        assert gpu.count("launch") == (way == "gather"), "a kernel is loaded, and staging made, only if it is used"
        assert (gpu.count("load"), bool(tier.statistics()["staging"])) == (way == "gather", way == "gather")
        await tier.close()
        pool.close()
        assert gpu.wrong() == []


async def test_loads_may_go_straight_where_stores_are_gathered(threads: ThreadPools) -> None:
    cheap_in = Costs(dma_s=0.0, row_call_s=1.0, short_out_s=1e-3, short_in_s=0.0)
    async with rig(FakeGpu(), threads, tuning=Tuning(grid=48, costs=cheap_in)) as made:
        assert await made.there_and_back()
        ways = {
            "in": {"gather": 0, "rows": 0, "pairs": 0, "straight": 1},
            "out": {"gather": 1, "rows": 0, "pairs": 0, "straight": 0},
        }
        assert made.tier.statistics()["copies"] == ways


FORMATS: dict[str, dict[str, object]] = {
    "gqa": {"kv_heads": 2, "head_dim": 8},
    "fp8": {"kv_heads": 2, "head_dim": 16, "dtype": "block_wise_fp8"},
    "mla": {"attention": "mla", "kv_lora_rank": 32, "qk_rope_head_dim": 4},
    "dsa": {"attention": "dsa", "kv_lora_rank": 128, "qk_rope_head_dim": 16},
    "mtp": {"kv_heads": 1, "head_dim": 9, "mtp_layers": 2, "mtp_blocks": 9},
}


@pytest.mark.parametrize("slot_bytes", [ONE_BLOCK, 1 << 16])
@pytest.mark.parametrize("name", FORMATS)
async def test_blocks_in_the_order_of_fastdeploys_objects_are_gathered_too(
    threads: ThreadPools, name: str, slot_bytes: int
) -> None:
    """Its objects hold plane behind plane: another order of the same segments, and still one range a block."""
    sizes = {"layers": 3, "block_size": 4, "device_blocks": 5, "host_blocks": 0} | FORMATS[name]
    layout = build_layout(CacheSection(**sizes))  # type: ignore[arg-type]
    objects, gpu = RawPlanes(layout), FakeGpu()
    tier = CudaDeviceTier(layout, 0, 0, threads, driver=gpu, slot_bytes=slot_bytes)
    await tier.open()
    staging = Staging(layout, 1 << 20, objects.slot_bytes, objects.offsets, pinning=CudaPinning(0, gpu))
    content = np.frombuffer(staging.memory.view, dtype=np.uint8)
    content[:] = np.random.default_rng(3).integers(0, 256, content.shape, dtype=np.uint8)
    inward = plan_copy(staging.packed, [4, 1, 2], tier.arena.geometry, [0, 4, 1])
    outward = plan_copy(tier.arena.geometry, [0, 4, 1], staging.packed, [9, 7, 8])
    await tier.copy_in(inward, staging.memory)
    await tier.copy_out(outward, staging.memory)
    objects_of = [view.tobytes() for view in staging.views((4, 1, 2, 9, 7, 8))]
    assert objects_of[3:] == objects_of[:3]
    device = np.ctypeslib.as_array((ctypes.c_uint8 * layout.device.extent).from_address(tier.arena.origin))
    expected = device.copy()
    copy_runs(content.ctypes.data, expected.ctypes.data, inward.runs)
    assert (device == expected).all(), "each segment is where the layout has it"
    assert tier.statistics()["copies"] == {
        way: {"gather": 1, "rows": 0, "pairs": 0, "straight": 0} for way in ("out", "in")
    }
    assert tier.statistics()["unregistered"] == 0
    await tier.copy_in(inward, staging.memory)
    assert gpu.count("allocate") == 9, "room for more tables in each direction, from the start"
    del content, device
    await tier.close()
    staging.close()
    assert gpu.wrong() == []
    assert gpu.leaks() == []


@pytest.mark.parametrize("registered", [True, False])
async def test_memory_that_is_not_registered_is_never_given_to_a_batch(threads: ThreadPools, registered: bool) -> None:
    gpu = FakeGpu()
    async with rig(gpu, threads, slot_bytes=1 << 16) as made:
        pool = made.pool if registered else HostPool(LAYOUT)
        await made.tier.copy_in(made.inward(APART, BLOCKS), pool.memory)
        assert (gpu.count("copy_batch"), gpu.count("copy") > 1) == ((1, False) if registered else (0, True))
        assert made.tier.statistics()["unregistered"] == (not registered)
        if not registered:
            pool.close()


@pytest.mark.parametrize("registered", [True, False])
async def test_a_plan_of_runs_alone_goes_run_by_run(threads: ThreadPools, registered: bool) -> None:
    gpu = FakeGpu()
    async with rig(gpu, threads) as made:
        region = HostRegion(4096, CudaPinning(0, gpu)) if registered else HostRegion(4096)
        region.view[:4096] = bytes(range(256)) * 16
        inward = CopyPlan(300, runs=np.array([[10, 0, 100], [200, 1000, 200]], dtype=np.int64))
        outward = CopyPlan(200, runs=np.array([[1000, 2000, 200]], dtype=np.int64))
        await made.tier.copy_in(inward, region)
        await made.tier.copy_out(outward, region)
        assert bytes(region.view[2000:2200]) == bytes(region.view[200:400])
        assert made.tier.statistics()["copies"]["in"]["straight"] == 1
        assert gpu.count("copy_batch") == registered
        region.close()


@pytest.mark.parametrize("outward", [True, False])
async def test_no_dma_crosses_from_one_registration_into_the_next(
    threads: ThreadPools, monkeypatch: pytest.MonkeyPatch, outward: bool
) -> None:
    monkeypatch.setattr(pinned, "REGISTER_MOST", 4096)
    gpu = FakeGpu()
    async with rig(gpu, threads) as made:
        region = HostRegion(3 * 4096, CudaPinning(0, gpu))
        assert len(gpu.memory.registered) > 3
        region.view[:] = bytes(range(256)) * 48
        cache = np.ctypeslib.as_array((ctypes.c_uint8 * LAYOUT.device.extent).from_address(made.tier.arena.origin))
        cache[:] = 7
        expected = bytearray(region.view), cache.copy()
        length = len(cache) - 100
        runs = np.array([[4000, 50, 200], [8000, 300, length - 300]], dtype=np.int64)[
            :, [1, 0, 2] if outward else [0, 1, 2]
        ]
        copy = made.tier.copy_out if outward else made.tier.copy_in
        await copy(CopyPlan(int(runs[:, 2].sum()), runs=np.ascontiguousarray(runs)), region)
        for source, target, nbytes in runs.tolist():
            if outward:
                expected[0][target : target + nbytes] = bytes([7]) * nbytes
            else:
                expected[1][target : target + nbytes] = np.frombuffer(expected[0], np.uint8)[source : source + nbytes]
        assert bytes(region.view) == bytes(expected[0])
        assert (cache == expected[1]).all()
        del cache
        region.close()


async def test_batches_are_short_and_given_up_when_the_driver_refuses_one(
    threads: ThreadPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitter, "BATCH_MOST", 3)
    gpu = FakeGpu()
    async with rig(gpu, threads, copy_path="straight") as made:
        assert await made.there_and_back()
        each = -(-8 * len(LAYOUT.segments) // 3)
        assert gpu.count("copy_batch") == 2 * each
        gpu.refuse("copy_batch", "CUDA_ERROR_INVALID_VALUE", after=2)
        with capture_logs() as logs:
            assert await made.there_and_back(), "the rest goes one by one"
            assert await made.there_and_back()
        assert [entry["log_level"] for entry in logs] == ["warning"]
        assert gpu.count("copy_batch") == 2 * each + 3 + 2 * each, "the other direction has had no refusal"


async def test_work_on_the_device_is_bounded_and_reused(threads: ThreadPools) -> None:
    gpu = FakeGpu()
    async with rig(gpu, threads) as made:
        await made.there_and_back()
        made_once = {call: gpu.count(call) for call in ("allocate", "create_stream", "create_event")}
        for _ in range(5):
            await made.there_and_back()
        assert {call: gpu.count(call) for call in made_once} == made_once
        assert made_once["allocate"] == 9, "cache, timelines, table, and two slots and room for tables each way"
        assert made_once["create_stream"] == 5


async def test_a_small_copy_does_not_wait_for_the_whole_of_a_large_one(
    threads: ThreadPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns: the second copy is done while the first has most of its way before it."""
    monkeypatch.setattr(copy_pipeline, "TURN_BYTES", 1)
    gpu, ended = Slow(), []
    async with rig(gpu, threads) as made:
        gpu.go.clear()
        large = asyncio.ensure_future(made.tier.copy_in(made.inward(BLOCKS, BLOCKS), made.pool.memory))
        await asyncio.to_thread(gpu.asked.wait, 30)
        submitted = gpu.count("copy_batch") + gpu.count("copy")
        small = asyncio.ensure_future(made.tier.copy_in(made.inward([9], [9]), made.pool.memory))
        for name, copying in (("large", large), ("small", small)):
            copying.add_done_callback(functools.partial(lambda name, _: ended.append(name), name))
        await asyncio.sleep(0)
        gpu.go.set()
        await asyncio.gather(large, small)
    assert ended == ["small", "large"]
    assert submitted <= copy_pipeline.WINDOW * len(LAYOUT.segments) + 1, "no more than a window is submitted ahead"


async def test_many_small_dmas_fill_no_launch_queue(threads: ThreadPools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pipeline, "TURN_DMAS", 1)
    monkeypatch.setattr(copy_pipeline, "QUEUE_DMAS", 2)
    gpu = Slow()
    async with rig(gpu, threads) as made:
        gpu.go.clear()
        copying = asyncio.ensure_future(made.tier.copy_in(made.inward(BLOCKS, BLOCKS), made.pool.memory))
        await asyncio.to_thread(gpu.asked.wait, 30)
        assert gpu.count("launch") == 2, "two turns of one DMA each, though the window has four"
        gpu.go.set()
        await copying
        assert await made.there_and_back()


async def test_a_copy_that_is_stopped_moves_nothing_more_and_says_so_when_nothing_moves(
    threads: ThreadPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_pipeline, "TURN_BYTES", 1)
    gpu = Slow()
    async with rig(gpu, threads) as made:
        stop = StopSignal()
        gpu.go.clear()
        copying = asyncio.ensure_future(stop.copied(made.tier.copy_in(made.inward(BLOCKS, BLOCKS), made.pool.memory)))
        await asyncio.to_thread(gpu.asked.wait, 30)
        queued = asyncio.ensure_future(stop.copied(made.tier.copy_in(made.inward([9], [9]), made.pool.memory)))
        await asyncio.sleep(0)
        launched = gpu.count("launch")
        stop.set(Stop.EXPIRED)
        await asyncio.sleep(0)
        assert not copying.done(), "some of it moves"
        gpu.go.set()
        assert not await wait_for(copying, 60)
        assert not await wait_for(queued, 60)
        assert not any(gpu._streams.values()), "nothing moves any more"
        assert gpu.count("launch") <= launched + 1 < 2 * len(BLOCKS), "and the rest was never submitted"
        assert await made.there_and_back(), "and the next copy works"


async def test_a_rank_whose_device_hangs_holds_up_no_other(threads: ThreadPools) -> None:
    """Whatever call blocks, it blocks the thread of one direction of one device."""
    hung = Slow()
    async with rig(hung, threads) as first, rig(FakeGpu(), threads) as second:
        hung.go.clear()
        copies = [
            asyncio.ensure_future(first.tier.copy_in(first.inward([n], [n]), first.pool.memory)) for n in range(8)
        ]
        await asyncio.to_thread(hung.asked.wait, 30)
        assert await wait_for(second.there_and_back(), 60)
        assert not any(copying.done() for copying in copies)
        assert first.tier.resources.inward.waiting_s > 0
        hung.go.set()
        await asyncio.gather(*copies)
        assert first.tier.resources.inward.waiting_s == 0


# --- failures -----------------------------------------------------------------------------------------


async def test_no_room_for_the_cache_is_said_with_figures_and_leaves_nothing(threads: ThreadPools) -> None:
    gpu = FakeGpu(capacity=LAYOUT.device.extent + 1000)
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu)
    with pytest.raises(
        TierError, match=rf"device 0 \(Fake GPU\) has too little free memory: the cache needs {LAYOUT.device.extent}"
    ) as e:
        await tier.open()
    assert e.value.reason == OUT_OF_MEMORY
    assert "\n" not in str(e.value)
    assert gpu.leaks() == []


@pytest.mark.parametrize(
    ("devices", "said"),
    [(0, "sees no GPU: check CUDA_VISIBLE_DEVICES"), (1, "no device 3: this process sees 1 GPU, device 0")],
)
async def test_an_absent_device_is_named(threads: ThreadPools, devices: int, said: str) -> None:
    gpu = FakeGpu(devices=devices)
    with pytest.raises(TierError, match=said):
        await CudaDeviceTier(LAYOUT, 0, 3, threads, driver=gpu).open()
    with pytest.raises(TierError, match=said):
        CudaPinning(3, gpu)


def calls_of_opening() -> list[tuple[str, int]]:
    """(name, number) of every call that an opening makes."""
    gpu, threads = FakeGpu(), ThreadPools(1)

    async def go() -> None:
        tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu, slot_bytes=ONE_BLOCK)
        await tier.open()

    asyncio.run(go())
    seen: dict[str, int] = {}
    found = []
    for call in gpu.calls:
        found.append((call, seen.get(call, 0)))
        seen[call] = seen.get(call, 0) + 1
    return [(call, number) for call, number in found if call not in ("compile", "device_count", "describe")]


async def test_whichever_call_fails_while_it_opens_nothing_is_left(threads: ThreadPools) -> None:
    calls = await asyncio.to_thread(calls_of_opening)
    assert len(calls) > 20
    for call, number in calls:
        gpu = FakeGpu()
        gpu.refuse(call, "CUDA_ERROR_INVALID_VALUE", after=number)
        tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu, slot_bytes=ONE_BLOCK)
        problem = ""
        try:
            await tier.open()
        except TierError as error:
            problem = str(error)
        if problem:
            assert call in problem
        else:  # what engines order their work by is optional: they can push when compute is done
            data = tier.handle().data
            assert data["event"] == "" or data["timelines"] is None, f"{call}, call {number}, was needed"
            await tier.close()
        assert gpu.leaks() == [], f"after {call}, call {number}"
        if call != "synchronize_stream":  # what cannot be waited for is freed all the same: CUDA waits then
            assert gpu.wrong() == []


@pytest.mark.parametrize("call", ["launch", "copy", "record", "wait"])
@pytest.mark.parametrize("after", [0, 3, 7])
async def test_a_copy_that_cannot_be_submitted_fails_when_all_of_it_has_ended(
    threads: ThreadPools, call: str, after: int
) -> None:
    gpu = FakeGpu(batches=False)
    async with rig(gpu, threads) as made:
        gpu.refuse(call, "CUDA_ERROR_INVALID_VALUE", after=after)
        with pytest.raises(TierError, match=call) as caught:
            await made.tier.copy_in(made.inward(BLOCKS, BLOCKS), made.pool.memory)
        assert not isinstance(caught.value, DeviceLost)
        assert not any(gpu._streams.values()), "nothing moves any more"
        assert await made.there_and_back(), "and the next copy works"


@pytest.mark.parametrize("call", ["synchronize", "copy_batch", "launch"])
@pytest.mark.parametrize("answer", ["CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_LAUNCH_FAILED"])
async def test_every_copy_on_a_lost_device_reports_it_and_close_succeeds(
    threads: ThreadPools, answer: str, call: str
) -> None:
    gpu = FakeGpu()
    async with rig(gpu, threads, clean=False, slot_bytes=1 << 16) as made:
        gpu.refuse(call, answer)
        with pytest.raises(DeviceLost, match=answer):
            await made.tier.copy_in(made.inward(APART, BLOCKS), made.pool.memory)
        with pytest.raises(DeviceLost):
            await made.tier.copy_out(made.outward([0], [0]), made.pool.memory)
        waiters = [pipeline._thread for pipeline in (made.tier.resources.outward, made.tier.resources.inward)]
    assert not any(thread.is_alive() for thread in waiters), "and nothing waits any more"


async def test_a_kernel_that_leaves_its_memory_loses_the_device(threads: ThreadPools) -> None:
    gpu = FakeGpu()
    async with rig(gpu, threads, clean=False, slot_bytes=1 << 16) as made:
        made.tier.resources.kernel_table.main.cutter.stride = 1 << 30  # a bug in the arithmetic
        with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
            await made.tier.copy_out(made.outward([0, 1], [0, 1]), made.pool.memory)


async def test_an_error_while_closing_is_raised_after_everything_else_was_freed(threads: ThreadPools) -> None:
    gpu = FakeGpu()
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu)
    await tier.open()
    gpu.refuse("destroy_stream", "CUDA_ERROR_INVALID_HANDLE")
    with pytest.raises(TierError, match="destroy_stream"):
        await tier.close()
    assert len(gpu.leaks()) == 1
    assert gpu.leaks()[0].startswith("stream")


async def test_an_engine_that_dies_before_its_event_keeps_the_memory_and_a_close_does_not_wait_for_ever(
    threads: ThreadPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is the older way. Nobody can make it happen; but only the tasks of that engine wait for it."""
    monkeypatch.setattr(device_resources, "CLOSE_S", 0.05)
    gpu, engine = FakeGpu(), FakeGpu()
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu)
    await tier.open()
    with engine.current(engine.retain(0)):
        event = engine.open_event(bytes.fromhex(tier.handle().data["event"]))
        stream = engine.create_stream()
        engine.record(event, stream)  # and the engine is killed before it gets there
    pool = HostPool(LAYOUT, CudaPinning(0, gpu))
    resources, cache = tier.resources, tier.arena.origin
    copying = asyncio.ensure_future(tier.copy_out(plan_copy(tier.arena.geometry, [0], LAYOUT.host, [0]), pool.memory))
    while resources._engine is None or resources._engine.gate.waits_for is None:  # noqa: ASYNC110 - a few turns
        await asyncio.sleep(0.001)
    withdrawn = asyncio.ensure_future(tier.copy_in(plan_copy(LAYOUT.host, [0], LAYOUT.device, [0]), pool.memory))
    await asyncio.sleep(0)
    withdrawn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait_for(withdrawn, 60)
    with pytest.raises(TierError, match="never reached the engine's event") as caught:
        await tier.close()
    assert caught.value.reason == "device_stuck"
    with pytest.raises(Closed):
        await wait_for(copying, 60)
    assert cache in gpu.memory.owned, "nothing is freed while something is on the device"
    assert gpu.wrong() == [], "and nothing was called that waits for it"
    with engine.current(engine.retain(0)):
        engine.synchronize_stream(stream)  # so that the test can end
        engine.destroy_event(event)
    assert await asyncio.to_thread(resources._engine.gate.ended, 10)
    pool.close()


async def test_it_can_be_closed_and_opened_again_and_holds_nothing_of_before(threads: ThreadPools) -> None:
    gpu = FakeGpu()
    async with rig(gpu, threads) as made:
        await made.tier.copy_in(made.inward(BLOCKS, BLOCKS), made.pool.memory)
        await made.tier.close()
        await made.tier.open()
        await made.tier.copy_out(made.outward(BLOCKS, BLOCKS), made.pool.memory)
        assert made.block(3) == bytes(LAYOUT.block_bytes)


# --- pinning ------------------------------------------------------------------------------------------


def test_host_memory_is_registered_as_long_as_it_lives() -> None:
    gpu = FakeGpu()
    region = HostRegion(10_000, CudaPinning(0, gpu))
    assert region.pinned
    assert is_registered(region.address)
    assert gpu.memory.registered[region.address].nbytes == region.nbytes
    address = region.address
    region.close()
    assert not is_registered(address)
    assert gpu.leaks() == []


@pytest.mark.parametrize("refused", ["register_host", "retain"])
def test_where_registering_is_refused_memory_is_pageable_and_says_why(refused: str) -> None:
    gpu = FakeGpu()
    pinning = CudaPinning(0, gpu)
    gpu.refuse(refused, "CUDA_ERROR_NOT_PERMITTED")
    region = HostRegion(10_000, pinning)
    assert not region.pinned
    assert "CUDA_ERROR_NOT_PERMITTED" in region.degraded
    assert not is_registered(region.address)
    region.close()
    assert gpu.leaks() == []


# --- what the fake itself sees --------------------------------------------------------------------------


def in_context(gpu: FakeGpu, work: Callable[[], None]) -> None:
    with gpu.current(gpu.retain(0)):
        work()
    gpu.release(0)


def test_memory_freed_under_a_copy_is_seen() -> None:
    gpu = FakeGpu()

    def work() -> None:
        one, other, stream = gpu.allocate(100), gpu.allocate(100), gpu.create_stream()
        gpu.copy(one, other, 100, stream)
        gpu.free(other)
        gpu.synchronize_stream(stream)
        gpu.free(one)
        gpu.destroy_stream(stream)

    in_context(gpu, work)
    assert any("is freed, and nobody has waited" in problem for problem in gpu.wrong())
    assert any("is gone when" in problem for problem in gpu.wrong())


def test_a_copy_past_the_end_of_memory_and_a_call_without_a_context_are_refused() -> None:
    gpu = FakeGpu()

    def work() -> None:
        one, other = gpu.allocate(100), gpu.allocate(200)
        with pytest.raises(TierError, match="INVALID_VALUE"):
            gpu.copy(one, other, 101, 0)
        gpu.free(one)
        gpu.free(other)

    in_context(gpu, work)
    with pytest.raises(TierError, match="INVALID_CONTEXT"):
        gpu.allocate(1)
    assert "leaves the memory" in gpu.wrong()[0]


def test_work_in_no_order_on_the_same_bytes_is_a_race_also_when_it_went_well() -> None:
    gpu = FakeGpu()

    def work() -> None:
        memory, one, other = gpu.allocate(100), gpu.create_stream(), gpu.create_stream()
        gpu.fill(memory, 1, 50, one)
        gpu.fill(memory + 50, 2, 50, other)  # other bytes: no race
        assert gpu.wrong() == []
        gpu.fill(memory + 49, 3, 1, other)
        assert len(gpu.wrong()) == 1
        gpu.synchronize_stream(one)
        gpu.fill(memory, 1, 49, other)  # the host has seen the end of the first
        assert len(gpu.wrong()) == 1
        for undo in (gpu.synchronize_stream, gpu.destroy_stream):
            undo(other)
        gpu.destroy_stream(one)
        gpu.free(memory)

    in_context(gpu, work)
    assert "share bytes, in no order" in gpu.wrong()[0]


# --- devices that are lost or hang ------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_LAUNCH_FAILED"])
async def test_a_device_lost_while_idle_is_reported_once_without_a_task(
    threads: ThreadPools, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(copy_pipeline, "PROBE_S", 0.005)
    gpu, told = FakeGpu(), asyncio.Queue[str]()
    async with rig(gpu, threads, clean=False) as made:
        made.tier.on_lost = told.put_nowait
        gpu.refuse("synchronize", answer, after=3)
        assert answer in await wait_for(told.get(), 30)
        with pytest.raises(DeviceLost):
            await made.tier.copy_out(made.outward([0], [0]), made.pool.memory)
    assert told.qsize() <= 1, "once for each direction at the most"


async def test_a_probe_that_hangs_is_seen_and_a_copy_after_it_goes_well(
    threads: ThreadPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_pipeline, "PROBE_S", 0.005)
    gpu = Slow()
    async with rig(gpu, threads) as made:
        gpu.go.clear()
        await asyncio.to_thread(gpu.asked.wait, 30)
        while not made.tier.waiting_s:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0.001)
        gpu.go.set()
        assert await made.there_and_back()


@pytest.mark.parametrize(
    ("call", "caller"), [("passed", "holds"), ("record", "_submit_turns"), ("synchronize_stream", "quiesce")]
)
async def test_a_call_that_hangs_between_two_chunks_is_seen(threads: ThreadPools, call: str, caller: str) -> None:
    """`/readyz` and the dispatcher ask for `waiting_s`: a rank that takes tasks and never ends one looks idle."""
    gpu, asked, go = FakeGpu(batches=False), threading.Event(), threading.Event()
    async with rig(gpu, threads) as made:
        assert await made.there_and_back()
        real = getattr(gpu, call)

        def hangs(*arguments: int) -> object:
            if sys._getframe(1).f_code.co_name == caller:
                asked.set()
                assert go.wait(30)
            return real(*arguments)

        setattr(gpu, call, hangs)
        if call == "synchronize_stream":
            gpu.refuse("copy", "CUDA_ERROR_INVALID_VALUE")  # so that the pipeline waits for what it has submitted
        copying = asyncio.ensure_future(made.tier.copy_out(made.outward([0], [9]), made.pool.memory))
        try:
            assert await asyncio.to_thread(asked.wait, 30)
            async with timeout(30):
                while not made.tier.waiting_s:  # noqa: ASYNC110 - a few turns of the loop
                    await asyncio.sleep(0.001)
        finally:
            go.set()
        if call == "synchronize_stream":
            with pytest.raises(TierError, match="CUDA_ERROR_INVALID_VALUE"):
                await copying
        else:
            await copying
        assert await made.there_and_back()


async def test_a_driver_that_refuses_everything_has_lost_the_device(threads: ThreadPools) -> None:
    """As after a reset of the device: no answer that CUDA calls sticky, and yet nothing will ever work."""
    gpu, told = FakeGpu(batches=False), asyncio.Queue[str]()
    async with rig(gpu, threads, clean=False) as made:
        made.tier.on_lost = told.put_nowait
        for _ in range(copy_pipeline.MOST_FAILURES - 1):
            gpu.refuse("copy", "CUDA_ERROR_INVALID_HANDLE")
            with pytest.raises(TierError) as refused:
                await made.tier.copy_in(made.inward([0], [0]), made.pool.memory)
            assert not isinstance(refused.value, DeviceLost)
        gpu.refuse("copy", "CUDA_ERROR_INVALID_HANDLE")
        with pytest.raises(DeviceLost, match="refused 16 copies in a row"):
            await made.tier.copy_in(made.inward([0], [0]), made.pool.memory)
        assert "in a row" in await wait_for(told.get(), 30)


@pytest.mark.parametrize("answer", ["CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_INVALID_VALUE"])
async def test_a_copy_that_is_refused_while_the_device_is_being_lost_ends_too(
    threads: ThreadPools, answer: str
) -> None:
    gpu = FakeGpu(batches=False)
    async with rig(gpu, threads, clean=False) as made:
        gpu.refuse("copy", "CUDA_ERROR_INVALID_VALUE")
        gpu.refuse("synchronize_stream", answer)
        with pytest.raises(DeviceLost, match=answer):
            await wait_for(made.tier.copy_in(made.inward([0], [0]), made.pool.memory), 30)
        with pytest.raises(DeviceLost):
            await wait_for(made.tier.copy_in(made.inward([1], [1]), made.pool.memory), 30)
