"""What a device tier does when something fails: one suite over the real tiers and the simulated one.

A tier says how a failure is brought about; what follows from it is the same for all of them. Shared memory fails in
the middle of a copy when another process truncates it; then it is lost, until the tier opens again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from tests.support.cuda.tier import FakeCudaTier
from tests.support.simulation.blocks import Bytes
from tests.support.simulation.device import SimDevice
from transferd.blocks.copyplan import plan_copy
from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.errors import DeviceLost, MemoryLost, TierError, TransferError
from transferd.runtime.threads import ThreadPools, Threads
from transferd.tiers import hostcopy, segment, shm
from transferd.tiers.base import INLINE_BYTES, DeviceTier
from transferd.tiers.paddle import PaddleDeviceTier
from transferd.tiers.pinned import HostPool
from transferd.tiers.shm import ShmDeviceTier

LAYOUT = build_layout(CacheSection(layers=2, kv_heads=4, head_dim=64, block_size=32, device_blocks=24, host_blocks=24))
BLOCKS = list(range(LAYOUT.device_blocks))


class Kind:
    """One tier, and how to make it fail.

    fails: a copy can fail on it. loses: it notices that its device is lost. vanishes: others can truncate its memory.
    """

    fails = True
    loses = True
    vanishes = False

    def __init__(self, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads = threads
        self.monkeypatch = monkeypatch
        self.tier: DeviceTier

    async def open_without_memory(self) -> None:
        """Open the tier where there is no room for it."""
        raise NotImplementedError

    def fail_next_copy(self) -> None:
        raise NotImplementedError

    def lose_device(self) -> None:
        """With the next copy."""
        raise NotImplementedError


class Shm(Kind):
    fails = loses = False
    vanishes = True

    def __init__(self, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(threads, monkeypatch)
        self.tier = ShmDeviceTier(LAYOUT, 0, 0, threads)

    async def open_without_memory(self) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # also of files in /dev/shm
        try:
            await self.tier.open()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Paddle(Kind):
    """Real tensors, on the CPU place; their operations raise what Paddle's do."""

    loses = False

    def __init__(self, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paddle = pytest.importorskip("paddle", reason="the paddle extra is not installed")
        super().__init__(threads, monkeypatch)
        self.tier = PaddleDeviceTier(LAYOUT, 0, 0, threads)

    def refuse(self, operation: str) -> None:
        """The next call of it fails, in whatever thread."""
        real, left = getattr(self.paddle, operation), [True]

        def refused(*arguments: object, **named: object) -> object:
            if left and left.pop():
                raise RuntimeError(f"(External) {operation} was refused")
            return real(*arguments, **named)

        self.monkeypatch.setattr(self.paddle, operation, refused)

    def fail_next_copy(self) -> None:
        self.refuse("split")

    async def open_without_memory(self) -> None:
        self.refuse("to_tensor")
        await self.tier.open()


class Cuda(Kind):
    def __init__(self, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(threads, monkeypatch)
        self.gpu = FakeGpu(seed=1)
        self.tier = FakeCudaTier(LAYOUT, 0, 0, threads, gpu=self.gpu, slot_bytes=1 << 16)

    async def open_without_memory(self) -> None:
        self.gpu.refuse("allocate", "CUDA_ERROR_OUT_OF_MEMORY")
        await self.tier.open()

    def fail_next_copy(self) -> None:
        self.gpu.refuse("record", "CUDA_ERROR_INVALID_VALUE")

    def lose_device(self) -> None:
        self.gpu.refuse("record", "CUDA_ERROR_ECC_UNCORRECTABLE")


class Simulated(Kind):
    def __init__(self, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(threads, monkeypatch)
        self.device = SimDevice(LAYOUT, 0, 0, threads)
        self.tier = self.device

    async def open_without_memory(self) -> None:
        self.device.dice.script("open", "fail")
        await self.tier.open()

    def fail_next_copy(self) -> None:
        self.device.dice.script("copy_in", "fail")

    def lose_device(self) -> None:
        self.device.dice.script("copy_in", "lost")


KINDS: dict[str, Callable[[Threads, pytest.MonkeyPatch], Kind]] = {
    "shm": Shm,
    "paddle": Paddle,
    "cuda": Cuda,
    "simulated": Simulated,
}


@pytest.fixture(params=KINDS, ids=str)
async def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kind]:
    if request.param == "cuda" and compiler() is None:
        pytest.skip("there is no C compiler to run kernels on the CPU with")
    threads = ThreadPools(2)
    yield KINDS[request.param](threads, monkeypatch)
    threads.close()


@pytest.fixture
def failing(kind: Kind) -> Kind:
    if not kind.fails:
        pytest.skip("a copy between two mappings of this process does not fail")
    return kind


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool(LAYOUT)
    yield made
    made.close()


def content(pool: HostPool) -> Bytes:
    return np.frombuffer(pool.memory.view, dtype=np.uint8)


async def copies_well(tier: DeviceTier, pool: HostPool, seed: int) -> bool:
    """Whether all blocks go in and come out again byte for byte."""
    memory = content(pool)
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.shape, dtype=np.uint8)
    before = memory.copy()
    await tier.copy_in(plan_copy(LAYOUT.host, BLOCKS, LAYOUT.device, BLOCKS), pool.memory)
    memory[:] = 0
    await tier.copy_out(plan_copy(LAYOUT.device, BLOCKS, LAYOUT.host, BLOCKS), pool.memory)
    return np.array_equal(memory, before)


def ours_in_shared_memory() -> set[str]:
    """Of this process only: other tests' processes make and remove segments meanwhile."""
    return set(segment._made_here)


async def test_without_memory_a_tier_does_not_open_and_leaves_nothing(kind: Kind, pool: HostPool) -> None:
    before = ours_in_shared_memory()
    with pytest.raises(TierError):
        await kind.open_without_memory()
    assert ours_in_shared_memory() <= before
    with pytest.raises(TierError, match="not open"):
        _ = kind.tier.arena
    await kind.tier.open()  # once there is room
    assert await copies_well(kind.tier, pool, 1)
    await kind.tier.close()


async def test_a_copy_that_no_thread_takes_fails_and_never_runs(
    kind: Kind, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kind.tier.open()
    plan = plan_copy(LAYOUT.host, BLOCKS, LAYOUT.device, BLOCKS)
    assert plan.nbytes > INLINE_BYTES
    start, refusals = threading.Thread.start, itertools.count()

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("transferd-"):
            next(refusals)
            raise RuntimeError("can't start new thread")
        start(thread)

    memory = content(pool)
    memory[:] = 0x5A
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        copying = asyncio.ensure_future(kind.tier.copy_in(plan, pool.memory))
        await asyncio.wait([copying])
    if not next(refusals):
        await kind.tier.close()
        pytest.skip("its copies have threads of their own, which it starts when it opens")
    with pytest.raises(TransferError):
        copying.result()
    assert await copies_well(kind.tier, pool, 2), "what was refused does not come later"
    await kind.tier.close()


async def test_a_failed_copy_is_an_error_of_its_own(failing: Kind, pool: HostPool) -> None:
    await failing.tier.open()
    failing.fail_next_copy()
    with pytest.raises(TierError) as caught:
        await failing.tier.copy_in(plan_copy(LAYOUT.host, [0, 1], LAYOUT.device, [2, 3]), pool.memory)
    assert not isinstance(caught.value, DeviceLost)
    assert await copies_well(failing.tier, pool, 3)
    await failing.tier.close()


@pytest.mark.parametrize("native", [True, False], ids=["compiled", "in Python"])
@pytest.mark.parametrize("left", [0, 4096, LAYOUT.device.extent // 2 // 4096 * 4096])
async def test_memory_that_vanishes_is_an_error_and_not_the_end(
    kind: Kind, pool: HostPool, native: bool, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kind.vanishes:
        pytest.skip("no other process can take its memory away")
    if not native:
        monkeypatch.setattr(shm, "copy_runs", hostcopy.copy_runs_python)
    elif not hostcopy.NATIVE:
        pytest.skip("the installation found no compiler")
    await kind.tier.open()
    assert await copies_well(kind.tier, pool, 5)
    os.truncate(Path("/dev/shm") / kind.tier.handle().data["name"], left)
    everything = plan_copy(LAYOUT.host, BLOCKS, LAYOUT.device, BLOCKS)
    for plan in (everything, plan_copy(LAYOUT.host, BLOCKS[-1:], LAYOUT.device, BLOCKS[-1:])):
        with pytest.raises(MemoryLost, match="vanished while it was copied"):
            await kind.tier.copy_in(plan, pool.memory)
    with pytest.raises(MemoryLost):
        await kind.tier.copy_out(plan_copy(LAYOUT.device, BLOCKS, LAYOUT.host, BLOCKS), pool.memory)
    await kind.tier.close()
    await kind.tier.open()
    assert await copies_well(kind.tier, pool, 6)
    await kind.tier.close()


async def test_a_lost_device_stays_lost_and_closes_quietly(failing: Kind, pool: HostPool) -> None:
    """Also over a close and an open, as a clear and a restore of the cache do them: its driver answers nothing more."""
    if not failing.loses:
        pytest.skip("Paddle does not say which errors mean that the device is lost")
    await failing.tier.open()
    failing.lose_device()
    plan = plan_copy(LAYOUT.host, [0], LAYOUT.device, [1])
    for _ in range(2):
        with pytest.raises(DeviceLost):
            await failing.tier.copy_in(plan, pool.memory)
    with pytest.raises(DeviceLost):
        await failing.tier.copy_out(plan_copy(LAYOUT.device, [1], LAYOUT.host, [0]), pool.memory)
    await failing.tier.close()
    with pytest.raises(DeviceLost):
        await failing.tier.open()
    with pytest.raises(TierError, match="not open"):
        _ = failing.tier.arena


async def test_a_copy_that_nobody_waits_for_any_more_touches_what_it_names_and_nothing_else(
    kind: Kind, pool: HostPool
) -> None:
    """A worker shields its copies; whoever does not has to expect that they run to their end."""
    await kind.tier.open()
    assert await copies_well(kind.tier, pool, 4)
    memory = content(pool)
    before = memory.copy()
    copying = asyncio.ensure_future(
        kind.tier.copy_in(plan_copy(LAYOUT.host, BLOCKS[:12], LAYOUT.device, BLOCKS[12:]), pool.memory)
    )
    await asyncio.sleep(0)
    copying.cancel()
    await asyncio.wait([copying])
    while isinstance(kind, Simulated) and kind.device.under_way:  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0)
    await kind.tier.copy_out(plan_copy(LAYOUT.device, BLOCKS[:12], LAYOUT.host, BLOCKS[12:]), pool.memory)
    for geometry_block in BLOCKS[:12]:
        for offset, stride, nbytes in zip(LAYOUT.host.offsets, LAYOUT.host.strides, LAYOUT.host.nbytes, strict=True):
            first = int(offset + geometry_block * stride)
            second = int(offset + (geometry_block + 12) * stride)
            assert np.array_equal(memory[first : first + int(nbytes)], before[first : first + int(nbytes)])
            assert np.array_equal(memory[second : second + int(nbytes)], before[first : first + int(nbytes)])
    await kind.tier.close()
