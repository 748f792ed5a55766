"""Two ranks with a byte in common are seen, whatever the memory is and however it was reached."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.runtime.threads import ThreadPools
from transferd.tiers.arrays import describe
from transferd.tiers.base import DeviceHandle
from transferd.tiers.extents import Extent, extent, overlap, overlapping
from transferd.tiers.owner import as_data, this_process
from transferd.tiers.paddle import PaddleDeviceTier
from transferd.tiers.segment import DIRECTORY, PREFIX, SharedSegment
from transferd.tiers.shm import ShmDeviceTier

LAYOUT = build_layout(CacheSection(layers=2, device_blocks=3, block_size=4, kv_heads=2, head_dim=8))
EXTENT = LAYOUT.device.extent
KINDS = {"shm": ShmDeviceTier, "paddle": PaddleDeviceTier}


def bytes_of(extents: list[Extent]) -> set[tuple[object, int]]:
    return {
        (one.memory, one.start + run * one.stride + at)
        for one in extents
        for run in range(one.runs)
        for at in range(one.nbytes)
    }


ranges = st.builds(
    lambda memory, start, size, gap, blocks: extent(memory, start, size, size + gap, blocks),
    st.sampled_from("ab"), st.integers(0, 20), st.integers(1, 5), st.integers(0, 6), st.integers(1, 5),
)  # fmt: skip


@given(st.lists(ranges, max_size=4), st.lists(ranges, max_size=4))
def test_overlap_means_a_byte_in_common(one: list[Extent], other: list[Extent]) -> None:
    assert overlap(one, other) == bool(bytes_of(one) & bytes_of(other))


@given(st.lists(ranges, max_size=5))
def test_two_that_overlap_are_found_and_named(extents: list[Extent]) -> None:
    extents = [one._replace(memory="a") for one in extents]
    found = overlapping(extents)
    if found is None:
        assert len(bytes_of(extents)) == sum(one.runs * one.nbytes for one in extents)
    else:
        one, other = (extents[position] for position in found)
        assert found[0] != found[1]
        assert bytes_of([one]) & bytes_of([other])


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    made = SharedSegment(f"{PREFIX}test.{os.getpid()}.extents", 2 * EXTENT, create=True)
    yield made
    made.close()


def handle(segment: SharedSegment, start: int = 0, name: str = "") -> DeviceHandle:
    places = [place | {"offset": place["offset"] + start} for place in describe(LAYOUT)]
    data: dict[str, Any] = {"name": name or segment.name, "nbytes": 2 * EXTENT, "arrays": places}
    return DeviceHandle("shm", data | {"owner": as_data(this_process())})


@pytest.mark.parametrize("kind", KINDS)
async def test_mappings_of_one_segment_overlap_where_their_arrays_do(kind: str, segment: SharedSegment) -> None:
    if kind == "paddle":
        pytest.importorskip("paddle", reason="the paddle extra is not installed")
    alias = DIRECTORY / f"{segment.name}.alias"
    os.link(DIRECTORY / segment.name, alias)
    threads = ThreadPools(1)
    starts = [(0, ""), (0, alias.name), (EXTENT // 2 // 256 * 256, ""), (EXTENT, ""), (EXTENT, alias.name)]
    tiers = [KINDS[kind](LAYOUT, rank, 0, threads) for rank in range(len(starts))]
    try:
        for tier, (start, name) in zip(tiers, starts, strict=True):
            await tier.attach(handle(segment, start, name))
        together = {
            pair for pair in itertools.combinations(range(5), 2)
            if overlap(tiers[pair[0]].extents(), tiers[pair[1]].extents())
        }  # fmt: skip
        assert together == {(0, 1), (0, 2), (1, 2), (2, 3), (2, 4), (3, 4)}
    finally:
        for tier in tiers:
            await tier.close()
        alias.unlink()
        threads.close()
