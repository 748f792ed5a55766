"""What a purge means: names that fit, and names that do not."""

from __future__ import annotations

import pytest

from transferd.blocks.formats import ObjectNamer
from transferd.storage.selection import Selection

NAMER = ObjectNamer("a model/α", "f1")
NAME = NAMER.names("RL 7", NAMER.ids(["k"]), 0)[0]
FASTDEPLOY = "prefix_k_0_key"


@pytest.mark.parametrize(
    ("selection", "fits"),
    [
        (Selection(), [True, True]),
        (Selection(model="a model/α"), [True, False]),
        (Selection(model="a model"), [False, False]),
        (Selection(generation="RL 7"), [True, False]),
        (Selection(generation=""), [False, False]),
        (Selection(model="a model/α", generation="RL 8"), [False, False]),
        (Selection(names=frozenset([FASTDEPLOY])), [False, True]),
        (Selection(names=frozenset([NAME]), model="another"), [False, False]),
        (Selection(unused_s=5.0, owner="whoever"), [True, True]),
    ],
)
def test_a_name_fits_all_that_is_said_or_not(selection: Selection, fits: list[bool]) -> None:
    assert [selection.fits(name) for name in (NAME, FASTDEPLOY)] == fits


def test_a_generation_of_no_name_is_not_that_of_every_name() -> None:
    plain = NAMER.names("", NAMER.ids(["k"]), 0)[0]
    assert Selection(generation="").fits(plain)
    assert not Selection(generation="").fits(NAME)
