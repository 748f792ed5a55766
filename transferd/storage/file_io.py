"""Reads the bytes of object files, through the page cache or past it. put_file.py writes them.

Blocking; called from I/O threads by directory.py, which opens and names the files.

With the C extension, one call opens and reads a file, or maps it. Mapping is for files in large pages: a copy from a
mapping reads the bytes once, and the kernel copies nothing. Any other file is read with one pread to the caller's slot,
which stays in a core's own cache. Without the extension every file is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transferd.storage.batch import Damaged

try:
    from transferd.storage import _files
except ImportError:  # the installation had no compiler
    NATIVE = False
else:
    NATIVE = True

UNIT = 4096  # bytes; direct I/O begins and ends at multiples of it, in the file and in memory. No disk needs more

LARGE_PAGE = 2 * 1024**2  # bytes; the kernel reads up to that many at once for a mapping with large pages
FETCHED_BYTES = 512 * 1024  # fewer bytes are read as fast without `_fetch`
_MADV_POPULATE_READ = 22  # Linux 5.14; asm-generic/mman-common.h
_CACHESTAT = 451  # Linux 6.5; the same on every architecture

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # which prove nothing about a file system's abilities

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL, which Python's mmap.madvise does not
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

NO_DIRECT_IO = "the file system at {} has no direct I/O: set it to false, or use another path"


def map_files() -> None:
    """Let loads map files, by handling SIGBUS in this process: the memory of a file that is truncated disappears.

    Call it in a process that is transferd's own.
    """
    if NATIVE:
        _files.catch_bus_errors()


def leave_files() -> None:
    """Call in a thread after its loads of a batch: releases the addresses at which it had files mapped."""
    if NATIVE:
        _files.forget_files()


Part = tuple[int, int, int]  # the bytes from the first to the second, and those from the third on


class Loaded(NamedTuple):
    """A file that was read or mapped."""

    modified: float  # when the file was last modified
    view: memoryview | None = None  # of mapping `number`; None if the file was read
    number: int = 0

    def unmap(self) -> bool:
        """End the view. Returns whether the file lost some of its bytes meanwhile: then the view had zeros instead."""
        assert self.view is not None
        self.view.release()
        return _files.unmap(self.number)


class CachedIO:
    """Through the page cache: recently used objects are read from memory, unless other programs need that memory.

    flags: for `open`.
    preallocates: whether the file system allocates blocks before they are written.
    """

    flags = 0

    def __init__(self) -> None:
        self.preallocates = False

    def probe(self, fd: int) -> None:
        """Find out the file system's abilities. fd: an empty file in it, open for writing with `flags`."""
        self.preallocates = _has_fallocate(fd)

    def direct_bytes(self, nbytes: int) -> int:  # noqa: ARG002 - a default
        """How many of the first bytes of an object of this length go past the page cache when it is written."""
        return 0

    def load_file(
        self,
        path: str,
        data: memoryview,
        flags: int,
        *,
        maps: bool,
        fetched: bool = False,
        part: Part | None = None,
    ) -> Loaded | None:
        """Fill `data` from a file of the same length in one step, or map the file, if the caller `maps`.

        flags: for `open`.
        fetched: `fetch` has just brought the file.
        part: the part of the file that suffices.

        Returns None if the caller must use `fetch` and `read`. Raises OSError if the disk cannot read it.
        """
        wanted = part or (0, data.nbytes, data.nbytes)
        loaded = _files.load_file(path, data, flags | self.flags, maps, fetched, wanted) if NATIVE else None
        return None if loaded is None else Loaded(*loaded)

    def read(self, fd: int, data: memoryview) -> None:
        """Fill `data` from a file that had the same length. Raises OSError; Damaged if the file has become shorter."""
        self.fetch(fd, data.nbytes)
        _read_from(fd, data, 0)

    def fetch(self, fd: int, nbytes: int) -> bool:
        """Bring a file of this length into the page cache. Returns False if most of it is there, or it is short."""
        wanted = nbytes >= FETCHED_BYTES and _missing(fd, nbytes) >= FETCHED_BYTES
        if wanted:
            _fetch(fd, nbytes)
        return wanted


