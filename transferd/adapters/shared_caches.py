"""A rank's cache in shared memory that the engine creates, computes in, and offers to the daemon.

with SharedCaches(cache) as mine:                       # the same table as the daemon's [cache]
    mine.caches["key"][0][3] = …                         # {plane: [one array per layer]}
    await client.offer(rank, mine.handle, caches=mine.caches)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from transferd.blocks.layout import build_layout
from transferd.config import from_tree
from transferd.runtime.compat import Self
from transferd.tiers.base import DeviceHandle
from transferd.tiers.segment import SharedSegment, attach_arrays, unnamed_segment
from transferd.tiers.shm import created_handle


class SharedCaches:
    """Zeroed arrays for one rank in shared memory. Owns the memory until `close`.

    cache: the daemon's [cache] section as plain data.
    name: in /dev/shm; "" for memory without a name, which nobody can shrink. Use a name if other processes attach;
        `transferd.tiers.segment.fresh_name("engine")` makes one that is not in use.
    handle: pass it to `Client.offer` in this process.
    caches: numpy arrays. After `close` they stay readable while a reference to them exists, but other processes can no
        longer see them.
    Raises ConfigError for an invalid `cache`, RequestError for an invalid name, TierError when there is no room.
    """

    def __init__(self, cache: Mapping[str, Any], *, name: str = "") -> None:
        layout = build_layout(from_tree({"cache": dict(cache)}).geometry)
        nbytes = layout.device.extent
        self._segment = SharedSegment(name, nbytes, create=True) if name else unnamed_segment(nbytes)
        self.handle: DeviceHandle = created_handle(layout, self._segment)
        self.caches = attach_arrays(self.handle.data, None if name else self._segment.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory once no process has it mapped. Idempotent."""
        self._segment.close()
