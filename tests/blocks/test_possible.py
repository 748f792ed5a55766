"""What can be an object, from its name and its length alone."""

from __future__ import annotations

import pytest

from transferd.blocks.formats import FOOTER_BYTES, object_format
from transferd.blocks.layout import build_layout
from transferd.config import from_tree

SMALL = {"layers": 1, "kv_heads": 1, "head_dim": 16, "block_size": 16}


@pytest.mark.parametrize("generation", ["", "RL-1"])
def test_a_sealed_block_has_one_length_and_one_of_another_layout_at_least_a_footer(generation: str) -> None:
    config = from_tree({"cache": SMALL})
    mine = object_format(config.storage, build_layout(config.geometry))
    other_config = from_tree({"cache": SMALL | {"layers": 2}})
    other = object_format(other_config.storage, build_layout(other_config.geometry))
    [name] = mine.names(generation, mine.ids(["k"]), 1)
    size = mine.slot_bytes
    assert [mine.possible(name, nbytes) for nbytes in (0, FOOTER_BYTES, size - 1, size, size + 1)] == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert [other.possible(name, nbytes) for nbytes in (0, FOOTER_BYTES, FOOTER_BYTES + 1, size)] == [
        False,
        False,
        True,
        True,
    ]


def test_raw_planes_are_of_any_length_but_none() -> None:
    config = from_tree({"cache": SMALL, "storage": {"key_schema": "fastdeploy"}})
    raw = object_format(config.storage, build_layout(config.geometry))
    assert [raw.possible("prefix_k_0_key", nbytes) for nbytes in (0, 1)] == [False, True]
