"""Shared memory without a name: an engine offers the number of a file descriptor, such as that of a memfd.

ZeroMQ cannot pass a descriptor (SCM_RIGHTS), so the daemon opens /proc/<pid>/fd/<number> of the process at the other
end of the connection. docs/adr/0041 says why that is safe. It is safe only with every check below, because an open
through /proc checks what the *daemon* may do with the file, not what the engine may do.

* The process is the one that the kernel names as the peer of the unix socket; nothing in the offer can change it.
* The file belongs to that process's user, so an engine cannot make the daemon write to a file that the engine itself
  could not write.
* The file is memory: only shared memory files (memfd, tmpfs, hugetlbfs) have seals.
* The file is sealed against shrinking under the daemon's mapping, if it can be sealed, and it is writable.

A client imports this module for `sealed`, so it uses only the standard library.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import Any

from transferd.errors import RequestError, TierError

PEER = "peer"  # in the data of an offer with a descriptor: [uid, pid], set by the daemon alone
UNSEALED = "unsealed"
NOT_PERMITTED = "permission denied; run daemon and engine as one user"
_NO_WRITES = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE, which the standard library does not name


def open_descriptor(data: dict[str, Any], nbytes: int) -> int:
    """A descriptor of our own for the memory that an offer's data names. Raises RequestError, TierError."""
    number, peer = data.get("fd"), data.get(PEER)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
        raise RequestError(f"fd must be the number of a file descriptor, not {str(number)[:40]!r}", code="bad_value")
    if peer is None or not peer[1]:
        what = "a descriptor can only be offered over a unix socket (ipc://), from a process that the daemon can see"
        raise RequestError(what, code="not_attachable")
    uid, pid = peer
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TierError(f"cannot open descriptor {number} of process {pid}: {_why(error)}") from error
    try:
        _check(fd, number, uid, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _why(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return NOT_PERMITTED
    return error.strerror or str(error)


def _check(fd: int, number: int, uid: int, nbytes: int) -> None:
    found = os.fstat(fd)
    seals = seals_of(fd)
    if not stat.S_ISREG(found.st_mode) or seals is None:
        raise RequestError(f"descriptor {number} is not shared memory", code="not_attachable")
    if found.st_uid != uid:
        what = f"the memory of descriptor {number} belongs to the user {found.st_uid}, and its engine runs as {uid}"
        raise RequestError(what, code="not_yours")
    if seals & _NO_WRITES:
        raise RequestError(f"the memory of descriptor {number} is sealed against writing", code="not_attachable")
    if not seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL):
        what = f"the memory of descriptor {number} could shrink while it is mapped: seal it with F_SEAL_SHRINK"
        raise RequestError(what, code=UNSEALED)
    if found.st_size < nbytes:
        raise TierError(f"the memory of descriptor {number} has only {found.st_size} bytes; {nbytes} are needed")


def seals_of(fd: int) -> int | None:
    """The seals of shared memory; None for any other file."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return None


def sealed(fd: int) -> None:
    """Seal the memory against shrinking, as the daemon requires, if it can be sealed. It may still grow.

    Raises RequestError if it is not shared memory.
    """
    seals = seals_of(fd)
    if seals is None:
        raise RequestError(f"descriptor {fd} is not shared memory", code="not_attachable")
    if not seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
