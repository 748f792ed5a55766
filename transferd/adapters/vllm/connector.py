"""TransferdConnector: the daemon moves blocks of the engine's own KV memory, without vLLM's host pool in between.

vLLM creates one object of this class in the scheduler's process and one in each worker. The workers offer their
memory and report which step their stream has passed (working.py). The scheduler's object pushes all tasks, each for
all ranks at once (scheduling.py).

The objects of one engine share a token: rank 0's worker makes it, the other workers get it through their process group,
and the scheduler gets it in vLLM's handshake metadata, or with the first step if another connector has its metadata
there. So the daemon never mixes up two engines of the same name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
    to_event_extra_keys,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from transferd.adapters.common import fingerprint
from transferd.adapters.common.entry import Order
from transferd.adapters.common.link import Link
from transferd.adapters.vllm import metrics, plugin
from transferd.adapters.vllm.groups import KvGroups, groups_of
from transferd.adapters.vllm.layers import blocks_of, distinct, page_ends
from transferd.adapters.vllm.scheduling import News, Scheduling
from transferd.adapters.vllm.settings import (
    VLLM,
    check_served,
    engine_name,
    loads_by_layer,
    settings,
    surrounding,
    warn_of_unstable_hashes,
)
from transferd.adapters.vllm.versions import Versions, version_of_the_engine
from transferd.adapters.vllm.working import Working, engine_facts
from transferd.tasks import TaskResult

log = logging.getLogger("vllm.transferd")
plugin.register()  # where VLLM_PLUGINS has left it out

LEAVE_TIMEOUT_S = 2.0
MEDIUM = "STORAGE"


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to every worker, with each step."""

    news: News


