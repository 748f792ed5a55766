"""What two engines must have in common to read each other's blocks: facts about vLLM, its configuration, its weights.

To the daemon, a block is opaque bytes. The facts contain everything that changes the meaning of those bytes, after all
overrides. Different by doubt: a difference costs a miss, sameness costs wrong text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from transferd.adapters.common import fingerprint
from transferd.adapters.common.fingerprint import Facts, configuration, plain, short
from transferd.adapters.vllm.groups import CHUNKS, STATES, WINDOWS
from transferd.adapters.vllm.settings import AdapterSettings, calls

log = logging.getLogger("vllm.transferd")  # vLLM shows only its own loggers

REMEDY = 'set "weights" in the adapter\'s settings, and change it with the weights'
MODEL = (  # of vLLM's ModelConfig
    "quantization", "quantization_config", "model_impl", "model_class_overrides", "disable_sliding_window", "convert",
    "code_revision",
)  # fmt: skip
CACHE = (  # of vLLM's CacheConfig
    "cache_dtype", "kv_cache_dtype_skip_layers", "sliding_window", "mamba_block_size", "mamba_cache_dtype",
    "mamba_ssm_cache_dtype", "mamba_cache_mode", "kv_sharing_fast_prefill",
)  # fmt: skip
SHAPE = (  # of vLLM's ParallelConfig: how blocks are divided among ranks. Data parallelism divides requests only
    "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size",
    "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size", "enable_expert_parallel",
)  # fmt: skip
DRAFT = ("method", "model", "quantization", "kv_cache_dtype", "revision")  # of vLLM's SpeculativeConfig


def of_tier(config: Any, row_bytes: int, chosen: AdapterSettings, life: str) -> Facts:
    """The facts about a chunk of vLLM's host pool.

    config: vLLM's OffloadingConfig.
    row_bytes: bytes of one chunk.

    A row holds every worker's part of a chunk, one after another, so the number of workers is a fact in every layout,
    whatever vLLM calls independent of parallelism. Logs what cannot be seen.
    """
    parallel = config.parallel
    groups = [[group.tokens_per_block, list(group.layer_names)] for group in config.groups]
    facts = {
        **_platform(),
        "KV dtype": str(config.model.dtype),
        "layout": str(config.kv_cache_layout),
        "canonical": bool(config.canonical_layout),
        "replicated": bool(config.replicated_layout),
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "tokens a hash": config.cache.tokens_per_hash,
        "blocks a chunk": config.cache.blocks_per_chunk,
        "groups of layers": f"{len(groups)}, {short(groups)}",
        "bytes a row": row_bytes,
    }
    whole = configuration_of(config.engine_id)
    if whole is None:
        if not chosen.weights:
            what = "transferd: vLLM's configuration is out of reach, so no other engine or start gets these blocks"
            log.warning("%s: %s and with every override", what, REMEDY)
        seen = f"{chosen.weights} (asserted)" if chosen.weights else f"not seen by this start, {life}"
        return facts | {"model and weights": seen, "LoRA": chosen.loras}
    return facts | of_model(whole, chosen, life) | _loras_of_a_tier(whole, chosen, life)


def of_connector(
    vllm_config: Any,
    layers: Mapping[str, tuple[int, ...]],
    orders: Mapping[str, tuple[int, ...]],
    page_bytes: int,
    groups: Sequence[Any],
    chosen: AdapterSettings,
    life: str,
) -> Facts:
    """The facts about a block of the engine's own KV memory. Logs what cannot be seen.

    layers: each layer's shape without the block axis.
    orders: the axes in the order of a block's bytes.
    groups: vLLM's KV groups.
    """
    shapes = [[name, list(shape), list(orders[name])] for name, shape in layers.items()]
    return {
        **_platform(),
        "tokens a block": vllm_config.cache_config.block_size,
        "KV tensors": f"{len(shapes)}, {short(shapes)}",
        "bytes a block": page_bytes,
        **_grouped(groups),
        **of_model(vllm_config, chosen, life),
    }


def _grouped(groups: Sequence[Any]) -> Facts:
    """Which layers a block of each group holds; empty for a model whose layers all see all tokens, in one group."""
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) == 1 and kinds[0] not in (*WINDOWS, CHUNKS, STATES):
        return {}
    names: list[Any] = [[kind, list(group.layer_names)] for kind, group in zip(kinds, groups, strict=True)]
    sizes = [group.kv_cache_spec.block_size for group in groups]
    names += [sizes] if len(set(sizes)) > 1 else []
    states = [group.kv_cache_spec for group in groups if type(group.kv_cache_spec).__name__ == STATES]
    names += [[str(spec.shapes), str(spec.dtypes), spec.page_size_bytes] for spec in states]
    return {"KV groups": f"{', '.join(kinds)}, {short(names)}"}


def of_model(vllm_config: Any, chosen: AdapterSettings, life: str) -> Facts:
    """The facts about the model that vLLM serves: configuration after overrides, weights, draft model."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, load = vllm_config.parallel_config, getattr(vllm_config, "load_config", None)
    shape = [f"{name.removesuffix('_size').replace('_', ' ')} {getattr(parallel, name, None)}" for name in SHAPE]
    revision = getattr(model.hf_config, "_commit_hash", None) or getattr(model, "revision", None)
    facts = {
        **_configured(model),
        "dtype": str(model.dtype),
        **_said("model", model, MODEL),
        **_said("cache", cache, CACHE),
        "parallel shape": ", ".join(shape),
        "attention": _attention(vllm_config),
        "weights": _loaded(model.model, revision, load, chosen, life, getattr(model, "seed", 0)),
    }
    if getattr(cache, "calculate_kv_scales", False):
        facts["KV scales"] = f"computed by this start, {life}"  # from the first requests: never the same ones
    draft = getattr(vllm_config, "speculative_config", None)
    return facts | ({} if draft is None else _draft(draft, load, chosen, life))


