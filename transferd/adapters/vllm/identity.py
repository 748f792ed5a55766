"""What two engines must have in common to read each other's blocks.

To the daemon, a block is opaque bytes. The identity must contain everything that changes the meaning of those bytes
without changing their number: then two engines that differ never share an object in storage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest(facts: Mapping[str, Any]) -> str:
    """A short name for these facts; equal facts give equal names, and others do not. facts: JSON values."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def of_tier(config: Any, row_bytes: int) -> dict[str, Any]:
    """The facts about a chunk of vLLM's host pool. config: vLLM's OffloadingConfig. row_bytes: bytes of one chunk.

    A row holds every worker's part of a chunk, so the number of workers is a fact, unless vLLM says otherwise.
    """
    parallel = config.parallel
    shape = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    return {
        "engine": f"vllm {_version()}",
        "platform": _platform(),
        "dtype": str(config.model.dtype),
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "parallel": None if parallel.is_parallelism_agnostic else shape,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "row_bytes": row_bytes,
    }


def of_connector(
    vllm_config: Any,
    layers: Mapping[str, tuple[int, ...]],
    orders: Mapping[str, tuple[int, ...]],
    page_bytes: int,
) -> dict[str, Any]:
    """The facts about a block of the engine's own KV memory.

    layers: each layer's shape without the block axis. orders: the axes in the order of a block's bytes.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    odd = {name: list(order) for name, order in orders.items() if list(order) != sorted(order)}
    return ({"order": odd} if odd else {}) | {
        "engine": f"vllm {_version()}",
        "platform": _platform(),
        "backend": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "dtype": f"{vllm_config.model_config.dtype}/{cache.cache_dtype}",
        "parallel": (parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
        "tokens_per_block": cache.block_size,
        "layers": [[name, list(shape)] for name, shape in layers.items()],
        "page_bytes": page_bytes,
    }


def _version() -> str:
    """vLLM's major and minor version: attention backends may arrange keys and values differently in each release."""
    import vllm

    return ".".join(str(vllm.__version__).split(".")[:2])


def _platform() -> str:
    """The kind of device. Together with the version it decides which attention backend vLLM chooses by default."""
    from vllm.platforms import current_platform

    return f"{current_platform.device_type} {current_platform.get_device_capability()}"
