"""POSIX shared memory that two processes map: the daemon creates it, the engine attaches.

A segment is a file in /dev/shm, created and mapped with plain system calls. (The standard library's SharedMemory
registers every attached segment with a tracker, which unlinks it when *any* attaching process ends.) Its owner
holds an flock on it for life, which the kernel drops even after kill -9. So `remove_stale_segments` can tell dead
owners from live ones without process ids, which mean nothing across pid namespaces.

Creating a segment allocates its memory: a full /dev/shm is an error then, not a SIGBUS later. A client imports this
module to attach, so it uses only numpy and the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import mmap
import os
import secrets
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transferd.errors import TierError
from transferd.runtime.limits import memory_left
from transferd.tiers.offered import DIRECTORY, NOT_PERMITTED, check_name, identity_of
from transferd.tiers.populate import PROGRESS, give_back, libc, pieces_of

PREFIX = "transferd."
MODE = 0o660  # whatever the umask is, so that the daemon's group can attach
CREATIONS = 100  # attempts; one fails only if `remove_stale_segments` runs in the same few microseconds

_made_here: set[str] = set()  # names of this process's own segments, from before their memory is allocated

Caches = dict[str, list[npt.NDArray[Any]]]


def fresh_name(kind: str) -> str:
    """An unpredictable name for a new segment: processes of several containers may share /dev/shm."""
    return f"{PREFIX}{kind}.{secrets.token_hex(16)}"


class SharedSegment:
    """A mapped segment. Its creator owns it: `close` then also unlinks it; others only unmap.

    fd: an open descriptor of memory without a name; the segment takes it over. `name` is then only for messages.
    descriptor: borrowed; -1 once closed.
    """

    def __init__(self, name: str, nbytes: int, *, create: bool, fd: int | None = None) -> None:
        self.name = name
        self.nbytes = nbytes
        self.named = create  # we made it under a name
        self.descriptor = fd if fd is not None else _create(name, nbytes) if create else _open(name, nbytes)
        try:
            self._mapping = SharedMapping(self.descriptor, nbytes)
        except (OSError, ValueError) as error:
            self.unlink()
            os.close(self.descriptor)
            raise TierError(f"cannot map shared memory {name}: {error}") from error
        self.address = self._mapping.address

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode: the same for every mapping, whatever name it was opened by."""
        return identity_of(self.descriptor)

    @property
    def buffer(self) -> memoryview:
        return self._mapping.view

    def close(self) -> None:
        """Unlink it if we own it, unmap, unlock. Idempotent. Raises TierError if arrays still use it.

        Whoever closes the last mapping frees the memory. That takes seconds for much of it, but does not hold the GIL.
        """
        if self.descriptor < 0:
            return
        self.unlink()
        give_back(self.address, self.nbytes)  # our page tables only: unmapping, which holds the GIL, is quick then
        fd, self.descriptor, self.address = self.descriptor, -1, 0
        try:
            self._mapping.close()
        except BufferError as error:
            raise TierError(f"shared memory {self.name} is still in use at close: {error}") from error
        finally:
            os.close(fd)  # last, because this is what frees the memory

    def unlink(self) -> None:
        """Remove the name if we own the segment. Mappings stay valid."""
        if self.named and self.descriptor >= 0:
            _unlink(self.name)


