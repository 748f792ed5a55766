"""The workers' half of TransferdConnector on GPUs, without vLLM and torch: tensors of a simulated GPU.

Bytes are compared block by block, and the simulated driver watches the order: nothing that a stream has yet to write
may be read, and no memory may be unmapped that a stream still writes to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.adapters.test_vllm_scheduling import Request, World
from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from tests.support.cuda.tensor import AXES, GpuTensor, extent, layer_views
from tests.support.cuda.tier import as_numpy
from transferd.adapters.common import directories
from transferd.adapters.common.entry import EngineFacts, Order
from transferd.adapters.common.gpu import GpuMemory
from transferd.adapters.vllm import working
from transferd.adapters.vllm.layers import blocks_of, distinct
from transferd.adapters.vllm.settings import VLLM, AdapterSettings, check_served
from transferd.adapters.vllm.working import INSTEAD
from transferd.blocks.copyplan import plan_copy
from transferd.blocks.layout import BlockLayout, build_layout
from transferd.client.pages import Pages
from transferd.config import CacheSection
from transferd.errors import ConfigError, TierError
from transferd.runtime.compat import wait_for
from transferd.runtime.threads import ThreadPools
from transferd.tiers.cuda import CudaDeviceTier, engine
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.pinned import HostPool

SHAPE = (3, 7, 2, 8, 5)  # layers, blocks, heads, tokens, content
LAYERS, BLOCKS = SHAPE[:2]
ITEM = 2
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
WAYS = [
    *[pytest.param(layout, 1, 0, id=layout) for layout in LAYOUTS],
    pytest.param("LBNHC", 2, 0, id="kernel blocks of half the size"),
    pytest.param("LBHNC", 4, 0, id="kernel blocks of a quarter"),
    pytest.param("LBNHC", 1, 24, id="padded pages"),
]
OLD, NEW = 0x11, 0x5A
needs_kernels = pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")


def tensors(storage: int, layout: str, parts: int = 1, padding: int = 0, device: int = 0) -> dict[str, GpuTensor]:
    views = layer_views(layout, SHAPE, ITEM, parts=parts, padding=padding)
    return {
        f"layer {i}": GpuTensor(storage, offset, shape, strides, ITEM, device)
        for i, (offset, shape, strides) in enumerate(views)
    }


def view(raw: npt.NDArray[np.uint8], tensor: GpuTensor, parts: int) -> npt.NDArray[np.uint16]:
    """What vLLM sees through the tensor: [blocks, kernel blocks in each, heads, tokens, content]. raw: the storage."""
    flat = raw[tensor.offset :].view(np.uint16)
    whole = np.lib.stride_tricks.as_strided(flat, tensor.shape, [stride * ITEM for stride in tensor.stride()])
    strides = (parts * whole.strides[0], *whole.strides)
    return np.lib.stride_tricks.as_strided(whole, (BLOCKS, parts, *tensor.shape[1:]), strides)


# --- where blocks lie -----------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "parts", "padding"), WAYS)
def test_the_pieces_of_a_block_are_its_bytes_and_no_others(layout: str, parts: int, padding: int) -> None:
    raw = np.zeros(extent(SHAPE, ITEM, padding), dtype=np.uint8)
    named = tensors(0, layout, parts, padding)
    for (name, tensor), lie in zip(named.items(), blocks_of(named, BLOCKS).values(), strict=True):
        for block in range(BLOCKS):
            raw[:] = 0
            view(raw, tensor, parts)[block] = 0xFFFF
            for piece in lie.pieces:
                start = tensor.offset + piece + block * lie.stride
                assert raw[start : start + lie.nbytes].all(), f"{name}: not all of it is the block's"
                raw[start : start + lie.nbytes] = 0
            assert not raw.any(), f"{name}: a part of the block is missing"
        dense = len(lie.pieces) == 1
        assert dense == (layout[2:] in ("HNC", "NHC")), "one piece, if nothing lies between"


def test_another_order_of_bytes_is_another_identity() -> None:
    orders = {layout: {one.order for one in blocks_of(tensors(0, layout), BLOCKS).values()} for layout in LAYOUTS}
    assert orders["LBHNC"] == orders["BLHNC"] != orders["LBNHC"] == orders["BLNHC"]


@pytest.mark.parametrize(
    ("shape", "strides", "why"),
    [
        ((7 * 80,), (1,), "does not count blocks"),  # one raw buffer for all layers
        ((2, 7, 8, 5), (280, 40, 5, 1), "does not count blocks"),  # keys and values apart, as vLLM once had them
        ((7, 2, 8, 5), (80, 0, 5, 1), "overlap"),
    ],
)
def test_tensors_without_blocks_are_refused_by_name(shape: Any, strides: Any, why: str) -> None:
    with pytest.raises(TierError, match=f"^layer: .*{why} .shape") as refused:
        blocks_of({"layer": GpuTensor(0, 0, shape, strides, ITEM)}, BLOCKS)
    assert "\n" not in str(refused.value)


def test_too_many_pieces_name_the_layout_to_choose() -> None:
    named = {str(i): GpuTensor(0, 0, (7, 128, 8, 5), (40, 280, 5, 1), ITEM) for i in range(33)}
    with pytest.raises(TierError, match="VLLM_KV_CACHE_LAYOUT"):
        blocks_of(named, BLOCKS)


def test_a_layer_that_shares_anothers_memory_is_not_offered_twice() -> None:
    named = tensors(0, "LBHNC")
    assert list(distinct(named | {"shares": named["layer 1"]})) == list(named)


# --- blocks and steps -----------------------------------------------------------------------------


class Rank:
    """A rank: vLLM's process with its tensors and its stream, and the daemon's tier that has mapped them."""

    def __init__(
        self, tier: CudaDeviceTier, layout: BlockLayout, here: FakeGpu, elsewhere: FakeGpu, way: tuple[str, int, int]
    ) -> None:
        self.tier, self.layout, self.gpu = tier, layout, elsewhere
        self.pool = HostPool(layout, CudaPinning(0, here))
        order, self.parts, padding = way
        self.context = elsewhere.retain(0)
        nbytes = extent(SHAPE, ITEM, padding)
        with elsewhere.current(self.context):
            self.allocation = elsewhere.allocate(nbytes + 512)
            self.stream = elsewhere.create_stream()
        self.tensors = tensors(self.allocation + 512, order, self.parts, padding)
        self.raw = as_numpy(engine.DeviceArray(self.allocation + 512, (nbytes,), "uint8", 0, None))
        self.raw[:] = OLD
        self.lie = blocks_of(self.tensors, BLOCKS)
        self.memory = GpuMemory(
            0,
            list(self.tensors.values()),
            list(self.lie.values()),
            program=VLLM,
            instead=INSTEAD,
            gather=lambda gpu: [gpu],
            stream=lambda: self.stream,
            driver=elsewhere,
        )

    @property
    def page_bytes(self) -> list[int]:
        return [one.nbytes for one in self.lie.values() for _ in one.pieces]

    def block(self, number: int) -> list[bytes]:
        """What vLLM has in a block, layer by layer."""
        return [view(self.raw, tensor, self.parts)[number].tobytes() for tensor in self.tensors.values()]

    async def enter(self) -> None:
        """What the link does once the daemon has mapped the memory."""

        async def device_handle(_rank: int) -> dict[str, Any]:
            return {"data": self.tier.with_timelines(self.memory.handle()).data}

        await self.memory.entered(SimpleNamespace(device_handle=device_handle))  # type: ignore[arg-type]

    def compute(self, value: int) -> None:
        """Put work on the stream that writes everything. It is done when somebody waits for it."""
        with self.gpu.current(self.context):
            self.gpu.fill(self.allocation + 512, value, self.raw.nbytes, self.stream)

    def finish(self) -> None:
        with self.gpu.current(self.context):
            self.gpu.synchronize_stream(self.stream)

    async def move(self, task: Any, *, save: bool) -> None:
        """What the daemon's worker does for a task of one block: into slot 1 of the host pool, or out of it."""
        if isinstance(task.after, tuple):
            await self.tier.reached(task.after)
        (block,), device, host = task.gpu_block_ids, self.tier.arena.geometry, self.layout.host
        if save:
            await self.tier.copy_out(plan_copy(device, [block], host, [1]), self.pool.memory)
        else:
            await self.tier.copy_in(plan_copy(host, [1], device, [block]), self.pool.memory)

    async def close(self) -> None:
        self.finish()
        self.memory.close()
        await self.tier.close()
        self.pool.close()
        with self.gpu.current(self.context):
            self.gpu.destroy_stream(self.stream)
            self.gpu.free(self.allocation)
        self.gpu.release(0)


