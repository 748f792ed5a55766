"""GQA, MQA and MHA: a key and a value plane; block_wise_fp8 adds one scale per head and token to each.

The shapes are those of FastDeploy's append and flash attention backends, without the block axis:
key, value [kv_heads, block_size, head_dim]; scales [kv_heads, block_size] (reference: its
append_attn and block_wise_fp8 backends).
"""

from __future__ import annotations

from transferd.blocks.layout.base import BlockLayout, Plane, assemble
from transferd.config import CacheSection


def layout(cache: CacheSection) -> BlockLayout:
    fp8 = cache.dtype == "block_wise_fp8"
    shape = (cache.kv_heads, cache.block_size, cache.head_dim)
    dtype = "uint8" if fp8 else cache.dtype
    planes = [Plane("key", shape, dtype), Plane("value", shape, dtype)]
    if fp8:
        planes += [Plane(name, shape[:2], cache.scale_dtype) for name in ("key_scale", "value_scale")]
    return assemble(cache, planes)
