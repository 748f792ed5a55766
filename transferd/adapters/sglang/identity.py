"""What two SGLang servers must have in common to read each other's pages.

In doubt, servers count as different: a needless difference costs misses, a missed one wrong text. Keys are SGLang's
page hashes, which cover tokens, the request's salt, and SGLang's identity of a loaded LoRA adapter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transferd.adapters.common import fingerprint
from transferd.adapters.common.fingerprint import Facts, configuration, configured, plain, short
from transferd.adapters.sglang.pools import PageGrid
from transferd.adapters.sglang.settings import SECTION, SGLANG, HiCacheSettings

ARGUMENTS = (  # of SGLang's ServerArgs: what changes the bytes of a page, after the model and the pool
    "dtype", "quantization", "quantization_param_path", "kv_cache_dtype", "json_model_override_args", "model_impl",
    "torchao_config", "attention_backend", "prefill_attention_backend", "decode_attention_backend", "device",
    "enable_dp_attention", "moe_dense_tp_size", "ep_size", "speculative_algorithm", "modelopt_quant",
)  # fmt: skip
MAMBA = "mamba"
WHOLE_POOLS = ("MLA", "DSA", "DeepSeekV4")  # begin the names of pools whose pages are equal on every rank


def facts(
    config: Any, name: str, pool: Any, pages: PageGrid, chosen: HiCacheSettings, arguments: Any, life: str
) -> Facts:
    """The facts about a page of one host pool of one rank. Logs what cannot be seen.

    config: SGLang's HiCacheStorageConfig.
    arguments: its ServerArgs, None if they are out of reach.
    """
    shape = [pages.tokens, list(pages.sizes), getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)]
    of_rank = f"rank {config.tp_rank} of {config.tp_size}"
    return {
        "engine": f"sglang {_version()}",
        "pool": f"{name}, {type(pool).__name__}, {getattr(pool, 'layout', '')}",
        "pool's format": str(getattr(pool, "storage_format_tag", None) or ""),
        "KV dtype": str(getattr(pool, "dtype", "")),
        "tokens a page": pages.tokens,
        "pieces of a page": f"{len(pages.sizes)}, {short(shape)}",
        "bytes a page": sum(pages.sizes),
        "tensor parallel": f"every rank of {config.tp_size}" if on_every_rank(config, name, pool) else of_rank,
        "pipeline parallel": f"{config.pp_rank} of {config.pp_size}",
        "context parallel": f"{config.attn_cp_rank} of {config.attn_cp_size}",
        **_of_model(config.model_name, chosen, arguments, life),
    }


def on_every_rank(config: Any, name: str, pool: Any) -> bool:
    """Whether all ranks of a tensor-parallel group hold the same bytes in this pool; then only one rank stores.

    That is MLA's cache. State of Mamba layers and a draft model's heads are divided among ranks beside it.
    """
    return bool(config.is_mla_model) and name != MAMBA and type(pool).__name__.startswith(WHOLE_POOLS)


def _of_model(model: str | None, chosen: HiCacheSettings, arguments: Any, life: str) -> Facts:
    if arguments is None:
        if not chosen.weights:
            what = "transferd: SGLang's arguments are out of reach, so no other start gets these pages: set "
            SGLANG.log.warning('%s"weights" in --%s', what, SECTION)
        return {"weights": f"{chosen.weights} (asserted)" if chosen.weights else f"not seen by this start, {life}"}
    said = {name: getattr(arguments, name, None) for name in ARGUMENTS}
    place = fingerprint.located(arguments.model_path, getattr(arguments, "revision", None))
    whole = {} if place is None else configured(place if place.is_dir() else Path())
    longest = getattr(arguments, "context_length", None) or 0
    found = {
        "arguments": json.dumps({name: plain(one) for name, one in said.items() if one not in (None, False, "")}),
        "weights": _weights(arguments, arguments.model_path, "revision", chosen, life),
        **configuration(whole, whole.get("text_config") or whole, longest),
    }
    if draft := getattr(arguments, "speculative_draft_model_path", None):
        found["draft weights"] = _weights(arguments, draft, "speculative_draft_model_revision", chosen, life)
    del model  # it is part of every object's name
    return found


def _weights(arguments: Any, path: str, revision: str, chosen: HiCacheSettings, life: str) -> str:
    if getattr(arguments, "load_format", "") == "dummy" and not chosen.weights:
        return f"made up from the seed {getattr(arguments, 'random_seed', None)}"
    found = fingerprint.look(
        path,
        revision=getattr(arguments, revision, None),
        cache=getattr(arguments, "download_dir", None),
        asserted=chosen.weights,
    )
    if not found.digest and not chosen.weights:
        what = "transferd: the weights of %s are not seen, so servers with other weights would share pages: "
        SGLANG.log.warning(f'{what}set "weights" in --%s, and change it with the weights', path, SECTION)
    return fingerprint.weights_fact(found, chosen.weights, life, fingerprint.process_started())


def _version() -> str:
    """SGLang's major and minor version: attention may arrange keys and values differently in each release."""
    import importlib.metadata

    try:
        return ".".join(importlib.metadata.version("sglang").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