@dataclass
class Belonging(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From each worker to the scheduler, at the start: the engine's token."""

    token: str = field(repr=False)


@dataclass
class ReadyWord(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From a worker to the scheduler: the worker has passed every step up to this one; `order` says in what sense."""

    step: int
    order: Order
    token: str = field(repr=False)  # the engine's
    loads: bool = False  # whether the worker could load now
    # the results of the step's own loads, by task; there are some only with one worker
    loaded: dict[str, TaskResult] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReadyWord:
        assert isinstance(other, ReadyWord)
        loads, loaded = self.loads and other.loads, self.loaded | other.loaded
        return ReadyWord(min(self.step, other.step), min(self.order, other.order), self.token, loads, loaded)


class TransferdConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # mypy runs where vLLM is not
    """vLLM's KV connector over a transferd daemon. See docs/vllm.md for its keys."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings("kv_connector_extra_config", self._kv_transfer_config.kv_connector_extra_config)
        self._outer = surrounding(vllm_config)
        check_served(vllm_config, self._outer or self._kv_transfer_config)
        self._scheduling: Scheduling | None = None
        self._working: Working | None = None
        self._link: Link | None = None
        self._token = ""
        parallel = vllm_config.parallel_config
        self._name = name = engine_name(self._settings, "vllm", self._kv_transfer_config.engine_id, parallel)
        unit, hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        model = groups_of(kv_cache_config, unit, hashed, getattr(vllm_config, "num_prefill_lookahead_tokens", 0))
        if role is KVConnectorRole.WORKER:
            return
        warn_of_unstable_hashes(vllm_config.cache_config)
        self._versions = Versions(self._settings.generation, version_of_the_engine())
        finder = self._settings.finder(VLLM, None, gpu=vllm_config.device_config.device_type != "cpu")
        self._link = link = Link(finder, name, token=None)  # a worker starts the daemon, and registers the engine
        self._scheduling = Scheduling(
            link,
            model=model,
            timeout=self._settings.timeout,
            prefix=f"{name}-{link.life}",
            loads=self._kv_transfer_config.is_kv_consumer,
            saves=self._kv_transfer_config.is_kv_producer,
            events=EventForms(model) if _events_wanted(vllm_config) else None,
            by_layer=loads_by_layer(self._settings, vllm_config, model, beside=self._outer is not None),
            adapters=fingerprint.Adapters(link.life, fingerprint.process_started(), self._settings.loras, _warn),
        )

    # --- in the workers -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Offer this rank's KV memory. Raises TierError for memory that cannot be shared; then the engine ends."""
        engine = engine_facts(
            self._vllm_config, self._kv_cache_config, self._name, self._settings, kv_caches, _of_all_ranks
        )
        tensors = distinct(kv_caches)
        ends = page_ends(kv_caches, blocks_of(tensors, self._kv_cache_config.num_blocks))
        self._working = Working(engine, self._settings, ends)

    def get_handshake_metadata(self) -> Belonging | None:
        if self._working is None or self._outer is not None:  # another connector may have its own, for its kind only
            return None
        return Belonging(self._working.engine.token)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin the loads that the step waits for, layer by layer. The scheduler's half begins all others."""
        assert self._working is not None
        self._working.loads.start(self._news.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._working is not None:
            self._working.loads.wait(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: the scheduler's half begins saves, once every rank's stream has passed this step."""

    def wait_for_save(self) -> None:
        """Called after everything that a step launches, including the drafts of a speculative model."""
        assert self._working is not None
        self._working.launched(self._news.step, self._news.after)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        return KVConnectorTransferResults(
            finished_recving=set(self._news.loaded), failed_recving=set(self._news.failed)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._working is not None
        bad, results = set(self._news.bad_blocks), self._working.loads.results()
        for task in self._news.loads:
            bad |= set(task.gpu_block_ids).difference(results[task.task_id].block_ids)
        return bad

    def build_connector_worker_meta(self) -> ReadyWord | None:
        assert self._working is not None
        working = self._working
        return ReadyWord(*working.passed(), working.engine.token, working.ready, working.loads.results())

    @property
    def _news(self) -> News:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.news

    # --- in the scheduler ---------------------------------------------------------------------------

    @property
    def _scheduler(self) -> Scheduling:
        assert self._scheduling is not None
        return self._scheduling

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]) -> None:
        """Take the token from the workers, and wait for the daemon. metadata: each worker's, by rank."""
        assert self._link is not None
        told = next((one for one in metadata.values() if isinstance(one, Belonging)), None)
        if told is None:
            log.info("transferd: other connectors are beside it, so it is in use from the first step on")
            return
        self._belong(told.token)
        if not self._link.wait_ready(self._settings.start_timeout):
            log.warning("transferd: no daemon after %g s; vLLM starts without it", self._settings.start_timeout)

    def _belong(self, token: str) -> None:
        assert self._link is not None
        if token != self._token:
            self._token = token
            self._link.belong(token)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata(metadata)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a missing save only causes a later miss

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._follow_weights()
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        self._follow_weights()
        if scheduler_output.num_scheduled_tokens:
            self._versions.computed()
        return StepMetadata(self._scheduler.stepped(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        word = connector_output.kv_connector_worker_meta
        if isinstance(word, ReadyWord):
            self._belong(word.token)
            self._scheduler.loaded(word.loaded, may_load=word.loads)
            self._scheduler.ready(word.step, word.order)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request.request_id, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler.busy

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events()

    def reset_cache(self) -> bool:
        """Make all stored blocks unreachable: vLLM resets its caches when the weights have changed in place.

        Engines of one weight version share what they store from now on (Versions). With keep_blocks_on_reset stored
        blocks stay valid. Always returns True, because vLLM's pause and sleep would fail:
        until a daemon has the reset, no block is found, saved or loaded.
        """
        if self._settings.keep_blocks_on_reset:
            self._scheduler.collect()
            return True
        self._serve(self._versions.reset())
        return True

    def _follow_weights(self) -> None:
        changed = None if self._settings.keep_blocks_on_reset else self._versions.changed()
        if changed is not None:
            self._serve(changed)

    def _serve(self, generation: str) -> None:
        """Find and store nothing of older weights. generation: "" = a unique one."""
        assert self._link is not None
        self._scheduler.forget()
        if generation:
            log.info("transferd: serves weight version %s", generation)
            self._link.renew(generation)
        else:
            self._link.reset()

    # --- both ---------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._working is not None:
            self._working.close(LEAVE_TIMEOUT_S)
        if self._link is not None:
            self._scheduler.release()
            self._link.close(LEAVE_TIMEOUT_S)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """Since vLLM 0.33. No other process can map what the sleeping allocator makes."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On a GPU a block of all layers is one range of bytes, so that one DMA moves it; elsewhere one of a layer is.

        vLLM takes another one if an attention backend does not support it, but raises if it must also split the
        operator's own blocks. It also raises if connectors in a MultiConnector want several; then we want none.
        """
        if surrounding(vllm_config) is not None:
            return None
        chosen = getattr(vllm_config.cache_config, "user_specified_block_size", False)
        return "LBHNC" if chosen or vllm_config.device_config.device_type != "cuda" else "BLHNC"

    def get_kv_connector_stats(self) -> metrics.ConnectorStats | None:
        if self._scheduling is None or self._link is None:
            return None
        counts = dict(self._scheduling.counts)
        self._scheduling.counts.clear()
        return metrics.ConnectorStats(data={**counts, metrics.READY: int(self._link.ready)})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> metrics.ConnectorStats:
        return metrics.ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        return metrics.Prometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class EventForms:
    """vLLM's events about blocks in the store. model: its KV groups."""

    def __init__(self, model: KvGroups) -> None:
        self._model = model

    def name(self, request: Any, group: int, i: int) -> tuple[Any, int]:
        return maybe_convert_block_hash(request.block_hashes[self._model.hash_of(group, i)]), group

    def stored(self, request: Any, group: int, i: int) -> BlockStored:
        tokens, lora = self._model.groups[group].tokens, request.lora_request
        start, end = i * tokens, (i + 1) * tokens
        extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
        return BlockStored(
            block_hashes=[self.name(request, group, i)[0]],
            parent_block_hash=self.name(request, group, i - 1)[0] if i else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys([extra]),
            group_idx=group,
        )

    def removed(self, names: Sequence[tuple[Any, int]]) -> list[BlockRemoved]:
        by_group: dict[int, list[Any]] = {}
        for block_hash, group in names:
            by_group.setdefault(group, []).append(block_hash)
        return [BlockRemoved(hashes, MEDIUM, group_idx=group) for group, hashes in by_group.items()]


def _warn(what: str) -> None:
    log.warning("transferd: %s", what)


def _of_all_ranks(own: str) -> list[str]:
    """What every rank's worker has passed, by rank. All of them call this, equally often."""
    group = get_tp_group()
    found = [own] * group.world_size
    if group.world_size > 1:
        import torch

        torch.distributed.all_gather_object(found, own, group=group.cpu_group)
    return found


def _events_wanted(vllm_config: Any) -> bool:
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)
