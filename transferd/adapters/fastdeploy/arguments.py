"""Derives the daemon's configuration from the command with which FastDeploy starts a cache transfer process.

The PrefixCacheManager starts one process for each rank with a shell command:

    NAME=value … python …/cache_transfer_manager.py --rank 0 --mp_num 2 --key_cache_shape 64,2,16,8 … >log 2>&1

That command is the interface: in every version that we know, it describes the cache completely. So we derive the
daemon's configuration from it, and read no part of FastDeploy's own configuration.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transferd.errors import ConfigError

SCRIPT = "cache_transfer_manager.py"
MTP_RATIO = "num_gpu_block_expand_ratio"
REDIRECTION = ">"
# Every flag of cache_transfer_manager.py in release/2.5, release/2.6 and develop.
KNOWN_FLAGS = frozenset((
    "splitwise_role", "rank", "device_id", "max_model_len", "num_layers", "mp_num", "cache_dtype", "default_dtype",
    "key_cache_shape", "value_cache_shape", "cache_queue_port", "enable_splitwise", "pod_ip",
    "engine_worker_queue_port", "num_cpu_blocks", "ipc_suffix", "protocol", "local_data_parallel_id", "rdma_port",
    "speculative_config", "create_cache_tensor", "kvcache_storage_backend", "write_policy", "model_path",
    "routing_replay_config",
))  # fmt: skip
Command = str | Sequence[str]  # as a shell reads it, or one word each


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """Of the routing of one block (routing.py): tokens, layers with experts, experts per token, type of a number."""

    tokens: int
    layers: int
    experts: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.tokens * self.layers * self.experts * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class TransferArguments:
    """One rank's transfer process, as FastDeploy would have started it. Sizes are in blocks, tokens and elements."""

    rank: int
    ranks: int
    device: int
    cache_queue_port: int
    engine_worker_queue_port: int
    data_parallel_id: int
    role: str
    creates: bool
    layers: int
    mtp_layers: int
    mtp_blocks: int
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    dtype: str
    default_dtype: str
    host_blocks: int
    backend: str
    model_path: str
    only_flush: bool
    frees_host: bool  # whether a sleep also frees host memory
    routing: RoutingShape | None  # None: nothing is replayed
    hands_over_by_storage: bool
    longest: int  # sequence, in tokens
    speculative: dict[str, Any]
    visible_devices: dict[str, str]  # such as CUDA_VISIBLE_DEVICES: `device` counts among these

    @property
    def version_file(self) -> Path:
        """The file in which FastDeploy's training loop names the served weights; it often does not exist."""
        return Path(self.model_path) / "version.yaml"


def is_transfer_process(command: Any) -> bool:
    """Whether this command, as FastDeploy passes it to Popen, would start a cache transfer process."""
    return any(word.rstrip("'\"").endswith(SCRIPT) for word in _words(command))


def read_command(command: Command) -> TransferArguments:
    """Parse a command that starts a transfer process. Raises ConfigError that names the wrong flag."""
    environment, flags = _split(command)
    speculative = _json(flags, "speculative_config")
    key_shape = _shape(flags, "key_cache_shape")
    return TransferArguments(
        rank=_number(flags, "rank", 0),
        ranks=_number(flags, "mp_num", 1),
        device=_number(flags, "device_id", 0),
        cache_queue_port=_number(flags, "cache_queue_port", 9923),
        engine_worker_queue_port=_number(flags, "engine_worker_queue_port", 9923),
        data_parallel_id=_number(flags, "local_data_parallel_id", 0),
        role=flags.get("splitwise_role", "mixed"),
        creates="create_cache_tensor" in flags,
        layers=_number(flags, "num_layers", 1),
        mtp_layers=int(_given(speculative, "num_extra_cache_layer", 1 if speculative.get("method") == "mtp" else 0)),
        mtp_blocks=int(key_shape[0] * float(_given(speculative, MTP_RATIO, 1.0))),
        key_shape=key_shape,
        value_shape=_shape(flags, "value_cache_shape") if flags.get("value_cache_shape") else (),
        dtype=flags.get("cache_dtype", "bfloat16"),
        default_dtype=flags.get("default_dtype", "bfloat16"),
        host_blocks=_number(flags, "num_cpu_blocks", 4),
        backend=flags.get("kvcache_storage_backend", "none"),
        model_path=flags.get("model_path", ""),
        only_flush=_is_on(environment.get("FD_AS_ONLY_FLUSH", "0")),
        frees_host=_is_on(environment.get("FD_ENABLE_SWAP_SPACE_CLEARING", "0")),
        routing=_routing_shape(_json(flags, "routing_replay_config"), key_shape[2]),
        longest=_number(flags, "max_model_len", 0),
        speculative=speculative,
        visible_devices={name: value for name, value in environment.items() if name.endswith("_VISIBLE_DEVICES")},
        hands_over_by_storage=_is_on(os.environ.get("FD_PD_TRANSFER_VIA_STORAGE", "0")),
    )