def configuration_of(engine_id: str) -> Any:
    """The whole configuration of an engine, while vLLM creates its tier; None if it cannot be found.

    vLLM gives a tier only a part of it, without any override. The rest is an argument of the calls that are creating
    the tier, as vLLM creates it in the constructor of its connector (docs/adr/0070).
    """
    for variables in calls():
        found = variables.get("vllm_config")
        if getattr(getattr(found, "kv_transfer_config", None), "engine_id", None) == engine_id:
            return found
    return None


def _configured(model: Any) -> Facts:
    text = getattr(model, "hf_text_config", None) or model.hf_config
    return configuration(_as_dict(model.hf_config), _as_dict(text), model.max_model_len)


def _as_dict(hf_config: Any) -> dict[str, Any]:
    found: dict[str, Any] = plain(hf_config if isinstance(hf_config, dict) else hf_config.to_dict())
    return found


def _said(of: str, section: Any, names: tuple[str, ...]) -> Facts:
    """Those of a section's settings that are set, in one fact each."""
    values = {name: getattr(section, name, None) for name in names}
    return {
        f"{of} {name.replace('_', ' ')}": json.dumps(plain(value), sort_keys=True)
        for name, value in values.items()
        if value is not None and value is not False and value not in ("", [], {}, "auto")
    }


def _attention(vllm_config: Any) -> str:
    """The chosen attention backend, with a digest of all settings of attention."""
    attention = getattr(vllm_config, "attention_config", None)
    return f"{getattr(attention, 'backend', None)}, {short(attention)}"


def _loaded(name: str, revision: str | None, load: Any, chosen: AdapterSettings, life: str, seed: Any) -> str:
    """The weights as vLLM's loader gets them. load: its LoadConfig."""
    if getattr(load, "load_format", "") == "dummy" and not chosen.weights:
        return f"made up from the seed {seed}"
    return _weights(name, revision, getattr(load, "download_dir", None), chosen, life)


def _weights(name: str, revision: str | None, cache: str | None, chosen: AdapterSettings, life: str) -> str:
    found = fingerprint.look(name, revision=revision, cache=cache, asserted=chosen.weights)
    if not found.digest and not chosen.weights:
        what = "transferd: the weights of %s are not seen, so engines with other weights would share blocks: %s"
        log.warning(what, name, REMEDY)
        return f"{fingerprint.NOT_SEEN}, revision {revision}" if revision else fingerprint.NOT_SEEN
    return fingerprint.weights_fact(found, chosen.weights, life, fingerprint.process_started())


def _draft(draft: Any, load: Any, chosen: AdapterSettings, life: str) -> Facts:
    """The draft model; the blocks also hold the KV of its layers."""
    facts = _said("draft", draft, DRAFT)
    model = getattr(draft, "draft_model_config", None)
    if model is None or not getattr(draft, "model", None):
        return facts
    facts["draft configuration"] = short(_as_dict(model.hf_config))
    facts["draft weights"] = _loaded(draft.model, getattr(draft, "revision", None), load, chosen, life, 0)
    return facts


def _loras_of_a_tier(vllm_config: Any, chosen: AdapterSettings, life: str) -> Facts:
    """A tier sees keys, which cover an adapter's name and path, but not which adapter a request uses.

    An adapter that was trained anew keeps both. So this engine shares with no other one, unless the operator names
    the adapters' weights.
    """
    if getattr(vllm_config, "lora_config", None) is None:
        return {}
    if not chosen.loras:
        what = "transferd: a tier cannot see which LoRA adapter a request uses, so no other engine or start gets blocks"
        log.warning('%s: set "loras", and change it with the adapters, or use TransferdConnector', what)
    return {"LoRA": f"{chosen.loras} (asserted)" if chosen.loras else f"this start, {life}"}


def _platform() -> Facts:
    """vLLM's major and minor version, and the kind of device.

    Together they decide which attention backend vLLM chooses by default, and how that arranges keys and values.
    """
    import vllm
    from vllm.platforms import current_platform

    version = ".".join(str(vllm.__version__).split(".")[:2])
    device = f"{current_platform.device_type} {current_platform.get_device_capability()}"
    return {"engine": f"vllm {version}", "platform": device}
