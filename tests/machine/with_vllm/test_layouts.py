"""Where vLLM puts the blocks of its KV tensors, in each of its layouts: what the adapter and its tests take it to be.

The tensors are vLLM's own views, on the CPU; on a GPU they lie in the same way.
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, KVCacheTensor, create_kv_cache_views

from tests.support.cuda.tensor import AXES, extent, layer_views
from transferd.adapters.vllm.connector import TransferdConnector
from transferd.adapters.vllm.layers import blocks_of, joined

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = SHAPE = (3, 7, 2, 32, 64)
ITEM = 2
CASES = [pytest.param(layout, 1, id=layout.name) for layout in KVCacheLayout]
CASES += [
    pytest.param(layout, 2, id=f"{layout.name}, kernel blocks") for layout in KVCacheLayout if layout.name[:2] == "LB"
]


def test_the_settings_that_are_refused_are_vllms() -> None:
    assert {"enable_sleep_mode", "enable_cumem_allocator"} <= {field.name for field in fields(ModelConfig)}
    assert "pipeline_parallel_size" in {field.name for field in fields(ParallelConfig)}


def test_vllm_knows_that_it_must_not_sleep() -> None:
    """Since 0.33 it asks."""
    assert TransferdConnector.supports_sleep_mode(None) is False


def views_of_vllm(raw: torch.Tensor, layout: KVCacheLayout, parts: int) -> dict[str, torch.Tensor]:
    """As vLLM's allocate_kv_cache makes them."""
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float16)
    assert extent(SHAPE, ITEM) == raw.nbytes == LAYERS * BLOCKS * spec.page_size_bytes
    sizes = dict(zip(AXES, SHAPE, strict=True))
    strides, step = {}, ITEM
    for axis in reversed(layout.name):
        strides[axis] = step
        step *= sizes[axis]
    names = [f"layer {number}" for number in range(LAYERS)]
    placed = KVCacheTensor(size=raw.nbytes, layers=names, layer_stride=strides["L"], block_stride=strides["B"])
    kernel = None if parts == 1 else TOKENS // parts
    return dict(zip(names, create_kv_cache_views(raw, spec, BLOCKS, layout, placed, kernel), strict=True))


@pytest.mark.parametrize(("layout", "parts"), CASES)
def test_the_tests_tensors_lie_as_vllms_do(layout: KVCacheLayout, parts: int) -> None:
    raw = torch.zeros(extent(SHAPE, ITEM), dtype=torch.int8)
    found = views_of_vllm(raw, layout, parts)
    real = [(view.data_ptr() - raw.data_ptr(), tuple(view.shape), view.stride()) for view in found.values()]
    assert real == layer_views(layout.name, SHAPE, ITEM, parts=parts)


@pytest.mark.parametrize(("layout", "parts"), CASES)
def test_the_pieces_of_a_block_are_what_vllm_writes_to_it(layout: KVCacheLayout, parts: int) -> None:
    raw = torch.zeros(extent(SHAPE, ITEM), dtype=torch.int8)
    found = views_of_vllm(raw, layout, parts)
    for name, lie in blocks_of(found, BLOCKS).items():
        for block in range(BLOCKS):
            raw.zero_()
            found[name][block * parts : (block + 1) * parts] = -1.0  # 0xBC00
            written = raw.view(torch.int16) != 0
            start = found[name].data_ptr() - raw.data_ptr() + block * lie.stride
            for piece in lie.pieces:
                here = written[(start + piece) // ITEM : (start + piece + lie.nbytes) // ITEM]
                assert here.all()
                here.zero_()
            assert not written.any()


@pytest.mark.parametrize(
    "layout", [layout for layout in KVCacheLayout if layout.name[0] == "B"], ids=lambda one: one.name
)
def test_with_the_blocks_outermost_a_block_is_one_range(layout: KVCacheLayout) -> None:
    raw = torch.zeros(extent(SHAPE, ITEM), dtype=torch.int8)
    views = views_of_vllm(raw, layout, 1)
    found = joined(views, blocks_of(views, BLOCKS))
    if layout.name == "BHLNC":  # other layers lie between its heads
        assert len(found) == LAYERS
        return
    ((name, lie),) = found.items()
    assert (views[name].data_ptr(), lie.pieces) == (raw.data_ptr(), (0,))
    assert lie.nbytes == lie.stride == raw.nbytes // BLOCKS


@pytest.mark.parametrize(
    ("device", "own", "wanted"), [("cuda", False, "BLHNC"), ("cuda", True, "LBHNC"), ("cpu", False, "LBHNC")]
)
def test_all_layers_of_a_block_together_are_asked_for_on_gpus(device: str, own: bool, wanted: str) -> None:
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(user_specified_block_size=own),
        kv_transfer_config=None,
    )
    assert "user_specified_block_size" in {field.name for field in fields(CacheConfig)}
    assert TransferdConnector.get_required_kvcache_layout(config) == wanted
    assert wanted in KVCacheLayout.__members__


def test_beside_other_connectors_those_choose_the_layout() -> None:
    """Mooncake's wants LBHNC, and vLLM refuses a MultiConnector whose connectors want several."""

    def asks_each(vllm_config: Any) -> str | None:  # our connector finds it here, as in vLLM's own call
        inner = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
        return TransferdConnector.get_required_kvcache_layout(inner)

    outer = SimpleNamespace(kv_connector_extra_config={"connectors": []})
    assert asks_each(SimpleNamespace(kv_transfer_config=outer)) is None
