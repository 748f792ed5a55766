"""Pages: opaque bytes, for engines that lay out their own KV cache (vLLM, SGLang, LMCache).

A block is one segment per layer, of `page_bytes` bytes or of a size of its own. What the bytes mean is the engine's
business, so it says what makes two caches equal: `identity`, such as "vllm/LBHNC/FlashAttention/bf16/64". It should
name layout, element type, attention backend and tokens per block. Engines with the same identity, sizes and
tensor-parallel size (and the same model and generation, which are in every object's name) read each other's blocks;
others never do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from transferd.blocks.layout.base import BlockLayout, Plane
from transferd.config import CacheSection
from transferd.errors import ConfigError

PLANE = "page"


@dataclass(frozen=True)
class PagesLayout(BlockLayout):
    """page_bytes: the page size of each layer. The offer says where the pages lie (tiers/pages.py)."""

    page_bytes: tuple[int, ...] = ()

    def planes_of(self, layer: int) -> tuple[Plane, ...]:
        return (_plane(self.page_bytes[layer]),)


def layout(cache: CacheSection) -> BlockLayout:
    """The layout of the configured pages. Raises ConfigError."""
    sizes = _sizes(cache)
    if not cache.identity:
        raise ConfigError("cache.identity", "must say what makes two caches of pages equal", cache.identity)
    if cache.mtp_layers:
        raise ConfigError("cache.mtp_layers", "count as layers where attention is pages", cache.mtp_layers)
    said = json.dumps([cache.identity, sizes])  # unambiguous, whatever the engine's text holds
    return PagesLayout(
        planes=tuple(dict.fromkeys(map(_plane, sizes))),
        layers=cache.layers,
        mtp_layers=0,
        device_blocks=cache.device_blocks,
        mtp_blocks=cache.device_blocks,
        host_blocks=cache.host_blocks,
        identity=f"pages {said} tp={cache.tensor_parallel_size}",
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


def _plane(nbytes: int) -> Plane:
    return Plane(PLANE, (nbytes,), "uint8")
