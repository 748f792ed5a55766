"""File descriptors: how many this process may have, how many of them connections may take, and the standard three.

libzmq ends the process when a connection cannot be accepted for want of a descriptor (an assertion in its
ipc listener; seen with 4.3.5). So the soft limit, which is low by default for the sake of programs that
use select(), is raised to the hard one at start, and connections are bounded well below it (connection_limit.py).
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import sys

from transferd.errors import ConfigError

LEAST = 512  # a daemon that starts with fewer could not promise to live
OTHERS = 1024  # descriptors that are not clients' connections: files, HTTP, a pool's sockets, libraries


def raise_limit() -> int:
    """Allow this process as many descriptors as it can have; returns how many. Raises ConfigError for too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < LEAST:
        problem = f"at least {LEAST} file descriptors are needed (LimitNOFILE in the unit, ulimit -n)"
        raise ConfigError("RLIMIT_NOFILE", problem, hard)
    return hard


def first_refused(max_connections: int) -> int:
    """The descriptor number from which on a connection is one too many.

    The kernel gives out the lowest free number, so the number of a new connection says how many are open. A
    quarter of a low limit is kept free: for files, and for what is accepted before connection_limit.py sees it.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = max_connections + OTHERS
    return wanted if limit == resource.RLIM_INFINITY else min(wanted, limit - limit // 4)


def fill_standard() -> None:
    """Open /dev/null in the place of a standard descriptor that is closed. Call it before anything else is opened.

    Else the next socket or file would get its number, and what a library prints would go into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    # Python leaves None where it found nothing, and print(file=None) writes to stdout.
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def never_waiting(fd: int) -> int:
    """A descriptor for the pipe at `fd` on which no write waits, without changing the pipe for others; else `fd`."""
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return fd


def spare(wanted: int) -> int:
    """How many of `wanted` connections besides the clients' there may be: an eighth of a low limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if limit == resource.RLIM_INFINITY else min(wanted, limit // 8)
