"""DMAs between slots and host memory: the same bytes whatever the bounds, few, short, and within one registration."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from transferd.blocks.copyplan import plan_copy
from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.runtime.threads import ThreadPools
from transferd.tiers import pinned
from transferd.tiers.cuda import CudaDeviceTier, tuning
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.cuda.tuning import Tuning
from transferd.tiers.pinned import HostPool

# A block is 2 layers x 2 planes x 1 KiB: exactly the host pool's stride, so consecutive blocks are one range.
LAYOUT = build_layout(CacheSection(layers=2, kv_heads=1, head_dim=64, block_size=8, device_blocks=12, host_blocks=12))
BLOCK = LAYOUT.block_bytes
IDS = [7, 0, 3, 1, 4, 2]
CONSECUTIVE = [2, 3, 4, 8, 9, 6]


@pytest.fixture
def threads() -> Iterator[ThreadPools]:
    threads = ThreadPools(2)
    yield threads
    threads.close()


async def dmas_of(threads: ThreadPools, monkeypatch: pytest.MonkeyPatch, *, most: int, slot: int) -> list[int]:
    """The sizes of the DMAs of a gathered copy into the device and one out of it, whose bytes are compared."""
    monkeypatch.setitem(tuning.MEASURED, (FakeGpu().describe(0).capability, False), Tuning(grid=4, dma_most=most))
    sizes: list[int] = []

    class Counting(FakeGpu):
        def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
            sizes.append(nbytes)
            super().copy(target, source, nbytes, stream)

    gpu = Counting(batches=False)
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu, copy_path="gather", slot_bytes=slot)
    await tier.open()
    pool = HostPool(LAYOUT, CudaPinning(0, gpu))
    memory = np.frombuffer(pool.memory.view, dtype=np.uint8)[: 12 * BLOCK].reshape(12, BLOCK)
    memory[:] = np.random.default_rng(3).integers(0, 256, memory.shape, dtype=np.uint8)
    before = memory[CONSECUTIVE].copy()
    sizes.clear()
    await tier.copy_in(plan_copy(LAYOUT.host, CONSECUTIVE, tier.arena.geometry, IDS), pool.memory)
    memory[:] = 0xA5
    await tier.copy_out(plan_copy(tier.arena.geometry, IDS, LAYOUT.host, CONSECUTIVE), pool.memory)
    assert np.array_equal(memory[CONSECUTIVE], before)
    assert (memory[[0, 1, 5, 7, 10, 11]] == 0xA5).all(), "nothing else was written"
    del memory
    await tier.close()
    pool.close()
    assert gpu.wrong() == []
    assert gpu.leaks() == []
    return sizes


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")
@pytest.mark.parametrize("most", [1000, BLOCK - 1, 1 << 20])
@pytest.mark.parametrize("slot", [1, 2 * BLOCK, 1 << 20])
async def test_no_dma_of_a_gathered_copy_is_longer_than_allowed(
    threads: ThreadPools, monkeypatch: pytest.MonkeyPatch, most: int, slot: int
) -> None:
    sizes = await dmas_of(threads, monkeypatch, most=most, slot=slot)
    assert max(sizes) <= most
    assert sum(sizes) == 2 * len(IDS) * BLOCK


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")
async def test_blocks_that_are_neighbours_in_host_memory_are_one_dma(
    threads: ThreadPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await dmas_of(threads, monkeypatch, most=1 << 20, slot=1 << 20) == [3 * BLOCK, 2 * BLOCK, BLOCK] * 2


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")
async def test_but_not_across_two_registrations(threads: ThreadPools, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake refuses a DMA that crosses from one registration into the next, as CUDA does."""
    monkeypatch.setattr(pinned, "REGISTER_MOST", BLOCK)
    assert await dmas_of(threads, monkeypatch, most=1 << 20, slot=1 << 20) == [BLOCK] * 12