@pytest.fixture
def threads() -> Iterator[ThreadPools]:
    threads = ThreadPools(2)
    yield threads
    threads.close()


@asynccontextmanager
async def opened(
    threads: ThreadPools, way: tuple[str, int, int] = ("LBHNC", 1, 0), seed: int = 0
) -> AsyncIterator[Rank]:
    here, elsewhere = FakeGpu(seed=seed), FakeGpu(seed=seed + 1)
    lie = blocks_of(tensors(0, *way), BLOCKS)
    sizes = [one.nbytes for one in lie.values() for _ in one.pieces]
    pages = Pages(layers=len(sizes), page_bytes=sizes, blocks=BLOCKS, identity="test")
    layout = build_layout(CacheSection(ranks=1, host_blocks=4, **pages.as_cache()))
    tier = CudaDeviceTier(layout, 0, 0, threads, driver=here, slot_bytes=1)
    made = Rank(tier, layout, here, elsewhere, way)
    await tier.attach(made.memory.handle())
    await made.enter()
    try:
        yield made
    finally:
        await made.close()
    for gpu in (here, elsewhere):
        assert gpu.wrong() == []
        assert gpu.leaks() == []


@needs_kernels
@pytest.mark.parametrize("way", [one.values for one in WAYS], ids=[one.id for one in WAYS])
async def test_a_block_comes_back_byte_for_byte_and_no_other_block_changes(threads: ThreadPools, way: Any) -> None:
    async with opened(threads, way) as rank:
        rank.raw[:] = np.random.default_rng(5).integers(0, 256, rank.raw.shape, dtype=np.uint8)
        before = [rank.block(number) for number in range(BLOCKS)]
        await rank.move(SimpleNamespace(after=None, gpu_block_ids=[4]), save=True)
        await rank.move(SimpleNamespace(after=None, gpu_block_ids=[2]), save=False)
        before[2] = before[4]
        assert [rank.block(number) for number in range(BLOCKS)] == before


