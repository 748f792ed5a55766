"""Blocks that a copy engine finds as rows: which segments these are, and that every byte arrives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import get_args

import numpy as np
import pytest

from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from transferd.blocks.copyplan import plan_copy
from transferd.blocks.formats import RawPlanes
from transferd.blocks.layout import build_layout
from transferd.blocks.layout.base import Arena, Geometry
from transferd.config import CacheSection
from transferd.runtime.threads import ThreadPools
from transferd.tiers import pinned
from transferd.tiers.cuda import CudaDeviceTier
from transferd.tiers.cuda.batches import row_batches_work
from transferd.tiers.cuda.costs import CopyPath
from transferd.tiers.cuda.driver import MAX_PITCH, RowTable
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.cuda.rows import BlockRows, _partners, block_rows
from transferd.tiers.cuda.tuning import Tuning
from transferd.tiers.pinned import HostPool

ORIGIN = 1 << 40
CACHES: dict[str, dict[str, object]] = {
    "gqa": {"layers": 4, "kv_heads": 2, "head_dim": 64, "block_size": 64},
    "scales": {"layers": 4, "kv_heads": 2, "head_dim": 64, "block_size": 64, "dtype": "block_wise_fp8"},
    "dsa": {"attention": "dsa", "layers": 4, "block_size": 16, "dtype": "uint8"},
    "odd": {"layers": 5, "kv_heads": 1, "head_dim": 5, "block_size": 3},
    "mtp": {"layers": 4, "kv_heads": 1, "head_dim": 9, "block_size": 4, "mtp_layers": 2, "mtp_blocks": 31},
}
needs_kernel = pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")


@pytest.fixture
def threads() -> Iterator[ThreadPools]:
    threads = ThreadPools(2)
    yield threads
    threads.close()


def packed(geometry: Geometry) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(geometry.nbytes)[:-1]))


@pytest.mark.parametrize("name", CACHES)
def test_rows_are_all_segments_of_a_block_and_no_others(name: str) -> None:
    layout = build_layout(CacheSection(**CACHES[name], device_blocks=7, host_blocks=7))  # type: ignore[arg-type]
    geometry, offsets = layout.device, packed(layout.device)
    rows = block_rows(Arena(geometry, ORIGIN), offsets, [(ORIGIN, geometry.extent)])
    assert rows
    for block in (0, 3, 6):
        found = np.concatenate([part.runs(block) for part in rows]).tolist()
        expected = np.stack((geometry.offsets + block * geometry.strides, offsets, geometry.nbytes), axis=1).tolist()
        assert sorted(found) == sorted(expected)


def geometry(offsets: list[int], nbytes: list[int], stride: int = 1 << 20) -> Geometry:
    strides = np.full(len(offsets), stride, dtype=np.int64)
    return Geometry(np.array(offsets), strides, np.array(nbytes), 4, max(offsets) + 4 * stride)


@pytest.mark.parametrize(
    ("offsets", "nbytes", "allocations", "expected"),
    [
        ([0, 100, 200, 300], [10] * 4, [(0, 9999)], [(0, 100, 0, 10, 10, 4)]),
        ([0, 100, 300, 400], [10] * 4, [(0, 9999)], [(0, 100, 0, 10, 10, 2), (300, 100, 20, 10, 10, 2)]),
        ([0, 100, 300, 401], [10] * 4, [(0, 9999)], [(0, 100, 0, 10, 10, 2), (300, 101, 20, 10, 10, 2)]),
        ([0, 50, 100, 150], [10, 20, 10, 20], [(0, 9999)], [(0, 100, 0, 30, 10, 2), (50, 100, 10, 30, 20, 2)]),
        ([0, 100, 200, 300], [10] * 4, [(0, 200), (200, 200)], [(0, 100, 0, 10, 10, 2), (200, 100, 20, 10, 10, 2)]),
        ([0, 100], [10] * 2, [(0, 100), (100, 100)], [(0, 10, 0, 10, 10, 1), (100, 10, 10, 10, 10, 1)]),
        ([100, 0], [10] * 2, [(0, 9999)], [(100, 10, 0, 10, 10, 1), (0, 10, 10, 10, 10, 1)]),  # a pitch never goes back
        ([0, MAX_PITCH + 1], [10] * 2, [(0, 1 << 40)], [(0, 10, 0, 10, 10, 1), (MAX_PITCH + 1, 10, 10, 10, 10, 1)]),
        ([0, 100, 200, 300], [10] * 4, [], []),
        ([0, 100, 200, 300], [10] * 4, [(50, 9999)], []),  # the first is in none that is known
        ([0, 100, 201], [10] * 3, [(0, 9999)], [(0, 100, 0, 10, 10, 2), (201, 10, 20, 10, 10, 1)]),
    ],
)
def test_rows_are_equally_far_apart_and_lie_in_one_allocation(
    offsets: list[int], nbytes: list[int], allocations: list[tuple[int, int]], expected: list[tuple[int, ...]]
) -> None:
    shape = geometry(offsets, nbytes)
    found = block_rows(Arena(shape, ORIGIN), packed(shape), [(ORIGIN + at, size) for at, size in allocations])
    assert [(one.offset, one.pitch, *one[3:]) for one in found] == expected
    assert all(isinstance(one, BlockRows) and one.stride == 1 << 20 for one in found)


@pytest.mark.parametrize(
    ("cache", "copies"),
    [
        ({"layers": 80, "kv_heads": 1, "head_dim": 128, "block_size": 64}, 2),  # keys, then values
        ({"layers": 80, "kv_heads": 1, "head_dim": 128, "block_size": 64, "dtype": "block_wise_fp8"}, 4),
        ({"layers": 61, "attention": "mla", "block_size": 64}, 1),
    ],
)
def test_objects_of_fastdeploy_are_as_few_copies_as_planes(cache: dict[str, object], copies: int) -> None:
    """Its objects hold all keys before all values; in the cache, keys and values take turns."""
    layout = build_layout(CacheSection(**cache, device_blocks=3))  # type: ignore[arg-type]
    arena = Arena(layout.device, ORIGIN)
    for offsets in (RawPlanes(layout).offsets, packed(layout.device)):
        rows = block_rows(arena, offsets, [(ORIGIN, layout.device.extent)])
        assert len(rows) <= copies
        found = np.concatenate([part.runs(2) for part in rows]).tolist()
        expected = np.stack((layout.device.offsets + 2 * layout.device.strides, offsets, layout.device.nbytes), axis=1)
        assert sorted(found) == sorted(expected.tolist())


@needs_kernel
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize(
    ("way", "dma_most"), [("rows", 1), ("rows", 40_000), ("rows", 4 << 20), ("pairs", 4 << 20), ("pairs", 1 << 30)]
)
async def test_every_byte_arrives_in_rows_and_no_copy_crosses_two_registrations(
    threads: ThreadPools, name: str, way: CopyPath, dma_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registrations of two pages: many blocks lie in two of them, and many in one. Pairs also in one registration."""
    monkeypatch.setattr(pinned, "REGISTER_MOST", 8192 if dma_most <= 4 << 20 else 1 << 30)
    layout = build_layout(CacheSection(**CACHES[name], device_blocks=7, host_blocks=9))  # type: ignore[arg-type]
    gpu = FakeGpu(seed=5, row_batches=way == "pairs")
    tuning = Tuning(grid=8, dma_most=dma_most)
    tier = CudaDeviceTier(layout, 0, 0, threads, driver=gpu, copy_path=way, tuning=tuning)
    await tier.open()
    with closing(HostPool(layout, CudaPinning(0, gpu))) as pool:
        host = np.frombuffer(pool.memory.view, dtype=np.uint8)
        stride, nbytes = int(layout.host.strides[0]), layout.block_bytes
        host[:] = np.random.default_rng(7).integers(0, 256, len(host), dtype=np.uint8)
        slots = host[: 9 * stride].reshape(9, stride)[:, :nbytes]
        before = slots.copy()
        geometry = tier.arena.geometry
        await tier.copy_in(plan_copy(layout.host, [8, 0, 5], geometry, [6, 2, 0]), pool.memory)
        assert (slots == before).all()
        host[:] = 0xA5
        await tier.copy_out(plan_copy(geometry, [2, 0, 6, 6], layout.host, [1, 7, 3, 4]), pool.memory)
        assert (slots[[1, 7, 3, 4]] == before[[0, 5, 8, 8]]).all()
        assert (slots[[0, 2, 5, 6, 8]] == 0xA5).all()
        assert [counts[way] for counts in tier.statistics()["copies"].values()] == [1, 1]
        assert gpu.count("copy_rows" if way == "rows" else "copy_row_batch") > 0
        del host, slots
        await tier.close()
    assert gpu.wrong() == []
    assert gpu.leaks() == []


