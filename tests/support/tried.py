"""Adapters as transferd.adapters.conformance asks for them, over engines that tests have."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np

from tests.support import fake_sglang
from transferd.adapters.conformance import Trial
from transferd.adapters.mooncake_store import MooncakeDistributedStore
from transferd.adapters.mooncake_store.settings import VARIABLE
from transferd.adapters.sglang.settings import HiCacheSettings


class TriedHiCache:
    """SGLang's backend over a pool. backend: made by SGLang's way to it. indices: of pages, as SGLang gives them."""

    def __init__(self, backend: Any, indices: Callable[[list[int]], Any], blocks: int, block_bytes: int) -> None:
        self._backend, self._indices = backend, indices
        self.blocks, self.block_bytes = blocks, block_bytes

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [self._backend.exists(key) for key in keys]

    def store(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        stored: list[bool] = self._backend.batch_set_v1(list(keys), self._indices(list(blocks)))
        return stored

    def load(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        loaded: list[bool] = self._backend.batch_get_v1(list(keys), self._indices(list(blocks)))
        return loaded

    def close(self) -> None:
        self._backend.close()


class TriedMooncake:
    """An engine that has private memory, and imports Mooncake's store."""

    blocks, block_bytes = 24, 70_000

    def __init__(self, trial: Trial) -> None:
        with mock.patch.dict(os.environ, {VARIABLE: json.dumps({"load_timeout": trial.timeout} | trial.settings())}):
            self._store = MooncakeDistributedStore()
            assert self._store.setup(tenant_id=trial.model) == 0
        self._memory = np.zeros((self.blocks, self.block_bytes), dtype=np.uint8)
        assert self._store.register_buffer(self._memory.ctypes.data, self._memory.nbytes) == 0

    def fill(self, block: int, content: bytes) -> None:
        self._memory[block] = np.frombuffer(content, dtype=np.uint8)

    def read(self, block: int) -> bytes:
        return bytes(self._memory[block])

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [one == 1 for one in self._store.batch_is_exist(keys)]

    def store(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        return [one == 0 for one in self._store.batch_put_from(keys, *self._where(blocks))]

    def load(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        return [one == self.block_bytes for one in self._store.batch_get_into(keys, *self._where(blocks))]

    def _where(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        return [int(self._memory[block].ctypes.data) for block in blocks], [self.block_bytes] * len(blocks)

    def close(self) -> None:
        self._store.close()


def sglang_settings(trial: Trial) -> dict[str, Any]:
    """The keys of a trial beside SGLang's own ones."""
    assert "load_timeout" in HiCacheSettings.__struct_fields__
    return {"interface_v1": 1, "load_timeout": trial.timeout} | trial.settings()


class TriedFakeSglang(TriedHiCache):
    def __init__(self, trial: Trial) -> None:
        from transferd.adapters.sglang import TransferdHiCache

        self._pool = fake_sglang.HostPool(private=trial.private)
        said = fake_sglang.HiCacheStorageConfig(model_name=trial.model, extra_config=sglang_settings(trial))
        backend = TransferdHiCache(said, {})
        backend.register_mem_pool_host(self._pool)
        backend.on_host_pools_registered()
        super().__init__(backend, fake_sglang.indices, fake_sglang.PAGES, 2 * fake_sglang.PIECE)

    def fill(self, block: int, content: bytes) -> None:
        self._pool.bytes[:, block] = np.frombuffer(content, dtype=np.uint8).reshape(2, fake_sglang.PIECE)

    def read(self, block: int) -> bytes:
        return self._pool.bytes[:, block].tobytes()