async def _waits(rank: Rank, after: tuple[int, int]) -> None:
    timelines = rank.tier.resources.timelines
    assert timelines is not None
    while timelines.waiting.get(after[0]) != after[1]:  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0.001)


@needs_kernels
@pytest.mark.parametrize("order", [Order.STREAM, Order.HOST], ids=["by the timeline", "without it"])
async def test_a_save_waits_on_the_device_for_the_rank_that_lags(threads: ThreadPools, order: Order) -> None:
    """The host of each rank has launched the step; the stream of the second one gets to it later.

    Without the timeline, that rank's bytes would be of the step before: the test would notice.
    """
    async with opened(threads) as first, opened(threads, seed=7) as lags:
        world, request = World(), Request("a", 4)
        world.it.matched(request, 0)
        world.ids["a"] = [3]
        news = world.step(new={"a": 0}, scheduled=4)
        for rank in (first, lags):
            rank.compute(NEW)
            rank.memory.advance(news.after)
        first.finish()
        world.it.ready(news.step, order)
        ((task, _),) = world.link.tasks
        assert task.gpu_block_ids == [3]
        moving = [asyncio.ensure_future(rank.move(task, save=True)) for rank in (first, lags)]
        if order is Order.STREAM:
            await _waits(lags, news.after)
            lags.finish()
        await wait_for(asyncio.gather(*moving), 60)
        found = {int(byte) for rank in (first, lags) for byte in np.unique(_slot(rank))}
        assert found == ({NEW} if order is Order.STREAM else {OLD, NEW})


def _slot(rank: Rank) -> npt.NDArray[np.uint8]:
    start = int(rank.layout.host.strides[0])
    return np.frombuffer(rank.pool.memory.view[start : start + rank.layout.block_bytes], dtype=np.uint8)


