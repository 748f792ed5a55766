"""LMCache's L2 backends as its `bench l2` drives them: 16 tasks of equal size at once.

    python -m benchmarks.peers.lmcache_l2 fs | fs_native | transferd | transferd-in-place

fs                  a file for each object, by aiofiles
fs_native           the same in C++, with 4 threads
transferd           TransferdL2 as it is by default: objects are copied, with 4 threads, and checked
transferd-in-place  its setting "in_place"; L1 is shared memory, as with --no-l1-use-lazy
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import mmap
import os
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import create_l1_memory_desc, wait_eventfd
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from benchmarks.peers.program import Order, Peer, area, batches, serve

PATIENCE_S = 60.0


class LmcacheL2(Peer):
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._open = contextlib.ExitStack()

    def prepare(self, order: Order) -> str:
        self._order = order
        in_place = self._kind == "transferd-in-place"
        self.areas = [_shared_area(order) if in_place else area(order.blocks, order.block_bytes)]
        memory = torch.from_numpy(self.areas[0].reshape(-1))
        self._adapter = create_l2_adapter(
            self._settings(order, in_place=in_place), l1_memory_desc=create_l1_memory_desc(memory, align_bytes=4096)
        )
        self._objects = [_object(memory, block, order.block_bytes) for block in range(order.blocks)]
        return f"LMCache {importlib.metadata.version('lmcache')}"

    def store(self, number: int) -> None:
        waiting = {
            self._adapter.submit_store_task(
                [_key(number, block) for block in blocks], [self._objects[b] for b in blocks]
            )
            for blocks in batches(self._order.blocks)
        }
        while waiting:
            if not wait_eventfd(self._adapter.get_store_event_fd(), PATIENCE_S):
                raise TimeoutError(f"{len(waiting)} stores are not done after {PATIENCE_S:g} s")
            for task, result in self._adapter.pop_completed_store_tasks().items():
                waiting.remove(task)
                if not result.is_successful():
                    raise OSError("a store failed")

    def before_load(self, number: int) -> None:
        """Look up and lock, as LMCache always does before it loads."""
        layouts = {0: MemoryLayoutDesc([torch.Size([self._order.block_bytes])], [torch.uint8])}
        for blocks in batches(self._order.blocks):
            keys = [_key(number, b) for b in blocks]
            task = self._adapter.submit_lookup_and_lock_task(keys, layouts)
            while (found := self._adapter.query_lookup_and_lock_result(task)) is None:
                if not wait_eventfd(self._adapter.get_lookup_and_lock_event_fd(), PATIENCE_S):
                    raise TimeoutError(f"a lookup is not done after {PATIENCE_S:g} s")
            if found.popcount() != len(keys):
                raise OSError("a lookup has missed")

    def forget(self, number: int) -> None:
        """Unlock what was loaded. Files stay, as they do under LMCache."""
        self._adapter.submit_unlock([_key(number, b) for b in range(self._order.blocks)])

    def load(self, number: int) -> None:
        waiting = {
            self._adapter.submit_load_task(
                [_key(number, b) for b in blocks], [self._objects[b] for b in blocks]
            ): blocks
            for blocks in batches(self._order.blocks)
        }
        while waiting:
            if not wait_eventfd(self._adapter.get_load_event_fd(), PATIENCE_S):
                raise TimeoutError(f"{len(waiting)} loads are not done after {PATIENCE_S:g} s")
            for task in list(waiting):
                found = self._adapter.query_load_result(task)
                if found is not None and found.popcount() != len(waiting.pop(task)):
                    raise OSError("a load failed")

    def close(self) -> None:
        self._adapter.close()
        self._open.close()

    def _settings(self, order: Order, *, in_place: bool) -> Any:
        where = str(order.directory)
        if self._kind == "fs":
            return FSL2AdapterConfig(where, use_odirect=order.direct)
        if self._kind == "fs_native":
            return FSNativeL2AdapterConfig(where, use_odirect=order.direct)
        os.environ["TRANSFERD_STORAGE__FILE__DIRECT_IO"] = str(order.direct).lower()  # for the daemon that is started
        os.environ["XDG_RUNTIME_DIR"] = self._open.enter_context(tempfile.TemporaryDirectory(prefix="lp."))
        params = {"path": where, "weights": "bench", "in_place": in_place}
        plugin = {"module_path": "transferd.adapters.lmcache", "class_name": "TransferdL2", "adapter_params": params}
        return PluginL2AdapterConfig.from_dict(plugin)


def _shared_area(order: Order) -> Any:
    file = os.memfd_create("lmcache-l1", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, order.blocks * order.block_bytes)
    return np.frombuffer(mmap.mmap(file, 0), np.uint8).reshape(order.blocks, order.block_bytes)


def _key(number: int, block: int) -> ObjectKey:
    return ObjectKey(hashlib.sha256(f"{number}/{block}".encode()).digest()[:16], "bench", 0)


def _object(memory: torch.Tensor, block: int, nbytes: int) -> TensorMemoryObj:
    start = block * nbytes
    shape = torch.Size([nbytes])
    about = MemoryObjMetadata(
        shape=shape, dtype=torch.uint8, address=start, phy_size=nbytes, fmt=MemoryFormat.KV_2LTD, ref_count=1,
        shapes=[shape], dtypes=[torch.uint8],
    )  # fmt: skip
    return TensorMemoryObj(raw_data=memory[start : start + nbytes], metadata=about, parent_allocator=None)


if __name__ == "__main__":
    serve(LmcacheL2(sys.argv[1]))
