"""Storage backends of SGLang's HiCache, called by SGLang's own page functions in its batches, over its own host pool.

    python -m benchmarks.peers.sglang_pages file | transferd | mooncake

file        SGLang's HiCacheFile: a file for each page, one after another, no checksums
transferd   TransferdHiCache over a daemon that it starts
mooncake    SGLang's MooncakeStore by tcp; its memory is in this process, and there are no checksums and no files
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.peers.program import Order, Peer, serve
from transferd.cli.pool.local import Master

importlib.import_module("tests.machine.with_sglang.standins").nothing_pinned()  # before all that imports SGLang

LAYERS, HEADS, DIM = 16, 8, 128
TOKEN_BYTES = 2 * LAYERS * HEADS * DIM * 2  # K and V in bfloat16
ALLOCATORS = {"file": "default", "transferd": "shm", "mooncake": "mooncake"}
COPYING, ZERO_COPY = ("_generic_page_set", "_generic_page_get"), ("_page_set_zero_copy", "_page_get_zero_copy")
PAGE_FUNCTIONS = {"file": COPYING, "transferd": ZERO_COPY, "mooncake": ZERO_COPY}  # as HiCacheController chooses them
SEGMENT = 2 * 1024**3


class SglangPages(Peer):
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._open = contextlib.ExitStack()

    def prepare(self, order: Order) -> str:
        import torch
        from sglang.srt.managers.cache_controller import HiCacheController

        from tests.machine.with_sglang import pools

        torch.set_num_threads(1)  # a second one waits in a loop for cores that others use: HiCacheFile's copies suffer
        self._order = order
        self._tokens = tokens = order.block_bytes // TOKEN_BYTES
        pool = pools.mha(
            "page_first",
            ALLOCATORS[self._kind],
            LAYERS,
            heads=HEADS,
            dim=DIM,
            page=tokens,
            tokens=order.blocks * tokens,
        )
        halves = [np.frombuffer(_memory(half), np.uint8).reshape(-1, order.block_bytes // 2) for half in pool.kv_buffer]
        self.areas = [half[: order.blocks] for half in halves]  # a pool has a page more than asked for
        place = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="sp.")))
        self._backend = backend = self._storage(pool, place, order.directory)
        # All that the page functions use of a controller.
        controller = SimpleNamespace(storage_backend=backend, storage_host_pool=pool, page_size=tokens)
        set_pages, get_pages = PAGE_FUNCTIONS[self._kind]
        self._set = getattr(HiCacheController, set_pages).__get__(controller)
        self._get = getattr(HiCacheController, get_pages).__get__(controller)
        return f"SGLang {importlib.metadata.version('sglang')}"

    def store(self, number: int) -> None:
        for keys, indices in self._batches(number):
            if not self._set(keys, indices):
                raise OSError("a store failed")

    def load(self, number: int) -> None:
        """Look up and load, batch by batch, as SGLang does for a prefix that its tree does not have."""
        operation = SimpleNamespace(request_id="bench", is_terminated=lambda: False)
        for keys, indices in self._batches(number):
            if self._backend.batch_exists(keys) != len(keys):
                raise OSError("a look-up has missed")
            if self._get(operation, keys, indices) != len(keys):
                raise OSError("a load failed")

    def close(self) -> None:
        self.areas = []
        self._open.close()

    def _storage(self, pool: Any, place: Path, directory: Path) -> Any:
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        from tests.machine.with_sglang import pools

        extra: dict[str, Any] = {}
        if self._kind == "transferd":
            os.environ["XDG_RUNTIME_DIR"] = str(place)
            backend = pools.backend(pool, pools.config(path=str(directory)))
            self._open.callback(backend.close)
            return backend
        if self._kind == "mooncake":
            master = Master(place / "master.log")
            master.start()
            self._open.callback(master.stop)
            extra = {"master_server_address": master.address, "local_hostname": "127.0.0.1", "protocol": "tcp"}
            extra |= {"metadata_server": "P2PHANDSHAKE", "global_segment_size": SEGMENT, "check_server": False}
        said = pools.config()
        said.extra_config = extra | {"file_storage_path": str(directory)}
        backend = StorageBackendFactory.create_backend(self._kind, said, pool)
        backend.register_mem_pool_host(pool)
        return backend

    def _batches(self, number: int) -> Iterator[tuple[list[str], Any]]:
        from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE

        from tests.machine.with_sglang import pools

        for start in range(0, self._order.blocks, STORAGE_BATCH_SIZE):
            pages = range(start, min(start + STORAGE_BATCH_SIZE, self._order.blocks))
            keys = [hashlib.sha256(f"{number}/{page}".encode()).hexdigest() for page in pages]
            yield keys, pools.indices(pages, self._tokens)


def _memory(tensor: Any) -> Any:
    import ctypes

    return (ctypes.c_uint8 * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())


if __name__ == "__main__":
    serve(SglangPages(sys.argv[1]))
