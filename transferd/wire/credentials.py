"""The users at the other end of a unix socket, as the kernel reports them (SO_PEERCRED), and which users may connect.

The kernel notes them when a peer connects. They are read once, when the connection is accepted, and belong to that
connection: they end with it (connection.py).

The kernel translates a uid into the user namespace of the reader: a uid that is not mapped there appears as 65534,
"nobody". A list of uids is meaningless then, so `resolve_uids` refuses it (systemd's PrivateUsers= creates such a
namespace; systemd/transferd.service.d/peers.conf turns it off).
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
from transferd.runtime.capabilities import CAP_CHOWN, has_capability

UID_MAP = Path("/proc/self/uid_map")
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
        unmapped = sorted(uids - _mapped(uids))
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


def _uid(key: str, user: int | str) -> int:
    if isinstance(user, int):
        if user < 0:
            raise ConfigError(key, "a uid cannot be negative", user)
        return user
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ConfigError(key, "no such user", user) from None


def _mapped(uids: frozenset[int]) -> frozenset[int]:
    """The uids that are mapped in this process's user namespace (user_namespaces(7))."""
    try:
        ranges = [tuple(map(int, line.split())) for line in UID_MAP.read_text().splitlines()]
    except OSError:  # no /proc, or a strict ProtectProc=: we cannot know
        return uids
    return frozenset(uid for uid in uids if any(start <= uid < start + count for start, _, count in ranges))
