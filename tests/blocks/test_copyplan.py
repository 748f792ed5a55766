"""Copy plans against a naive model, byte for byte, for every layout and every pair of memories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferd.blocks.copyplan import CopyPlan, plan_copy
from transferd.blocks.layout import BlockLayout, Geometry, build_layout
from transferd.config import CacheSection
from transferd.errors import ConfigError, InvariantError, RequestError
from transferd.tasks import check_ids
from transferd.tiers.hostcopy import NATIVE, copy_runs, copy_runs_python

SMALL: dict[str, Any] = {"layers": 2, "device_blocks": 7, "host_blocks": 9, "block_size": 3}
CACHES = {
    "gqa": CacheSection(**SMALL, kv_heads=1, head_dim=5),
    "fp8": CacheSection(**SMALL, kv_heads=3, head_dim=5, dtype="block_wise_fp8", scale_dtype="float32"),
    "mla": CacheSection(**SMALL, attention="mla", kv_lora_rank=7, qk_rope_head_dim=2, dtype="uint8"),
    "dsa": CacheSection(**SMALL, attention="dsa", kv_lora_rank=128, qk_rope_head_dim=1, index_head_dim=128),
    "pages": CacheSection(**SMALL, attention="pages", page_bytes=[3, 40], identity="i"),
    "mtp": CacheSection(**SMALL, kv_heads=1, head_dim=5, mtp_layers=2, mtp_blocks=11),
}
PLACES = ("device", "host", "packed")


def geometry(layout: BlockLayout, place: str) -> Geometry:
    if place == "packed":
        return layout.packed(6, layout.block_bytes + 13)
    found: Geometry = getattr(layout, place)
    return found


def block_of(memory: np.ndarray, where: Geometry, block: int) -> bytes:
    """One block's bytes in packed order, by the definition of a geometry."""
    parts = []
    for offset, stride, nbytes in zip(where.offsets, where.strides, where.nbytes, strict=True):
        start = int(offset + block * stride)
        parts.append(memory[start : start + int(nbytes)].tobytes())
    return b"".join(parts)


@given(
    cache=st.sampled_from(sorted(CACHES)),
    source_place=st.sampled_from(PLACES),
    target_place=st.sampled_from(PLACES),
    data=st.data(),
)
def test_exactly_the_named_blocks_arrive_and_nothing_else_is_touched(
    cache: str, source_place: str, target_place: str, data: st.DataObject
) -> None:
    layout = build_layout(CACHES[cache])
    source_at, target_at = geometry(layout, source_place), geometry(layout, target_place)
    count = data.draw(st.integers(0, min(source_at.blocks, target_at.blocks)))
    source_ids = data.draw(st.lists(st.integers(0, source_at.blocks - 1), min_size=count, max_size=count))
    target_ids = data.draw(st.lists(st.integers(0, target_at.blocks - 1), min_size=count, max_size=count, unique=True))
    source = np.random.default_rng(1).integers(0, 256, source_at.extent, dtype=np.uint8)
    target = np.random.default_rng(2).integers(0, 256, target_at.extent, dtype=np.uint8)
    before = target.copy()
    plan = plan_copy(source_at, source_ids, target_at, target_ids)
    copy_runs(source.ctypes.data, target.ctypes.data, plan.runs)
    expected = before
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        content = np.frombuffer(block_of(source, source_at, source_id), dtype=np.uint8)
        position = 0
        for offset, stride, nbytes in zip(target_at.offsets, target_at.strides, target_at.nbytes, strict=True):
            start, size = int(offset + target_id * stride), int(nbytes)
            expected[start : start + size] = content[position : position + size]
            position += size
    assert np.array_equal(target, expected)
    assert plan.nbytes == count * layout.block_bytes == int(plan.runs[:, 2].sum())
    slow = before.copy()
    copy_runs_python(source.ctypes.data, slow.ctypes.data, plan.runs)
    assert np.array_equal(slow, expected), "the slow twin agrees"


def test_the_native_copy_is_built_where_a_compiler_is() -> None:
    assert NATIVE, "make set-up has gcc and Python's headers; see docs/adr/0004"


def test_neighbours_on_both_sides_become_one_run() -> None:
    layout = build_layout(CACHES["gqa"])
    plan = plan_copy(layout.device, [4, 2, 3], layout.device, [6, 4, 5])
    assert len(plan.runs) == len(layout.segments)
    scattered = plan_copy(layout.device, [4, 2, 3], layout.device, [4, 5, 6])
    assert len(scattered.runs) == 2 * len(layout.segments), "2, 3 → 6, 7 go together, 4 → 5 alone"


@pytest.mark.parametrize("cache", sorted(CACHES))
def test_neighbours_are_joined_in_every_plane_whatever_the_size_of_its_blocks(cache: str) -> None:
    layout = build_layout(CACHES[cache])
    device = layout.device
    runs = plan_copy(device, [2, 3, 4], device, [3, 4, 5]).runs
    start, target = device.offsets + 2 * device.strides, device.offsets + 3 * device.strides
    assert np.array_equal(runs, np.stack((start, target, 3 * device.nbytes), axis=1))


def test_two_runs_that_continue_each_other_are_one() -> None:
    device = build_layout(CacheSection(**SMALL | {"layers": 1}, attention="mla", kv_lora_rank=7)).device
    assert len(device.offsets) == 1
    [run] = plan_copy(device, [1, 2], device, [4, 5]).runs.tolist()
    stride, nbytes = int(device.strides[0]), int(device.nbytes[0])
    assert run == [stride, 4 * stride, 2 * nbytes]


