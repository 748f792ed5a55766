"""The attention families: each turns the configuration into planes. A new family is a function and a line in FAMILIES.

Shapes are without the block axis.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from transferd.blocks import fingerprint
from transferd.blocks.layout.base import BlockLayout, Plane, assemble, page
from transferd.config import CacheSection
from transferd.errors import ConfigError

QUANT_BLOCK = 128  # fp8 values that share one float32 scale in dsa


def build_layout(cache: CacheSection) -> BlockLayout:
    """The layout of one rank's cache. Raises ConfigError."""
    family = FAMILIES.get(cache.attention)
    if family is None:
        raise ConfigError("cache.attention", f"expected one of {', '.join(FAMILIES)}", cache.attention)
    layout = family(cache)
    if not cache.fingerprint:
        return layout
    if why := fingerprint.refusal(cache.fingerprint):
        raise ConfigError("cache.fingerprint", why)
    return dataclasses.replace(layout, identity=f"{layout.identity} facts={fingerprint.digest(cache.fingerprint)}")


def gqa(cache: CacheSection) -> BlockLayout:
    """GQA, MQA and MHA, which differ only in kv_heads.

    key, value: [kv_heads, block_size, head_dim]; with block_wise_fp8 one scale per head and token for each:
    key_scale, value_scale: [kv_heads, block_size].
    """
    fp8 = cache.dtype == "block_wise_fp8"
    shape = (cache.kv_heads, cache.block_size, cache.head_dim)
    dtype = "uint8" if fp8 else cache.dtype
    planes = [Plane("key", shape, dtype), Plane("value", shape, dtype)]
    if fp8:
        planes += [Plane(name, shape[:2], cache.scale_dtype) for name in ("key_scale", "value_scale")]
    return assemble(cache, planes)


def mla(cache: CacheSection) -> BlockLayout:
    """MLA: one latent per token, shared by all heads, and no value plane.

    key: [1, block_size, kv_lora_rank + qk_rope_head_dim]; 512 + 64 in DeepSeek V2 and V3.
    """
    if cache.dtype == "block_wise_fp8":
        raise ConfigError("cache.dtype", "block_wise_fp8 is not defined for mla", cache.dtype)
    width = cache.kv_lora_rank + cache.qk_rope_head_dim
    return assemble(cache, [Plane("key", (1, cache.block_size, width), cache.dtype)])


def dsa(cache: CacheSection) -> BlockLayout:
    """DSA (DeepSeek V3.2 sparse attention): an fp8 latent that includes its scales and rope, and an indexer.

    Per token the key holds kv_lora_rank fp8 bytes, one float32 scale for each 128 of them, and qk_rope_head_dim
    bfloat16 values: 512 + 4·4 + 2·64 = 656 bytes. The indexer holds index_head_dim fp8 bytes and one float32 scale for
    each 128 of them.

    key: uint8 [1, block_size, …]. indexer: uint8 [block_size, …].
    """
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


def pages(cache: CacheSection) -> BlockLayout:
    """Opaque bytes: one segment per layer. Raises ConfigError.

    `cache.identity` contains all that makes two caches equal: layout name, element type, attention backend and tokens
    per block.
    """
    sizes = _sizes(cache)
    if not cache.identity:
        raise ConfigError("cache.identity", "must say what makes two caches of pages equal", cache.identity)
    if cache.mtp_layers:
        raise ConfigError("cache.mtp_layers", "count as layers where attention is pages", cache.mtp_layers)
    said = json.dumps([cache.identity, sizes])  # unambiguous, whatever the engine's text holds
    return BlockLayout(
        planes=tuple(dict.fromkeys(map(page, sizes))),
        layers=cache.layers,
        mtp_layers=0,
        device_blocks=cache.device_blocks,
        mtp_blocks=cache.device_blocks,
        host_blocks=cache.host_blocks,
        identity=f"pages {said} tp={cache.tensor_parallel_size}",
        windows=cache.windows,
        page_bytes=tuple(sizes),
    )


def _sizes(cache: CacheSection) -> list[int]:
    if cache.page_bytes is None:
        raise ConfigError("cache.page_bytes", 'is needed where cache.attention is "pages"')
    if isinstance(cache.page_bytes, int):
        return [cache.page_bytes] * cache.layers
    if len(cache.page_bytes) != cache.layers:
        raise ConfigError("cache.page_bytes", f"must have one size per layer ({cache.layers})", len(cache.page_bytes))
    return list(cache.page_bytes)


FAMILIES: dict[str, Callable[[CacheSection], BlockLayout]] = {"gqa": gqa, "mla": mla, "dsa": dsa, "pages": pages}
