"""Detects memory of this process that no other process can map, and names the framework setting that causes it.

CUDA IPC shares what cudaMalloc returned. Memory that an allocator reserves and maps itself (cuMemCreate) or takes from
a pool (cudaMallocAsync) has no such handle: docs/adr/0039.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from transferd.errors import TierError
from transferd.tiers.cuda.driver import Driver

# An environment variable, a text in its value, and what to do.
_SETTINGS = (
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:true", "unset it, or set expandable_segments:False"),
    ("PYTORCH_ALLOC_CONF", "expandable_segments:true", "unset it, or set expandable_segments:False"),
    ("PYTORCH_CUDA_ALLOC_CONF", "cudamallocasync", "set backend:native"),
    ("PYTORCH_ALLOC_CONF", "cudamallocasync", "set backend:native"),
    ("FLAGS_use_cuda_malloc_async_allocator", "1", "set it to 0"),
    ("FLAGS_use_virtual_memory_auto_growth", "1", "set it to 0"),
    ("FLAGS_use_cuda_malloc_async_allocator", "true", "set it to 0"),
    ("FLAGS_use_virtual_memory_auto_growth", "true", "set it to 0"),
    ("LD_PRELOAD", "torch_memory_saver", "start SGLang without --enable-memory-saver"),
)
_SLEEP_MODE = "vllm.device_allocator.cumem"  # imported, with an allocator in it, only in sleep mode


def check_exportable(driver: Driver, places: Sequence[tuple[str, int]], device: int) -> None:
    """Raise TierError (`not_shareable`) for the first address that cannot be shared, naming the setting to change.

    places: (what is there, in words; address) of each.
    """
    context = driver.retain(device)
    try:
        with driver.current(context):
            for what, address in places:
                if not driver.exportable(address):
                    sentence = f"{what} is in memory that no other process can map (not from cudaMalloc)"
                    raise TierError(f"{sentence}: {_remedy()}", code="not_shareable")
    finally:
        driver.release(device)


def _remedy() -> str:
    """The setting of this process that causes such memory, or, if none is found, all known ones."""
    for variable, text, remedy in _SETTINGS:
        if text in os.environ.get(variable, "").lower().replace(" ", ""):
            return f"{variable}={os.environ[variable]} causes this: {remedy}"
    if getattr(getattr(sys.modules.get(_SLEEP_MODE), "CuMemAllocator", None), "instance", None) is not None:
        return "vLLM's sleep mode causes this: start vLLM without --enable-sleep-mode"
    return (
        "switch off torch's expandable_segments and cudaMallocAsync, vLLM's sleep mode, SGLang's memory saver, "
        "Paddle's FLAGS_use_virtual_memory_auto_growth and FLAGS_use_cuda_malloc_async_allocator, and NCCL's symmetric "
        "memory; or let the daemon make the cache (cache.ownership)"
    )
