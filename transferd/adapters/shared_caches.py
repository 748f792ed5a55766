"""A rank's cache in shared memory that the engine creates, computes in, and offers to the daemon.

with SharedCaches(cache) as mine:                       # the same table as the daemon's [cache]
    mine.caches["key"][0][3] = …                         # {plane: [one array per layer]}
    await client.offer(rank, mine.handle, caches=mine.caches)
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from transferd.blocks.layout import build_layout
from transferd.config import from_tree
from transferd.tiers.base import DeviceHandle
from transferd.tiers.segment import PREFIX, SharedSegment, attach_arrays
from transferd.tiers.shm import created_handle

_numbers = itertools.count()


class SharedCaches:
    """Zeroed arrays for one rank in a segment of POSIX shared memory. Owns the segment until `close`.

    cache: the daemon's [cache] section as plain data. handle: pass it to `Client.offer`. caches: numpy arrays. After
    `close` they stay readable while a reference to them exists, but other processes can no longer see them.
    Raises ConfigError for an invalid `cache`, TierError when /dev/shm has no room.
    """

    def __init__(self, cache: Mapping[str, Any]) -> None:
        layout = build_layout(from_tree({"cache": dict(cache)}).geometry)
        name = f"{PREFIX}engine.{os.getpid()}.{next(_numbers)}"
        self._segment = SharedSegment(name, layout.device.extent, create=True)
        self.handle: DeviceHandle = created_handle(layout, self._segment)
        self.caches = attach_arrays(self.handle.data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory once no process has it mapped. Idempotent."""
        self._segment.close()
