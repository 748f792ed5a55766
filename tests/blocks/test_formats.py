"""The two object formats: names, places and checks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from transferd.blocks.formats import (
    FOOTER_BYTES,
    Damage,
    ObjectFormat,
    ObjectNamer,
    RawPlanes,
    SealedBlocks,
    key_digest,
    object_format,
)
from transferd.blocks.layout import BlockLayout, build_layout
from transferd.config import Config, from_tree
from transferd.errors import ConfigError

CACHES: list[dict[str, Any]] = [
    {"layers": 3, "kv_heads": 2, "head_dim": 4, "block_size": 2, "mtp_layers": 2},
    {"layers": 2, "kv_heads": 1, "head_dim": 4, "block_size": 2, "dtype": "block_wise_fp8"},
    {"layers": 2, "attention": "mla", "kv_lora_rank": 8, "qk_rope_head_dim": 4, "block_size": 2},
    {"layers": 2, "attention": "dsa", "block_size": 2},
]


def configured(cache: dict[str, Any], **storage: Any) -> tuple[BlockLayout, Config]:
    config = from_tree({"cache": cache, "storage": storage})
    return build_layout(config.geometry), config


def formats(cache: dict[str, Any]) -> list[ObjectFormat]:
    layout, config = configured(cache)
    return [SealedBlocks(config.storage.model, layout), RawPlanes(layout)]


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("number", [0, 1], ids=["transferd", "fastdeploy"])
def test_the_parts_and_the_segments_fill_a_slot_without_gap_or_overlap(cache: dict[str, Any], number: int) -> None:
    objects, layout = formats(cache)[number], configured(cache)[0]
    ends = [0, *(part.stop for part in objects.parts)]
    assert [part.start for part in objects.parts] == ends[:-1]
    covered = np.zeros(objects.slot_bytes, dtype=int)
    for offset, segment in zip(objects.offsets, layout.segments, strict=True):
        covered[offset : offset + segment.nbytes] += 1
    assert (covered[: layout.block_bytes] == 1).all()
    assert not covered[layout.block_bytes :].any()


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_a_raw_plane_holds_its_layers_in_order(cache: dict[str, Any]) -> None:
    objects, layout = formats(cache)[1], configured(cache)[0]
    parts = {part.suffix: part for part in objects.parts}
    assert [part.suffix for part in objects.parts] == [f"_{plane.name}" for plane in layout.planes]
    for offset, segment in zip(objects.offsets, layout.segments, strict=True):
        assert offset == parts[f"_{segment.plane.name}"].start + segment.layer * segment.nbytes


def test_names_are_fastdeploys() -> None:
    _, raw = formats(CACHES[0])
    assert raw.names("", raw.ids(["a"]), 0) == ["prefix_a_0"]
    (name,) = raw.names("RL-STEP03", raw.ids(["ab12"]), 3)
    assert [name + part.suffix for part in raw.parts] == ["prefixRL-STEP03_ab12_3_key", "prefixRL-STEP03_ab12_3_value"]


def test_the_sealed_name_is_what_it_always_was() -> None:
    layout, _ = configured(CACHES[0])
    sealed = SealedBlocks("m", layout)
    assert sealed.names("g", sealed.ids(["k"]), 1) == [
        ObjectNamer("m", layout.fingerprint).names("g", [key_digest("k")], 1)[0]
    ]
    assert sealed.space == f"m/{layout.fingerprint}"


def test_sealed_blocks_detect_damage_and_raw_planes_do_not() -> None:
    for objects in formats(CACHES[0]):
        ids = objects.ids(["a", "b"])
        slots = [memoryview(bytearray(random.Random(i).randbytes(objects.slot_bytes))) for i in range(2)]
        objects.seal(slots, "g", ids, 1)
        assert objects.check(slots, "g", ids, 1) == [None, None]
        slots[0][5] ^= 1
        raw = isinstance(objects, RawPlanes)
        assert objects.check(slots, "g", ids, 1) == [None if raw else Damage.CHECKSUM, None]
        assert objects.check(slots, "g", ids[::-1], 1) == ([None] * 2 if raw else [Damage.KEY] * 2)
        assert objects.check(slots[1:], "h", ids[1:], 1) == [None if raw else Damage.GENERATION]
        assert objects.check(slots[1:], "g", ids[1:], 0) == [None if raw else Damage.RANK]


def test_a_block_without_an_id_of_its_own_is_a_bug() -> None:
    sealed, _ = formats(CACHES[0])
    ids, slots = sealed.ids(["a", "b"]), [memoryview(bytearray(sealed.slot_bytes))]
    for wrong in (sealed.seal, sealed.check):
        with pytest.raises(ValueError, match="longer"):
            wrong(slots, "g", ids, 0)


def test_what_ranks_and_threads_share_does_not_change() -> None:
    sealed, _ = formats(CACHES[0])
    [stamp] = ObjectNamer("m", "f").stamps("g", sealed.ids(["a"]), 0)
    for shared, name in ((sealed.parts[0], "start"), (stamp, "rank")):
        with pytest.raises(AttributeError):
            setattr(shared, name, 7)


def test_raw_planes_add_nothing_to_the_bytes() -> None:
    sealed, raw = formats(CACHES[0])
    assert sealed.slot_bytes == raw.slot_bytes + FOOTER_BYTES
    assert (sealed.checked_bytes, raw.checked_bytes) == (raw.slot_bytes, 0), "a footer is checked at any size"
    slot = bytearray(random.Random(1).randbytes(raw.slot_bytes))
    before = bytes(slot)
    raw.seal([memoryview(slot)], "", ["a"], 0)
    assert slot == before


def test_the_configuration_chooses() -> None:
    for schema, kind in (("transferd", SealedBlocks), ("fastdeploy", RawPlanes)):
        layout, config = configured(CACHES[0], key_schema=schema)
        assert type(object_format(config.storage, layout)) is kind
    with pytest.raises(ConfigError, match=r"storage\.key_schema"):
        configured(CACHES[0], key_schema="other")


def test_a_name_leads_back_to_its_id_in_its_generation_only() -> None:
    for objects in formats(CACHES[0]):
        for generation in ("", "RL-STEP03"):
            for key in ("ab", "a_b_7", "a/b", ""):
                ids = objects.ids([key])
                (name,) = objects.names(generation, ids, 12)
                assert objects.id_of(generation, name) == ids[0]
                assert objects.id_of("other", name) is None
        assert objects.id_of("", "somebody/elses") is None
