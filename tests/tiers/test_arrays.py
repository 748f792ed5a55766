"""Arrays in a handle: described and found again, and refused when a copy made from them could go wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.errors import RequestError
from transferd.tiers.arrays import MISMATCH, Region, describe, locate

LAYOUT = build_layout(
    CacheSection(layers=2, device_blocks=5, block_size=3, kv_heads=2, head_dim=4, dtype="block_wise_fp8", mtp_layers=1,
                 mtp_blocks=7)
)  # fmt: skip
BASE = 0x10000


def test_described_arrays_are_located_as_in_the_layout() -> None:
    places = describe(LAYOUT)
    random.Random(1).shuffle(places)
    arena = locate(LAYOUT, places, [Region(BASE, LAYOUT.device.extent)])
    assert arena.origin == BASE
    for name in ("offsets", "strides", "nbytes"):
        assert getattr(arena.geometry, name).tolist() == getattr(LAYOUT.device, name).tolist()
    assert arena.geometry.blocks == 5


def test_arrays_may_lie_in_several_regions_and_have_more_blocks_than_needed() -> None:
    places = describe(LAYOUT)
    regions: list[Region] = []
    for number, place in enumerate(places):
        place |= {"region": number, "offset": 2, "shape": [place["shape"][0] + 1, *place["shape"][1:]]}
        regions.append(Region(BASE + 4096 * (len(places) - number), 4096))
    arena = locate(LAYOUT, places, regions)
    assert arena.origin == BASE + 4096 + 2, "the lowest"
    starts = (arena.origin + arena.geometry.offsets).tolist()
    assert starts == [region.address + 2 for region in regions]
    assert arena.geometry.blocks == 5, "what every layer has by the configuration"


def change(**fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda places: places[1].update(fields)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda places: places.pop(1), "value of layer 0 is missing"),
        (lambda places: places.append(dict(places[1])), "value of layer 0 occurs twice"),
        (lambda places: places.append(places[1] | {"layer": 9}), "value of layer 9 is not part of this layout"),
        (change(dtype="float16"), "float16"),
        (change(shape=[4, 2, 3, 4]), r"\[4, 2, 3, 4\]; the layout needs \[5, 2, 3, 4\]"),
        (change(shape=[5, 2, 4, 3]), "the layout"),
        (change(shape=[]), "the layout"),
        (change(region=1), "names region 1; the handle has 1"),
        (change(region=-1), "names region -1; the handle has 1"),
        (change(offset=-1), "extends past its region"),
        (change(offset=10**30), "extends past its region"),
        (change(offset=LAYOUT.device.extent - 8), "extends past its region"),
        (change(shape=[10**12, 2, 3, 4]), "extends past its region"),
        (change(offset=119), "key of layer 0 and value of layer 0 overlap"),
        (lambda places: places[2].update(offset=places[2]["offset"] + 1), "not a multiple of its element size"),
        (lambda places: places.__setitem__(0, 7), "malformed"),
        (lambda places: places[0].pop("offset"), "malformed"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(spoil: Callable[[list[Any]], None], said: str) -> None:
    places: list[Any] = describe(LAYOUT)
    spoil(places)
    with pytest.raises(RequestError, match=said) as caught:
        locate(LAYOUT, places, [Region(BASE, LAYOUT.device.extent)])
    assert caught.value.reason == MISMATCH
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arrays", [None, 7, "x", {"a": 1}, [None]])
def test_malformed_arrays_are_refused(arrays: object) -> None:
    with pytest.raises(RequestError):
        locate(LAYOUT, arrays, [Region(BASE, LAYOUT.device.extent)])
