"""Which process owns memory that was handed over, and whether that process is still there.

A handle outlives the memory it names: in a message that was sent late, in a file that nobody removed.
So it carries its owner: the machine's boot, the process, and when that process started, since process
ids are given out again. A process in another pid namespace (another container) cannot be looked up
from here; of such an owner only the boot is checked.

Standard library and msgspec only: a client imports this to say who it is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from transferd.errors import EngineGone, RequestError

PROC = Path("/proc")


class Owner(msgspec.Struct, frozen=True):
    """boot: the kernel's boot id. namespace: inode of the pid namespace. started: ticks since boot; 0 = unknown."""

    boot: str
    namespace: int
    pid: int
    started: int


def this_process() -> Owner:
    """Who we are. Costs three small files; not cached, since a fork is another process."""
    return Owner(_boot(), _namespace(), os.getpid(), _started(os.getpid()))


def as_data(owner: Owner) -> dict[str, Any]:
    """Plain data for a handle."""
    data: dict[str, Any] = msgspec.to_builtins(owner)
    return data


def check_owner(data: object) -> Owner:
    """The owner that a handle names, known to be alive as far as can be told from here.

    Raises RequestError for what is no owner, EngineGone for one that is no more.
    """
    try:
        owner = msgspec.convert(data, Owner)
    except msgspec.ValidationError as error:
        raise RequestError(f"the owner of the handle cannot be read: {error}", code="bad_value") from None
    if owner.boot != _boot():
        raise EngineGone("the handle is from another machine, or from before this one was started")
    if owner.namespace == _namespace() and not _alive(owner):
        raise EngineGone(f"the process that made the handle, {owner.pid}, has gone")
    return owner


def _alive(owner: Owner) -> bool:
    if owner.pid <= 0:
        return False
    try:
        os.kill(owner.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is another user's, and alive
    return owner.started in (0, _started(owner.pid) or owner.started)


def _boot() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> int:
    return os.stat(PROC / "self/ns/pid").st_ino


def _started(pid: int) -> int:
    """Field 22 of proc(5)'s stat, after the command's name, which may hold anything; 0 if it cannot be read."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])