def configuration(group: Sequence[TransferArguments], *, device: str) -> dict[str, Any]:
    """The daemon's configuration for one tensor-parallel group, as plain sections.

    group: one for each rank, in order.
    device: the value of `cache.device` on this machine.
    The caller or the defaults set what FastDeploy's arguments do not say: the endpoint, directories, staging.
    Raises ConfigError for a cache that transferd cannot serve.
    """
    first = group[0]
    _check_served(first)
    cache: dict[str, Any] = {
        "ranks": first.ranks,
        "devices": [rank.device for rank in group],
        "device": device,
        "ownership": "create" if first.creates else "attach",
        "role": first.role,
        "layers": first.layers,
        "dtype": first.dtype,
        "device_blocks": first.key_shape[0],
        "host_blocks": first.host_blocks,
        "mtp_layers": first.mtp_layers,
        **_block(first),
    }
    if first.dtype == "block_wise_fp8":
        cache["scale_dtype"] = first.default_dtype
    if first.mtp_layers:
        cache["mtp_blocks"] = first.mtp_blocks
    storage: dict[str, Any] = {"backend": first.backend, "model": Path(first.model_path).name or "model"}
    if first.version_file.is_file():
        storage["version_file"] = str(first.version_file)
    if first.backend == "attention_store":
        storage["attention_store"] = {
            "only_flush": first.only_flush,
            "splitwise_role": first.role,
            "dp_id": first.data_parallel_id,
        }
    return {"cache": cache, "storage": storage}


def _check_served(arguments: TransferArguments) -> None:
    """Refuse a cache that transferd cannot serve now, not at the first request. Raises ConfigError."""
    if arguments.routing is not None and arguments.backend == "attention_store" and not arguments.only_flush:
        what = "AttentionStore has no place for the routing of its blocks: use file or mooncake, or turn replay off"
        raise ConfigError("routing_replay_config", what, "enable_routing_replay")
    if arguments.dtype == "block_wise_fp8" and not arguments.value_shape:
        what = "transferd does not move the scales of latent blocks (MLA): use another type for the KV cache"
        raise ConfigError("--cache_dtype", what, arguments.dtype)
    if arguments.backend == "attention_store" and arguments.hands_over_by_storage:
        what = "the last block of a prompt is incomplete, and AttentionStore holds whole blocks: use mooncake"
        raise ConfigError("FD_PD_TRANSFER_VIA_STORAGE", what, "1")


def _block(arguments: TransferArguments) -> dict[str, Any]:
    """The settings that describe a block. FastDeploy gives two shapes: [blocks, heads, block_size, dim]."""
    _, heads, tokens, dim = arguments.key_shape
    if not arguments.value_shape:
        return {
            "attention": "mla",
            "kv_heads": heads,
            "block_size": tokens,
            **_latent(dim),
        }
    if arguments.value_shape != arguments.key_shape:
        layers = f"in layers 0 to {arguments.layers - 1}, as the command says of all,"
        what = f"{layers} differs from the keys' {list(arguments.key_shape)}; transferd moves both of one shape"
        raise ConfigError("value_cache_shape", what, list(arguments.value_shape))
    return {"attention": "gqa", "kv_heads": heads, "block_size": tokens, "head_dim": dim}


def _latent(dim: int) -> dict[str, int]:
    """MLA's dimensions. FastDeploy gives only the sum of latent and rope, and only the sum matters."""
    rope = 64 if dim > 64 else 1
    return {"kv_lora_rank": dim - rope, "qk_rope_head_dim": rope}


def unknown_flags(command: Command) -> list[str]:
    """The flags of a command that no version of FastDeploy had that this module was written for."""
    return sorted(_split(command)[1].keys() - KNOWN_FLAGS)


def _words(command: Any) -> list[str]:
    if isinstance(command, str):
        return command.split()
    return [str(word) for word in command] if isinstance(command, list | tuple) else []


def _split(command: Command) -> tuple[dict[str, str], dict[str, str]]:
    """The variables set before the command, and its flags; a flag without a value maps to ''."""
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    script = next((i for i, word in enumerate(words) if word.endswith(SCRIPT)), None)
    if script is None:
        raise ConfigError("command", f"does not start {SCRIPT}", str(command)[:200])
    environment = dict(word.split("=", 1) for word in words[:script] if "=" in word)
    flags: dict[str, str] = {}
    name = ""
    for word in words[script + 1 :]:
        if word.startswith(REDIRECTION):
            break
        if word.startswith("--"):
            name = word.removeprefix("--")
            flags[name] = ""
        else:
            flags[name] = word
    return environment, flags


def _number(flags: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(flags.get(name, default))
    except ValueError:
        raise ConfigError(f"--{name}", "is not a number", flags[name]) from None


def _shape(flags: Mapping[str, str], name: str) -> tuple[int, ...]:
    text = flags.get(name, "")
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) != 4 or min(sizes) < 1:
        raise ConfigError(f"--{name}", "must be blocks,heads,block_size,dim", text)
    return sizes


def _json(flags: Mapping[str, str], name: str) -> dict[str, Any]:
    text = flags.get(name) or "{}"
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"--{name}", "is not a JSON object", text[:200])
    return value


def _routing_shape(routing: Mapping[str, Any], tokens: int) -> RoutingShape | None:
    """Of a --routing_replay_config; None if nothing is replayed. Raises ConfigError."""
    if not routing.get("enable_routing_replay", False):
        return None
    try:
        shape = RoutingShape(
            tokens, int(routing["num_moe_layers"]), int(routing["moe_top_k"]), str(np.dtype(routing["routing_dtype"]))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("routing_replay_config", f"has no usable layers, experts and type: {error}") from None
    return shape if shape.nbytes else None


def _given(tree: Mapping[str, Any], name: str, default: float) -> float:
    """A number of a JSON object; one that is absent or null is the default."""
    value = tree.get(name)
    return default if value is None else value


def _is_on(value: str) -> bool:
    """Whether a variable is on. FastDeploy takes any number but 0, and writes some as True in its commands."""
    word = value.strip().lower()
    return word == "true" or (word.lstrip("+-").isdecimal() and int(word) != 0)
