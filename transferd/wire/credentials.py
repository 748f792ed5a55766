"""The users at the other end of a unix socket, as the kernel reports them (SO_PEERCRED), and which users may connect.

libzmq passes them on in two places, both tested with other real users: in the request that it makes before it admits
a connection (zap.py), and in the property "Peer-Address" of every message that arrives by ipc. Both have the form
`…:uid:gid:pid`; for tcp it is only the address.

The kernel translates a uid into the user namespace of the reader: a uid that is not mapped there appears as 65534,
"nobody". A list of uids is meaningless then, so `resolve_uids` refuses it (systemd's PrivateUsers= creates such a
namespace; systemd/transferd.service.d/peers.conf turns it off).
"""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Sequence
from pathlib import Path

import zmq

from transferd.errors import ConfigError
from transferd.runtime.capabilities import CAP_CHOWN, has_capability

UID_MAP = Path("/proc/self/uid_map")
MOST_UIDS = 64  # each connection is compared with all of them; use socket_group for a group of users


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


def peer_address(message: zmq.Frame) -> str:
    """The peer address of a message, in libzmq's form; "" if it has none."""
    try:
        return str(message.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


def uid_of(address: str) -> int | None:
    """The uid of the process that connected; None if the address has none."""
    parts = address.rsplit(":", 3)
    return int(parts[1]) if len(parts) == 4 and parts[1].isdigit() else None


def peer_text(address: str) -> str:
    """The peer for a log: user and process on this machine, else the network address."""
    parts = address.rsplit(":", 3)
    return f"uid {parts[1]}, pid {parts[3]}" if uid_of(address) is not None else address


def process_of(text: str) -> tuple[int | None, int | None]:
    """(uid, pid) out of `peer_text`'s text; (None, None) for a peer that is unknown or on another machine."""
    found = re.fullmatch(r"uid (\d+), pid (\d+)", text)
    return (int(found[1]), int(found[2])) if found else (None, None)


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
