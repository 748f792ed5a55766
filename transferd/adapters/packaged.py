"""The packaged daemon: whether an engine uses it when its operator names no other one."""

from __future__ import annotations

import logging
import os
import socket

from transferd.config.sections import DEFAULT_ENDPOINT


def packaged_endpoint(engine: str, log: logging.Logger) -> str:
    """The packaged daemon's endpoint if it listens and runs as this user or as root; "" if it does not.

    Another user's daemon cannot open this user's memory: segments in /dev/shm have mode 0600, and CUDA shares memory
    only among processes of one user. A warning says so. engine: its name for that line.
    """
    if nobody_listens(DEFAULT_ENDPOINT):
        return ""
    path = DEFAULT_ENDPOINT.removeprefix("ipc://")
    try:
        owner = os.stat(path).st_uid
    except FileNotFoundError:
        return ""  # it has just ended
    except OSError as error:
        why = f"this user may not connect to it ({error.strerror})"
    else:
        if owner not in (os.getuid(), 0):
            why = f"it runs as another user (uid {owner}, we are {os.getuid()}), who cannot open this engine's memory"
        elif not os.access(path, os.W_OK):
            why = "this user may not connect to it"
        else:
            return DEFAULT_ENDPOINT
    what = "not using the packaged daemon at %s: %s. To share it, run it as %s's user"
    log.warning(what, DEFAULT_ENDPOINT, why, engine)
    return ""


def nobody_listens(endpoint: str) -> bool:
    """Whether no process has the unix socket open. False if this cannot be known: another transport, no permission.

    The daemon sees no connection: it would report one that says nothing as a failed handshake. A datagram socket
    cannot connect to the daemon's, and the kernel's error tells whether there is one. (gVisor's kernel always answers
    "refused"; only a connection tells there.)
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
        return False  # it is of another kind, its queue is full, or we may not connect
    return False