@pytest.mark.parametrize("order", ["none", "the same", "backwards", "twice"])
@pytest.mark.parametrize("count", [1, 2, 7, 200])
def test_partners_lie_behind_each_other_on_both_sides(order: str, count: int) -> None:
    chance = np.random.default_rng(count)
    blocks, places = chance.permutation(count), chance.permutation(count) * 4096
    if order != "none":
        blocks = np.argsort(np.argsort(places)) * (-1 if order == "backwards" else 1)
    if order == "twice":  # a source may be named twice: such blocks have no pitch
        blocks = blocks // 2
    first, second = _partners(blocks, places)
    assert len(set(first.tolist()) | set(second.tolist())) == 2 * len(first), "nobody is in two pairs"
    assert (places[second] > places[first]).all()
    assert (blocks[second] >= blocks[first]).all()
    most = {"none": 4 * int(count**0.5), "the same": 1, "twice": 2, "backwards": count}
    assert count - 2 * len(first) <= most[order]


@needs_kernel
@pytest.mark.parametrize(
    ("name", "dma_most", "way"),
    [("long", 4 << 20, "rows"), ("long", 8192, "gather"), ("dsa", 4 << 20, "gather"), ("scales", 4 << 20, "gather")],
)
async def test_blocks_go_in_rows_if_that_is_predicted_to_be_best(
    threads: ThreadPools, name: str, dma_most: int, way: str
) -> None:
    """32 layers of 16 KiB, and of these if no DMA may be so long; four of 10 and 2 KiB; of 8 KiB and 256 bytes."""
    long = CACHES["gqa"] | {"layers": 32}
    layout = build_layout(CacheSection(**(CACHES | {"long": long})[name], device_blocks=7, host_blocks=9))  # type: ignore[arg-type]
    gpu = FakeGpu()
    tier = CudaDeviceTier(layout, 0, 0, threads, driver=gpu, tuning=Tuning(grid=8, dma_most=dma_most))
    await tier.open()
    with closing(HostPool(layout, CudaPinning(0, gpu))) as pool:
        await tier.copy_in(plan_copy(layout.host, [8, 0, 5], tier.arena.geometry, [6, 2, 0]), pool.memory)
        counts = dict.fromkeys(get_args(CopyPath), 0) | {way: 1}
        assert tier.statistics()["copies"]["in"] == counts
        await tier.close()


