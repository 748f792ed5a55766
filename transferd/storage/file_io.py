"""Reads and writes the bytes of object files, through the page cache or past it.

Blocking; called from I/O threads by directory.py, which opens and names the files.

The ways to write were measured (2 MiB objects, ext4). Through the page cache, allocating the file's blocks first
(fallocate) and then one pwrite is a third faster than pwrite alone, several pwrites, or O_TMPFILE with linkat; reading
with one preadv beats mmap. Past the page cache, the disk decides: it makes no difference whether the tail is truncated
afterwards or written through the page cache. Without support for fallocate we skip it (glibc would write zeros).
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

from transferd.storage.batch import Damaged

UNIT = 4096  # bytes; direct I/O begins and ends at multiples of it, in the file and in memory. No disk needs more

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # which say nothing about what a file system can do

NO_DIRECT_IO = "the file system at {} has no direct I/O: set it to false, or use another path"


class CachedIO:
    """Through the page cache: recently used objects are read from memory, unless other programs need that memory.

    flags: for `open`. preallocates: whether the file system allocates blocks before they are written.
    """

    flags = 0

    def __init__(self) -> None:
        self.preallocates = False

    def probe(self, fd: int) -> None:
        """Find out what the file system can do. fd: an empty file in it, open for writing with `flags`."""
        self.preallocates = _has_fallocate(fd)

    def write(self, fd: int, data: memoryview, *, is_new: bool) -> None:
        """Fill a file, either empty (is_new) or of exactly this length. Raises OSError."""
        self._allocate(fd, data.nbytes, is_new)
        _write_from(fd, data, 0)

    def read(self, fd: int, data: memoryview) -> None:
        """Fill `data` from a file that had the same length. Raises OSError; Damaged if the file has become shorter."""
        _read_from(fd, data, 0)

    def _allocate(self, fd: int, nbytes: int, is_new: bool) -> None:
        if is_new and self.preallocates and nbytes:
            os.posix_fallocate(fd, 0, nbytes)


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

    def write(self, fd: int, data: memoryview, *, is_new: bool) -> None:
        self._allocate(fd, data.nbytes, is_new)
        whole = data.nbytes // UNIT * UNIT
        done = 0
        with _unless_refused():
            while done < whole and done % UNIT == 0:
                done += os.pwrite(fd, data[done:whole], done)
        if done < data.nbytes:
            _through_the_cache(fd)
            _write_from(fd, data, done)

    def read(self, fd: int, data: memoryview) -> None:
        whole, tail = data.nbytes // UNIT * UNIT, self._tail()
        with _unless_refused():
            # One call is enough, because a read may extend past the end of the file.
            if os.preadv(fd, [data[:whole], tail] if whole else [tail], 0) == data.nbytes:
                data[whole:] = tail[: data.nbytes - whole]
                return
        _through_the_cache(fd)
        _read_from(fd, data, 0)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _tail(self) -> memoryview:
        tail: memoryview | None = getattr(self._own, "tail", None)
        if tail is None:
            tail = self._own.tail = memoryview(mmap.mmap(-1, UNIT))
        return tail


def read_now(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """A ReadNow of this file, from the page cache. Reads nothing if the file system lacks RWF_NOWAIT."""
    try:
        return os.preadv(fd, buffers, offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return 0
        raise


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


def _write_from(fd: int, data: memoryview, done: int) -> None:
    while done < data.nbytes:  # once, except on a nearly full disk
        done += os.pwrite(fd, data[done:], done)


def _read_from(fd: int, data: memoryview, done: int) -> None:
    while done < data.nbytes:
        count = os.preadv(fd, [data[done:]], done)
        if not count:
            raise Damaged
        done += count


@contextlib.contextmanager
def _unless_refused() -> Iterator[None]:
    """Ignore EINVAL: this memory or this file cannot be used past the page cache."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _through_the_cache(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def _has_fallocate(fd: int) -> bool:
    """Whether the file system can allocate blocks. posix_fallocate does not tell: it falls back to writing zeros."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(UNIT)) == 0) or ctypes.get_errno() in FULL
