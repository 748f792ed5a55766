"""Storage backends that note the sha256 of pages. SGLang imports this file itself, by the name in its JSON.

WitnessHiCache     the adapter; notes each page that it has stored, and each that it has loaded
NoStorage          stores nothing and finds nothing; notes each page that SGLang has computed
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from tests.machine.with_sglang.serving import COMPUTED, KILL, LOADED, NOTES, STORED
from transferd.adapters.sglang import TransferdHiCache


def _digests(pool: Any, indices: Any) -> list[str]:
    """Of each page at these indices, read in SGLang's own way."""
    import torch

    firsts = indices.reshape(-1)[:: pool.page_size].tolist()
    pages = [pool.get_data_page(first, flat=True).contiguous().view(torch.uint8).numpy() for first in firsts]
    return [hashlib.sha256(page).hexdigest() for page in pages]


def _spoil(pool: Any, indices: Any) -> None:
    """Overwrite pages of a pool: slots that were freed may still have the right bytes."""
    for address, size in zip(*pool.get_page_buffer_meta(indices), strict=True):
        ctypes.memset(address, 0x40, size)


def _note(what: str, keys: Sequence[str], digests: Sequence[str], moved: Sequence[bool]) -> None:
    with Path(os.environ[NOTES], f"{os.getpid()}.jsonl").open("a", encoding="ascii") as file:
        for key, digest, is_moved in zip(keys, digests, moved, strict=True):
            if is_moved:
                file.write(json.dumps([what, key, digest]) + "\n")


def _kill(what: str, rank: Any) -> None:
    """Kill the daemon under the batch that begins now, if the test has ordered that: [what, pid, seconds from now].

    seconds: null = a suspended daemon is killed, and nothing is read without it, so the batch has surely not been
    moved.
    """
    order = Path(os.environ[NOTES], KILL)
    if not order.exists():
        return
    wanted, pid, seconds = json.loads(order.read_text(encoding="ascii"))
    if wanted == what:
        if seconds is None:
            for pool in rank.pools.values():
                pool._leased.forget()
            os.kill(pid, signal.SIGSTOP)
        order.unlink()
        threading.Timer(0.2 if seconds is None else seconds, os.kill, (pid, signal.SIGKILL)).start()


class WitnessHiCache(TransferdHiCache):
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        before = _digests(self.mem_pool_host, host_indices)
        _kill(STORED, self._rank)
        stored = super().batch_set_v1(keys, host_indices, extra_info)
        _note(STORED, keys, before, stored)
        return stored

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        _spoil(self.mem_pool_host, host_indices)
        _kill(LOADED, self._rank)
        loaded = super().batch_get_v1(keys, host_indices, extra_info)
        _note(LOADED, keys, _digests(self.mem_pool_host, host_indices), loaded)
        return loaded


class NoStorage(HiCacheStorage):  # type: ignore[misc] # SGLang is not installed where mypy runs
    def __init__(self, storage_config: Any, _: Any = None) -> None:
        del storage_config

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        del keys, extra_info
        return 0

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        del extra_info
        _note(COMPUTED, keys, _digests(self.mem_pool_host, host_indices), [True] * len(keys))
        return [True] * len(keys)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        del host_indices, extra_info
        return [False] * len(keys)

    # SGLang calls these only without "interface_v1": 1.

    def exists(self, key: str) -> bool:
        raise NotImplementedError(key)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        raise NotImplementedError(key, target_location, target_sizes)

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        raise NotImplementedError(keys, target_locations, target_sizes)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError(key, value, target_location, target_sizes)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError(keys, values, target_locations, target_sizes)
