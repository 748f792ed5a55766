"""[storage.attention_store], complete: names that it leaves open follow from other settings."""

from __future__ import annotations

from dataclasses import dataclass

from transferd.config import Config
from transferd.config.rules import namespace_of, pod_name_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the section and the defaults come to.

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


def settings(config: Config) -> Settings:
    """Of [storage.attention_store]; the environment is in it already (config/environment.py)."""
    section = config.storage.attention_store
    return Settings(
        namespace=section.namespace or namespace_of(config.storage.model),
        pod_name=section.pod_name or pod_name_of(None, section.splitwise_role, section.dp_id),
        model_version=section.model_version,
        slice_blocks=section.slice_blocks,
        slice_timeout=section.slice_timeout,
        total_timeout=section.total_timeout,
        only_flush=section.only_flush,
    )
