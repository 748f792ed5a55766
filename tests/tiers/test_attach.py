"""A tier that maps memory which somebody else made: the same bytes, refused whole, left behind never."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from transferd.blocks.copyplan import plan_copy
from transferd.blocks.layout import build_layout
from transferd.blocks.layout.base import Segment as BlockSegment
from transferd.config import CacheSection
from transferd.errors import RequestError, TierError
from transferd.runtime.threads import ThreadPools
from transferd.tiers import segment
from transferd.tiers.arrays import describe
from transferd.tiers.base import DeviceHandle, DeviceTier
from transferd.tiers.offered import DIRECTORY, PEER
from transferd.tiers.owner import as_data, this_process
from transferd.tiers.pinned import HostPool
from transferd.tiers.segment import PREFIX, SharedSegment, attach_arrays
from transferd.tiers.shm import ShmDeviceTier

LAYOUT = build_layout(
    CacheSection(layers=2, device_blocks=6, host_blocks=6, block_size=5, kv_heads=3, head_dim=7, mtp_layers=1,
                 mtp_blocks=9, dtype="block_wise_fp8", scale_dtype="float32")
)  # fmt: skip


@pytest.fixture
def threads() -> Iterator[ThreadPools]:
    threads = ThreadPools(1)
    yield threads
    threads.close()


@pytest.fixture
def tier(threads: ThreadPools) -> DeviceTier:
    return ShmDeviceTier(LAYOUT, 0, 0, threads)


@pytest.fixture
async def engine(threads: ThreadPools) -> AsyncIterator[ShmDeviceTier]:
    made = ShmDeviceTier(LAYOUT, 0, 0, threads)
    await made.open()
    yield made
    await made.close()


def moved_apart() -> tuple[list[dict[str, Any]], int]:
    """Arrays as an engine might have them: in no order of ours, odd gaps between them, more blocks than needed."""
    places, end = describe(LAYOUT), 64
    for place, part in reversed(list(zip(places, LAYOUT.segments, strict=True))):
        assert isinstance(part, BlockSegment)
        place["offset"] = end
        place["shape"][0] += 2
        end += place["shape"][0] * part.nbytes + 4 - part.nbytes * place["shape"][0] % 4 + 12
    return places, end


async def test_memory_whose_making_is_called_off_can_be_freed(
    tier: DeviceTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread makes it, and ends what it has begun: nobody else knows of the memory, or of its name."""
    began, go, allocate = asyncio.Event(), threading.Event(), segment._allocate
    loop = asyncio.get_running_loop()

    def held(fd: int, nbytes: int) -> None:
        loop.call_soon_threadsafe(began.set)
        assert go.wait(60)
        allocate(fd, nbytes)

    before = set(segment._made_here)

    def names() -> set[str]:
        return segment._made_here - before

    monkeypatch.setattr(segment, "_allocate", held)
    opening = asyncio.ensure_future(tier.open())
    try:
        await began.wait()
        opening.cancel()
    finally:
        go.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert len(names()) == 1
    await tier.close()
    assert names() == set()


def from_me(handle: DeviceHandle) -> DeviceHandle:
    """As the daemon's server passes it on: with the process that the kernel named."""
    return DeviceHandle(handle.kind, handle.data | {PEER: (os.getuid(), os.getpid())})


async def test_blocks_go_between_host_memory_and_what_the_engine_made(tier: DeviceTier, engine: ShmDeviceTier) -> None:
    caches = attach_arrays(engine.handle().data)
    rng = np.random.default_rng(5)
    for arrays in caches.values():
        for array in arrays:
            array.view(np.uint8)[...] = rng.integers(0, 256, array.view(np.uint8).shape, dtype=np.uint8)
    before = {plane: [array.copy() for array in arrays] for plane, arrays in caches.items()}
    await tier.attach(from_me(engine.handle()))
    pool = HostPool(LAYOUT)
    where = tier.arena.geometry
    await tier.copy_out(plan_copy(where, [4, 1, 2], LAYOUT.host, [0, 5, 3]), pool.memory)
    await tier.copy_in(plan_copy(LAYOUT.host, [0, 5, 3], where, [0, 5, 3]), pool.memory)
    for plane, arrays in caches.items():
        for array, was in zip(arrays, before[plane], strict=True):
            expected = was.copy()
            expected[[0, 5, 3]] = was[[4, 1, 2]]
            assert array.tobytes() == expected.tobytes(), plane
    await tier.close()
    pool.close()
    assert caches["key"][0].tobytes() is not None, "the engine's memory is still its own"
    assert (DIRECTORY / engine.handle().data["name"]).exists()


