"""[storage.attention_store] with its defaults filled in: some names follow from other settings."""

from __future__ import annotations

import msgspec

from transferd.config import StorageSection
from transferd.config.rules import namespace_of, pod_name_of
from transferd.config.sections import AttentionStoreSection


def settings(storage: StorageSection) -> AttentionStoreSection:
    """The section, which already includes the environment (config/environment.py), with namespace and pod_name."""
    section = storage.attention_store
    return msgspec.structs.replace(
        section,
        namespace=section.namespace or namespace_of(storage.model),
        pod_name=section.pod_name or pod_name_of(None, section.splitwise_role, section.dp_id),
    )
