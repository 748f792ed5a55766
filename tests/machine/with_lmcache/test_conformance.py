"""TransferdL2 over LMCache's real objects in private memory passes the checks that every adapter must pass."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from tests.machine.with_lmcache.managers import GROUPS, PARAMS
from transferd.adapters import conformance
from transferd.adapters.conformance import CHECKS, Bench, Trial
from transferd.adapters.lmcache import TransferdL2

LAYOUT = GROUPS[1]
(SHAPE,), (DTYPE,) = LAYOUT.shapes, LAYOUT.dtypes
PATIENCE_MS = 120_000


class TriedLmcache:
    """Private memory with objects at multiples of 4096 bytes, as LMCache allocates them."""

    blocks, block_bytes = 24, SHAPE.numel() * DTYPE.itemsize

    def __init__(self, trial: Trial) -> None:
        self._model = trial.model
        self._stride = -(-self.block_bytes // 4096) * 4096
        self._arena = torch.zeros(self.blocks * self._stride, dtype=torch.uint8)
        self._l2 = TransferdL2(PARAMS | {"load_timeout": trial.timeout} | trial.settings())

    def fill(self, block: int, content: bytes) -> None:
        self._at(block)[:] = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def read(self, block: int) -> bytes:
        return bytes(self._at(block).numpy().tobytes())

    def exists(self, keys: Sequence[str]) -> list[bool]:
        named, l2 = self._keys(keys), self._l2
        task = l2.submit_lookup_and_lock_task(named, {1: LAYOUT})
        found = _awaited(l2.get_lookup_and_lock_event_fd(), lambda: l2.query_lookup_and_lock_result(task))
        l2.submit_unlock(named)
        return [found.test(i) for i in range(len(keys))]

    def store(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        task = self._l2.submit_store_task(self._keys(keys), self._objects(blocks))
        done: Any = _awaited(self._l2.get_store_event_fd(), lambda: self._l2.pop_completed_store_tasks().get(task))
        return [done.is_successful()] * len(keys)

    def load(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        l2 = self._l2
        task = l2.submit_load_task(self._keys(keys), self._objects(blocks))
        found = _awaited(l2.get_load_event_fd(), lambda: l2.query_load_result(task))
        return [found.test(i) for i in range(len(keys))]

    def close(self) -> None:
        self._l2.close()

    def _at(self, block: int) -> torch.Tensor:
        return self._arena[block * self._stride : block * self._stride + self.block_bytes]

    def _keys(self, keys: Sequence[str]) -> list[ObjectKey]:
        rank = ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
        return [ObjectKey(bytes.fromhex(key), self._model, rank, 1) for key in keys]

    def _objects(self, blocks: Sequence[int]) -> list[TensorMemoryObj]:
        return [
            TensorMemoryObj(
                self._at(block),
                MemoryObjMetadata(
                    SHAPE, DTYPE, block * self._stride, self._stride, 1, fmt=MemoryFormat.KV_2LTD, shapes=[SHAPE],
                    dtypes=[DTYPE],
                ),
                None,
            )
            for block in blocks
        ]  # fmt: skip


def _awaited(event: int, result: Callable[[], Any]) -> Any:
    """LMCache's controllers wait for the eventfd, and then ask."""
    poller = select.poll()
    poller.register(event, select.POLLIN)
    while (found := result()) is None:
        assert poller.poll(PATIENCE_MS), "no event, and no result"
        os.read(event, 8)
    return found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_adapter_is_fit(check: Callable[[Bench], None]) -> None:
    assert conformance.run(TriedLmcache, check) == ""
