"""What stands beside the adapter in tests with the engine.

A memcpy worker, as vLLM's own refuses the CPU, and witnesses that note the sha256 of every block as it is stored and
after it was loaded.

Named in kv_connector_extra_config, so vLLM imports this module itself, in each of its processes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import group_kernel_blocks
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from transferd.adapters.common.entry import OfferedMemory
from transferd.adapters.vllm.connector import TransferdConnector
from transferd.adapters.vllm.scheduling import PendingTransfer, Scheduling
from transferd.adapters.vllm.tier import TransferdTier

NOTES = "TRANSFERD_WITNESS"  # environment: the directory to note in
ZEROED = "TRANSFERD_ZEROED"  # environment: zero what was loaded, so that answers must differ
LAYERS: dict[int, dict[str, Any]] = {}  # for each KV group, each layer's blocks; in the workers' process


def note(what: str, key: str, data: Any) -> None:
    directory = Path(os.environ[NOTES])
    line = json.dumps([what, key, hashlib.sha256(data).hexdigest()])
    with (directory / f"{os.getpid()}.jsonl").open("a", encoding="ascii") as file:
        file.write(line + "\n")


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering spec with a worker that copies on the CPU."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return MemcpyWorker(kv_caches, region)


class MemcpyWorker(OffloadingWorker):
    """One block a chunk, one group."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs = [(one.tensor, region.create_next_worker_view(one.page_size_bytes)) for one in kv_caches.tensors]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, row in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
            for tensor, rows in self._pairs:
                rows[row].copy_(_bytes(tensor[block]))
        self._done.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for row, block in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
            for tensor, rows in self._pairs:
                _bytes(tensor[block]).copy_(rows[row])
                if os.environ.get(ZEROED):
                    _bytes(tensor[block]).zero_()
        self._done.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every copy has ended when `submit` returns."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


def _bytes(page: Any) -> Any:
    import torch

    return (
        page.view(-1).view(torch.int8)
        if page.is_contiguous()
        else torch.as_strided(page, (page.numel(),), (1,), page.storage_offset()).view(torch.int8)
    )


class WitnessTier(TransferdTier):
    def submit_store(self, job_metadata: Any) -> None:
        for key, row in zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True):
            note("stored", key.hex(), np.asarray(self._primary_kv_view)[row])
        super().submit_store(job_metadata)

    def _finished(self, job: Any, result: Any) -> Any:
        finished = super()._finished(job, result)
        if job.is_promotion:
            good = set(job.keys) if finished.success else set(finished.successful_keys or ())
            for key, row in zip(job.keys, job.chunk_ids.tolist(), strict=True):
                if key in good:
                    note("loaded", key.hex(), np.asarray(self._primary_kv_view)[row])
        return finished


class WitnessConnector(TransferdConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self._scheduling is not None:
            witness: Any = self._scheduling
            witness.__class__, witness.engine = WitnessScheduling, self._name

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        assert self._working is not None
        engine = self._working.engine
        region = engine.memory
        assert isinstance(region, OfferedMemory)
        where = f"/proc/{os.getpid()}/fd/{region.mapped.descriptor()}"  # it has no name
        facts = [where, region.mapped.offset, list(region.segments), list(engine.page_bytes)]
        (Path(os.environ[NOTES]) / f"memory.{self._name}.{region.rank}").write_text(json.dumps(facts), encoding="ascii")
        blocks = self._kv_cache_config.num_blocks
        for group, spec in enumerate(self._kv_cache_config.kv_cache_groups):
            LAYERS[group] = {name: group_kernel_blocks(kv_caches[name], blocks) for name in spec.layer_names}


class WitnessScheduling(Scheduling):
    """Notes what it finds in the engine's memory by the adapter's own facts, and by vLLM's tensors of each layer."""

    engine: str  # its name: data-parallel engines note in one directory

    def _save_ended(self, transfer: PendingTransfer, moved: set[int]) -> None:
        self._look("stored", transfer, moved)
        super()._save_ended(transfer, moved)

    def _load_ended(self, transfer: PendingTransfer, moved: set[int]) -> None:
        self._look("loaded", transfer, moved)
        if os.environ.get(ZEROED):
            for blocks in (blocks for layers in LAYERS.values() for blocks in layers.values()):
                blocks[sorted(moved)] = 0
        super()._load_ended(transfer, moved)

    def _look(self, what: str, transfer: PendingTransfer, moved: set[int]) -> None:
        for key, block in zip(transfer.task.keys, transfer.task.gpu_block_ids, strict=True):
            group = re.search(r"/(\d+)", key)
            for layer, blocks in LAYERS.get(int(group[1]) if group else 0, {}).items():
                if block in moved:
                    note(f"layer {what}", f"{key} {layer}", blocks[block].contiguous().view(torch.uint8).numpy())
        for memory in sorted(Path(os.environ[NOTES]).glob(f"memory.{self.engine}.*")):
            where, offset, segments, pages = json.loads(memory.read_text(encoding="ascii"))
            if not Path(where).exists():
                return  # the engine ends
            with open(where, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                for key, block in zip(transfer.task.keys, transfer.task.gpu_block_ids, strict=True):
                    if block in moved:
                        parts = [
                            mapped[offset + start + block * stride : offset + start + block * stride + nbytes]
                            for (start, stride), nbytes in zip(segments, pages, strict=True)
                        ]
                        note(what, f"{key}/{memory.suffix}", b"".join(parts))
