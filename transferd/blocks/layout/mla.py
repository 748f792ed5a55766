"""MLA: one latent per token, shared by all heads, and no value plane.

key [1, block_size, kv_lora_rank + qk_rope_head_dim]; 512 + 64 in DeepSeek V2 and V3.
"""

from __future__ import annotations

from transferd.blocks.layout.base import BlockLayout, Plane, assemble
from transferd.config import CacheSection
from transferd.errors import ConfigError


def layout(cache: CacheSection) -> BlockLayout:
    if cache.dtype == "block_wise_fp8":
        raise ConfigError("cache.dtype", "block_wise_fp8 is not defined for mla", cache.dtype)
    return assemble(
        cache, [Plane("key", (1, cache.block_size, cache.kv_lora_rank + cache.qk_rope_head_dim), cache.dtype)]
    )
