"""File descriptors: the process's limit, the share that connections may use, and the three standard ones.

The soft limit is low by default for programs that use select(), so the daemon raises it to the hard limit at start and
bounds connections well below that (wire/acceptor.py). Half of a low limit stays free for files and libraries.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from transferd.errors import ConfigError, NoDescriptors

if TYPE_CHECKING:
    import asyncio

LEAST = 2048  # half of them for files, HTTP, a pool's sockets and libraries
OTHERS = 1024  # descriptors besides clients' connections: files, HTTP, a pool's sockets, libraries


def raise_limit() -> int:
    """Raise the soft limit to the hard limit and return it. Raises ConfigError if that is too low."""
    hard = hard_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def hard_limit() -> int:
    """The limit to which this process may raise its own. Raises ConfigError if that is too low for the daemon."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < LEAST:
        problem = f"the limit must be at least {LEAST} file descriptors; raise LimitNOFILE in the unit, or ulimit -n"
        raise ConfigError("RLIMIT_NOFILE", problem, hard)
    return hard


def soft_limit() -> int:
    """How many descriptors this process may have open; a huge number if that has no limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def most_connections(wanted: int) -> int:
    """How many connections of clients to allow: `wanted`, but less than half of the limit.

    It depends on the limit alone. Whatever else takes descriptors has bounds of its own, below the rest: HTTP and
    subscribers (`spare`), memory that engines offer (daemon/memories.py), watched processes, files.
    """
    limit = soft_limit()
    return min(wanted, limit // 2 - limit // 16)


def fill_standard() -> None:
    """Open /dev/null for each standard descriptor that is closed. Call it before anything else is opened.

    If one stays closed, the next socket or file gets its number, and libraries print into that.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    # Python sets a stream to None if its descriptor was closed, and print(file=None) writes to stdout.
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def never_waiting(fd: int) -> int:
    """Reopen the pipe at `fd` as non-blocking without changing it for others. Returns `fd` if it is not a pipe."""
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return fd


def seals_of(fd: int) -> int | None:
    """The seals of shared memory; None for any other file. It asks no file system, which could hang."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return None


def check_free(number: int, what: str) -> None:
    """Raise NoDescriptors unless so many descriptors are free. what: needs them, for the error.

    For libraries that end the process when they find none.
    """
    held: list[int] = []
    try:
        held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(held) < number:
            held.append(os.dup(held[0]))
    except OSError as error:
        raise _none_free(number, what) from error
    finally:
        for fd in held:
            os.close(fd)


def new_event_loop(what: str) -> asyncio.AbstractEventLoop:
    """An event loop. Raises NoDescriptors. what: needs it, for the error."""
    import asyncio  # here: commands that need no loop import this module as well

    try:
        return asyncio.new_event_loop()
    except OSError as error:
        raise _none_free(3, what) from error


def _none_free(number: int, what: str) -> NoDescriptors:
    limit = soft_limit()
    needs = f"{what} needs {number} file descriptors, and fewer are free"
    return NoDescriptors(f"{needs}: this process may open {limit} files (ulimit -n, LimitNOFILE)")


def spare(wanted: int) -> int:
    """The number of other connections to allow: `wanted`, but at most an eighth of the limit."""
    return min(wanted, soft_limit() // 8)


STATUS = Path("/proc/self/status")
CAP_CHOWN = 0  # the numbers of linux/capability.h
CAP_IPC_LOCK = 14  # may lock memory beyond RLIMIT_MEMLOCK
CAP_SYS_RESOURCE = 24


def has_capability(number: int) -> bool:
    """Whether this capability is effective in this process. False if that cannot be read."""
    try:
        status = STATUS.read_text(errors="replace")
    except OSError:
        return False
    line = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(line.split()[1], 16) >> number & 1)
