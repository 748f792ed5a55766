"""LMCache's real StorageManager with its controllers' threads, L1 and the plugin that it loads by name.

`Server` is what its multi-process server does with a manager: chunks of several object groups come from an engine, and
the longest prefix that all groups have is fetched for one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager

from tests.support.waits import wait_until

PLUGIN = {"module_path": "transferd.adapters.lmcache", "class_name": "TransferdL2"}
PARAMS = {"weights": "tiny", "buffer": "8MiB"}
MIB = 1024**2
L1_BYTES = 64 * MIB
# Three groups as hybrid models have them: full attention, a sliding window with other heads, a recurrent state.
GROUPS = {
    0: MemoryLayoutDesc([torch.Size([2, 4, 64, 64])], [torch.bfloat16]),
    1: MemoryLayoutDesc([torch.Size([2, 3, 64, 32])], [torch.float16]),
    2: MemoryLayoutDesc([torch.Size([5, 1000]), torch.Size([3, 7])], [torch.float32, torch.uint8]),
}
UNIFORM = {0: GROUPS[0]}


class Server:
    """private: L1 is memory that no other process can map, as with --l1-use-lazy. params: of the plugin.

    quotas: bytes of L2 that each salt may have; LMCache evicts what is more.
    """

    def __init__(
        self,
        groups: dict[int, MemoryLayoutDesc],
        *,
        model: str = "tiny",
        salt: str = "",
        private: bool = True,
        quotas: Mapping[str, int] | None = None,
        **params: Any,
    ) -> None:
        self.groups, self.model, self.salt = groups, model, salt
        self._closed = False
        plugin = PluginL2AdapterConfig.from_dict(PLUGIN | {"adapter_params": PARAMS | params})
        if quotas is not None:
            plugin.eviction_config = EvictionConfig("IsolatedLRU", trigger_watermark=1.0, eviction_ratio=0.5)
        memory = L1MemoryManagerConfig(L1_BYTES, use_lazy=False, **({"shm_name": ""} if private else {}))
        self.manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory),
                eviction_config=EvictionConfig("LRU"),
                l2_adapter_config=L2AdaptersConfig([plugin]),
            )
        )

        for name, limit in (quotas or {}).items():
            self.manager.quota_manager.set_quota(name, limit)

    @property
    def l2(self) -> Any:
        ((_, adapter),) = self.manager.l2_adapters()
        return adapter

    def keys(self, group: int, chunks: Sequence[int]) -> list[ObjectKey]:
        rank = ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
        return [
            ObjectKey(hashlib.sha256(str(chunk).encode()).digest()[:16], self.model, rank, group, self.salt)
            for chunk in chunks
        ]

    def save(self, chunks: Sequence[int], seed: int = 0) -> dict[tuple[int, int], str]:
        """Put chunks with random bytes into L1, from where LMCache stores them. The sha256 of each (group, chunk)."""
        digests = {}
        for group, layout in self.groups.items():
            keys = self.keys(group, chunks)
            objects = self.manager.reserve_write(keys, layout)
            for key, chunk in zip(keys, chunks, strict=True):
                content = content_of(group, chunk, seed, objects[key].get_size())
                memoryview(objects[key].byte_array).cast("B")[:] = content
                digests[group, chunk] = hashlib.sha256(content).hexdigest()
            self.manager.finish_write(keys)
        return digests

    def stored(self, count: int) -> None:
        """Wait until LMCache has had this many objects stored."""
        wait_until(lambda: self.objects() >= count, "LMCache has not stored what it has in L1", within=60)

    def objects(self) -> int:
        return int(self.l2.report_status()["storage"].get("objects", -1))

    def fetch(self, chunks: Sequence[int]) -> dict[tuple[int, int], str]:
        """Have LMCache bring what is there into an empty L1. The sha256 of each object of the prefix it then has."""
        rows = [GroupedObjectKeys(self.keys(group, chunks), group, layout) for group, layout in self.groups.items()]
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec(rows))
        assert self.manager.wait_prefetch_status(handle, 60)
        result = self.manager.query_prefetch_status(handle)
        digests = {}
        for row, hits in zip(rows, result.hit_cells, strict=True):
            there = [i for i in range(len(chunks)) if hits.test(i)]
            keys = [row.keys[i] for i in there]
            with self.manager.read_prefetched_results(keys) as objects:
                for i, one in zip(there, objects or (), strict=True):
                    digests[row.object_group_id, chunks[i]] = hashlib.sha256(bytes(one.byte_array)).hexdigest()
            self.manager.finish_read_prefetched(keys)
        return digests

    def forget(self) -> None:
        """Empty L1."""
        self.manager.clear(force=True)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.manager.close()


def content_of(group: int, chunk: int, seed: int, nbytes: int) -> bytes:
    return hashlib.shake_128(f"{group}/{chunk}/{seed}".encode()).digest(nbytes)
