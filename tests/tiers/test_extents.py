"""Two ranks with a byte in common are seen, whatever the memory is and however it was reached."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.errors import RequestError
from transferd.runtime.threads import ThreadPools
from transferd.tiers import extents as extents_module
from transferd.tiers.arrays import describe
from transferd.tiers.base import DeviceHandle
from transferd.tiers.extents import Extent, extent, overlap, overlapping
from transferd.tiers.offered import DIRECTORY, PEER
from transferd.tiers.owner import as_data, this_process
from transferd.tiers.segment import PREFIX, SharedSegment
from transferd.tiers.shm import ShmDeviceTier

LAYOUT = build_layout(CacheSection(layers=2, device_blocks=3, block_size=4, kv_heads=2, head_dim=8))
EXTENT = LAYOUT.device.extent


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


# Few sizes and strides, so that many extents share a stride and interleave in rows of it.
crowded = st.builds(
    lambda start, size, stride, blocks: extent("a", start, size, max(size, stride), blocks),
    st.integers(0, 60), st.integers(1, 4), st.sampled_from([6, 6, 6, 8, 9]), st.integers(1, 6),
)  # fmt: skip


@settings(max_examples=500)
@given(st.lists(crowded, max_size=8), st.lists(crowded, max_size=8))
def test_extents_of_one_stride_or_several_are_compared_byte_for_byte(one: list[Extent], other: list[Extent]) -> None:
    assert overlap(one, other) == bool(bytes_of(one) & bytes_of(other))


@settings(max_examples=500)
@given(st.lists(crowded, max_size=8))
def test_apart_means_no_byte_twice(extents: list[Extent]) -> None:
    found = overlapping(extents)
    assert (found is None) == (len(bytes_of(extents)) == sum(one.runs * one.nbytes for one in extents))
    if found is not None:
        assert bytes_of([extents[found[0]]]) & bytes_of([extents[found[1]]])


@settings(max_examples=300)
@given(
    *(st.integers(1, 2**20) for _ in range(2)), *(st.integers(2, 2**8) for _ in range(2)),
    st.integers(1, 2**12), st.integers(1, 2**12), st.integers(-(2**20), 2**20),
)  # fmt: skip
def test_long_strides_are_compared_run_for_run(
    nbytes: int, size: int, runs: int, more: int, gap: int, space: int, behind: int
) -> None:
    one = extent("a", 2**40, nbytes, nbytes + gap, runs)
    other = extent("a", 2**40 + behind, size, size + space, more)
    mine = one.start + np.arange(one.runs)[:, None] * one.stride
    theirs = other.start + np.arange(other.runs) * other.stride
    assert overlap([one], [other]) == bool(((mine < theirs + other.nbytes) & (theirs < mine + one.nbytes)).any())


def test_work_does_not_grow_with_blocks_nor_with_the_square_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    touch = extents_module._touch
    monkeypatch.setattr(
        extents_module, "_touch", lambda ones, others: (compared.append(len(ones)), touch(ones, others))[1]
    )
    layers, page, blocks = 4096, 64, 2**26
    interleaved = [extent("a", layer * page, page, layers * page, blocks) for layer in range(layers)]
    assert overlapping(interleaved) is None
    assert not compared  # one stride: no pair is compared, and none of 2^26 blocks is made
    assert overlapping([*interleaved, extent("a", 2**30 + 1, 1, layers * page, 2)]) is not None
    assert compared == [1]
    assert overlapping([extent("a", 0, 16, 32, blocks), extent("a", 16, 16, 64, blocks)]) is None
    assert compared == [1, 1]  # two strides: one pair


def test_too_many_strides_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents_module, "MOST_PAIRS", 10)
    apart = [extent("a", layer, 1, 20 + 10 * layer, 2) for layer in range(5)]
    assert overlapping(apart) is None  # ten pairs
    with pytest.raises(RequestError, match="more than 10 pairs") as caught:
        overlapping([extent("a", layer, 1, 20 + 10 * layer, 2) for layer in range(6)])
    assert caught.value.reason == "bad_value"


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
    return DeviceHandle("shm", data | {"owner": as_data(this_process()), PEER: (os.getuid(), os.getpid())})


async def test_mappings_of_one_segment_overlap_where_their_arrays_do(segment: SharedSegment) -> None:
    alias = DIRECTORY / f"{segment.name}.alias"
    os.link(DIRECTORY / segment.name, alias)
    threads = ThreadPools(1)
    starts = [(0, ""), (0, alias.name), (EXTENT // 2 // 256 * 256, ""), (EXTENT, ""), (EXTENT, alias.name)]
    tiers = [ShmDeviceTier(LAYOUT, rank, 0, threads) for rank in range(len(starts))]
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
