"""Who is at the other end of a unix socket, as the kernel says it (SO_PEERCRED), and who may be.

libzmq passes it on in two places, each tested with real other users: in the question that it asks before it admits
a connection (zap.py), and in the property "Peer-Address" of every message that came in by ipc. Both have one form,
`…:uid:gid:pid`; for tcp it is the address alone.

The kernel translates a uid into the user namespace of whoever asks: one that has no name there appears
as 65534, "nobody". A list of uids means nothing then, so `resolve_uids` refuses it (systemd's
PrivateUsers= makes such a namespace; systemd/transferd.service.d/peers.conf switches it off).
"""

from __future__ import annotations

import grp
import pwd
import re
from collections.abc import Sequence
from pathlib import Path

import zmq

from transferd.errors import ConfigError

UID_MAP = Path("/proc/self/uid_map")
MOST_UIDS = 64  # a connection is compared with each; a group of users is what socket_group is for


def resolve_uids(key: str, users: Sequence[int | str]) -> frozenset[int]:
    """Uids of users given by number or name. Raises ConfigError naming `key`."""
    uids = frozenset(_uid(key, user) for user in users)
    if len(uids) > MOST_UIDS:
        raise ConfigError(key, f"has {len(uids)} users, at most {MOST_UIDS}; a group can be had by socket_group")
    if uids:
        unmapped = sorted(uids - _mapped(uids))
        if unmapped:
            problem = "are not known in this user namespace, and would look like nobody (PrivateUsers= of the unit?)"
            raise ConfigError(key, problem, unmapped)
    return uids


def resolve_group(key: str, group: str) -> int:
    """Gid of a group given by name or number; -1 for "". Raises ConfigError naming `key`."""
    if not group:
        return -1
    if group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(key, "there is no such group", group) from None


def peer_address(message: zmq.Frame) -> str:
    """Where a message came from, in libzmq's form; "" where it does not say."""
    try:
        return str(message.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


def uid_of(address: str) -> int | None:
    """The uid of the process that connected; None where the kernel did not say."""
    parts = address.rsplit(":", 3)
    return int(parts[1]) if len(parts) == 4 and parts[1].isdigit() else None


def peer_text(address: str) -> str:
    """The same for a log: user and process on this machine, else the network address."""
    parts = address.rsplit(":", 3)
    return f"uid {parts[1]}, pid {parts[3]}" if uid_of(address) is not None else address


def process_of(text: str) -> tuple[int | None, int | None]:
    """(uid, pid) as peer_text wrote them; (None, None) of a peer that is not on this machine or not known."""
    found = re.fullmatch(r"uid (\d+), pid (\d+)", text)
    return (int(found[1]), int(found[2])) if found else (None, None)


def _uid(key: str, user: int | str) -> int:
    if isinstance(user, int):
        if user < 0:
            raise ConfigError(key, "a uid is not negative", user)
        return user
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ConfigError(key, "there is no such user", user) from None


def _mapped(uids: frozenset[int]) -> frozenset[int]:
    """Those that have a name of their own in this process's user namespace (user_namespaces(7))."""
    try:
        ranges = [tuple(map(int, line.split())) for line in UID_MAP.read_text().splitlines()]
    except OSError:  # no /proc, or ProtectProc= of a stricter kind: nothing to tell it by
        return uids
    return frozenset(uid for uid in uids if any(start <= uid < start + count for start, _, count in ranges))
