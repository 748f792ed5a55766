"""TransferdHiCache: transferd as the storage of SGLang's HiCache (`--hicache-storage-backend dynamic`).

SGLang copies KV between the GPU and its host pools, which lie in shared memory. The daemon maps them, and a page is one
transferd block, so this class moves no bytes: it turns SGLang's batches into tasks and their results into one bool a
page. SGLang calls it on its own threads and waits there; a call returns when nothing touches its pages any more.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolTransfer,
    PoolTransferResult,
)

from transferd.adapters.sglang.pools import AttachedPool
from transferd.adapters.sglang.rank import GIGABYTE, KV, Move, RankPools
from transferd.adapters.sglang.settings import settings

MOST_BATCHES = 4096  # whose figures are kept for SGLang


class TransferdHiCache(HiCacheStorage):  # type: ignore[misc] # SGLang is not installed where mypy runs
    """A storage backend that stores in a transferd daemon. See docs/sglang.md for its keys."""

    def __init__(self, storage_config: HiCacheStorageConfig, _: Mapping[str, Any] | None = None) -> None:
        """Check the settings. The daemon is found or started when SGLang hands over its pools. Raises ConfigError."""
        self._config = storage_config
        self._rank = RankPools(storage_config, settings(storage_config.extra_config or {}))
        self._figures = _BatchFigures()

    # --- pools --------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Offer the daemon the pool of the main KV cache. Raises ConfigError, TierError."""
        super().register_mem_pool_host(mem_pool_host)
        self._rank.add(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Offer the daemon another pool. Raises ConfigError, TierError."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._rank.add(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Wait for the daemon, at most start_timeout seconds; SGLang starts without it if none answers."""
        self._rank.wait_ready()

    def close(self) -> None:
        """Leave the daemon. SGLang has stopped its storage threads before."""
        self._rank.close()

    # --- questions ----------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """How many leading pages of the main pool can be loaded."""
        return max(self._rank.restorable(keys, [])[0], default=0)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,  # noqa: ARG002
    ) -> PoolTransferResult:
        """How long a prefix can be restored from all pools, and each pool's own boundary."""
        whole, found = self._rank.restorable(keys, pool_transfers or [])
        return PoolTransferResult(max(whole, default=0), found, whole)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # --- transfers ----------------------------------------------------------------------------------

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        return self._moved(AttachedPool.store, KV, keys, host_indices)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        return self._moved(AttachedPool.load, KV, keys, host_indices)

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        return self._rank.moved_together(transfers, functools.partial(self._moved, AttachedPool.store))

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        return self._rank.moved_together(transfers, functools.partial(self._moved, AttachedPool.load))

    def _moved(self, move: Move, name: str, keys: Sequence[str] | None, indices: Any) -> list[bool]:
        moved, seconds = self._rank.moved(name, keys, indices, move)
        if seconds:
            storing = move is AttachedPool.store
            self._figures.add(moved.count(True), self._rank.pools[name].page_bytes, seconds, storing=storing)
        return moved

    # --- the rest -----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove all stored pages of this model and generation, of every rank and pool. Raises TransferError."""
        self._rank.purge()

    def get_stats(self) -> Any:
        """Pages and GB/s of the batches since the last call, for SGLang's metrics; None if those are off."""
        return self._figures.taken() if self._config.enable_storage_metrics else None

    # SGLang calls these only without "interface_v1": 1, which the settings require.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:  # noqa: ARG002
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:  # noqa: ARG002
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002
        return False

    def batch_set(
        self,
        keys: list[str],  # noqa: ARG002
        values: Any = None,  # noqa: ARG002
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        return False


class _BatchFigures:
    """The figures for SGLang's StorageMetrics: pages and GB/s of each batch."""

    def __init__(self) -> None:
        self._batches: deque[tuple[bool, int, float]] = deque(maxlen=MOST_BATCHES)

    def add(self, pages: int, page_bytes: int, seconds: float, *, storing: bool) -> None:
        if pages:
            self._batches.append((storing, pages, pages * page_bytes / GIGABYTE / max(seconds, 1e-9)))

    def taken(self) -> Any:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        found = StorageMetrics()
        while self._batches:
            storing, pages, speed = self._batches.popleft()
            (found.backup_pgs if storing else found.prefetch_pgs).append(pages)
            (found.backup_bandwidth if storing else found.prefetch_bandwidth).append(speed)
        return found
