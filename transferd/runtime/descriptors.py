"""File descriptors: how many this process may have, and how many of them connections may take.

libzmq ends the process when a connection cannot be accepted for want of a descriptor (an assertion in its
ipc listener; seen with 4.3.5). So the soft limit, which is low by default for the sake of programs that
use select(), is raised to the hard one at start, and connections are bounded well below it (connection_limit.py).
"""

from __future__ import annotations

import resource

from transferd.errors import ConfigError

LEAST = 512  # a daemon that starts with fewer could not promise to live
OTHERS = 512  # descriptors that are not clients' connections: files, a pool's sockets, libraries


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
    quarter of a low limit is kept free: for files, and for what is accepted before the doorman sees it.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = max_connections + OTHERS
    return wanted if limit == resource.RLIM_INFINITY else min(wanted, limit - limit // 4)
