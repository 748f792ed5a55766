"""Finds out why a client cannot reach its daemon, for the text of ConnectTimeout.

libzmq retries silently, whatever the reason. So we try one more connection on a separate socket with a monitor, which
shows how far it got. If a unix socket refuses the connection, we also check its path, because the monitor does not
give the reason. This is only for diagnosis, so nothing here raises.
"""

from __future__ import annotations

import asyncio
import grp
import os
import socket as sockets
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import zmq

from transferd.errors import NoDescriptors
from transferd.runtime.descriptors import check_free
from transferd.wire.credentials import credentials_of, user_name

DESCRIPTORS = 16  # a context, its threads, a socket and its monitor; without any, libzmq ends this process
TRY_S = 0.5  # a handshake with a nearby machine takes milliseconds
_EVENT = struct.Struct("=Hi")  # libzmq's monitor frame: event, value
_FINAL = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_FINAL |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
NO_SOCKET = "there is no such socket; is the daemon running?"
NOBODY_LISTENS = "nobody listens there; is the daemon running?"
SUSPENDED = "the daemon does not accept connections; it may be suspended or overloaded"
STUCK = "the daemon accepts connections but does not answer; it may be suspended or stuck"
SILENT = "the handshake got no reply; the host, its firewall or the daemon is silent"


async def find_obstacle(endpoint: str, prepare: Callable[[zmq.Socket[bytes]], None], *, keys: bool) -> str:
    """Say briefly why `endpoint` cannot be reached; "" if no reason can be found.

    prepare: sets the same socket options as the client's.
    keys: whether the client uses CURVE keys for this endpoint.

    Takes little more than TRY_S.
    """
    scheme, _, address = endpoint.partition("://")
    try:
        check_free(DESCRIPTORS, "to look for the reason")
        event, value = await _try(endpoint, prepare)
    except NoDescriptors as error:
        return str(error)
    except (zmq.ZMQError, OSError):
        return ""
    is_file = scheme == "ipc" and not address.startswith("@")
    if event == zmq.EVENT_CLOSED:
        return (obstacle_at(address) if is_file else "") or NOBODY_LISTENS
    if not event and is_file and (found := obstacle_at(address)):
        return found  # on a busy machine, libzmq's thread may take longer than TRY_S to notice
    return _meaning(event, value, scheme, keys)


def is_refusal(obstacle: str) -> bool:
    """Whether this obstacle shows that the connection is refused. If False, the daemon may only be slow to answer."""
    return obstacle not in ("", SUSPENDED, STUCK, SILENT)


def obstacle_at(path: str) -> str:
    """Say why a connection to a unix socket fails; "" if it succeeds."""
    try:
        found = os.stat(path)
        if not stat.S_ISSOCK(found.st_mode):
            return "the path is not a socket"
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_NONBLOCK) as probe:
            probe.connect(path)
    except FileNotFoundError:
        return NO_SOCKET
    except PermissionError:
        return f"permission denied: {_who_may(path)}"
    except ConnectionRefusedError:
        return NOBODY_LISTENS
    except BlockingIOError:
        return SUSPENDED
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _who_may(path: str) -> str:
    """Name the directory or socket that denies access, and the users who have access to it."""
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
    owner, me = user_name(found.st_uid), user_name(os.geteuid())
    try:
        group = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        group = str(found.st_gid)
    mode = f"mode {stat.S_IMODE(found.st_mode):04o}"
    if found.st_mode & needed:
        return f"{denied} ({mode}) allows group {group}, but user {me} is not in it (usermod -aG {group} {me})"
    return f"{denied} ({mode}) allows user {owner}, but this process runs as user {me}"


async def _try(endpoint: str, prepare: Callable[[zmq.Socket[bytes]], None]) -> tuple[int, int]:
    """Connect once; return (event, value) of the outcome, or (0, 0) if there was none within TRY_S."""
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
        return STUCK
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        if scheme == "ipc":
            return f"the daemon refuses user {user_name(os.geteuid())} (server.allowed_uids)"
        return "the daemon refuses this client's key (server.curve.client_keys_dir)"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "the daemon does not use CURVE keys" if keys else "the daemon requires CURVE keys (ClientCurve)"
    if event:  # two incompatible ends both close the connection, and either may be first
        guess = "be full (server.max_connections)" if scheme == "ipc" else "require CURVE keys (ClientCurve)"
        if keys:
            guess = "have a key other than server_key, or not use CURVE keys"
        return f"the peer closed the connection during the handshake; it may {guess}, or not be transferd"
    return SILENT


PROC = Path("/proc")
BUSY = ("R", "D")  # running or ready to run; in an uninterruptible wait
# Flags of a thread (linux/sched.h).
EXITING, KILLED = 0x4, 0x400


def listener_of(endpoint: str) -> int:
    """The pid of the process that listens on an ipc endpoint; 0 if there is none or it is unknown. Never waits.

    A silent daemon that is dead or stopped is lost; one that waits for a CPU or a disk is only slow.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme != "ipc":
        return 0
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_NONBLOCK) as probe:
            probe.connect(name)
            listener = credentials_of(probe)
    except (OSError, ValueError):
        return 0
    return 0 if listener is None else listener.pid


def wants_machine(pid: int) -> bool:
    """Whether a thread of this process runs, or waits for a CPU, a disk or memory. False for pid 0.

    False as well for a process that was killed, although it may take long to write its core and to free its memory.
    """
    if not pid:
        return False
    try:
        threads = [_state(thread) for thread in (PROC / str(pid) / "task").iterdir()]
    except OSError:
        return False
    killed = any(flags & KILLED for _, flags in threads)
    return not killed and any(state in BUSY and not flags & EXITING for state, flags in threads)


def _state(thread: Path) -> tuple[str, int]:
    """A thread's state and flags, which follow its name (proc_pid_stat(5)). The name itself may contain parentheses."""
    try:
        stat = (thread / "stat").read_bytes().decode(errors="replace")  # no codec that may have to be imported
    except OSError:  # it has just ended
        return "", 0
    fields = stat.rpartition(") ")[2].split(" ", 7)
    return fields[0], int(fields[6])
