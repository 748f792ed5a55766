"""[storage.attention_store] and FastDeploy's variables: the key counts first, then the variable, then the default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from transferd.config import Config
from transferd.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the section, the environment and the defaults come to.

    namespace, pod_name, model_version: what the store keeps apart. total_timeout: None = the task's own.
    only_flush: write tasks move no bytes and tell the index.
    """

    namespace: str
    pod_name: str
    model_version: str
    slice_blocks: int
    slice_timeout: float
    total_timeout: float | None
    only_flush: bool


def settings(config: Config, env: Mapping[str, str] | None = None) -> Settings:
    """Raises ConfigError naming the variable that is wrong."""
    env = os.environ if env is None else env
    section = config.storage.attention_store
    pod_name = _first(section.pod_name, env, "AS_POD_NAME", str, "default_pod")
    if section.pod_name is None and _first(None, env, "ENABLE_EP_DP_IN_FD", _flag, default=True):
        # As FastDeploy does it: several engines of one pod keep their names apart.
        pod_name = f"{pod_name}_{section.splitwise_role}_{section.dp_id}"
    model = os.path.basename(config.storage.model.rstrip("/")) or config.storage.model
    return Settings(
        namespace=_first(section.namespace, env, "AS_NAMESPACE", str, model),
        pod_name=pod_name,
        model_version=_first(section.model_version, env, "AS_MODEL_VERSION", str, "v0"),
        slice_blocks=_first(section.slice_blocks, env, "AS_WRITE_SLICE_BLOCK_NUM", _count, 100),
        slice_timeout=_first(section.slice_timeout, env, "AS_WRITE_SLICE_TIMEOUT", _seconds, 10.0),
        total_timeout=_first(section.total_timeout, env, "AS_WRITE_TOTAL_TIMEOUT", _seconds, None),
        only_flush=_first(section.only_flush, env, "FD_AS_ONLY_FLUSH", _flag, default=False),
    )


def _first(given: T | None, env: Mapping[str, str], variable: str, parse: Callable[[str], T], default: T) -> T:
    if given is not None:
        return given
    text = env.get(variable, "")
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(variable, str(error), text) from None


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError("expected a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError("expected a number of seconds above 0")
    return seconds
