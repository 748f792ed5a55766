"""Populates the pages of host memory: in pieces, by several threads, without Python's lock.

A server's pool has hundreds of gigabytes. One thread populates three to ten of them per second, and mmap.madvise holds
the GIL meanwhile; a call through ctypes releases it. (Before Linux 5.14, we write to the pages instead.)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from transferd.errors import NoThreads, TierError
from transferd.runtime.limits import memory_left
from transferd.runtime.threads import start_thread

# Bytes per call. During a call the kernel holds the lock of the process's memory map, so a thread that maps or unmaps
# anything, such as the loop when it needs memory, waits for the call to end.
PIECE = 32 * 1024**2
THREADS = 8  # more would contend for the kernel's own locks

_MADV_POPULATE_WRITE = 23  # Linux 5.14; asm-generic/mman-common.h

libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def last_error() -> str:
    """Why the last call of `libc` in this thread has failed, in words."""
    code = ctypes.get_errno()
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"


class Progress:
    """Bytes that this process has populated and pinned so far; they show that a start makes progress.

    cancelled: threads that populate or pin end soon, with TierError, and none begins.
    """

    def __init__(self) -> None:
        self.populated = self.pinned = 0
        self.cancelled = False
        self._lock = threading.Lock()

    def add(self, *, populated: int = 0, pinned: int = 0) -> None:
        with self._lock:
            self.populated += populated
            self.pinned += pinned

    @contextlib.contextmanager
    def cancelling(self) -> Iterator[None]:
        self.cancelled = True
        try:
            yield
        finally:
            self.cancelled = False

    def check(self) -> None:
        """Call this between two pieces. Raises TierError if `cancelled`."""
        if self.cancelled:
            raise TierError("the process is ending")


PROGRESS = Progress()


def populate(address: int, nbytes: int, cpus: Sequence[int] = ()) -> None:
    """Create every page of a range now, as huge pages if possible. Releases the GIL.

    cpus: the CPUs on which the threads run that touch the pages first; empty: any.
    Raises TierError, also if there is no room for them: beyond a control group's limit the kernel would kill us.
    """
    if nbytes > (room := memory_left()):
        raise TierError(f"cannot allocate {nbytes} bytes of host memory: there is room for {room}", code="no_room")
    libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # copies of scattered blocks then miss the TLB less
    pieces, problems = deque(pieces_of(address, nbytes)), list[TierError]()

    def work() -> None:
        if cpus:
            with contextlib.suppress(OSError):  # a cgroup without these CPUs
                os.sched_setaffinity(0, cpus)
        with contextlib.suppress(IndexError):  # another thread has taken the last piece
            while not problems:
                at, length = pieces.popleft()
                try:
                    PROGRESS.check()
                    _touch(at, length)
                except TierError as error:
                    problems.append(error)
                else:
                    PROGRESS.add(populated=length)

    count = min(THREADS, os.cpu_count() or 1, -(-nbytes // PIECE))
    threads = []
    if count > 1 or cpus:
        with contextlib.suppress(NoThreads):
            for number in range(count):
                threads.append(start_thread(f"transferd-populate-{number}", work))  # noqa: PERF401 - kept when one fails
    for thread in threads:
        thread.join()
    if not cpus:  # do the pieces that no thread took; with `cpus`, work() would change the caller's own affinity
        work()
    if problems:
        raise problems[0]
    for at, length in pieces:
        _touch(at, length)


def _touch(address: int, nbytes: int) -> None:
    if libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise TierError(f"cannot allocate {nbytes} bytes of host memory: {last_error()}")
    ctypes.memset(address, 0, nbytes)


def allocate(fd: int, nbytes: int, label: str) -> None:
    """Allocate what is missing of an engine's shared memory file, so that no copy has to. Blocks, for much of it.

    The machine must have that much: memory that we allocate counts as ours. Raises TierError.
    """
    found = os.fstat(fd)
    missing = max(0, min(nbytes, found.st_size) - found.st_blocks * 512)
    if not missing and found.st_size == nbytes:
        return
    system = os.fstatvfs(fd)
    try:
        _check_room(missing, system.f_bavail * system.f_frsize if system.f_blocks else 2**63)
        for at, length in pieces_of(0, nbytes):
            PROGRESS.check()
            _check_room(length)  # `missing` is less than the truth if the file is longer than nbytes
            os.posix_fallocate(fd, at, length)
    except OSError as error:
        what = f"the memory of {label} cannot be allocated: {error.strerror}; allocate it before you offer it"
        raise TierError(what, code="memory_unusable") from error


def _check_room(nbytes: int, free: int = 2**63) -> None:
    room = min(free, memory_left())
    if nbytes > room:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes of it do not exist yet, and there is room for {room}")


def give_back(address: int, nbytes: int) -> None:
    """Free the pages of a range that is no longer needed, without the GIL, so that unmapping it is quick."""
    for at, length in pieces_of(address, nbytes):
        libc.madvise(at, length, mmap.MADV_DONTNEED)


def pieces_of(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """A range in pieces of PIECE bytes."""
    for at in range(address, address + nbytes, PIECE):
        yield at, min(PIECE, address + nbytes - at)
