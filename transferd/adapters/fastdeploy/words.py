"""FastDeploy's settings where the daemon's own defaults would mean something else.

FastDeploy has one client of its storage for each rank; a daemon has one for a node. So a daemon that an engine starts
gets these settings, and one line says which storage they lead to. docs/fastdeploy_details.md has all words.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transferd.config import Config
from transferd.config.environment import fold

SDK = "attentionstore_sdk"
DRIVER_VARIABLE = "TRANSFERD_STORAGE__ATTENTION_STORE__DRIVER"
RDMA_DEVICES = Path("/sys/class/infiniband")


def storage_settings(backend: str, environment: Mapping[str, str], devices: Path = RDMA_DEVICES) -> dict[str, Any]:
    """Sections below [storage] for `--kvcache-storage-backend` BACKEND; TRANSFERD_… variables override them.

    devices: the directory that lists this machine's RDMA devices.
    """
    if backend == "attention_store":
        return {backend: {"driver": "sdk" if has_sdk() else "open"}}
    if backend != "mooncake":
        return {}
    settings: dict[str, Any] = {"segment_per_rank": True}
    said: dict[str, Any] = {"storage": {"backend": backend}}
    fold(said, environment)
    pool = said["storage"].get(backend, {})
    if devices.is_dir() and any(devices.iterdir()):
        if "protocol" not in pool:
            settings["protocol"] = "rdma"  # FastDeploy's default; without a device Mooncake could use tcp only
        if pool.get("protocol", "rdma") == "rdma" and not pool.get("rdma_devices") and (nics := gpu_nics()):
            settings["rdma_devices"] = nics
    return {backend: settings}


def gpu_nics() -> str:
    """The RDMA devices next to GPUs, in the order in which FastDeploy gives them to ranks; "" if it finds none."""
    try:
        from fastdeploy.cache_manager.transfer_factory.utils import get_rdma_nics

        return str(get_rdma_nics())
    except (ImportError, RuntimeError, ValueError):  # ValueError: its script prints nothing
        return ""


def has_sdk() -> bool:
    """Whether AttentionStore's own SDK is installed where the engine runs."""
    return importlib.util.find_spec(SDK) is not None


def storage_in_words(config: Config) -> str:
    """What the group's storage is, for one line at the start; "" without storage."""
    storage = config.storage
    if storage.backend == "attention_store" and storage.attention_store.driver == "sdk":
        return f"AttentionStore's service, through {SDK}"
    if storage.backend == "attention_store":
        where = f"bytes in {storage.attention_store.data}"
        why = f"{DRIVER_VARIABLE}=open" if has_sdk() else f"{SDK} is not installed, so AttentionStore hears nothing"
        return f"an index of transferd's own, {where} ({why})"
    if storage.backend == "mooncake":
        pool = storage.mooncake
        lends = f"{pool.global_segment_size} for each rank" if pool.segment_per_rank else f"{pool.global_segment_size}"
        here = pool.local_hostname or "the address by which this host reaches it"
        return f"the Mooncake pool of {pool.master_server_addr}, over {pool.protocol}, as {here}, lending {lends}"
    return "" if storage.backend == "none" else storage.title
