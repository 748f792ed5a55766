"""Host memory that stays where it is: page-aligned, populated, and locked where that is allowed.

Copies to and from a GPU, and zero-copy transfers over a network, need memory that the kernel does not
move. Locking asks for RLIMIT_MEMLOCK; where it is refused the memory works all the same, more slowly,
`pinned` says so, and one warning a process is logged.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
from typing import Any

import structlog

from transferd.errors import TierError
from transferd.layout.base import Arena, BlockLayout, align

log = structlog.get_logger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; asm-generic/mman-common.h

_warned = False


class HostRegion:
    """An anonymous range of host memory. Owns it from construction until `close`.

    Raises TierError when there is not that much memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = align(max(nbytes, 1), mmap.PAGESIZE)
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _populate(self._map)
        except (OSError, ValueError) as error:
            raise TierError(f"cannot allocate {self.nbytes} bytes of host memory: {error}") from error
        self.view = memoryview(self._map)
        self._anchor = (ctypes.c_char * self.nbytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.pinned = _lock(self.address, self.nbytes)

    def close(self) -> None:
        """Unlock and give the memory back. Idempotent; no view of it may be in use any more."""
        if self.address == 0:
            return
        if self.pinned:
            _libc.munlock(self.address, self.nbytes)
        self.address = 0
        self.pinned = False
        del self._anchor
        self.view.release()
        with contextlib.suppress(BufferError):
            self._map.close()
            return
        # The traceback of a failed transfer holds the view it worked on, in a cycle with the task that
        # raised it: such views are nobody's any more, but only the collector frees them.
        gc.collect()
        try:
            self._map.close()
        except BufferError as error:
            raise TierError(f"host memory is still in use at close: {error}") from error


def _populate(memory: mmap.mmap) -> None:
    """Make every page real now, huge ones where the kernel has them: copies of scattered blocks miss the TLB less."""
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


def _lock(address: int, nbytes: int) -> bool:
    global _warned
    if _libc.mlock(address, nbytes) == 0:
        return True
    if not _warned:
        _warned = True
        code = ctypes.get_errno()
        log.warning(
            "host memory is not pinned: copies to a device will be slower",
            reason=errno.errorcode.get(code, str(code)),
            problem=os.strerror(code),
            advice="raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity in the unit)",
        )
    return False


class HostPool:
    """One rank's host tier: `host_blocks` packed blocks in one region that it owns."""

    def __init__(self, layout: BlockLayout, rank: int) -> None:
        self.rank = rank
        self.memory = HostRegion(layout.host.extent)
        self.arena = Arena(layout.host, self.memory.address)

    def close(self) -> None:
        self.memory.close()

    def statistics(self) -> dict[str, Any]:
        """blocks and bytes of this rank's pool, and whether it is locked in memory."""
        return {"blocks": self.arena.geometry.blocks, "bytes": self.memory.nbytes, "pinned": self.memory.pinned}
