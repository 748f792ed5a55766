"""TransferdTier: transferd as a secondary tier under vLLM's TieringOffloadingSpec.

vLLM copies KV between the GPU and its host pool, a file in /dev/shm. Each chunk of the pool is one row of the file,
which holds the bytes of all workers. The daemon maps that file; a chunk is one transferd block, and its row number is
the block id. This class turns jobs into tasks and task results into job results; what the page cache has, it reads
itself (read_leases.py).

Everything here runs in vLLM's scheduler process and on its thread, except `_Lookups.batch_lookup` (on a thread of
vLLM's), reads (on threads of their own) and the end of a job (on these, or the link's).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from msgspec.structs import replace
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from transferd.adapters.common.entry import EngineFacts, OfferedMemory
from transferd.adapters.common.link import BlockTasks, Link, why_not_stored
from transferd.adapters.common.memory import bytes_at, shared_memory_at
from transferd.adapters.common.read_leases import LeasedBlocks
from transferd.adapters.vllm import identity
from transferd.adapters.vllm.jobs import Jobs
from transferd.adapters.vllm.router_events import RouterEvents, StoredBlock
from transferd.adapters.vllm.settings import VLLM, AdapterSettings, engine_name, settings
from transferd.blocks.fingerprint import digest
from transferd.client.client import NO_ANSWER_S
from transferd.errors import ConfigError
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.tasks import Status, TaskResult

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

log = logging.getLogger("vllm.transferd")

CONFIG_INFO = ("transferd_endpoint", "transferd_generation", "transferd_fingerprint")
LEAVE_TIMEOUT_S = 2.0  # vLLM gives an engine about 5 s to end

READY = "vllm:kv_offload_transferd_ready"
LOST_CHUNKS = "vllm:kv_offload_transferd_chunks_not_moved"


class TransferdTier(SecondaryTierManager):  # type: ignore[misc] # vLLM is not installed where mypy runs
    """A secondary tier that stores in a transferd daemon. See docs/vllm.md for its keys."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        enable_kv_events: bool = False,
        locality: str | None = None,
        **given: Any,
    ) -> None:
        """Find or start the daemon and offer it vLLM's host pool. Raises ConfigError, TierError.

        If the daemon does not answer in time, that is not an error: until it does, every lookup misses.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings = chosen = settings("secondary_tiers", given)
        if chosen.by_layer:
            raise ConfigError("secondary_tiers.by_layer", "is for TransferdConnector; vLLM waits for its tiers", True)
        self.locality = None if locality is None else Locality(locality)
        config = offloading_spec.config
        name = engine_name(chosen, "vllm-tier", config.engine_id)
        engine = _engine(config, primary_kv_view, name, chosen)
        self._fingerprint = engine.fingerprint
        self._link = Link(chosen.finder(VLLM, engine), engine.name, engine.enter)
        self._tasks = BlockTasks(self._link, "chunks")
        self._jobs = Jobs()
        self._leased = LeasedBlocks(self._link)
        self._rows = _rows(primary_kv_view)
        self._lookups = _Lookups(self._leased, tier_type)
        events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events = RouterEvents(self._link, lambda keys: [(key, True) for key in keys]) if events else None
        self._not_moved: Counter[str] = Counter()
        if not self._link.wait_ready(chosen.start_timeout):
            log.warning("transferd: no daemon after %g s; vLLM starts without it", chosen.start_timeout)

    # --- lookups ------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        there = self._lookups.lookup(key, req_context)
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002
        self._lookups.flush()
        if self._events is not None:
            self._events.ask()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002
        """These chunks are used from vLLM's host pool, so the store keeps them longer as well."""
        if self._link.ready:
            self._link.ask([key.hex() for key in keys])  # a look-up counts as a use

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    # --- transfers ----------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        task = self._tasks.write(*_chunks_of(job_metadata), self._settings.timeout)
        self._link.submit(task, self._jobs.began(job_metadata, task.task_id))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read what a look-up has found in the page cache; the daemon loads the rest."""
        keys, rows = _chunks_of(job_metadata)
        task = self._tasks.read(keys, rows, self._settings.timeout)
        done, began = self._jobs.began(job_metadata, task.task_id), time.monotonic()

        def ended(read: list[bool]) -> None:
            here = [row for row, one in zip(rows, read, strict=True) if one]
            rest = [i for i, one in enumerate(read) if not one]
            if not rest:
                duration = time.monotonic() - began
                done(TaskResult(task_id=task.task_id, status=Status.OK, block_ids=here, duration=duration))
                return
            left = replace(task, keys=[keys[i] for i in rest], gpu_block_ids=[rows[i] for i in rest])
            self._link.submit(left, lambda result: done(replace(result, block_ids=[*here, *result.block_ids])))

        self._leased.begin_reading(keys, [[self._rows(row)] for row in rows], ended)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._finished(job, result) for job, result in self._jobs.take()]

    def _finished(self, job: TransferJob, result: TaskResult) -> JobResult:
        moved = set(result.block_ids)
        good = [key for key, row in zip(job.keys, job.chunk_ids.tolist(), strict=True) if row in moved]
        whole = result.status is Status.OK
        if not whole:
            bad = [key for key, row in zip(job.keys, job.chunk_ids.tolist(), strict=True) if row not in moved]
            self._not_moved[result.error.code if result.error else str(result.status)] += len(bad)
            if job.is_promotion:
                self._lookups.mark_miss(bad)  # otherwise vLLM would look it up and load it for ever
            elif bad:
                self._link.count_not_stored(why_not_stored(result), len(bad))
        if self._events is not None and not job.is_promotion:
            for key in good:
                self._events.stored(StoredBlock(key.hex(), key, lambda key=key: (key, False)))  # type: ignore[misc]
        return JobResult(
            job_id=job.job_id,
            success=whole,
            successful_keys=good if good and job.is_promotion and not whole else None,
            transfer_time=result.duration,
            transfer_bytes=len(good) * self._block_size_bytes,
        )

    def take_events(self) -> Iterable[OffloadingEvent]:
        told = [] if self._events is None else self._events.take()
        for removed, some in itertools.groupby(told, lambda one: one[1]):
            keys = [key for key, _ in some]
            yield OffloadingEvent(keys=keys, medium=self.medium, removed=removed, locality=self.locality)

    def drain_jobs(self) -> None:
        """Wait until no job touches the pool; vLLM then uses its rows for others. vLLM calls this on a reset.

        The weights may have changed, so all stored blocks become unreachable, unless keep_blocks_on_reset is set.

        Raises StillRunning if the daemon does not answer in time, because it may still write. vLLM's call then fails,
        and its pool is not reset.
        """
        if not self._settings.keep_blocks_on_reset:
            self._leased.forget()
            self._link.reset()  # if no daemon knows it yet, nothing is found until one does
            if self._events is not None:
                self._events.clear()
        elif self._events is not None:
            self._events.forgotten()
        self._jobs.wait_idle(self._settings.timeout + NO_ANSWER_S, self._link.endpoint)

    def shutdown(self) -> None:
        self._lookups.stop()
        self._leased.close()
        self._link.close(LEAVE_TIMEOUT_S)
        self._lookups.shutdown()

    # --- what vLLM publishes of it, since 0.33 -------------------------------------------------------

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG003
        return tuple(CONFIG_INFO)

    def config_info(self) -> dict[str, str]:
        """The endpoint, the weight version at the start, and the digest of the facts that engines must share."""
        values = (self._link.endpoint, self._settings.generation, digest(self._fingerprint))
        return dict(zip(CONFIG_INFO, values, strict=True))

    # --- metrics ------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        return {
            READY: OffloadingGaugeMetadata(documentation="1 while a transferd daemon serves this engine, else 0."),
            LOST_CHUNKS: OffloadingCounterMetadata(
                documentation="Chunks that transferd did not store or load; reason: an error code, or miss.",
                labelnames=("reason",),
            ),
        }

    def get_stats(self) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        stats.set_gauge(READY, int(self._link.ready))
        for reason, count in self._not_moved.items():
            stats.increase_counter(LOST_CHUNKS, count, (reason,))
        self._not_moved.clear()
        return stats


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's own lookup thread, with one question to the daemon per request and step."""

    def __init__(self, leased: LeasedBlocks, tier_type: str) -> None:
        self._leased = leased
        self._stopped = False
        super().__init__(tier_type)

    def batch_lookup(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Iterable[bool]:  # noqa: ARG002
        if self._stopped:
            return [False] * len(keys)
        return self._leased.look_up([key.hex() for key in keys])

    def stop(self) -> None:
        """From now on, answer at once."""
        self._stopped = True


def _chunks_of(job: TransferJob) -> tuple[list[str], list[int]]:
    """The keys of a job's chunks, and their rows in vLLM's host pool."""
    return [key.hex() for key in job.keys], job.chunk_ids.tolist()


def _pool_at(view: memoryview) -> tuple[int, int, int]:
    """Where vLLM's host pool begins, how many rows it has, and the bytes from row to row."""
    pool = np.asarray(view)
    return pool.ctypes.data, pool.shape[0], pool.strides[0]


def _rows(view: memoryview) -> Callable[[int], memoryview]:
    """Returns the bytes of a row of vLLM's host pool."""
    address, rows, stride = _pool_at(view)
    whole = bytes_at(address, rows * stride)
    return lambda row: whole[row * stride : (row + 1) * stride]


def _engine(config: Any, view: memoryview, name: str, chosen: AdapterSettings) -> EngineFacts:
    """vLLM's host pool as an engine of one rank. Raises TierError."""
    address, rows, stride = _pool_at(view)
    return EngineFacts(
        name=name,
        model=config.model.name,
        generation=chosen.generation,
        identity="vllm-tier",
        ranks=1,
        blocks=rows,
        page_bytes=(stride,),
        memory=OfferedMemory(0, shared_memory_at(address, rows * stride), ((0, stride),)),
        fingerprint=identity.of_tier(config, stride, chosen, SYSTEM_CLOCK.fresh_id()),
    )
