"""transferd moves an LLM engine's KV cache between device memory, pinned host memory and storage.

    from transferd import Client, WriteStorageTask

The names below are the public interface; each is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transferd.client.client import Client as Client
    from transferd.client.engines import Engine as Engine
    from transferd.client.group import GroupClient as GroupClient
    from transferd.client.pages import Pages as Pages
    from transferd.client.sync_client import SyncClient as SyncClient
    from transferd.errors import Closed as Closed
    from transferd.errors import ConfigError as ConfigError
    from transferd.errors import ConnectRefused as ConnectRefused
    from transferd.errors import ConnectTimeout as ConnectTimeout
    from transferd.errors import DaemonLost as DaemonLost
    from transferd.errors import HandoverFailed as HandoverFailed
    from transferd.errors import RequestError as RequestError
    from transferd.errors import TierError as TierError
    from transferd.errors import TransferError as TransferError
    from transferd.tasks import RankResult as RankResult
    from transferd.tasks import ReadStorageTask as ReadStorageTask
    from transferd.tasks import Status as Status
    from transferd.tasks import SwapInTask as SwapInTask
    from transferd.tasks import SwapOutTask as SwapOutTask
    from transferd.tasks import TaskResult as TaskResult
    from transferd.tasks import WriteStorageTask as WriteStorageTask
    from transferd.tiers.page_handles import cuda_pages as cuda_pages
    from transferd.tiers.page_handles import shm_pages as shm_pages

# Where each name is, for the first use; above they are for type checkers.
_HOMES = {
    "transferd.client.client": ("Client",),
    "transferd.client.engines": ("Engine",),
    "transferd.client.group": ("GroupClient",),
    "transferd.client.pages": ("Pages",),
    "transferd.client.sync_client": ("SyncClient",),
    "transferd.errors": (
        *("Closed", "ConfigError", "ConnectRefused", "ConnectTimeout", "DaemonLost", "HandoverFailed"),
        *("RequestError", "TierError", "TransferError"),
    ),
    "transferd.tasks": (
        *("RankResult", "ReadStorageTask", "Status", "SwapInTask", "SwapOutTask", "TaskResult", "WriteStorageTask"),
    ),
    "transferd.tiers.page_handles": ("cuda_pages", "shm_pages"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("transferd.runtime.version").VERSION
    if name not in _HOME_OF:
        raise AttributeError(f"module 'transferd' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
