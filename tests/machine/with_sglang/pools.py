"""SGLang's real host pools and its real way to a storage backend, with device tensors on the CPU.

Import standins.py before this.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool_host import (
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    LogicalHostPool,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

LAYERS, HEADS, DIM, PAGE = 3, 2, 16, 8  # a page has tokens
TOKENS = 40 * PAGE
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
STALE = 0xA5
KEYS = [f"{number:064x}" for number in range(20)]
STORED = [3, 39, 0, 12, 7, 25, 31, 2, 18, 5, 9, 22, 36, 14, 1, 28, 33, 11, 20, 6]
LOADED = [page for page in range(40) if page % 2]  # other pages than those, in another order
EXTRA = {
    "backend_name": "transferd",
    "module_path": "transferd.adapters.sglang",
    "class_name": "TransferdHiCache",
    "interface_v1": 1,
    "allocator": "shm",
    "weights": "tiny",
}


def mha(
    layout: str,
    allocator: str = "shm",
    layers: int = LAYERS,
    *,
    heads: int = HEADS,
    dim: int = DIM,
    page: int = PAGE,
    tokens: int = TOKENS,
) -> Any:
    """A host pool of keys and values. page: tokens of a page. tokens: of the pool."""
    device = [torch.zeros(tokens, heads, dim, dtype=torch.bfloat16) for _ in range(2 * layers)]
    pointers = torch.tensor([one.data_ptr() for one in device], dtype=torch.uint64)
    buffers = KVBuffers(
        k=tuple(device[:layers]),
        v=tuple(device[layers:]),
        k_data_ptrs=pointers[:layers],
        v_data_ptrs=pointers[layers:],
        layout=KVBufferLayout.NHD,
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=page,
        head_num=heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return _stale(MHATokenToKVPoolHost(info, 1.0, 0, page, layout, **_host(allocator, layers, tokens)))


def mla(layout: str, allocator: str = "shm", layers: int = LAYERS) -> Any:
    """A host pool of compressed KV, the same on every rank."""
    device = [torch.zeros(TOKENS, 1, DIM + 4, dtype=torch.bfloat16) for _ in range(layers)]
    info = MLABufferInfo(
        buffers=tuple(device),
        data_ptrs=torch.tensor([one.data_ptr() for one in device], dtype=torch.uint64),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=PAGE,
        kv_lora_rank=DIM,
        qk_rope_head_dim=4,
        kv_cache_dim=DIM + 4,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return _stale(MLATokenToKVPoolHost(info, 1.0, 0, PAGE, layout, target_layer_num=layers, **_host(allocator, layers)))


def deepseek_v4(layout: str, allocator: str = "shm") -> dict[str, Any]:
    """The host pools of a DeepSeek V4, by name: the main one, which only numbers pages, and some of those beside it."""
    state = SimpleNamespace(
        ring_size=4,
        kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(TOKENS // PAGE * 4, 1, DIM, dtype=torch.float32)),
        swa_page_size=PAGE,
    )
    where = {"layout": layout, "pin_memory": False, "allocator_type": allocator}
    device = [torch.zeros(TOKENS // PAGE, 640, dtype=torch.uint8) for _ in range(LAYERS)]
    pages = {"num_host_pages": TOKENS // PAGE, **where}
    made = {
        "deepseek_v4_c4": DeepSeekV4PagedHostPool("deepseek_v4_c4", device, 640, slot_page_size=PAGE, **pages),
        "deepseek_v4_c128": DeepSeekV4PagedHostPool("deepseek_v4_c128", device[1:], 640, slot_page_size=PAGE, **pages),
        "swa": DeepSeekV4PagedHostPool("swa", device[:2], 640, slot_page_size=PAGE, **pages),
        "deepseek_v4_c4_state": DeepSeekV4StateHostPool(
            "deepseek_v4_c4_state", [state] * LAYERS, swa_page_size=PAGE, **pages
        ),
    }
    for pool in made.values():
        for part in pool.get_hybrid_pool_buffer():
            part.view(torch.uint8).fill_(STALE)
    return {"kv": LogicalHostPool(TOKENS, PAGE, layout), **made}


def _host(allocator: str, layers: int, tokens: int = TOKENS) -> dict[str, Any]:
    where = {"pin_memory": False, "device": "cpu", "allocator_type": allocator}  # CUDA is not there to pin it
    return where | {"device_capacity_tokens": tokens, "start_layer": 0, "end_layer": layers}


def _stale(pool: Any) -> Any:
    pool.kv_buffer.view(torch.uint8).fill_(STALE)
    return pool


def config(
    *, rank: int = 0, ranks: int = 1, is_mla: bool = False, model: str = "tiny", **extra: Any
) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=is_mla,
        enable_storage_metrics=True,
        is_page_first_layout=True,
        model_name=model,
        extra_config=EXTRA | extra,
    )


def backend(pool: Any, said: HiCacheStorageConfig, **more: Any) -> Any:
    """Make and attach the backend as SGLang's controllers do. more: further pools, by name."""
    made = StorageBackendFactory.create_backend("dynamic", said, pool)
    made.register_mem_pool_host(pool)
    for name, one in more.items():
        made.register_mem_host_pool_v2(one, name)
    made.on_host_pools_registered()
    return made


def indices(pages: Sequence[int], tokens: int = PAGE) -> torch.Tensor:
    """SGLang's indices of these pages: those of their tokens."""
    return torch.cat([torch.arange(page * tokens, (page + 1) * tokens) for page in pages])


def fill(pool: Any, pages: list[int], seed: int) -> None:
    """Put random bytes into pages, in SGLang's own way."""
    random = np.random.default_rng(seed)
    for page in pages:
        flat = pool.get_data_page(page * PAGE, flat=True)
        content = torch.from_numpy(random.integers(0, 256, flat.numel() * flat.element_size(), dtype=np.uint8))
        pool.set_from_flat_data_page(page * PAGE, content.view(flat.dtype))


def pieces(pool: Any, pages: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """The memory of these pages where SGLang says it lies, piece after piece."""
    addresses, sizes = pool.get_page_buffer_meta(indices(pages))
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        for address, size in zip(addresses, sizes, strict=True)
    ]


def filled(pool: Any, pages: Sequence[int], seed: int) -> list[bytes]:
    """Put random bytes into pages where SGLang says they lie. Returns them, piece after piece."""
    draw = np.random.default_rng(seed)
    for piece in pieces(pool, pages):
        piece[:] = draw.integers(0, 256, len(piece), dtype=np.uint8)
    return [bytes(piece) for piece in pieces(pool, pages)]


def check_loads(backend: Any, to: Any, source: Any) -> None:
    """The backend of the pool `to` loads KEYS, the pages STORED of `source`, to LOADED, and touches no other page."""
    assert backend.batch_exists([*KEYS, "f" * 64]) == len(KEYS)
    wanted = [*KEYS[:10], "e" * 64, *KEYS[10:19]]
    assert backend.batch_get_v1(wanted, indices(LOADED)) == [key in KEYS for key in wanted]
    for key, page in zip(wanted, LOADED, strict=True):
        if key in KEYS:
            assert read(to, page) == read(source, STORED[KEYS.index(key)])
    untouched = bytes([STALE]) * len(read(to, 0))
    assert all(read(to, page) == untouched for page in [*range(0, 41, 2), LOADED[10]])


def read(pool: Any, page: int) -> bytes:
    """A page's bytes, in SGLang's own way."""
    flat = pool.get_data_page(page * PAGE, flat=True).contiguous()
    return bytes(flat.view(torch.uint8).numpy().tobytes())