class DirectIO(CachedIO):
    """Past the page cache, directly between the disk and the caller's memory, without a copy by the CPU.

    Only whole units can go past the page cache. A file's last bytes, less than a unit, are written through it; so is
    memory that does not begin at a unit, such as some objects of FastDeploy's format.
    """

    flags = os.O_DIRECT

    def __init__(self) -> None:
        super().__init__()
        self._own = threading.local()  # for each thread, a buffer of one unit for the end of a file

    def probe(self, fd: int) -> None:
        super().probe(fd)
        try:
            os.pwrite(fd, self._tail(), 0)
        except OSError as error:
            if error.errno not in FULL:
                raise

    def direct_bytes(self, nbytes: int) -> int:
        return nbytes // UNIT * UNIT

    def read(self, fd: int, data: memoryview) -> None:
        whole, tail = data.nbytes // UNIT * UNIT, self._tail()
        with unless_refused():
            # One call is enough, because a read may extend past the end of the file.
            if os.preadv(fd, [data[:whole], tail] if whole else [tail], 0) == data.nbytes:
                data[whole:] = tail[: data.nbytes - whole]
                return
        through_the_cache(fd)
        _read_from(fd, data, 0)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _tail(self) -> memoryview:
        tail: memoryview | None = getattr(self._own, "tail", None)
        if tail is None:
            tail = self._own.tail = memoryview(mmap.mmap(-1, UNIT))
        return tail


def _missing(fd: int, nbytes: int) -> int:
    """How many of the file's first bytes the page cache does not have; all without the system call cachestat."""
    span, pages = (ctypes.c_uint64 * 2)(0, nbytes), (ctypes.c_uint64 * 5)()
    if sys.platform != "linux" or _libc.syscall(_CACHESTAT, fd, span, pages, 0) != 0:
        return nbytes
    return max(0, nbytes - pages[0] * mmap.PAGESIZE)


def _fetch(fd: int, nbytes: int) -> None:
    """Have the kernel read a file from the disk into the page cache, in pages as large as it can find.

    A plain read fills pages of 4 KiB. Large pages take a quarter of the CPU time to fill, and half of the time or less
    whenever the file is loaded again (docs/files.md). If the kernel or the file system has none, this only begins the
    same reading.
    """
    if sys.platform != "linux":
        return
    address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        return
    try:
        if _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE) == 0:
            last = (nbytes - 1) // UNIT * UNIT
            for offset in (*range(0, last, LARGE_PAGE), last):  # each brings the bytes up to the next offset
                _libc.madvise(address + offset, UNIT, _MADV_POPULATE_READ)
    finally:
        _libc.munmap(address, nbytes)


def load_warm(path: str, pieces: Sequence[memoryview], flags: int, end: int) -> tuple[int, bytes] | None:
    """Fill `pieces` from a file that has `end` more bytes: their xxh3-64, and these bytes. Never waits for the disk.

    None if there is no file of this length, not all of it is in the page cache, or its file system cannot tell; for
    pieces that are no multiples of 64 bytes; and without the C extension.
    """
    return _files.load_warm(path, pieces, flags, end) if NATIVE else None


def direct_io_problem(directory: str) -> str:
    """Why a file in that directory cannot be written past the page cache; "" if it can. Leaves no file behind."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            DirectIO().probe(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _read_from(fd: int, data: memoryview, done: int) -> None:
    while done < data.nbytes:
        count = os.preadv(fd, [data[done:]], done)
        if not count:
            raise Damaged
        done += count


@contextlib.contextmanager
def unless_refused() -> Iterator[None]:
    """Ignore EINVAL: this memory or this file cannot be used past the page cache."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def through_the_cache(fd: int) -> None:
    """From now on, this file goes through the page cache."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def _has_fallocate(fd: int) -> bool:
    """Whether the file system can allocate blocks. posix_fallocate cannot show it: it falls back to writing zeros."""
    if sys.platform != "linux":
        return False
    return bool(_libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(UNIT)) == 0) or ctypes.get_errno() in FULL
