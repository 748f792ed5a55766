"""DSA (DeepSeek V3.2 sparse attention): an fp8 latent that includes its scales and rope, and an indexer.

Per token the key holds kv_lora_rank fp8 bytes, one float32 scale for each 128 of them, and
qk_rope_head_dim bfloat16 values: 512 + 4·4 + 2·64 = 656 bytes. The indexer holds index_head_dim fp8
bytes and one float32 scale for each 128 of them. Both planes are uint8: key [1, block_size, …],
indexer [block_size, …].
"""

from __future__ import annotations

from transferd.blocks.layout.base import BlockLayout, Plane, assemble
from transferd.config import CacheSection
from transferd.errors import ConfigError

QUANT_BLOCK = 128  # fp8 values that share one float32 scale


def layout(cache: CacheSection) -> BlockLayout:
    for key, width in (("kv_lora_rank", cache.kv_lora_rank), ("index_head_dim", cache.index_head_dim)):
        if width % QUANT_BLOCK:
            raise ConfigError(f"cache.{key}", f"must be a multiple of {QUANT_BLOCK} for dsa", width)
    key_bytes = _quantised(cache.kv_lora_rank) + 2 * cache.qk_rope_head_dim
    planes = [
        Plane("key", (1, cache.block_size, key_bytes), "uint8"),
        Plane("indexer", (cache.block_size, _quantised(cache.index_head_dim)), "uint8"),
    ]
    return assemble(cache, planes)


def _quantised(width: int) -> int:
    """Bytes of `width` fp8 values with their scales."""
    return width + 4 * (width // QUANT_BLOCK)
