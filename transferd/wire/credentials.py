"""The users at the other end of a unix socket, as the kernel reports them (SO_PEERCRED), and which users may connect.

The kernel notes them when a peer connects. They are read once, when the connection is accepted, and belong to that
connection: they end with it (acceptor.py).

The kernel translates a uid into the user namespace of the reader: all users that are not mapped there appear as one,
the overflow uid (65534, "nobody"). systemd's PrivateUsers= makes such a namespace, and so do rootless containers. There
only mapped users have uids of their own. So no right may follow from the overflow uid: `resolve_uids` refuses a list
with a user that is not mapped, and `hidden` returns whether a peer can own nothing (ADR 71).
"""

from __future__ import annotations

import grp
import os
import pwd
import socket as sockets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transferd.errors import ConfigError
from transferd.runtime.descriptors import CAP_CHOWN, has_capability

UID_MAP = Path("/proc/self/uid_map")
OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
ALL_UIDS = 2**32 - 1  # the last one, (uid_t) -1, is no user
MOST_UIDS = 64  # each connection is compared with all of them; use socket_group for a group of users

_CREDENTIALS = struct.Struct("3i")


class Credentials(NamedTuple):
    """The process at the other end of a unix socket, as this process's namespaces show it. pid: 0 if it is not seen."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        return f"uid {self.uid}, pid {self.pid}"


def resolve_uids(key: str, users: Sequence[int | str]) -> frozenset[int]:
    """Uids of users given by number or name. Raises ConfigError naming `key`."""
    uids = frozenset(_uid(key, user) for user in users)
    if len(uids) > MOST_UIDS:
        what = f"has {len(uids)} users, the limit is {MOST_UIDS}; use server.socket_group to allow a whole group"
        raise ConfigError(key, what)
    if uids:
        mapped = [range(first, first + count) for first, count in _map()]
        unmapped = sorted(uid for uid in uids if hidden(uid) or not any(uid in known for known in mapped))
        if unmapped:
            problem = "these uids are not mapped in this user namespace; set PrivateUsers=no in the unit"
            raise ConfigError(key, problem, unmapped)
    return uids


def resolve_group(key: str, group: str) -> int:
    """Gid of a group given by name or number; -1 for "". Raises ConfigError naming `key`."""
    if not group:
        return -1
    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(key, "no such group", group) from None


def may_give(gid: int) -> bool:
    """Whether this process may give its own files to the group. True for -1, which changes no group."""
    return gid in (-1, os.getegid(), *os.getgroups()) or has_capability(CAP_CHOWN)


def user_name(uid: int) -> str:
    """The name of a user, or the number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def credentials_of(connection: sockets.socket) -> Credentials | None:
    """Who opened an accepted connection; None on tcp."""
    if connection.family != sockets.AF_UNIX:
        return None
    found = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
    return Credentials(*_CREDENTIALS.unpack(found))


def hidden_uid() -> int | None:
    """The uid as which the kernel shows every user that is not mapped here; None if all users are mapped."""
    if sum(count for _, count in _map()) >= ALL_UIDS:
        return None
    try:
        return int(OVERFLOW_UID.read_text())
    except OSError:
        return 65534


def hidden(uid: int | None) -> bool:
    """Whether this uid may stand for several users: two peers, or a peer and a file, that both show it may differ.

    Also True for a user that is mapped to the overflow uid: it looks like the others. None, a peer of tcp, is not
    hidden: it has no user.
    """
    return uid is not None and uid == hidden_uid()


def users_problem(endpoints: Sequence[str]) -> str:
    """A warning about peers of these endpoints that may share one uid, with its consequences; "" if none may."""
    problems = []
    if (uid := hidden_uid()) is not None:
        what = f"users that this user namespace does not map all appear as uid {uid}: they cannot register engines"
        problems.append(f"{what} (a unit: PrivateUsers=no; containers: one user namespace for daemon and engine)")
    if by_network := [endpoint for endpoint in endpoints if endpoint.startswith("tcp://")]:
        what = "names no user: whoever may connect there may use the engines that registered there"
        problems.append(f"{', '.join(by_network)} {what}")
    return "; ".join(problems)


def _uid(key: str, user: int | str) -> int:
    if isinstance(user, int):
        if user < 0:
            raise ConfigError(key, "a uid cannot be negative", user)
        return user
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ConfigError(key, "no such user", user) from None


def _map() -> list[tuple[int, int]]:
    """(first uid, count) of each range that is mapped in this process's user namespace (user_namespaces(7)).

    Without user namespaces, or without a /proc to look at, every uid counts as mapped.
    """
    try:
        lines = UID_MAP.read_text().splitlines()
    except OSError:
        return [(0, ALL_UIDS)]
    return [(int(first), int(count)) for first, _, count in map(str.split, lines)]