def unnamed_segment(nbytes: int) -> SharedSegment:
    """New memory without a name, which can neither shrink nor grow. Owned by the caller. Raises TierError."""
    fd = -1
    try:
        fd = os.memfd_create("transferd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        _allocate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise TierError(f"cannot allocate {nbytes} bytes of shared memory: {error.strerror}") from error
    return SharedSegment(f"descriptor {fd}", nbytes, create=False, fd=fd)


def unlink_all() -> None:
    """Remove the name of every segment of this process, which is about to end while the memory may be in use.

    Thread-safe. It includes segments that other threads are making.
    """
    for name in list(_made_here):
        _unlink(name)


def _unlink(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(DIRECTORY / name)
    _made_here.discard(name)


def _create(name: str, nbytes: int) -> int:
    for _ in range(CREATIONS):
        fd = _create_once(check_name(name), nbytes)
        if fd is not None:
            return fd
    raise TierError(f"shared memory {name!r} was removed while it was being created, {CREATIONS} times in a row")


def _create_once(name: str, nbytes: int) -> int | None:
    """The locked descriptor; None if `remove_stale_segments` in another process removed the file before the lock."""
    path = DIRECTORY / name
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    except FileExistsError as error:
        raise TierError(f"shared memory {name!r} already exists") from error
    except OSError as error:
        raise TierError(f"cannot create shared memory {name!r}: {error.strerror}") from error
    _made_here.add(name)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink == 0:
            _made_here.discard(name)
            os.close(fd)
            return None
        os.fchmod(fd, MODE)
        _allocate(fd, nbytes)
    except (OSError, TierError) as error:
        _unlink(name)
        os.close(fd)
        why = error.strerror if isinstance(error, OSError) else error
        raise TierError(f"cannot allocate {nbytes} bytes of shared memory in {DIRECTORY}: {why}") from error
    return fd


def _allocate(fd: int, nbytes: int) -> None:
    """Allocate all pages now, in pieces: a process that ends makes no more of them. Raises OSError, TierError."""
    found = os.fstatvfs(fd)
    # Instead of filling it first, to everybody's cost; beyond a control group's limit the kernel would kill us.
    if (found.f_blocks and nbytes > found.f_bavail * found.f_frsize) or nbytes > memory_left():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _make_large_pages(fd, nbytes)
    for at, length in pieces_of(0, nbytes):
        PROGRESS.check()
        os.posix_fallocate(fd, at, length)  # what is missing


def _open(name: str, nbytes: int) -> int:
    """The descriptor of a regular file in DIRECTORY. Trusts nothing: the name may lead to any kind of file."""
    try:
        # O_NONBLOCK: so that a FIFO or device cannot block the open. It does not affect a regular file.
        fd = os.open(DIRECTORY / check_name(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        known = {errno.ELOOP: "it is a symbolic link", errno.EACCES: NOT_PERMITTED}
        why = known.get(error.errno or 0, error.strerror)
        raise TierError(f"cannot open shared memory {name!r}: {why}") from error
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_size >= nbytes:
        return fd
    os.close(fd)
    if not stat.S_ISREG(found.st_mode):
        raise TierError(f"cannot open shared memory {name!r}: it is not a regular file")
    raise TierError(f"shared memory {name!r} has only {found.st_size} bytes; {nbytes} are needed")


def remove_stale_segments(users: Collection[int] = ()) -> list[str]:
    """Unlink every transferd segment whose owner is dead. Returns their names.

    Only those of our own user and of these: root may remove anybody's files, but must not.
    """
    ours = {os.geteuid(), *users}
    return [path.name for path in sorted(DIRECTORY.glob(f"{PREFIX}*")) if _removed(path, ours)]


def _removed(path: Path, users: Collection[int]) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # gone meanwhile, or another user's
    try:
        found = os.fstat(fd)
        if found.st_uid not in users or not stat.S_ISREG(found.st_mode):
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Since the open, the name may have passed to another segment with a live owner.
        if not os.path.samestat(os.fstat(fd), os.lstat(path)):
            return False
        os.unlink(path)
    except OSError:
        return False  # its owner is alive, or we may not remove it
    finally:
        os.close(fd)
    return True


def attach_arrays(data: dict[str, Any], fd: int | None = None) -> Caches:
    """Map the segment that a DeviceHandle of kind "shm" describes: {plane: [one array per layer]}, zero-copy.

    data: {name, nbytes, arrays: [{plane, layer, offset, shape, dtype}]}.
    fd: a descriptor of memory that this process made without a name; borrowed.
    The mapping lives as long as any of the arrays.
    Raises TierError, or RequestError for an invalid name.
    """
    if "arrays" not in data or (fd is None and "name" not in data):
        raise TierError("the engine made this memory itself, as pages or without a name: only it can map it")
    name, nbytes = check_name(data["name"]) if fd is None else f"descriptor {fd}", int(data["nbytes"])
    fd = _open(name, nbytes) if fd is None else os.dup(fd)
    try:
        buffer = SharedMapping(fd, nbytes).view
    except (OSError, ValueError) as error:
        raise TierError(f"cannot map shared memory {name}: {error}") from error
    finally:
        os.close(fd)
    caches: Caches = {}
    for item in sorted(data["arrays"], key=lambda item: int(item["layer"])):
        shape, dtype = tuple(item["shape"]), np.dtype(item["dtype"])
        flat = np.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=int(item["offset"]))
        caches.setdefault(item["plane"], []).append(flat.reshape(shape))
    return caches


LARGE_PAGE = 2 * 1024**2  # bytes; of x86-64 and of arm64 with pages of 4 KiB. Others find every range refused

_MADV_COLLAPSE = 25  # asm-generic/mman-common.h
_MAP_FIXED = 0x10  # the same on every architecture that Linux still has CPUs of
_FAILED = ctypes.c_void_p(-1).value

libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.mmap.restype = ctypes.c_void_p


# A large page is mapped as one only if its address and its offset in the file are both multiples of its size, and
# mmap(2) aligns shared memory only as shmem_enabled allows. So we map it over a reserved range.
class SharedMapping:
    """A mapped shared memory file, to read and write; at a multiple of LARGE_PAGE if that is possible.

    view: its bytes. They stay mapped until `close`, or as long as anything made from the view lives. Raises OSError,
    ValueError.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        # Python's own mapping of a file keeps a descriptor of it.
        mapping, offset = _map_aligned(fd, nbytes, LARGE_PAGE if nbytes >= LARGE_PAGE else mmap.PAGESIZE)
        self._map = mapping or mmap.mmap(fd, nbytes)
        self.view = memoryview(self._map)[offset : offset + nbytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    def close(self) -> None:
        """Unmap it. Raises BufferError if anything made from the view lives."""
        self.view.release()
        self._map.close()


def _map_aligned(fd: int, nbytes: int, step: int) -> tuple[mmap.mmap | None, int]:
    """A range with the file at an offset, and the offset. Returns (None, 0) if the kernel gives none."""
    try:
        reserved = mmap.mmap(-1, nbytes + step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None, 0
    begin = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    offset = -begin % step
    how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(begin + offset, nbytes, *how, fd, 0) == _FAILED:
        reserved.close()
        return None, 0
    return reserved, offset  # closing it unmaps the whole range, and with it the file


# A copy to scattered small pages waits for the TLB. Linux takes large pages for shared memory only if the
# administrator has changed shmem_enabled in /sys/kernel/mm/transparent_hugepage, but collapses existing pages for
# any process on request (madvise(2), MADV_COLLAPSE, Linux 6.1). So we make one small page for each large one, and
# collapse it; that is also faster than to make small pages only.
def _make_large_pages(fd: int, nbytes: int) -> None:
    """Make large pages in a new shared memory file, which is extended to nbytes. The caller allocates what is missing.

    It ends after a failure: the kernel cannot make them, or has none left. Raises OSError, TierError.
    """
    if nbytes < LARGE_PAGE:
        return
    os.ftruncate(fd, nbytes)
    with contextlib.closing(SharedMapping(fd, nbytes)) as mapping:
        if mapping.address % LARGE_PAGE:
            return
        for at, length in pieces_of(0, nbytes // LARGE_PAGE * LARGE_PAGE):
            PROGRESS.check()
            for page in range(at, at + length, LARGE_PAGE):
                os.posix_fallocate(fd, page, mmap.PAGESIZE)
            refused = libc.madvise(mapping.address + at, length, _MADV_COLLAPSE) < 0
            if refused and ctypes.get_errno() != errno.EAGAIN:  # a page was busy for a moment
                return
