"""The judge of a replay: it must notice one wrong byte anywhere, and name it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transferd.cli.replay.kvdata import POISON, KvData, Mismatch
from transferd.errors import InvariantError

BLOCKS, RANKS, LAYERS = 6, 2, 3
FIRST_BYTES = "378bb49d918b07ac"  # found once by running it; stored blocks of replays depend on it
Cache = dict[str, list[npt.NDArray[Any]]]


def caches() -> list[Cache]:
    """Two ranks; planes of several types, one with an odd number of bytes, the last layer with more blocks."""

    def arrays(shape: tuple[int, ...], dtype: str) -> list[npt.NDArray[Any]]:
        return [np.zeros((BLOCKS + 2 * (layer == LAYERS - 1), *shape), dtype=dtype) for layer in range(LAYERS)]

    return [
        {"key": arrays((2, 4, 8), "uint16"), "value": arrays((2, 4, 8), "uint16"), "key_scale": arrays((1, 7), "uint8")}
        for _ in range(RANKS)
    ]


def raw(array: npt.NDArray[Any], block: int) -> npt.NDArray[np.uint8]:
    view: npt.NDArray[np.uint8] = array[block].reshape(-1).view(np.uint8)
    return view


def test_a_filled_block_verifies_and_no_other_content_does() -> None:
    data = KvData(caches())
    data.fill(3, 77)
    assert data.verify(3, 77) is None
    assert data.verify(3, 78) == Mismatch(78, 3, 0, "key", 0, 0)


def test_filling_goes_to_the_attached_memory_and_to_no_other_block() -> None:
    attached = caches()
    data = KvData(attached)
    data.poison(range(BLOCKS))
    data.fill(2, 5)
    for cache in attached:
        for layers in cache.values():
            for array in layers:
                assert [bool((raw(array, b) == POISON).all()) for b in range(BLOCKS)] == [b != 2 for b in range(BLOCKS)]


@given(
    rank=st.integers(0, RANKS - 1),
    plane=st.sampled_from(["key", "value", "key_scale"]),
    layer=st.integers(0, LAYERS - 1),
    where=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
)
def test_one_wrong_byte_anywhere_is_found_and_named(rank: int, plane: str, layer: int, where: float, flip: int) -> None:
    attached = caches()
    data = KvData(attached)
    data.fill(4, 9)
    block = raw(attached[rank][plane][layer], 4)
    offset = int(where * len(block))
    block[offset] ^= flip
    assert data.verify(4, 9) == Mismatch(9, 4, rank, plane, layer, offset)


@given(first=st.integers(0, 2**64), second=st.integers(0, 2**64))
@settings(max_examples=200)
def test_two_contents_differ_in_every_part(first: int, second: int) -> None:
    attached = caches()
    data = KvData(attached)
    data.fill(0, first)
    data.fill(1, second)
    for cache in attached:
        for layers in cache.values():
            for array in layers:
                assert np.array_equal(raw(array, 0), raw(array, 1)) == (first == second)


def test_ranks_planes_and_layers_of_one_content_differ() -> None:
    attached = caches()
    KvData(attached).fill(0, 1)
    parts = [raw(array, 0)[:7].tobytes() for cache in attached for layers in cache.values() for array in layers]
    assert len(set(parts)) == len(parts)


def test_a_shifted_copy_does_not_verify() -> None:
    attached = caches()
    data = KvData(attached)
    data.fill(0, 1)
    block = raw(attached[1]["value"][2], 0)
    block[:] = np.roll(block, 8)
    assert data.verify(0, 1) is not None


def test_the_bytes_are_the_same_in_every_process_and_for_ever() -> None:
    attached = caches()
    KvData(attached).fill(0, 123)
    assert raw(attached[1]["key"][2], 0)[:8].tobytes().hex() == FIRST_BYTES, "then VERSION has to change"


@pytest.mark.parametrize("offset", [0, 5, 127])
def test_a_poisoned_block_shows_whether_it_was_touched(offset: int) -> None:
    attached = caches()
    data = KvData(attached)
    data.poison([1, 5])
    assert data.untouched(1, 8) is None
    raw(attached[1]["value"][0], 5)[offset] ^= 0x10
    assert data.untouched(5, 8) == Mismatch(8, 5, 1, "value", 0, offset)
    assert data.untouched(1, 8) is None


def test_poison_never_verifies() -> None:
    data = KvData(caches())
    data.poison([0])
    assert data.verify(0, 0) is not None


def test_an_array_whose_bytes_cannot_be_reached_is_refused() -> None:
    strided = [{"key": [np.zeros((4, 8), dtype=np.uint8)[:, ::2]]}]
    with pytest.raises(InvariantError, match="not contiguous"):
        KvData(strided)


def test_block_bytes_counts_every_rank_plane_and_layer() -> None:
    assert KvData(caches()).block_bytes == RANKS * LAYERS * (128 + 128 + 7)
