"""Backs shared memory with large pages, and maps it at aligned addresses.

A copy to scattered small pages waits for the TLB. Linux takes large pages for shared memory only if the administrator
has changed shmem_enabled in /sys/kernel/mm/transparent_hugepage, but collapses existing pages for any process that asks
(madvise(2), MADV_COLLAPSE, Linux 6.1). So we make one small page for each large one, and ask; that is also faster.

A large page is mapped as one only if its address and its offset in the file are both multiples of its size, and mmap(2)
aligns shared memory only if shmem_enabled says so. So we map it over a reserved range, at an aligned address.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from transferd.runtime.compat import Self

LARGE_PAGE = 2 * 1024**2  # bytes; of x86-64 and of arm64 with pages of 4 KiB. Others find every range refused

_MADV_COLLAPSE = 25  # asm-generic/mman-common.h
_MAP_FIXED = 0x10  # the same on every architecture that Linux still has CPUs of
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


class SharedMapping:
    """A mapped shared memory file, to read and write; at a multiple of LARGE_PAGE if that is possible.

    view: its bytes. They stay mapped until `close`, or as long as anything made from the view lives. Raises OSError,
    ValueError.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        mapping, offset = _map_aligned(fd, nbytes) if nbytes >= LARGE_PAGE else (None, 0)
        self._map = mapping or mmap.mmap(fd, nbytes)
        self.view = memoryview(self._map)[offset : offset + nbytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    def close(self) -> None:
        """Unmap it. Raises BufferError if anything made from the view lives."""
        self.view.release()
        self._map.close()


def _map_aligned(fd: int, nbytes: int) -> tuple[mmap.mmap | None, int]:
    """A range that has the file at an offset, and the offset; None if there is no such range."""
    try:
        reserved = mmap.mmap(-1, nbytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None, 0
    begin = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    offset = -begin % LARGE_PAGE
    how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(begin + offset, nbytes, *how, fd, 0) == _FAILED:
        reserved.close()
        return None, 0
    return reserved, offset  # to close it unmaps the whole range, and so the file, too


class LargePages:
    """Makes large pages in a new shared memory file of at most nbytes, which it extends to nbytes. A context manager.

    Without large pages the caller allocates what is missing. Raises OSError.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self._nbytes = nbytes
        self._mapping: SharedMapping | None = None
        self._possible = False

    def __enter__(self) -> Self:
        if self._nbytes >= LARGE_PAGE:
            os.ftruncate(self._fd, self._nbytes)
            self._mapping = SharedMapping(self._fd, self._nbytes)
            self._possible = self._mapping.address % LARGE_PAGE == 0
        return self

    def __exit__(self, *_: object) -> None:
        if self._mapping is not None:
            self._mapping.close()

    def make(self, offset: int, nbytes: int) -> None:
        """Make those that lie in a range, unless that failed before: then the kernel cannot, or has none left."""
        begin, end = -(-offset // LARGE_PAGE) * LARGE_PAGE, (offset + nbytes) // LARGE_PAGE * LARGE_PAGE
        if self._mapping is None or not self._possible or begin >= end:
            return
        for at in range(begin, end, LARGE_PAGE):
            os.posix_fallocate(self._fd, at, mmap.PAGESIZE)
        if _libc.madvise(self._mapping.address + begin, end - begin, _MADV_COLLAPSE) < 0:
            self._possible = ctypes.get_errno() == errno.EAGAIN  # a page was busy for a moment
