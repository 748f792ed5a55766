"""Finds the process that listens on a unix socket, and whether it is waiting for a CPU or a disk.

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
# Flags of a thread (linux/sched.h).
EXITING, KILLED = 0x4, 0x400


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
        stat = (thread / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # it has just ended
        return "", 0
    fields = stat.rpartition(") ")[2].split(" ", 7)
    return fields[0], int(fields[6])