@needs_kernels
async def test_a_load_does_not_begin_before_the_stream_has_left_its_blocks(threads: ThreadPools) -> None:
    """The blocks belonged to a request that was aborted, and a step in flight still writes to them."""
    async with opened(threads) as rank:
        np.frombuffer(rank.pool.memory.view, dtype=np.uint8)[:] = NEW
        world, request = World(), Request("a", 5)
        assert world.load(request, set(request.keys)) == 1
        news = world.step()
        rank.compute(OLD)
        rank.memory.advance(news.after)
        world.it.ready(news.step, Order.STREAM)
        ((task, _),) = world.link.tasks
        loading = asyncio.ensure_future(rank.move(SimpleNamespace(after=task.after, gpu_block_ids=[3]), save=False))
        await _waits(rank, news.after)
        assert not loading.done()
        rank.finish()
        await wait_for(loading, 60)
        assert set(b"".join(rank.block(3))) == {NEW}
        assert set(b"".join(rank.block(2))) == {OLD}


@needs_kernels
async def test_another_daemons_words_replace_the_old_ones_once_the_stream_has_written_those(
    threads: ThreadPools,
) -> None:
    async with opened(threads) as rank:
        rank.compute(NEW)
        rank.memory.advance((0, 5))
        await rank.enter()  # unmapping a word that the stream has yet to write would be noticed
        assert rank.memory.order is Order.STREAM
        rank.compute(NEW)
        rank.memory.advance((0, 6))
        rank.finish()
        await wait_for(rank.tier.reached((0, 6)), 60)


@needs_kernels
async def test_cuda_calls_of_the_links_thread_do_not_disturb_a_capture(threads: ThreadPools) -> None:
    """vLLM captures CUDA graphs while it starts, and other threads' calls would end that."""
    async with opened(threads, ("LBNHC", 1, 24)) as rank:
        layout = Pages(layers=len(rank.page_bytes), page_bytes=rank.page_bytes, blocks=BLOCKS, identity="test")
        rank.gpu.calls.clear()
        rows = rank.memory.caches(layout)["page"]
        assert rows[1].read_block(2) == rank.block(2)[1]
        rows[1].write_block(2, b"\x77" * rank.page_bytes[1])
        assert [set(part) for part in rank.block(2)] == [{OLD}, {0x77}, {OLD}]
        assert {*b"".join(rank.block(1)), *b"".join(rank.block(3))} == {OLD}
        assert rank.gpu.calls[0] == "allow_during_capture"


