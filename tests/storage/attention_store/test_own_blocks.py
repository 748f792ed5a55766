"""Blocks of a slice in memory of our own: the right bytes of the right blocks, and nothing of the others."""

from __future__ import annotations

import ctypes
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from transferd.blocks.layout import build_layout
from transferd.blocks.layout.base import Arena
from transferd.config import CacheSection
from transferd.errors import MemoryLost
from transferd.runtime.threads import ThreadPools
from transferd.storage.attention_store.own_blocks import OwnBlocks, tensors_of
from transferd.tiers.shm import ShmDeviceTier

LAYOUT = build_layout(
    CacheSection(layers=2, kv_heads=2, head_dim=8, block_size=4, device_blocks=40, mtp_layers=1, mtp_blocks=60)
)
BLOCKS = [7, 0, 39, 12]
NBYTES = int(LAYOUT.device.nbytes[0])  # of one tensor's block; all tensors of this layout have equal ones


@pytest.fixture
async def device() -> AsyncIterator[ShmDeviceTier]:
    """Shared memory, which is what other processes may truncate."""
    threads = ThreadPools(1)
    tier = ShmDeviceTier(LAYOUT, 0, 0, threads)
    await tier.open()
    view(tier.arena.origin, tier.arena.geometry.extent)[:] = np.random.default_rng(3).integers(
        0, 256, tier.arena.geometry.extent, dtype=np.uint8
    )
    yield tier
    await tier.close()
    threads.close()


def view(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), shape=(nbytes,))


def tensors(arena: Arena) -> list[int]:
    keys, values = tensors_of(LAYOUT, arena)
    return [*keys, *values]


def block(address: int, number: int) -> bytes:
    """A block of one tensor, whose blocks follow each other, as the SDK takes it."""
    return view(address + number * NBYTES, NBYTES).tobytes()


async def test_each_layer_has_its_key_and_value_tensor_where_the_device_has_them(device: ShmDeviceTier) -> None:
    offsets = device.arena.geometry.offsets.tolist()
    at = {(one.plane.name, one.layer): offset for one, offset in zip(LAYOUT.segments, offsets, strict=True)}
    for plane, addresses in zip(("key", "value"), tensors_of(LAYOUT, device.arena), strict=True):
        assert addresses == [device.arena.origin + at[plane, layer] for layer in range(3)]


async def test_copy_out_copies_each_blocks_bytes_in_the_order_of_the_slice(device: ShmDeviceTier) -> None:
    own = OwnBlocks(LAYOUT, device.arena, BLOCKS)
    own.copy_out()
    for ours, theirs in zip([*own.tensors[0], *own.tensors[1]], tensors(device.arena), strict=True):
        assert [block(ours, i) for i in range(len(BLOCKS))] == [block(theirs, number) for number in BLOCKS]


@pytest.mark.parametrize("count", [0, 1, 3, 4])
async def test_only_the_first_blocks_come_back_and_no_other_byte_changes(device: ShmDeviceTier, count: int) -> None:
    own = OwnBlocks(LAYOUT, device.arena, BLOCKS)
    for number, address in enumerate((*own.tensors[0], *own.tensors[1])):
        view(address, len(BLOCKS) * NBYTES)[:] = np.random.default_rng(number).integers(
            0, 256, len(BLOCKS) * NBYTES, dtype=np.uint8
        )
    expected = view(device.arena.origin, device.arena.geometry.extent).copy()
    for ours, theirs in zip((*own.tensors[0], *own.tensors[1]), tensors(device.arena), strict=True):
        for i in range(count):
            at = theirs - device.arena.origin + BLOCKS[i] * NBYTES
            expected[at : at + NBYTES] = view(ours + i * NBYTES, NBYTES)
    own.copy_in(count)
    assert view(device.arena.origin, device.arena.geometry.extent).tobytes() == expected.tobytes()


@pytest.mark.parametrize("way", ["out", "in"])
async def test_memory_that_another_process_has_truncated_is_an_error_and_ends_nothing(
    device: ShmDeviceTier, way: str
) -> None:
    own = OwnBlocks(LAYOUT, device.arena, BLOCKS)
    os.truncate(Path("/dev/shm") / device.handle().data["name"], 0)
    with pytest.raises(MemoryLost):
        own.copy_out() if way == "out" else own.copy_in(4)
