"""Finds the process that listens on a unix socket, and tells whether it is waiting for a CPU or a disk.

A client uses this when a daemon is silent: a dead or stopped daemon is lost, one that gets no CPU is only slow. So is
one that waits in the kernel for a disk or for memory, for example to import a module while others write. It
works for ipc endpoints on this machine, within one PID namespace, if /proc shows the process. Nothing here raises.
"""

from __future__ import annotations

import socket as sockets
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
PROC = Path("/proc")
BUSY = ("R", "D")  # running or ready to run; in an uninterruptible wait


def listener_of(endpoint: str) -> int:
    """The pid of the process that listens on an ipc endpoint; 0 if there is none or it is unknown. Never waits."""
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


def wants_machine(pid: int) -> bool:
    """Whether a thread of this process runs, or waits for a CPU, a disk or memory. False for pid 0."""
    if not pid:
        return False
    try:
        return any(_state(thread) in BUSY for thread in (PROC / str(pid) / "task").iterdir())
    except OSError:
        return False


def _state(thread: Path) -> str:
    """A thread's state, the letter after its name (proc_pid_stat(5)). The name itself may contain parentheses."""
    return (thread / "stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2][:1]
