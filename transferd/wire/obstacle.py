"""What keeps a client from its daemon, found by trying: ConnectTimeout says it.

libzmq retries in silence whatever happens. So one more connection is tried, on a socket of its own whose
monitor tells how far it came; and a unix socket that could not be connected to is looked at, because the
monitor does not say why. Nothing here is needed to connect, so nothing here raises.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import socket as sockets
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import zmq

TRY_S = 0.5  # a handshake on a machine near by takes milliseconds
_EVENT = struct.Struct("=Hi")  # libzmq's monitor frame: event, value
_FINAL = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
NOBODY_LISTENS = "nobody listens there; is the daemon running?"


async def find_obstacle(endpoint: str, prepare: Callable[[zmq.Socket[bytes]], None], *, keys: bool) -> str:
    """Why `endpoint` cannot be reached, in a few words; "" if it can be, as far as one sees from here.

    prepare: sets a socket's options as the client's. keys: the client has CURVE keys and uses them here.
    Takes at most TRY_S, plus a moment.
    """
    scheme, _, address = endpoint.partition("://")
    try:
        event, value = await _try(endpoint, prepare)
    except (zmq.ZMQError, OSError):  # out of descriptors, most likely
        return ""
    if event == zmq.EVENT_CLOSED:
        is_file = scheme == "ipc" and not address.startswith("@")
        return (obstacle_at(address) if is_file else "") or NOBODY_LISTENS
    return _meaning(event, value, scheme, keys)


def obstacle_at(path: str) -> str:
    """Why a unix socket cannot be connected to; "" if it can be."""
    try:
        found = os.stat(path)
        if not stat.S_ISSOCK(found.st_mode):
            return "that is not a socket"
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_NONBLOCK) as probe:
            probe.connect(path)
    except FileNotFoundError:
        return "there is no such socket; is the daemon running?"
    except PermissionError:
        return f"permission denied: {_who_may(path)}"
    except ConnectionRefusedError:
        return NOBODY_LISTENS
    except BlockingIOError:
        return "the daemon accepts no more connections; it may be stopped"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _who_may(path: str) -> str:
    """Which directory or socket denies us, and to whom it would not."""
    denied = path
    for directory in reversed(Path(path).absolute().parents):
        if not os.access(directory, os.X_OK, effective_ids=True):
            denied = str(directory)
            break
    try:
        found = os.stat(denied)
    except OSError:
        return denied
    needed = stat.S_IXGRP if stat.S_ISDIR(found.st_mode) else stat.S_IWGRP
    owner, group, me = _user(found.st_uid), _group(found.st_gid), _user(os.geteuid())
    mode = f"mode {stat.S_IMODE(found.st_mode):04o}"
    if found.st_mode & needed:
        return f"{denied} ({mode}) is for group {group}, and user {me} of this process is not in it"
    return f"{denied} ({mode}) is for user {owner}, and this process runs as user {me}"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


async def _try(endpoint: str, prepare: Callable[[zmq.Socket[bytes]], None]) -> tuple[int, int]:
    """Connect once; (event, value) of how it ended, (0, 0) if it had not after TRY_S."""
    loop = asyncio.get_running_loop()
    with zmq.Context() as context, context.socket(zmq.DEALER) as probe:
        prepare(probe)
        probe.setsockopt(zmq.LINGER, 0)
        with probe.get_monitor_socket(_FINAL) as monitor:
            probe.connect(endpoint)
            give_up = loop.time() + TRY_S
            try:
                while loop.time() < give_up:
                    if monitor.poll(0):
                        event, value = _EVENT.unpack(monitor.recv_multipart(zmq.DONTWAIT)[0])
                        return event, value
                    await asyncio.sleep(0.01)
            finally:
                probe.disable_monitor()
    return 0, 0


def _meaning(event: int, value: int, scheme: str, keys: bool) -> str:
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return "it accepts connections and does not answer; the daemon may be stopped or stuck"
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        if scheme == "ipc":
            return f"the daemon refuses user {_user(os.geteuid())} (server.allowed_uids)"
        return "the daemon refuses this client's key (server.curve.client_keys_dir)"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "the daemon uses no CURVE keys" if keys else "the daemon asks for CURVE keys (ClientCurve)"
    if event:  # two ends that do not fit hang up on each other, and either may be the first
        guess = "have no room (server.max_connections)" if scheme == "ipc" else "ask for CURVE keys (ClientCurve)"
        if keys:
            guess = "have another key than server_key says, or use no CURVE keys"
        return f"it closed the connection during the handshake; it may {guess}, or be no transferd"
    return "no handshake came about; the host, its firewall or the daemon is silent"
