"""The vLLM interfaces that each class here needs, and the one error for a vLLM that lacks them."""

from __future__ import annotations

import functools
import importlib
import logging
import operator
from collections.abc import Mapping, Sequence

from transferd.errors import ConfigError

log = logging.getLogger("vllm.transferd")  # vLLM shows only its own loggers

TESTED = ("0.32.0",)  # the versions that `make vllm-check` runs
TRIED = ("0.33.0",)  # `make vllm-check NEXT=1`: its Python over 0.32's compiled parts; there is none for the CPU
OFFLOAD = "vllm.v1.kv_offload"
TIERING = f"{OFFLOAD}.tiering"
KV_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"

TIER: Mapping[str, Sequence[str]] = {
    f"{OFFLOAD}.base": (
        "Locality",
        "LookupResult",
        "Medium",
        "OffloadingCounterMetadata",
        "OffloadingEvent",
        "OffloadingGaugeMetadata",
        "OffloadingMetricMetadata",
        "RequestOffloadingContext",
    ),
    f"{TIERING}.base": ("JobResult", "SecondaryTierManager.drain_jobs", "TransferJob"),
    f"{TIERING}.async_lookup": (
        "AsyncLookupManager.cleanup",
        "AsyncLookupManager.flush",
        "AsyncLookupManager.mark_miss",
    ),
    f"{KV_CONNECTOR}.offloading.metrics": ("OffloadingConnectorStats",),
}
CONNECTOR: Mapping[str, Sequence[str]] = {
    f"{KV_CONNECTOR}.base": (
        "KVConnectorBase_V1.bind_kv_cache_manager",
        "KVConnectorBase_V1.get_handshake_metadata",
        "KVConnectorBase_V1.set_xfer_handshake_metadata",
        "KVConnectorBase_V1.build_connector_worker_meta",
        "KVConnectorBase_V1.has_pending_push_work",
        "KVConnectorHandshakeMetadata",
        "KVConnectorMetadata",
        "KVConnectorRole",
        "KVConnectorTransferResults",
        "KVConnectorWorkerMetadata",
        "SupportsHMA",
    ),
    f"{KV_CONNECTOR}.metrics": ("KVConnectorPromMetrics", "KVConnectorStats"),
    "vllm.distributed.kv_events": ("BlockRemoved", "BlockStored"),
    "vllm.distributed.parallel_state": ("get_tp_group",),
    "vllm.v1.core.kv_cache_utils": (
        "generate_block_hash_extra_keys",
        "maybe_convert_block_hash",
        "resolve_kv_cache_block_sizes",
        "to_event_extra_keys",
    ),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource",),
}


def require(user: str, needed: Mapping[str, Sequence[str]]) -> None:
    """Check that this vLLM has what `user` needs. Raises ConfigError that names the version and the missing names."""
    missing = [name for module, names in needed.items() for name in _missing(module, names)]
    if missing:
        what = f"lacks {', '.join(missing)}, which {user} needs; tested with {', '.join(TESTED)}"
        raise ConfigError("vllm", what, _version())
    _say_if_untested(_version())


@functools.cache
def _say_if_untested(version: str) -> None:
    """One line for each process. version: builds of one version differ in what is behind its `+`."""
    if version.partition("+")[0] not in (*TESTED, *TRIED):
        log.warning("transferd: vLLM %s is untested; tested with %s", version, ", ".join(TESTED))


def _missing(module: str, names: Sequence[str]) -> list[str]:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        return [f"{module} ({error})"]
    return [f"{module}.{name}" for name in names if not _has(found, name)]


def _has(module: object, dotted: str) -> bool:
    try:
        operator.attrgetter(dotted)(module)
    except AttributeError:
        return False
    return True


def _version() -> str:
    try:
        import vllm
    except ImportError:
        return "not installed"
    return str(getattr(vllm, "__version__", "unknown"))
