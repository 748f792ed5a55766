"""TransferdHiCache: transferd as the storage of SGLang's HiCache (`--hicache-storage-backend dynamic`).

SGLang copies KV between the GPU and its host pools, which lie in shared memory. The daemon maps them, and a page is one
transferd block, so this class moves no bytes: it turns SGLang's batches into tasks and their results into one bool a
page. SGLang calls it on its own threads and waits there; a call returns when nothing touches its pages any more.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)

from transferd.adapters.common.settings import engine_name
from transferd.adapters.sglang import arguments, identity
from transferd.adapters.sglang.pools import AttachedPool, has_pages, pages_of
from transferd.adapters.sglang.settings import SGLANG, settings
from transferd.adapters.sglang.weights import WeightVersion
from transferd.errors import ConfigError, TierError, TransferError
from transferd.runtime.clock import SYSTEM_CLOCK

KV = "kv"
LEAVE_TIMEOUT_S = 2.0
GIGABYTE = 1e9
UPDATED_FROM_DISK = "model_runner.update_model_fields"  # what SGLang calls it in its record of changed settings
MOST_BATCHES = 4096  # whose figures are kept for SGLang

Move = Callable[[AttachedPool, Sequence[str], Any], list[bool]]


class TransferdHiCache(HiCacheStorage):  # type: ignore[misc] # SGLang is not installed where mypy runs
    """A storage backend that stores in a transferd daemon. See docs/sglang.md for its keys."""

    def __init__(self, storage_config: HiCacheStorageConfig, _: Mapping[str, Any] | None = None) -> None:
        """Check the settings. The daemon is found or started when SGLang hands over its pools. Raises ConfigError."""
        self._config = storage_config
        self._chosen = settings(storage_config.extra_config or {})
        self._arguments = arguments.of_this_server()
        self._life = SYSTEM_CLOCK.fresh_id()
        self._model = storage_config.model_name or (self._arguments or {}).get("model_path", "")
        if not self._model:
            raise ConfigError("--served-model-name", "is needed, because pages are stored under the model's name")
        self._pools: dict[str, AttachedPool] = {}
        self._without_pages: set[str] = set()  # pools that only number pages, as the main one of DeepSeek V4
        self._weights = WeightVersion(self._chosen.generation, _weight_version)
        self._figures = _BatchFigures()

    # --- pools --------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Offer the daemon the pool of the main KV cache. Raises ConfigError, TierError."""
        super().register_mem_pool_host(mem_pool_host)
        self._offer(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Offer the daemon another pool. Raises ConfigError, TierError."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._offer(str(host_pool_name), host_pool)

    def _offer(self, name: str, host: Any) -> None:
        if name in self._pools:
            if self._pools[name].host is host:
                return
            self._pools.pop(name).close(LEAVE_TIMEOUT_S)
        if not has_pages(host):
            self._without_pages.add(name)
            return
        config, pages = self._config, pages_of(name, host)
        rank = f"dp{config.dp_rank}-pp{config.pp_rank}-cp{config.attn_cp_rank}-tp{config.tp_rank}"
        first = not (config.dp_rank or config.pp_rank or config.attn_cp_rank or config.tp_rank)
        self._pools[name] = AttachedPool(
            name,
            host,
            engine_name(self._chosen.name or f"sglang-{os.getpid()}-{self._life[:4]}", f"-{rank}-{name}"),
            self._model,
            self._weights.generation,
            self._chosen,
            identity.facts(config, name, host, pages, self._chosen, self._arguments, self._life),
            starts_daemon=first and not self._pools,
        )

    def on_host_pools_registered(self) -> None:
        """Wait for the daemon, at most start_timeout seconds; SGLang starts without it if none answers."""
        until = time.monotonic() + self._chosen.start_timeout
        for pool in self._pools.values():
            if not pool.link.wait_ready(max(0.0, until - time.monotonic())):
                what = "transferd: no daemon after %g s; SGLang starts without it"
                SGLANG.log.warning(what, self._chosen.start_timeout)
                return

    def close(self) -> None:
        """Leave the daemon. SGLang has stopped its storage threads before."""
        for pool in self._pools.values():
            pool.close(LEAVE_TIMEOUT_S)
        self._pools.clear()

    # --- questions ----------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """How many leading pages of the main pool can be loaded."""
        return 0 if KV in self._without_pages else _leading(self._there(KV, keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,  # noqa: ARG002
    ) -> PoolTransferResult:
        """How long a prefix can be restored from all pools, and each pool's own boundary."""
        deciding = [one for one in pool_transfers or [] if one.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        if KV in self._without_pages and not deciding:
            return PoolTransferResult(0, {}, [])
        kv = _leading(self._there(KV, keys))
        # SGLang skips what it believes to be stored: a pool without pages is no proof
        found: dict[str, int] = {KV: kv} if kv and KV not in self._without_pages else {}
        whole = set(range(1, kv + 1))
        for transfer in deciding:
            if not whole:
                break
            there = self._there(str(transfer.name), keys[:kv])
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                last = max(1, len(transfer.keys or ()))
                mine = {end for end in range(1, kv + 1) if all(there[max(0, end - last) : end])}
            else:
                mine = set(range(1, _leading(there) + 1))
            if mine:
                found[transfer.name] = max(mine)
            whole &= mine
        return PoolTransferResult(max(whole, default=0), found, sorted(whole))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _there(self, name: str, keys: Sequence[str]) -> list[bool]:
        if name in self._without_pages:  # then the pools beside it decide
            return [True] * len(keys)
        pool = self._pools.get(name)
        self._weights.follow(self._pools.values())
        return [False] * len(keys) if pool is None else pool.exists(keys)

    # --- transfers ----------------------------------------------------------------------------------

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        return self._moved(KV, keys, host_indices, AttachedPool.store)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        return self._moved(KV, keys, host_indices, AttachedPool.load)

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        return {
            one.name: self._moved(str(one.name), one.keys, one.host_indices, AttachedPool.store) for one in transfers
        }

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        return {
            one.name: self._moved(str(one.name), one.keys, one.host_indices, AttachedPool.load) for one in transfers
        }

    def _moved(self, name: str, keys: Sequence[str] | None, indices: Any, move: Move) -> list[bool]:
        """Move pages; for each of them whether it was."""
        pool, keys = self._pools.get(name), keys or []
        if name in self._without_pages:
            return [True] * len(keys)
        storing = move is AttachedPool.store
        fresh = self._weights.follow(self._pools.values())
        if pool is None or not keys or indices is None or (storing and not fresh):
            return [False] * len(keys)
        began = time.perf_counter()
        try:
            moved = move(pool, keys, indices)
        except TierError as error:  # SGLang's threads end with an exception
            SGLANG.log.warning("transferd: pages of %s are not moved: %s", name, error)
            return [False] * len(keys)
        self._figures.add(moved.count(True), pool.page_bytes, time.perf_counter() - began, storing=storing)
        return moved

    # --- the rest -----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove all stored pages of this model and generation, of every rank and pool. Raises TransferError."""
        pool = next(iter(self._pools.values()), None)
        if pool is None:
            raise TransferError("SGLang has not handed over its host pool yet", code="not_connected")
        generation = self._weights.generation
        purged = pool.link.purge(pool.facts.model, generation)
        what = "transferd: cleared %s, generation %r: %d objects, %.1f GB"
        SGLANG.log.info(what, pool.facts.model, generation, purged.objects, purged.bytes / GIGABYTE)

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


def _leading(there: Sequence[bool]) -> int:
    return next((i for i, one in enumerate(there) if not one), len(there))


def _weight_version() -> tuple[str, int]:
    """The version that SGLang's last update of the weights has named, "" before the first; how many were from disk."""
    try:
        from sglang.srt.runtime_context import get_context, get_serving

        version = str(get_serving().weight_version or "")
        updates = sum(source == UPDATED_FROM_DISK for source, _ in get_context().overrides_log())
    except (ImportError, RuntimeError, ValueError, AttributeError):
        return "", 0
    return "" if version == "default" else version, updates
