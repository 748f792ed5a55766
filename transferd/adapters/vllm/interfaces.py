"""The vLLM interfaces that each class here needs, and the one error for a vLLM that lacks them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from transferd.errors import ConfigError

TESTED = ("0.32.0",)  # the versions that `make vllm-check` runs
OFFLOAD = "vllm.v1.kv_offload"
TIERING = f"{OFFLOAD}.tiering"

TIER: Mapping[str, Sequence[str]] = {
    f"{OFFLOAD}.base": ("LookupResult", "Medium", "OffloadingEvent", "OffloadingCounterMetadata"),
    f"{TIERING}.base": ("SecondaryTierManager", "TransferJob", "JobResult", "RequestOffloadingContext"),
    f"{TIERING}.async_lookup": ("AsyncLookupManager",),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": ("OffloadingConnectorStats",),
}
CONNECTOR: Mapping[str, Sequence[str]] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        "KVConnectorBase_V1",
        "KVConnectorMetadata",
        "KVConnectorRole",
        "KVConnectorWorkerMetadata",
    ),
    "vllm.v1.outputs": ("KVConnectorOutput",),
    "vllm.distributed.kv_events": ("BlockStored",),
}


def require(user: str, needed: Mapping[str, Sequence[str]]) -> None:
    """Check that this vLLM has what `user` needs. Raises ConfigError that names its version and what it lacks."""
    missing = [name for module, names in needed.items() for name in _missing(module, names)]
    if missing:
        what = f"lacks {', '.join(missing)}, which {user} needs; tested with {', '.join(TESTED)}"
        raise ConfigError("vllm", what, _version())


def _missing(module: str, names: Sequence[str]) -> list[str]:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        return [f"{module} ({error})"]
    return [f"{module}.{name}" for name in names if not hasattr(found, name)]


def _version() -> str:
    try:
        import vllm
    except ImportError:
        return "not installed"
    return str(getattr(vllm, "__version__", "unknown"))
