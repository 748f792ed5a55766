"""Throw-away users and groups of this machine, and processes that become them.

    with accounts("engine", "other") as users: users["other"].uid

Names are unique for each process; the users and their groups are removed at the end. Only root can make them.
"""

from __future__ import annotations

import asyncio.base_subprocess  # noqa: F401 - see `become`
import concurrent.futures.thread  # noqa: F401
import contextlib
import ctypes
import encodings.ascii
import encodings.idna  # noqa: F401
import grp
import importlib
import os
import pkgutil
import pwd
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PR_SET_DUMPABLE = 4


@dataclass(frozen=True, slots=True)
class Account:
    """A user with a group of its own; groups: the others that it is in."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@contextlib.contextmanager
def accounts(*names: str, shared: Sequence[str] = ()) -> Iterator[dict[str, Account]]:
    """Make the users. shared: those of them that are in the group of the first one, too."""
    made: dict[str, Account] = {}
    try:
        for name in names:
            login = f"td-{os.getpid()}-{name}"
            groups = ["--groups", made[names[0]].name] if name in shared else []
            subprocess.run(
                ["useradd", "--no-create-home", "--user-group", "--shell", "/bin/false", *groups, login], check=True
            )
            found = pwd.getpwnam(login)
            others = tuple(group.gr_gid for group in grp.getgrall() if login in group.gr_mem)
            made[name] = Account(login, found.pw_uid, found.pw_gid, others)
        yield made
    finally:
        for account in reversed(made.values()):  # the first one's group goes with it once nobody else is in it
            subprocess.run(["userdel", "--force", account.name], check=False, capture_output=True)


def preload() -> None:
    """Import what is imported late: another user may not read this installation."""
    import transferd

    for module in pkgutil.walk_packages(transferd.__path__, "transferd."):
        if not module.name.endswith("__main__") and ".adapters." not in module.name:
            with contextlib.suppress(ImportError):  # extras that are not installed
                importlib.import_module(module.name)


def become(uid: int, gid: int, groups: Sequence[int] = ()) -> None:
    """Become this user for good, as a process that this user started itself would be. Import everything before."""
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)
    be_visible()


def be_visible() -> None:
    """Let this process's user see it in /proc, as if that user had started it: a change of user hides a process."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