def cross_layer(layout: BlockLayout) -> Geometry:
    """A memory in which all layers of a block lie together, as vLLM's BLHNC."""
    return Geometry(
        np.cumsum([0, *layout.device.nbytes[:-1]]),
        np.full(len(layout.segments), layout.block_bytes + 64),
        layout.device.nbytes,
        5,
        5 * (layout.block_bytes + 64),
    )


@pytest.mark.parametrize("cache", sorted(CACHES))
def test_layers_that_lie_together_on_both_sides_are_one_run(cache: str) -> None:
    layout = build_layout(CACHES[cache])
    memory = cross_layer(layout)
    stride = layout.block_bytes + 64
    assert plan_copy(memory, [3], layout.host, [1]).runs.tolist() == [
        [3 * stride, int(layout.host.offsets[0] + layout.host.strides[0]), layout.block_bytes]
    ]
    assert len(plan_copy(layout.host, [0, 4, 2], memory, [3, 1, 0]).runs) == 3
    assert len(plan_copy(memory, [3], layout.device, [1]).runs) == len(layout.segments), "apart on one side"


def test_a_plan_may_be_made_of_runs_alone() -> None:
    runs = np.array([[0, 8, 4]], dtype=np.int64)
    plan = CopyPlan(4, runs=runs)
    assert plan.runs is runs
    assert (plan.moves, plan.nbytes) == (None, 4)


def test_a_plan_of_nothing_at_all_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        CopyPlan(4)


def test_a_block_of_the_host_pool_is_one_range() -> None:
    layout = build_layout(CACHES["fp8"])
    runs = plan_copy(layout.device, [3], layout.host, [2]).runs
    targets = sorted((int(target), int(nbytes)) for _, target, nbytes in runs.tolist())
    ends = [target + nbytes for target, nbytes in targets]
    assert [target for target, _ in targets[1:]] == ends[:-1]
    assert ends[-1] - targets[0][0] == layout.block_bytes


@pytest.mark.parametrize(
    ("source", "target", "code"),
    [
        ([0], [0, 1], "length_mismatch"),
        ([7], [0], "id_out_of_range"),
        ([-1], [0], "id_out_of_range"),
        ([0], [9], "id_out_of_range"),
        ([0, 1], [3, 3], "duplicate_id"),
    ],
)
def test_impossible_plans_are_refused(source: list[int], target: list[int], code: str) -> None:
    layout = build_layout(CACHES["gqa"])
    with pytest.raises(RequestError) as caught:
        plan_copy(layout.device, source, layout.host, target)
    assert caught.value.reason == code


def test_memories_of_different_layouts_never_meet() -> None:
    with pytest.raises(InvariantError):
        plan_copy(build_layout(CACHES["gqa"]).device, [0], build_layout(CACHES["mla"]).device, [0])


def test_the_first_wrong_id_is_named() -> None:
    with pytest.raises(RequestError, match=r"gpu_block_ids: block 12 is out of range \(0 … 7\)"):
        check_ids([1, 12, 99], 8, "gpu_block_ids", target=True)
    with pytest.raises(RequestError, match=r"gpu_block_ids: block 8 is out of range \(0 … 7\)"):
        check_ids([0, 8], 8, "gpu_block_ids", target=False)
    with pytest.raises(RequestError, match=r"gpu_block_ids: block 3 occurs twice"):
        check_ids([1, 3, 2, 3], 8, "gpu_block_ids", target=True)
    check_ids([3, 3], 8, "sources", target=False)


# --- layouts --------------------------------------------------------------------------------------


def planes(**cache: object) -> dict[str, tuple[tuple[int, ...], str]]:
    layout = build_layout(CacheSection(**cache))  # type: ignore[arg-type]
    return {plane.name: (plane.shape, plane.dtype) for plane in layout.planes}


def test_planes_are_as_the_contract_says() -> None:
    assert planes() == {"key": ((2, 64, 64), "bfloat16"), "value": ((2, 64, 64), "bfloat16")}
    assert planes(dtype="block_wise_fp8") == {
        "key": ((2, 64, 64), "uint8"),
        "value": ((2, 64, 64), "uint8"),
        "key_scale": ((2, 64), "bfloat16"),
        "value_scale": ((2, 64), "bfloat16"),
    }
    assert planes(attention="mla") == {"key": ((1, 64, 576), "bfloat16")}
    assert planes(attention="dsa") == {"key": ((1, 64, 656), "uint8"), "indexer": ((64, 132), "uint8")}


def test_segments_are_layer_major_and_packed_without_gaps() -> None:
    layout = build_layout(CACHES["fp8"])
    names = [(segment.layer, segment.plane.name) for segment in layout.segments]
    order = ("key", "value", "key_scale", "value_scale")
    assert names == [(layer, name) for layer in range(2) for name in order]
    ends = [segment.offset + segment.nbytes for segment in layout.segments]
    assert [segment.offset for segment in layout.segments] == [0, *ends[:-1]]
    assert ends[-1] == layout.block_bytes


def test_the_fingerprint_changes_with_whatever_makes_bytes_mean_something_else() -> None:
    base = build_layout(CacheSection()).fingerprint
    changes: list[dict[str, object]] = [
        {"layers": 5}, {"kv_heads": 4}, {"head_dim": 32}, {"block_size": 32}, {"dtype": "float16"}, {"ranks": 4},
        {"mtp_layers": 1}, {"attention": "mla"},
    ]  # fmt: skip
    prints = [build_layout(CacheSection(**change)).fingerprint for change in changes]  # type: ignore[arg-type]
    assert len({base, *prints}) == len(changes) + 1
    assert build_layout(CacheSection(device_blocks=9, host_blocks=9)).fingerprint == base


def test_an_unknown_attention_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cache\.attention: expected one of gqa, mla, dsa"):
        build_layout(CacheSection(attention="linear"))
