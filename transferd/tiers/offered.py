"""Opens the shared memory that an engine offers: a name in /dev/shm, or the number of a file descriptor of the engine.

A client may offer only memory that its user owns. A daemon often has more rights than its engines, and it must not read
or write a file for a user who could not do so. So it examines the file before it opens it, and compares the file's
owner with the user whom the kernel names at the other end of the connection. It does so on the open file, because a
path could lead elsewhere a moment later. A link, a mount or a group's right to write does not make up for the owner.

A client over a unix socket passes its own descriptors of the memory (wire/passing.py), so that the daemon needs no
right to open it. Clients before 0.4 do not, and then the daemon opens the name, or /proc/<pid>/fd/<number> of the
process at the other end of the connection (docs/adr/0041). A client imports this module, so it imports nothing that
takes long to load.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transferd.errors import RequestError, TierError
from transferd.runtime.descriptors import seals_of
from transferd.tiers.populate import allocate
from transferd.wire.credentials import hidden

DIRECTORY = Path("/dev/shm")
LONGEST_NAME = 255  # bytes: NAME_MAX
PEER = "peer"  # in the data of an offer: [uid, pid] of the client from the socket; only the daemon sets it
# in the data of an offer: the token of its descriptors; in the daemon, (Descriptors, which of them) for each memory
PASSED = "passed"
MORE = "more"  # in the data of an offer: further memories, each with name or fd, nbytes and INODE
INODE = "inode"  # in the data of an offer: [st_dev, st_ino] of the memory as the client sees it; optional
UNSEALED = "unsealed"
UNUSABLE = "memory_unusable"
NOT_YOURS = "not_yours"
NOT_PERMITTED = "permission denied; run daemon and engine as one user"
_NO_WRITES = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE, which the standard library does not name


def open_offered(data: Mapping[str, Any], nbytes: int) -> tuple[int, str]:
    """A descriptor of our own for the memory that an offer's data names, all of it allocated; and its name in messages.

    Blocks while it allocates what is missing. Raises RequestError, TierError.
    """
    uid, pid = _offerer(data)
    passed, which = data.get(PASSED) or (None, 0)
    if "fd" in data:
        path = _descriptor(data["fd"], pid if passed is None else os.getpid())
        label, flags = f"descriptor {data['fd']}", 0
    else:
        path, label, flags = str(DIRECTORY / check_name(data.get("name"))), f"{data['name']!r}", os.O_NOFOLLOW
    if passed is not None:
        fd = _copied(passed.numbers, which, label)
    else:
        seen = _opened(path, os.O_PATH | flags, label)
        try:
            _check_owner(os.fstat(seen), label, uid)
            fd = _opened(f"/proc/self/fd/{seen}", os.O_RDWR | os.O_NONBLOCK, label)  # the very file that was looked at
        finally:
            os.close(seen)
    try:
        _check(fd, label, uid, nbytes, sealable="fd" in data)
        _check_seen(fd, label, data.get(INODE))
        allocate(fd, nbytes, label)
    except BaseException:
        os.close(fd)
        raise
    return fd, label


def _copied(numbers: Sequence[int], which: int, label: str) -> int:
    """A descriptor of our own for one that a client has passed. Raises RequestError."""
    if which >= len(numbers):
        raise RequestError(f"no descriptor was passed for the memory of {label}", code="bad_value")
    _check_shared(numbers[which], label)  # before all else: another file may be on a mount that hangs
    if fcntl.fcntl(numbers[which], fcntl.F_GETFL) & (os.O_ACCMODE | os.O_PATH) != os.O_RDWR:
        raise RequestError(f"the descriptor that was passed for {label} cannot be written", code="not_attachable")
    return fcntl.fcntl(numbers[which], fcntl.F_DUPFD_CLOEXEC, 0)


def _offerer(data: Mapping[str, Any]) -> tuple[int, int]:
    """(uid, pid) of the client that offers. Raises RequestError if its user is not known."""
    uid, pid = data.get(PEER) or (None, None)
    if uid is None:
        what = "the daemon cannot know which user offers this memory: offer it over a unix socket (ipc://)"
        raise RequestError(what, code=NOT_YOURS)
    if hidden(uid):
        what = (
            f"the daemon cannot know which user offers this memory: in its user namespace that user appears as {uid}, "
            "like every user who is not mapped there; run the daemon outside of one (PrivateUsers=no in the unit)"
        )
        raise RequestError(what, code=NOT_YOURS)
    return uid, pid or 0


def _descriptor(number: object, pid: int) -> str:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
        raise RequestError(f"fd must be the number of a file descriptor, not {str(number)[:40]!r}", code="bad_value")
    if not pid:
        what = "a descriptor can only be offered by a process that the daemon can see (its PID namespace): use a name"
        raise RequestError(what, code="not_attachable")
    return f"/proc/{pid}/fd/{number}"


def check_name(name: object) -> str:
    """`name`, checked to be a plain file name in DIRECTORY. Raises RequestError."""
    # Printable text has no NUL, and can be encoded and logged.
    if not isinstance(name, str) or not name.isprintable() or "/" in name or name in ("", ".", ".."):
        raise RequestError(f"{str(name)[:80]!r} is not a valid name of shared memory", code="bad_value")
    if len(os.fsencode(name)) > LONGEST_NAME:
        raise RequestError(f"{name[:80]!r}… is not a valid name of shared memory: too long", code="bad_value")
    return name


def _opened(path: str, flags: int, label: str) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        refused = error.errno in (errno.EACCES, errno.EPERM)
        why = NOT_PERMITTED if refused else error.strerror or str(error)
        raise TierError(f"cannot open the memory of {label}: {why}") from error


def _check_owner(found: os.stat_result, label: str, uid: int) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise RequestError(f"{label} is a symbolic link, not shared memory", code="not_attachable")
    if not stat.S_ISREG(found.st_mode):
        raise RequestError(f"{label} is not shared memory: it is not a regular file", code="not_attachable")
    if found.st_uid != uid:
        what = f"the memory of {label} belongs to the user {found.st_uid}, and the client that offers it runs as {uid}"
        raise RequestError(what, code=NOT_YOURS)


def _check_shared(fd: int, label: str) -> int:
    """The seals of shared memory. Raises RequestError for a file: its pages come from a medium that may hang.

    A thread that touches such a page then waits without an end, and cannot even be killed.
    """
    seals = seals_of(fd)
    if seals is None:
        raise RequestError(f"{label} is not shared memory", code="not_attachable")
    return seals


def _check(fd: int, label: str, uid: int, nbytes: int, *, sealable: bool) -> None:
    seals = _check_shared(fd, label)
    found = os.fstat(fd)
    _check_owner(found, label, uid)
    if seals & _NO_WRITES:
        raise RequestError(f"the memory of {label} is sealed against writing", code="not_attachable")
    if sealable and not seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL):
        what = f"the memory of {label} could shrink while it is mapped: seal it with F_SEAL_SHRINK"
        raise RequestError(what, code=UNSEALED)
    if found.st_size < nbytes:
        what = f"the memory of {label} has only {found.st_size} bytes; {nbytes} are needed"
        raise TierError(what, code=UNUSABLE)


def _check_seen(fd: int, label: str, inode: object) -> None:
    """Check the memory's identity: two containers may each have their own /dev/shm, with different files of a name."""
    if inode is not None and list(identity_of(fd)) != inode:
        what = f"{label} leads to other memory here than in the process that offers it: share /dev/shm (--ipc=host)"
        raise RequestError(what, code="not_attachable")