async def test_arrays_may_lie_anywhere_in_the_memory(tier: DeviceTier) -> None:
    places, nbytes = moved_apart()
    segment = SharedSegment(f"{PREFIX}test.{id(tier):x}", nbytes, create=True)
    data = {"name": segment.name, "nbytes": nbytes, "arrays": places, "owner": as_data(this_process())}
    await tier.attach(from_me(DeviceHandle("shm", data)))
    caches = attach_arrays(data)
    pool = HostPool(LAYOUT)
    memory = np.frombuffer(pool.memory.view, dtype=np.uint8)
    memory[:] = np.random.default_rng(6).integers(0, 256, memory.shape, dtype=np.uint8)
    await tier.copy_in(plan_copy(LAYOUT.host, [0, 1, 2, 3], tier.arena.geometry, [5, 0, 1, 3]), pool.memory)
    for part, offset, stride in zip(LAYOUT.segments, LAYOUT.host.offsets, LAYOUT.host.strides, strict=True):
        array = caches[part.plane.name][part.layer]
        for source, target in ((0, 5), (1, 0), (2, 1), (3, 3)):
            start = int(offset + source * stride)
            assert array[target].tobytes() == memory[start : start + part.nbytes].tobytes()
        assert not array[2].any(), "no other block is written"
        assert not array[6:].any()
    del memory
    await tier.close()
    pool.close()
    segment.close()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"nbytes": LAYOUT.device.extent // 2}, RequestError, "extends past its region"),
        ({"nbytes": LAYOUT.device.extent * 4}, TierError, "bytes; \\d+ are needed"),
        ({"nbytes": "7"}, RequestError, "nbytes"),
        ({"nbytes": 0}, RequestError, "nbytes"),
        ({"name": 7}, RequestError, "name"),
        ({"name": "../x"}, RequestError, "not a valid name"),
        ({"name": "a\0b"}, RequestError, "not a valid name"),
        ({"name": "transferd.nobody"}, TierError, "cannot open"),
        ({"arrays": []}, RequestError, "missing"),
    ],
)
async def test_memory_that_does_not_fit_is_refused_and_nothing_stays_open(
    tier: DeviceTier, engine: ShmDeviceTier, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    handle = engine.handle()
    with pytest.raises(error, match=said):
        await tier.attach(from_me(DeviceHandle(handle.kind, handle.data | change)))
    with pytest.raises(TierError, match="not open"):
        _ = tier.arena
    await tier.attach(from_me(handle))
    await tier.close()


async def test_a_handle_of_another_kind_is_refused(tier: DeviceTier, engine: ShmDeviceTier) -> None:
    with pytest.raises(RequestError, match="cuda_ipc") as caught:
        await tier.attach(from_me(replace(engine.handle(), kind="cuda_ipc")))
    assert caught.value.reason == "wrong_kind"


async def test_memory_is_attached_once_and_can_be_again_after_it_was_closed(
    tier: DeviceTier, engine: ShmDeviceTier
) -> None:
    await tier.attach(from_me(engine.handle()))
    for again in (tier.attach(from_me(engine.handle())), tier.open()):
        with pytest.raises(TierError, match="already open"):
            await again
    await tier.close()
    await tier.attach(from_me(engine.handle()))
    await tier.close()
    await tier.open()
    own = tier.handle().data
    assert own["name"] != engine.handle().data["name"]
    await tier.close()
    assert not (DIRECTORY / own["name"]).exists()


async def test_memory_made_anew_holds_nothing_of_what_was_there(tier: DeviceTier) -> None:
    everything = list(range(6))
    pool = HostPool(LAYOUT)
    memory = np.frombuffer(pool.memory.view, dtype=np.uint8)
    for _ in range(2):
        await tier.open()
        memory[:] = 0x5A
        await tier.copy_out(plan_copy(LAYOUT.device, everything, LAYOUT.host, everything), pool.memory)
        for block in everything:
            start = block * int(LAYOUT.host.strides[0])
            assert not memory[start : start + LAYOUT.block_bytes].any()
        memory[:] = 0xC3
        await tier.copy_in(plan_copy(LAYOUT.host, everything, LAYOUT.device, everything), pool.memory)
        await tier.close()
    del memory
    pool.close()
