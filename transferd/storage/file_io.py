"""Writes and reads the bytes of object files, through the page cache or past it.

Blocking; called from I/O threads by directory.py, which opens and names the files.

The C extension (_files.c) loads and stores whole objects, several in one call. It maps files in large pages: a copy
from a mapping reads the bytes once, and the kernel copies nothing. Any other file is read with one pread to the
caller's slot, which stays in a core's own cache. What is here is its slow twin, and does what is unusual.

The ways to write were measured (2 MiB objects, ext4). Through the page cache, allocating the file's blocks first
(fallocate) and then one pwrite is a third faster than pwrite alone, several pwrites, or O_TMPFILE with linkat. Without
support for fallocate we skip it (glibc would write zeros). Past the page cache, the disk decides: it makes no
difference whether the tail is truncated afterwards or written through the page cache.
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

from transferd.runtime import native
from transferd.storage.batch import Damaged
from transferd.storage.opening import opened

try:
    from transferd.storage import _files
except ImportError:  # the installation had no compiler
    NATIVE = False
else:
    NATIVE = native.NATIVE

UNIT = 4096  # bytes; direct I/O begins and ends at multiples of it, in the file and in memory. No disk needs more

WRITE_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # which prove nothing about a file system's abilities

_libc = ctypes.CDLL(None, use_errno=True)

NO_DIRECT_IO = "the file system at {} has no direct I/O: set it to false, or use another path"


def map_files() -> None:
    """Let loads map files, by handling SIGBUS in this process: the memory of a file that is truncated disappears.

    Call it in a process that is transferd's own.
    """
    if NATIVE:
        _files.catch_bus_errors()


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

    def put(self, temporary: str, path: str, data: memoryview, mode: int, *, syncs: bool) -> None:
        """Write the object to a new file at `temporary`, and then rename that to `path`. Raises OSError.

        mode: for `open`. syncs: wait for the medium before the file gets its name.
        """
        with opened(temporary, WRITE_FLAGS | self.flags | os.O_CREAT | os.O_EXCL, mode) as fd:
            if self.preallocates and data.nbytes:
                os.posix_fallocate(fd, 0, data.nbytes)
            self._fill(fd, data)
            if syncs:
                os.fsync(fd)
        os.rename(temporary, path)

    def _fill(self, fd: int, data: memoryview, done: int = 0) -> None:
        while done < data.nbytes:  # once, except on a nearly full disk
            done += os.pwrite(fd, data[done:], done)

    def read(self, fd: int, data: memoryview) -> None:
        """Fill `data` from a file that had the same length. Raises OSError; Damaged if the file has become shorter."""
        done = 0
        while done < data.nbytes:
            count = os.preadv(fd, [data[done:]], done)
            if not count:
                raise Damaged
            done += count


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

    def _fill(self, fd: int, data: memoryview, done: int = 0) -> None:
        whole = data.nbytes // UNIT * UNIT
        with unless_refused():
            while done < whole and done % UNIT == 0:
                done += os.pwrite(fd, data[done:whole], done)
        if done < data.nbytes:
            through_the_cache(fd)
        super()._fill(fd, data, done)

    def read(self, fd: int, data: memoryview) -> None:
        whole, tail = data.nbytes // UNIT * UNIT, self._tail()
        with unless_refused():
            # One call is enough, because a read may extend past the end of the file.
            if os.preadv(fd, [data[:whole], tail] if whole else [tail], 0) == data.nbytes:
                data[whole:] = tail[: data.nbytes - whole]
                return
        through_the_cache(fd)
        super().read(fd, data)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _tail(self) -> memoryview:
        tail: memoryview | None = getattr(self._own, "tail", None)
        if tail is None:
            tail = self._own.tail = memoryview(mmap.mmap(-1, UNIT))
        return tail


def load_warm(orders: list[tuple[str, Sequence[memoryview], bytes]], flags: int) -> list[bool]:
    """Fill the pieces of objects from their files, and check them; for each whether that is done. Waits for no disk.

    orders: of each object its path, pieces, and footer without checksums.

    False, with any bytes in the pieces, if there is no such object, not all of it is in the page cache, or its file
    system cannot tell; for pieces that are no multiples of 64 bytes; and without the C extension.
    """
    return _files.load_warm(orders, flags) if NATIVE else [False] * len(orders)


def direct_io_problem(directory: str) -> str:
    """Why a file in that directory cannot be written past the page cache; "" if it can. Leaves no file behind."""
    try:
        with opened(directory, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC) as fd:
            DirectIO().probe(fd)
    except OSError as error:
        return error.strerror or str(error)
    return ""


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
