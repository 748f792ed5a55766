"""The part of SGLang that TransferdHiCache is written against, for machines without it; and a host pool in a memfd.

tests/machine/with_sglang compares these names with the real ones.
"""

from __future__ import annotations

import enum
import mmap
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

STORAGE = "sglang.srt.mem_cache.hicache_storage"
METRICS = "sglang.srt.observability.metrics_collector"
TOKENS, PAGES, PIECE = 4, 24, 4096  # of a page; of a pool; bytes of K, and of V, of a page
STALE = 0xA5


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}


class PoolHitPolicy(str, enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: str
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = True
    model_name: str | None = "tiny"
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


FAKES = {
    STORAGE: (HiCacheStorage, HiCacheStorageConfig, PoolHitPolicy, PoolTransfer, PoolTransferResult),
    METRICS: (StorageMetrics,),
}


@contextmanager
def installed() -> Iterator[None]:
    """While these stand for SGLang, and the adapter is imported anew."""
    fakes: dict[str, types.ModuleType] = {}
    for name, classes in FAKES.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            fakes.setdefault(".".join(parts[:i]), types.ModuleType(parts[i - 1])).__path__ = []
        for one in classes:
            setattr(fakes[name], one.__name__, one)
    with mock.patch.dict(sys.modules, fakes):
        sys.modules.pop("transferd.adapters.sglang.hicache", None)
        yield
        sys.modules.pop("transferd.adapters.sglang.hicache", None)


class HostPool:
    """K of all pages, then V of all pages, as SGLang's page_first. private: no other process can map it.

    split: K and V lie in memories of their own, as in SGLang's pools for Mamba.
    """

    layout, page_size, size, dtype, start_layer, end_layer = "page_first", TOKENS, TOKENS * PAGES, "bfloat16", 0, 2

    def __init__(self, *, private: bool = False, split: bool = False) -> None:
        memories = 2 if split else 1
        parts = [_memory(2 * PAGES * PIECE // memories, private=private) for _ in range(memories)]
        self.kv_buffer: Any = parts
        self.bytes: npt.NDArray[np.uint8] = parts[0].reshape(-1, PAGES, PIECE)
        self.halves = [half for part in parts for half in part.reshape(-1, PAGES, PIECE)]
        self.clear()

    def clear(self) -> None:
        """SGLang forgets what is in it."""

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        pages = [int(one) // TOKENS for one in indices.tolist()[::TOKENS]]
        addresses = [int(self.halves[half][page].ctypes.data) for page in pages for half in range(2)]
        return addresses, [PIECE] * len(addresses)


def _memory(nbytes: int, *, private: bool) -> npt.NDArray[np.uint8]:
    fd = -1
    if not private:
        fd = os.memfd_create("sglang_host_pool")
        os.ftruncate(fd, nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANON if private else mmap.MAP_SHARED
    found = np.frombuffer(mmap.mmap(fd, nbytes, flags=flags), dtype=np.uint8)
    found[:] = STALE
    return found


def indices(pages: list[int]) -> npt.NDArray[np.int64]:
    """SGLang's indices of these pages: those of their tokens."""
    return np.concatenate([np.arange(page * TOKENS, (page + 1) * TOKENS) for page in pages])