async def test_memory_that_is_not_registered_does_not_go_in_rows(threads: ThreadPools) -> None:
    layout = build_layout(CacheSection(**CACHES["gqa"], device_blocks=7, host_blocks=9))  # type: ignore[arg-type]
    tier = CudaDeviceTier(layout, 0, 0, threads, driver=FakeGpu(), copy_path="rows")
    await tier.open()
    with closing(HostPool(layout)) as pool:
        await tier.copy_in(plan_copy(layout.host, [8], tier.arena.geometry, [6]), pool.memory)
        assert tier.statistics()["copies"]["in"]["rows"] == 0
        await tier.close()


@needs_kernel
@pytest.mark.parametrize("name", CACHES)
async def test_rows_go_in_batches_of_one_call_where_the_driver_has_it(threads: ThreadPools, name: str) -> None:
    layout = build_layout(CacheSection(**CACHES[name], device_blocks=7, host_blocks=9))  # type: ignore[arg-type]
    gpu = FakeGpu(seed=3, row_batches=True)
    tier = CudaDeviceTier(layout, 0, 0, threads, driver=gpu, copy_path="rows")
    await tier.open()
    tried = gpu.count("copy_row_batch")
    assert tried == 2, "both ways are tried before an engine's bytes move"
    with closing(HostPool(layout, CudaPinning(0, gpu))) as pool:
        host = np.frombuffer(pool.memory.view, dtype=np.uint8)
        host[:] = np.random.default_rng(7).integers(0, 256, len(host), dtype=np.uint8)
        stride, nbytes = int(layout.host.strides[0]), layout.block_bytes
        slots = host[: 9 * stride].reshape(9, stride)[:, :nbytes]
        before = slots.copy()
        await tier.copy_in(plan_copy(layout.host, [8, 0, 5], tier.arena.geometry, [6, 2, 0]), pool.memory)
        await tier.copy_out(plan_copy(tier.arena.geometry, [2, 0, 6], layout.host, [1, 7, 3]), pool.memory)
        assert (slots[[1, 7, 3]] == before[[0, 5, 8]]).all()
        assert (gpu.count("copy_row_batch"), gpu.count("copy_rows")) == (tried + 2, 0)
        gpu.refuse("copy_row_batch", "CUDA_ERROR_INVALID_VALUE")
        for _ in range(2):
            await tier.copy_out(plan_copy(tier.arena.geometry, [6], layout.host, [2]), pool.memory)
            assert (slots[2] == before[8]).all()
        assert gpu.count("copy_row_batch") == tried + 3, "a driver that refuses one is not asked again"
        del host, slots
        await tier.close()
    assert gpu.wrong() == []
    assert gpu.leaks() == []


@pytest.mark.parametrize("fault", ["refuses", "wrong bytes"])
def test_a_batch_of_rows_is_tried_before_it_is_used(fault: str) -> None:
    class Faulty(FakeGpu):
        def copy_row_table(self, table: RowTable, stream: int, *, outward: bool, batch: bool) -> None:
            if fault == "refuses":
                self._refuse("copy_row_batch", "CUDA_ERROR_NOT_SUPPORTED")
            shorter = table.copy()
            shorter[:, 11] -= 1  # the height
            super().copy_row_table(shorter, stream, outward=outward, batch=batch)

    gpu = Faulty(row_batches=True)
    context = gpu.retain(0)
    with gpu.current(context):
        assert not row_batches_work(gpu)
    gpu.release(0)
    assert gpu.leaks() == []
