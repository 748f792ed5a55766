"""transferd moves an LLM engine's KV cache between device memory, pinned host memory and storage.

    from transferd import Client, WriteStorageTask

The names below are the public interface; each is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transferd.client.client import Client
    from transferd.client.engines import Engine
    from transferd.client.group import GroupClient
    from transferd.client.pages import Pages
    from transferd.client.sync_client import SyncClient
    from transferd.errors import (
        Closed,
        ConfigError,
        ConnectRefused,
        ConnectTimeout,
        DaemonLost,
        HandoverFailed,
        RequestError,
        TierError,
        TransferError,
    )
    from transferd.tasks import (
        RankResult,
        ReadStorageTask,
        Status,
        SwapInTask,
        SwapOutTask,
        TaskResult,
        WriteStorageTask,
    )
    from transferd.tiers.page_handles import cuda_pages, shm_pages

__all__ = [
    "Client",
    "Closed",
    "ConfigError",
    "ConnectRefused",
    "ConnectTimeout",
    "DaemonLost",
    "Engine",
    "GroupClient",
    "HandoverFailed",
    "Pages",
    "RankResult",
    "ReadStorageTask",
    "RequestError",
    "Status",
    "SwapInTask",
    "SwapOutTask",
    "SyncClient",
    "TaskResult",
    "TierError",
    "TransferError",
    "WriteStorageTask",
    "cuda_pages",
    "shm_pages",
]

# Where the names are: looked through in this order, so that an error or a task loads no client, and a client no numpy.
_HOMES = (
    *("transferd.errors", "transferd.tasks", "transferd.client.client", "transferd.client.engines"),
    *("transferd.client.pages", "transferd.client.group", "transferd.client.sync_client"),
    "transferd.tiers.page_handles",
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("transferd.runtime.version").VERSION
    if name not in __all__:
        raise AttributeError(f"module 'transferd' has no attribute {name!r}")
    homes = map(importlib.import_module, _HOMES)
    return getattr(next(home for home in homes if hasattr(home, name)), name)
