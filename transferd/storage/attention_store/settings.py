"""[storage.attention_store] with its defaults filled in: some names follow from other settings."""

from __future__ import annotations

from dataclasses import dataclass

from transferd.config import StorageSection
from transferd.config.rules import namespace_of, pod_name_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The section with every default filled in.

    namespace, pod_name, model_version: the store separates blocks by these. total_timeout: None = the task's own.
    only_flush: write tasks move no bytes and only update the index.
    """

    namespace: str
    pod_name: str
    model_version: str
    slice_blocks: int
    slice_timeout: float
    total_timeout: float | None
    only_flush: bool


def settings(storage: StorageSection) -> Settings:
    """The settings of [storage.attention_store], which already includes the environment (config/environment.py)."""
    section = storage.attention_store
    return Settings(
        namespace=section.namespace or namespace_of(storage.model),
        pod_name=section.pod_name or pod_name_of(None, section.splitwise_role, section.dp_id),
        model_version=section.model_version,
        slice_blocks=section.slice_blocks,
        slice_timeout=section.slice_timeout,
        total_timeout=section.total_timeout,
        only_flush=section.only_flush,
    )