def identity_of(file: int | Path) -> tuple[int, int]:
    """Device and inode: the same for every name, descriptor and mapping of one piece of memory. Raises OSError."""
    found = os.stat(file)
    return found.st_dev, found.st_ino


def inode_of(data: Mapping[str, Any]) -> tuple[int, int] | None:
    """In the process that offers: the memory to which its handle leads now; None if that is no shared memory."""
    number, name = data.get("fd"), data.get("name")
    try:
        if isinstance(number, int):
            return identity_of(number)
        return identity_of(DIRECTORY / check_name(name)) if isinstance(name, str) else None
    except (OSError, RequestError):
        return None


def inodes_of(data: Mapping[str, Any]) -> tuple[tuple[int, int] | None, ...]:
    """`inode_of` each memory of a handle."""
    return tuple(inode_of(one) for one in (data, *data.get(MORE, ())))


@contextlib.contextmanager
def own_descriptors(data: Mapping[str, Any]) -> Iterator[list[int]]:
    """In the process that offers: a descriptor for each memory of a handle, to pass; [] if one cannot be opened."""
    with contextlib.ExitStack() as opened:
        found = []
        try:
            for one in (data, *data.get(MORE, ())):
                number = one.get("fd")
                if not isinstance(number, int):
                    number = os.open(DIRECTORY / check_name(one.get("name")), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                    opened.callback(os.close, number)
                os.fstat(number)
                found.append(number)
        except (OSError, RequestError):  # the daemon says what is wrong with it
            found = []
        yield found


def with_inodes(data: dict[str, Any], inodes: Sequence[tuple[int, int] | None]) -> dict[str, Any]:
    """The data of a handle, with these inodes of its memories."""
    said = [{} if one is None else {INODE: list(one)} for one in inodes] or [{}]
    more = [one | also for one, also in zip(data.get(MORE, ()), said[1:], strict=False)]
    return data | said[0] | ({MORE: more} if more else {})


def said_of_memory(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a handle without what the daemon knows of the memory to which it leads."""
    return _without((PEER, PASSED, INODE), data)


def memory_named(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a handle's data leads to, and where in it blocks lie, by which two offers are compared.

    A name or a descriptor's number may lead to other memory later, so it counts only where nothing else is known.
    """
    return _without((PEER, PASSED, "name", "fd") if INODE in data else (PEER, PASSED), data)


def _without(keys: Collection[str], data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a handle without these keys, also of its further memories."""
    left = {key: value for key, value in data.items() if key not in keys}
    if isinstance(left.get(MORE), list):
        left[MORE] = [_without(keys, one) if isinstance(one, Mapping) else one for one in left[MORE]]
    return left


def sealed(fd: int) -> None:
    """Seal the memory against shrinking, if it can be sealed. Raises RequestError if it is not shared memory."""
    if not _check_shared(fd, f"descriptor {fd}") & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
