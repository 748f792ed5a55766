"""The process that owns shared memory, and whether it is still alive.

A handle can outlive the memory it names, in a late message or a stale file. So it names its owner: the machine's
boot, the process, and the start time of the process, because the kernel reuses process ids. A process in another
pid namespace (another container) cannot be looked up from here; for such an owner only the boot is checked.
"""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from pathlib import Path
from typing import Any

import msgspec

from transferd.errors import EngineGone, RequestError
from transferd.runtime.compat import convert, converted

PROC = Path("/proc")


class Owner(msgspec.Struct, frozen=True):
    """The process that owns memory."""

    boot: str  # the kernel's boot id
    namespace: int  # inode of the pid namespace
    pid: int
    started: int  # ticks since boot; 0 = unknown


def this_process() -> Owner:
    """This process as an owner. Reads three small files; not cached, because a fork is another process."""
    return Owner(_boot(), _namespace(), os.getpid(), _started(os.getpid()))


class WatchedProcess:
    """Another process. fd: its pidfd, which this owns: readable when it has ended; -1 if the kernel has no pidfd."""

    def __init__(self, owner: Owner, fd: int) -> None:
        self.owner = owner
        self.fd = fd
        self._known_ended = False
        if fd >= 0:
            weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def find(cls, data: object) -> WatchedProcess | None:
        """The process that an owner's data names; None if the data is malformed, or the process is not visible here."""
        try:
            owner = convert(data, Owner)
            if owner.pid <= 0 or not owner.started or (owner.boot, owner.namespace) != (_boot(), _namespace()):
                return None
            return cls._opened(owner)
        except (msgspec.ValidationError, OSError):  # OSError: this process may open no more files
            return None

    @classmethod
    def of_pid(cls, pid: int) -> WatchedProcess | None:
        """The process with this pid, which the kernel has just reported for a connection; None for 0."""
        started = _started(pid) if pid > 0 else 0
        return cls._opened(Owner(_boot(), _namespace(), pid, started)) if started else None

    @classmethod
    def _opened(cls, owner: Owner) -> WatchedProcess:
        fd = -1
        with contextlib.suppress(OSError, OverflowError):  # it has ended, or the kernel has no pidfd
            fd = os.pidfd_open(owner.pid)
        process = cls(owner, fd)
        # Look after opening: if the pid was used again before, the descriptor is another process's.
        process._known_ended = not _alive(owner)
        return process

    @property
    def ended(self) -> bool:
        """Whether it has ended, with all its threads."""
        if not self._known_ended:
            if self.fd >= 0:
                poll = select.poll()
                poll.register(self.fd, select.POLLIN)
                self._known_ended = bool(poll.poll(0))
            else:
                self._known_ended = not _alive(self.owner)
        return self._known_ended


def as_data(owner: Owner) -> dict[str, Any]:
    """The owner as plain data for a handle."""
    data: dict[str, Any] = msgspec.to_builtins(owner)
    return data


def check_owner(data: object) -> Owner:
    """The owner that a handle names, checked to be alive if this process can see it.

    Raises RequestError if the data is no owner, EngineGone if the owner is dead.
    """
    owner = converted(data, Owner, "the handle's owner is malformed")
    if owner.boot != _boot():
        raise EngineGone("the handle is from another machine, or from before this machine's last boot")
    if owner.namespace == _namespace() and not _alive(owner):
        raise EngineGone(f"the process that made the handle, {owner.pid}, has ended")
    return owner


def check_user(owner: Owner, uid: int | None) -> None:
    """Check that the process named by a handle runs as this user, if that can be known.

    uid: of the client that offers; None if unknown. Raises RequestError with code `not_yours`.
    """
    if uid is None or owner.namespace != _namespace():
        return
    try:
        status = (PROC / str(owner.pid) / "status").read_text()
    except OSError:
        return
    effective = next(int(line.split()[2]) for line in status.splitlines() if line.startswith("Uid:"))
    if effective != uid:
        what = f"the process that made the handle, {owner.pid}, runs as the user {effective}, and its client as {uid}"
        raise RequestError(what, code="not_yours")


def _alive(owner: Owner) -> bool:
    if owner.pid <= 0:
        return False
    try:
        os.kill(owner.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # alive, but another user's
    return owner.started in (0, _started(owner.pid) or owner.started)


def _boot() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> int:
    return os.stat(PROC / "self/ns/pid").st_ino


def _started(pid: int) -> int:
    """Field 22 of proc(5)'s stat, after the command name, which may contain anything; 0 if it cannot be read."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])
