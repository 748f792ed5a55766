"""Host memory that stays in place: page-aligned, populated, next to its device, and pinned if that is allowed.

Copies to and from a GPU, and zero-copy transfers over a network, need memory that the kernel does not move. The
device's class decides how to pin it (pinning.py). If pinning is refused, the memory still works, only more slowly:
`degraded` says why, stats report it, and the process logs one warning.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
from typing import Any

import structlog

from transferd.blocks.layout.base import Arena, BlockLayout, align
from transferd.errors import TierError
from transferd.tiers.numa import prefer_node
from transferd.tiers.pinning import MEMORY_LOCK, Pinning

log = structlog.get_logger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; asm-generic/mman-common.h

_warned = False


class HostRegion:
    """An anonymous range of host memory. Owns it, and its pinning, from construction until `close`.

    degraded: why it is not pinned; "" if it is. Raises TierError if there is not enough memory.
    """

    def __init__(self, nbytes: int, pinning: Pinning = MEMORY_LOCK) -> None:
        self.nbytes = align(max(nbytes, 1), mmap.PAGESIZE)
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._anchor = (ctypes.c_char * self.nbytes).from_buffer(self._map)
            self.address = ctypes.addressof(self._anchor)
            if pinning.node is not None:  # before the first page exists; best effort, because it only affects speed
                prefer_node(self.address, self.nbytes, pinning.node)
            _populate(self._map)
        except (OSError, ValueError) as error:
            raise TierError(f"cannot allocate {self.nbytes} bytes of host memory: {error}") from error
        self.view = memoryview(self._map)
        self._pinning = pinning
        self.degraded = pinning.pin(self.address, self.nbytes)
        self.pinned = not self.degraded
        if self.degraded:
            _warn(self.degraded)

    def close(self) -> None:
        """Unpin and free the memory. Idempotent. No view of it may be in use."""
        if self.address == 0:
            return
        address, self.address = self.address, 0
        pinned, self.pinned = self.pinned, False
        try:
            if pinned:
                self._pinning.unpin(address, self.nbytes)
        finally:
            del self._anchor
            self.view.release()
            self._unmap()

    def _unmap(self) -> None:
        with contextlib.suppress(BufferError):
            self._map.close()
            return
        # The traceback of a failed transfer holds the view that it used, in a cycle with the task that raised it.
        # Such views are garbage, but only the collector frees them.
        gc.collect()
        try:
            self._map.close()
        except BufferError as error:
            raise TierError(f"host memory is still in use at close: {error}") from error


def _populate(memory: mmap.mmap) -> None:
    """Allocate every page now, as huge pages if possible: copies of scattered blocks then miss the TLB less."""
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        view = memoryview(memory)
        for page in range(0, len(view), mmap.PAGESIZE):
            view[page] = 0
        view.release()


def _warn(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning("host memory is not pinned: copies to a device will be slower", reason=reason)


class HostPool:
    """One rank's host tier: `host_blocks` packed blocks. Owns its memory."""

    def __init__(self, layout: BlockLayout, rank: int, pinning: Pinning = MEMORY_LOCK) -> None:
        self.rank = rank
        self._layout = layout
        self._pinning = pinning
        self.memory = HostRegion(layout.host.extent, pinning)
        self.arena = Arena(layout.host, self.memory.address)

    def allocate(self) -> None:
        """Allocate the memory again after `close`, zeroed. Does nothing if it is allocated. Raises TierError."""
        if self.memory.address == 0:
            self.memory = HostRegion(self._layout.host.extent, self._pinning)
            self.arena = Arena(self._layout.host, self.memory.address)

    def close(self) -> None:
        self.memory.close()

    def statistics(self) -> dict[str, Any]:
        """blocks and bytes of this rank's pool, and whether it is pinned."""
        nbytes = self.memory.nbytes if self.memory.address else 0
        return {"blocks": self.arena.geometry.blocks, "bytes": nbytes, "pinned": self.memory.pinned}
