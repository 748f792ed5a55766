"""transferd moves an LLM engine's KV cache between device memory, pinned host memory and storage.

    from transferd import Client, WriteStorageTask

The names below are the public interface; each is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transferd.client.client import Client
    from transferd.client.sync_client import SyncClient
    from transferd.errors import HandoverFailed, TransferError
    from transferd.tasks import (
        RankResult,
        ReadStorageTask,
        Status,
        SwapInTask,
        SwapOutTask,
        TaskResult,
        WriteStorageTask,
    )

__all__ = [
    "Client",
    "HandoverFailed",
    "RankResult",
    "ReadStorageTask",
    "Status",
    "SwapInTask",
    "SwapOutTask",
    "SyncClient",
    "TaskResult",
    "TransferError",
    "WriteStorageTask",
]

_HOMES = {
    "Client": "transferd.client.client",
    "SyncClient": "transferd.client.sync_client",
    "HandoverFailed": "transferd.errors",
    "TransferError": "transferd.errors",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'transferd' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "transferd.tasks")), name)
