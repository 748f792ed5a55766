"""The process that listens on a unix socket: which it is, and whether it waits for the CPU.

A client asks when a daemon is silent: a dead or stopped daemon is lost, one that gets no CPU is only slow. This works
for ipc endpoints on this machine, within one PID namespace, and where /proc shows the process. Nothing here raises.
"""

from __future__ import annotations

import socket as sockets
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
PROC = Path("/proc")


def listener_of(endpoint: str) -> int:
    """The pid of the process that listens on an ipc endpoint; 0 if nobody does or it cannot be known. Never waits."""
    scheme, _, address = endpoint.partition("://")
    if scheme != "ipc":
        return 0
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_NONBLOCK) as probe:
            probe.connect(name)
            credentials = probe.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
    except (OSError, ValueError):
        return 0
    pid, _, _ = _CREDENTIALS.unpack(credentials)
    return int(pid)


def wants_cpu(pid: int) -> bool:
    """Whether a thread of this process runs, or could if it got the CPU. False for 0."""
    if not pid:
        return False
    try:
        return any(_state(thread) == "R" for thread in (PROC / str(pid) / "task").iterdir())
    except OSError:
        return False


def _state(thread: Path) -> str:
    """proc_pid_stat(5): the letter after the name, which is in parentheses and may contain some."""
    return (thread / "stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2][:1]
