"""Decides whether an engine uses the packaged daemon, if its operator names no endpoint."""

from __future__ import annotations

import logging
import os
import socket

from transferd.config.sections import DEFAULT_ENDPOINT


def packaged_endpoint(engine: str, log: logging.Logger, *, gpu: bool) -> str:
    """The packaged daemon's endpoint if it listens, and can map this engine's memory; "" if it does not.

    It maps shared memory of every user who may connect. CUDA shares memory only among processes of one user, so for
    memory of a GPU the daemon must run as this user or as root. If it is there and not used, this logs a warning.
    engine: the engine's name for the warning.
    """
    if nobody_listens(DEFAULT_ENDPOINT):
        return ""
    path = DEFAULT_ENDPOINT.removeprefix("ipc://")
    try:
        owner = os.stat(path).st_uid
    except FileNotFoundError:
        return ""  # the daemon has just ended
    except OSError as error:
        why = f"this user may not connect to it ({error.strerror})"
    else:
        if not os.access(path, os.W_OK):
            why = "this user may not connect to it (server.socket_mode, server.socket_group)"
        elif gpu and owner not in (os.getuid(), 0):
            why = (
                f"it runs as another user (uid {owner}, we are {os.getuid()}), and CUDA shares memory of one user only"
            )
        else:
            return DEFAULT_ENDPOINT
    what = "not using the packaged daemon at %s: %s. To share it, run it as %s's user"
    log.warning(what, DEFAULT_ENDPOINT, why, engine)
    return ""


def nobody_listens(endpoint: str) -> bool:
    """Whether no process has the unix socket open. False if this cannot be known: another transport, no permission.

    We make no connection, because the daemon would report a silent one as a failed handshake. Instead we try to connect
    a datagram socket, which must fail, and the kernel's error shows whether a process listens. (gVisor's kernel always
    answers "refused", so there we make a connection.)
    """
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc":
        return False
    return _refused(path, socket.SOCK_DGRAM) and _refused(path, socket.SOCK_STREAM)


def _refused(path: str, kind: socket.SocketKind) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as probe:
            probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return True
    except OSError:
        return False  # a process listens (the socket is of another kind), its queue is full, or we may not connect
    return False
