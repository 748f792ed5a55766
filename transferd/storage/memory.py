"""Storage in this process's own memory: for tests, and for engines that only want a second host tier.

Objects are copied in and out; the least recently used ones go when the capacity is reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transferd.clock import SYSTEM_CLOCK, Clock
from transferd.config import Config
from transferd.errors import StorageFull
from transferd.storage.base import EXISTS, FOUND, MISSING, STORED, Blob, Found, Outcome, Storage
from transferd.storage.lru import LruIndex

T = TypeVar("T")
INLINE_BYTES = 256 * 1024  # smaller copies cost less on the loop than the way to a thread


class MemoryStorage(Storage):
    """A dict of bytes with an LRU bound (`storage.memory.capacity`)."""

    backend = "memory"

    def __init__(self, config: Config, *, clock: Clock = SYSTEM_CLOCK) -> None:  # noqa: ARG002 - the registry's form
        self._index = LruIndex(config.storage.memory.capacity)
        self._objects: dict[str, bytes] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._hits = self._misses = self._quarantined = 0

    async def open(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="transferd-memory")

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return [name in self._objects for name in names]

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        new = [blob for blob in blobs if not self._index.touch(blob.name)]
        copies = await self._run(sum(b.data.nbytes for b in new), lambda: [bytes(b.data) for b in new])
        outcomes = {blob.name: self._keep(blob.name, data) for blob, data in zip(new, copies, strict=True)}
        return [outcomes.get(blob.name, EXISTS) for blob in blobs]

    def _keep(self, name: str, data: bytes) -> Outcome:
        if len(data) > self._index.capacity:
            what = f"an object of {len(data)} bytes is larger than storage.memory.capacity, {self._index.capacity}"
            return Outcome(Found.FAILED, StorageFull(what))
        self._objects[name] = data
        for evicted in self._index.add(name, len(data)):
            del self._objects[evicted]
        return STORED

    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        found = [self._look_up(blob) for blob in blobs]

        def copy() -> None:
            for blob, data in zip(blobs, found, strict=True):
                if data is not None:
                    blob.data[:] = data

        await self._run(sum(len(data) for data in found if data is not None), copy)
        return [MISSING if data is None else FOUND for data in found]

    def _look_up(self, blob: Blob) -> bytes | None:
        data = self._objects.get(blob.name)
        if data is None or len(data) != blob.data.nbytes:
            self._misses += 1
            return None
        self._hits += 1
        self._index.touch(blob.name)
        return data

    async def _run(self, nbytes: int, work: Callable[[], T]) -> T:
        if nbytes <= INLINE_BYTES or self._threads is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def quarantine(self, name: str) -> None:
        self._quarantined += 1
        self._objects.pop(name, None)
        self._index.discard(name)

    async def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True)
        self._objects.clear()

    def statistics(self) -> dict[str, Any]:
        return {
            "objects": len(self._index),
            "bytes": self._index.bytes,
            "capacity": self._index.capacity,
            "hits": self._hits,
            "misses": self._misses,
            "errors": 0,
            "quarantined": self._quarantined,
        }
