"""What two SGLang servers must have in common to read each other's pages.

In doubt, servers count as different: a needless difference costs misses, a missed one wrong text. Keys are SGLang's
page hashes, which cover tokens, the request's salt, and SGLang's identity of a LoRA adapter: of one that the server
starts with it is made from name and path, of one that is loaded later it is new. tests/machine/with_sglang reads that
in the pinned version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transferd.adapters.common import fingerprint
from transferd.adapters.common.fingerprint import Facts, configuration, configured, short
from transferd.adapters.sglang import arguments
from transferd.adapters.sglang.arguments import Arguments
from transferd.adapters.sglang.pools import PageGrid, kind
from transferd.adapters.sglang.settings import SGLANG, PoolSettings

MAMBA = "mamba"
REMOTE = ("remote", "remote_instance", "private")  # load formats
MOST_WORDS = 300  # characters
WHOLE_POOLS = ("MLA", "DSA", "DeepSeekV4")  # begin the names of pools whose pages are equal on every rank


def facts(
    config: Any, name: str, pool: Any, pages: PageGrid, chosen: PoolSettings, said: Arguments | None, life: str
) -> Facts:
    """The facts about a page of one host pool of one rank. Logs what cannot be seen.

    config: SGLang's HiCacheStorageConfig.
    said: its arguments, None if they are out of reach.
    """
    shape = [pages.tokens, list(pages.sizes), getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)]
    of_rank = f"rank {config.tp_rank} of {config.tp_size}"
    return {
        "engine": f"sglang {_version()}",
        "pool": f"{name}, {kind(pool)}, {getattr(pool, 'layout', '')}",
        "pool's format": str(getattr(pool, "storage_format_tag", None) or ""),
        "KV dtype": str(getattr(pool, "dtype", "")),
        "tokens a page": pages.tokens,
        "pieces of a page": f"{len(pages.sizes)}, {short(shape)}",
        "bytes a page": sum(pages.sizes),
        "tensor parallel": f"every rank of {config.tp_size}" if on_every_rank(config, name, pool) else of_rank,
        "pipeline parallel": f"{config.pp_rank} of {config.pp_size}",
        "context parallel": f"{config.attn_cp_rank} of {config.attn_cp_size}",
        **_of_model(chosen, said, life),
    }


def on_every_rank(config: Any, name: str, pool: Any) -> bool:
    """Whether all ranks of a tensor-parallel group hold the same bytes in this pool; then only one rank stores.

    That is MLA's cache. State of Mamba layers and a draft model's heads are divided among ranks beside it.
    """
    if (said := getattr(pool, "rank_replicated", None)) is not None:
        return bool(said)
    whole = all(one.startswith(WHOLE_POOLS) for one in kind(pool).split(" + "))
    return bool(config.is_mla_model) and name != MAMBA and whole


def _of_model(chosen: PoolSettings, said: Arguments | None, life: str) -> Facts:
    if said is None:
        if not chosen.weights:
            what = "transferd: SGLang's arguments are out of reach, so no other start gets these pages: set "
            SGLANG.log.warning('%s"weights" in --%s', what, chosen.section)
        return {"weights": f"{chosen.weights} (asserted)" if chosen.weights else f"not seen by this start, {life}"}
    place = fingerprint.located(said["model_path"], said.get("revision"), said.get("download_dir"))
    whole = {} if place is None else configured(place if place.is_dir() else Path())
    found = {
        **arguments.facts(said),
        "weights": _weights(said, said["model_path"], "revision", chosen, life),
        **configuration(whole, whole.get("text_config") or whole, said.get("context_length") or 0),
    }
    if draft := said.get("speculative_draft_model_path"):
        found["draft weights"] = _weights(said, draft, "speculative_draft_model_revision", chosen, life)
    if loras := said.get("lora_paths"):
        found["LoRA adapters"] = _adapters(loras, chosen, life)
    return found


def _adapters(loras: Sequence[Mapping[str, Any]], chosen: PoolSettings, life: str) -> str:
    """The adapters that the server starts with: a page's key has their names and paths, and not what these contain.

    A page's key does not show either whether it is an adapter's. So servers share pages only if all of their adapters
    agree. An adapter that is loaded later has an identity that no other load has.
    """
    seen = fingerprint.Adapters(life, fingerprint.process_started(), chosen.loras, _warn)
    contents = {f"{one['lora_name']}={one['lora_path']}": seen.salt(one["lora_path"]) for one in loras}
    return f"{len(contents)}, {short(contents)}: {', '.join(sorted(contents))[:MOST_WORDS]}"


def _warn(what: str) -> None:
    SGLANG.log.warning("transferd: %s", what)


def _weights(said: Arguments, path: str, revision: str, chosen: PoolSettings, life: str) -> str:
    set_weights = f'set "weights" in --{chosen.section}, and change it with the weights'
    if said.get("load_format") == "dummy" and not chosen.weights:
        return f"made up from the seed {said.get('random_seed')}"
    if not chosen.weights and _from_elsewhere(said):
        _warn(f"the weights of {path} do not come from its files, so no other start gets these pages: {set_weights}")
        return f"not from files, {life}"
    found = fingerprint.look(path, revision=said.get(revision), cache=said.get("download_dir"), asserted=chosen.weights)
    if not found.digest and not chosen.weights:
        _warn(f"the weights of {path} are not seen, so servers with other weights would share pages: {set_weights}")
    return fingerprint.weights_fact(found, chosen.weights, life, fingerprint.process_started())


def _from_elsewhere(said: Arguments) -> bool:
    """Whether SGLang has its weights from another process, which may have read other files."""
    cached = said.get("weight_cache_mode") not in (None, "off")
    waits = bool(said.get("checkpoint_engine_wait_weights_before_ready"))
    return cached or waits or said.get("load_format") in REMOTE


def _version() -> str:
    """SGLang's major and minor version: attention may arrange keys and values differently in each release."""
    import importlib.metadata

    try:
        return ".".join(importlib.metadata.version("sglang").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