@needs_kernels
async def test_a_driver_that_fails_costs_the_cache_and_not_the_engine(
    threads: ThreadPools, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(threads) as rank:
        rank.gpu.refuse("write_value", "CUDA_ERROR_INVALID_VALUE")
        with caplog.at_level(logging.WARNING, logger="vllm.transferd"):
            for number in (1, 2):
                rank.memory.advance((0, number))
        assert [record.getMessage().count("runs without it") for record in caplog.records] == [1]
        assert rank.memory.order is Order.NONE


def test_a_rank_that_cannot_order_its_copies_has_none() -> None:
    """Its tasks fail at once, before the daemon hears of them: the scheduler must not wait, and not get stale bytes."""
    world, request = World(), Request("a", 9)
    assert world.load(request, set(request.keys)) == 2
    news = world.step(new={"a": 8}, scheduled=1)
    world.it.ready(news.step, min(Order.STREAM, Order.NONE))
    assert not world.link.tasks
    after = world.step()
    assert (after.loaded, after.bad_blocks) == ({"a"}, {10, 11})
    assert not world.pool.pinned


def test_the_numbers_of_steps_grow_also_from_one_engine_to_the_next() -> None:
    numbers = [world.step().after for made in (World, World) for world in [made()] for _ in range(3)]
    assert numbers == sorted(set(numbers))


# --- what is refused ------------------------------------------------------------------------------


def memory(gpu: FakeGpu, found: dict[str, GpuTensor]) -> GpuMemory:
    lie = blocks_of(found, BLOCKS)
    return GpuMemory(
        0,
        list(found.values()),
        list(lie.values()),
        program=VLLM,
        instead=INSTEAD,
        gather=lambda own: [own],
        stream=lambda: 0,
        driver=gpu,
    )


def allocated(gpu: FakeGpu, device: int = 0) -> int:
    with gpu.current(gpu.retain(device)):
        return gpu.allocate(extent(SHAPE, ITEM))


@pytest.mark.parametrize(
    ("value", "named"),
    [("expandable_segments:True", "expandable_segments:False"), ("backend:cudaMallocAsync", "backend:native")],
)
def test_memory_that_cannot_be_shared_names_the_setting_before_anything_is_exported(
    value: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    gpu = FakeGpu()
    at = allocated(gpu)
    gpu.unshareable.add(at)
    with pytest.raises(TierError, match=f"PYTORCH_CUDA_ALLOC_CONF={value}.*{named}") as refused:
        memory(gpu, tensors(at, "LBHNC"))
    assert "\n" not in str(refused.value)
    assert not gpu.count("export_memory")


def test_a_gpu_without_stream_memory_operations_is_refused() -> None:
    gpu = FakeGpu(words=False)
    with pytest.raises(TierError, match=r"stream memory operations.*use TransferdTier"):
        memory(gpu, tensors(allocated(gpu), "LBHNC"))
    assert not gpu.count("export_memory")


def test_tensors_on_two_gpus_are_refused() -> None:
    gpu = FakeGpu(devices=2)
    found = tensors(allocated(gpu), "LBHNC") | {"other": tensors(allocated(gpu, 1), "LBHNC", device=1)["layer 0"]}
    with pytest.raises(TierError, match="on devices"):
        memory(gpu, found)


def test_memory_of_another_kind_of_device_is_refused() -> None:
    found = tensors(0, "LBHNC")["layer 0"]
    found.device = SimpleNamespace(type="xpu", index=0)
    with pytest.raises(TierError, match=r"KV memory is on xpu.*use TransferdTier"):
        working._memory(0, [found], [], gather=lambda own: [own])


@pytest.mark.parametrize(
    ("section", "given", "named"),
    [
        ("kv_transfer_config", {"kv_load_failure_policy": "fail"}, "kv_load_failure_policy: must be .recompute."),
        ("parallel_config", {"pipeline_parallel_size": 2}, "pipeline_parallel_size: must be 1"),
        ("model_config", {"enable_sleep_mode": True}, "enable_sleep_mode: must be off"),
        ("model_config", {"enable_cumem_allocator": True}, "enable_cumem_allocator: must be off"),
    ],
)
def test_an_unsupported_setting_is_refused_by_name(section: str, given: dict[str, Any], named: str) -> None:
    """Sleep mode: its allocator makes memory that cannot be shared, and frees it while the engine sleeps."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        model_config=SimpleNamespace(enable_sleep_mode=False),
    )
    check_served(config, config.kv_transfer_config)
    vars(getattr(config, section)).update(given)
    with pytest.raises(ConfigError, match=f"^(kv_transfer_config.)?{named}") as refused:
        check_served(config, config.kv_transfer_config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("visible", "kept"), [("1,3", False), ("MIG-0f", True), (None, False)])
def test_a_daemon_that_an_engine_starts_sees_every_gpu(
    visible: str | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of this user on other GPUs share it. A slice of a GPU is seen only by who names it."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ("CUDA_VISIBLE_DEVICES" in directories.sees_all_gpus()) is kept


def test_the_layouts_are_all_that_vllm_has() -> None:
    assert all(sorted(layout) == sorted(AXES) for layout in LAYOUTS)
    assert len(set(LAYOUTS)) == 6


async def test_a_canary_is_laid_only_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may read vLLM's null block beside others: random bytes in it are numbers that are none."""
    offers: list[Any] = []

    async def offer(_rank: int, _handle: Any, *, caches: Any, block: int) -> None:
        assert block == 0
        offers.append(caches)

    async def nothing(*_: Any) -> None: ...

    monkeypatch.setattr(working, "Link", lambda _finder, _name, enter, **_: SimpleNamespace(enter=enter, submit=None))
    held = SimpleNamespace(
        rank=1, handle=lambda: None, caches=lambda _: {"page": []}, entered=nothing, advance=lambda _: None
    )
    facts = EngineFacts("e", "m", "", "identity", 2, BLOCKS, [64], held)
    worker = working.Working(facts, AdapterSettings(endpoint="ipc:///nowhere"))
    client = SimpleNamespace(offer=offer)
    await worker._link.enter(client)  # type: ignore[attr-defined]
    worker.launched(1, (0, 1))
    await worker._link.enter(client)  # type: ignore[attr-defined]
    assert offers == [{"page": []}, None]
