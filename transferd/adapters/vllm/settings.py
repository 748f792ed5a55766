"""The settings that an operator can give in vLLM's configuration, checked where they are read."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transferd.adapters.common.program import Program
from transferd.adapters.common.settings import CommonSettings, parsed
from transferd.adapters.vllm.groups import KvGroups
from transferd.errors import ConfigError

VLLM = Program("vLLM", "vllm.transferd")  # vLLM shows only its own loggers
log = VLLM.log


class AdapterSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a tier, or of kv_connector_extra_config; those of every adapter, and vLLM's own.

    name: "" = derived from vLLM's engine id (engine_name).
    loras: the operator's name for the weights of LoRA adapters; "" = by their files.
    keep_blocks_on_reset: stored blocks stay valid when vLLM resets its caches, because the weights stay the same.
    by_layer: a request that is alone is computed while its blocks are loaded (TransferdConnector only).
    """

    loras: str = ""
    keep_blocks_on_reset: bool = False
    by_layer: bool = False


def settings(section: str, given: Mapping[str, Any]) -> AdapterSettings:
    """Parse the settings of a section. Raises ConfigError that names the key."""
    return parsed(section, given, AdapterSettings)


def engine_name(chosen: AdapterSettings, kind: str, engine_id: str, parallel: Any = None) -> str:
    """The engine's name for the daemon. kind: its prefix if the operator has given no name.

    Data-parallel engines share one configuration, so a given name gets the number of the engine among them: from
    parallel, vLLM's ParallelConfig, or else from the engine id, to which vLLM appends it.
    """
    if not chosen.name:
        return f"{kind}-{engine_id}"
    appended = re.search(r"_dp(\d+)$", engine_id)
    number = int(appended[1]) if appended else 0
    number = getattr(parallel, "data_parallel_index", None) or getattr(parallel, "data_parallel_rank", None) or number
    several = number or getattr(parallel, "data_parallel_size", 1) > 1 or appended
    return f"{chosen.name}-dp{number}" if several else chosen.name


def check_served(vllm_config: Any, transfer: Any) -> None:
    """Refuse settings of vLLM that TransferdConnector cannot serve correctly. Raises ConfigError.

    transfer: the KVTransferConfig with the failure policy that vLLM obeys.
    """
    if transfer.kv_load_failure_policy != "recompute":
        what = 'must be "recompute", so that vLLM recomputes lost blocks instead of failing requests'
        outer = f" (of {transfer.kv_connector})" if transfer is not vllm_config.kv_transfer_config else ""
        raise ConfigError(f"kv_transfer_config.kv_load_failure_policy{outer}", what, transfer.kv_load_failure_policy)
    for name in ("enable_sleep_mode", "enable_cumem_allocator"):
        if getattr(vllm_config.model_config, name, False):
            what = "must be off: no other process can map what vLLM's sleeping allocator makes; use TransferdTier"
            raise ConfigError(name, what, value=True)
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(vllm_config.parallel_config, name, 1) > 1:
            what = "must be 1 with TransferdConnector; use TransferdTier"
            raise ConfigError(name, what, getattr(vllm_config.parallel_config, name))


def loads_by_layer(chosen: AdapterSettings, vllm_config: Any, model: KvGroups, *, beside: bool = False) -> bool:
    """Whether layers wait for their loads. Logs the obstacles if `by_layer` is set but not possible.

    beside: other connectors are beside this one.
    """
    parallel, scheduling = vllm_config.parallel_config, vllm_config.scheduler_config
    obstacles = {
        "the KV memory is not on a CPU": vllm_config.device_config.device_type != "cpu",
        "other connectors are beside it": beside,
        "there are several workers": parallel.world_size > 1,
        "steps are scheduled ahead": bool(scheduling.async_scheduling),
        "a speculative model runs beside it": vllm_config.speculative_config is not None,
        "the model has windows or several kinds of layers": not model.whole,
    }
    why = [what for what, there in obstacles.items() if there]
    if chosen.by_layer and why:
        log.warning("transferd: by_layer is not in use: %s", ", ".join(why))
    return chosen.by_layer and not why


def surrounding(vllm_config: Any) -> Any:
    """The KVTransferConfig of the MultiConnector that is creating a connector with this configuration, or None.

    vLLM obeys the failure policy of the MultiConnector, and leaves it out of the configuration of each connector in it.
    The whole configuration is an argument of the calls that are creating the connector, as for a tier (docs/adr/0070).
    """
    ours = vllm_config.kv_transfer_config
    for variables in calls():
        found = getattr(variables.get("vllm_config"), "kv_transfer_config", None)
        if found is not None and found is not ours and "connectors" in (found.kv_connector_extra_config or {}):
            return found
    return None


def calls() -> Iterator[Mapping[str, Any]]:
    """The variables of each call that is under way in this thread, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def warn_of_unstable_hashes(cache_config: Any) -> None:
    """Log one warning if block hashes, which are the keys, differ from start to start.

    vLLM seeds hashes that are not cryptographic at random, unless PYTHONHASHSEED is set.
    """
    algorithm = str(getattr(cache_config, "prefix_caching_hash_algo", ""))
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        what = "transferd: no block stored with --prefix-caching-hash-algo %s is found after a restart or by another "
        log.warning(what + "engine; use sha256, or set PYTHONHASHSEED to the same value in all of them", algorithm)
