"""vLLM's own host pool and tiering manager, driven as its scheduler drives them, without an engine around them.

Each stored chunk holds bytes that follow from its key alone, so every load can be checked, whoever stored it.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

CHUNK_BYTES = 8192
TIER = {  # `forget` resets vLLM's caches to load again, with the same weights
    "type": "TransferdTier", "module_path": "transferd.adapters.vllm", "weights": "tiny", "keep_blocks_on_reset": True,
}  # fmt: skip
MOST_ROUNDS = 4000  # far beyond any real number: a livelock fails here
PAUSE_S = 0.005  # a step of the model
STEP = ScheduleEndContext((), ())


def keys(name: str, count: int) -> list[OffloadKey]:
    return [make_offload_key(hashlib.sha256(f"{name}/{i}".encode()).digest(), 0) for i in range(count)]


def content(key: OffloadKey) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)


def config(
    chunks: int, tier: dict[str, Any], *, model: str = "tiny", tp: int = 1, engine: str = "", agnostic: bool = False
) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=32, layer_names=("a", "b"), group_id=0),),
        worker_kv_bytes_per_block=CHUNK_BYTES // tp,
        enable_kv_cache_events=True,
        extra_config={
            "cpu_bytes_to_use": chunks * CHUNK_BYTES,
            "secondary_tiers": [TIER | tier],
        },
        engine_id=engine or uuid.uuid4().hex[:12],
        model=OffloadingModelConfig(name=model, dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0, world_size=tp, tp_size=tp, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
            data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=agnostic,
        ),
        kv_cache_layout="LBHNC",
    )  # fmt: skip


class Pool:
    """A host pool of `chunks` chunks over a TransferdTier. `with` shuts it down."""

    def __init__(self, chunks: int = 16, **tier: Any) -> None:
        known = {name: tier.pop(name) for name in ("model", "tp", "engine", "agnostic") if name in tier}
        self.spec = TieringOffloadingSpec(config(chunks, tier, **known))
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.rounds = 0
        self._requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self.rows  # a view of memory that goes
        self.manager.shutdown()

    def step(self) -> None:
        self.manager.on_schedule_end(STEP)
        self.rounds += 1
        assert self.rounds < MOST_ROUNDS, "a livelock"

    def request(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(req_id=f"r{self._requests}")
        self.manager.on_new_request(context)
        return context

    def store(self, wanted: Sequence[OffloadKey]) -> None:
        """Compute and store these chunks, and wait until the tier has answered."""
        context = self.request()
        out = self.manager.prepare_store(wanted, context)
        assert out is not None
        for key, row in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            self.rows[int(row)] = content(key)
        self.manager.complete_store(out.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.settle()

    def settle(self) -> None:
        while self.manager.has_pending_work():
            self.step()
            time.sleep(PAUSE_S)
        self.step()

    def load(self, wanted: Sequence[OffloadKey]) -> list[bool]:
        """Bring these chunks into the pool as a request does, check every byte, and say which ones came."""
        context = self.request()
        found: dict[OffloadKey, LookupResult] = {}
        self.rounds = 0
        while len(found) < len(wanted):
            for key in wanted:
                if key not in found:
                    answer = self.manager.lookup(key, context)
                    if answer in (LookupResult.HIT, LookupResult.MISS):
                        found[key] = answer
            self.step()
            time.sleep(PAUSE_S)
        came = [found[key] is LookupResult.HIT for key in wanted]
        good = [key for key, there in zip(wanted, came, strict=True) if there]
        spec = self.manager.prepare_load(good, context) if good else None
        for key, row in zip(good, spec.chunk_ids if spec else [], strict=True):
            assert np.array_equal(self.rows[int(row)], content(key)), f"wrong bytes for {key.hex()}"
        if good:
            self.manager.complete_load(good, context)
        self.manager.on_request_finished(context)
        self.step()
        return came

    def forget(self) -> None:
        """Empty the host pool; what the tier stores stays."""
        self.manager.reset_cache()
        if flushed := getattr(self.manager, "on_reset_flushed", None):  # since vLLM 0.33
            flushed()
