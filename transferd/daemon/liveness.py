"""Detects clients that are lost: their process has ended, or they are silent for longer than `server.client_timeout`.

The kernel reports the end of a process at once (its pidfd becomes readable). That matters for clients that share memory
with us: a restarted engine needs the memory of its predecessor.

Silence is no death where we can see life. An engine that captures graphs or compiles may hold its GIL for minutes; its
memory stays mapped in it, so to dismiss it would gain nothing. A client whose process we watch, and whose connection is
open, is lost only after LIVING times as long. If the kernel reports no pid (another PID namespace, tcp) or provides no
pidfd, silence counts. Without clients no timer runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from transferd.daemon.clients import Clients
from transferd.runtime.aio import Timer
from transferd.wire.shares import Places

log = structlog.get_logger(__name__)

LIVING = 120  # times server.client_timeout, ten minutes by default: a process that lives and is silent so long hangs
MOST_PROCESSES = 256  # watched at once; each takes a descriptor, and engines have one process per rank


@dataclass(slots=True)
class _Watched:
    """A process, and its clients."""

    fd: int
    uid: int
    clients: set[bytes]


@dataclass(eq=False, repr=False)
class Liveness:
    """Watches `clients`. Used on one event loop.

    forget: called with a lost client, and how it was lost; it must call `left`.

    lost: how many clients were lost.
    """

    clients: Clients
    timeout: float
    now: Callable[[], float]
    forget: Callable[[bytes, str], None]
    lost: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._processes: dict[int, _Watched] = {}  # by process id
        self._pid_of: dict[bytes, int] = {}  # of the clients whose processes are watched
        self._places = Places()
        self._timer = Timer()
        self._due = 0.0

    def came(self) -> None:
        """Call this after a client was added to `clients`."""
        if not self._timer:
            self._look_later()

    def watch_process(self, client: bytes) -> None:
        """Watch the process of this client, if the kernel reports its pid.

        If all places are taken, the user with most of them gives his newest to a user who has fewer.
        """
        uid, pid = self.clients[client].who
        if uid is None or not pid or client in self._pid_of:
            return
        if pid not in self._processes:
            if len(self._processes) >= MOST_PROCESSES:
                if not (crowd := self._places.taken_by_another(uid)):
                    return
                self._stop(next(one for one, its in reversed(self._processes.items()) if its.uid == crowd[0]))
            with contextlib.suppress(OSError):
                watched = self._processes[pid] = _Watched(os.pidfd_open(pid), uid, set())
                self._places.enter(uid)
                asyncio.get_running_loop().add_reader(watched.fd, self._ended, pid)
        if pid in self._processes:
            self._processes[pid].clients.add(client)
            self._pid_of[client] = pid

    def left(self, client: bytes) -> None:
        """Stop watching a client that is no longer in `clients`."""
        pid = self._pid_of.pop(client, 0)
        if pid:
            clients = self._processes[pid].clients
            clients.discard(client)
            if not clients:
                self._stop(pid)

    def _stop(self, pid: int) -> None:
        """Watch this process no more."""
        watched = self._processes.pop(pid)
        for client in watched.clients:
            del self._pid_of[client]
        self._places.leave(watched.uid)
        asyncio.get_running_loop().remove_reader(watched.fd)
        os.close(watched.fd)

    def close(self) -> None:
        self._timer.cancel()
        for pid in list(self._processes):
            self._stop(pid)

    def _look_later(self) -> None:
        delay = self.timeout / 2
        self._due = self.now() + delay
        self._timer.set(delay, self._look)

    def _look(self) -> None:
        now = self.now()
        # If we are late, this process was stalled, and messages of clients may be unread in the socket.
        if now - self._due < self.timeout / 4:
            for client in self.clients:
                if (known := self.clients.get(client)) is None:  # it went with one that was lost before it
                    continue
                silent_s = now - known.seen_at
                if silent_s > self.timeout * (LIVING if self._lives(client) else 1):
                    self.clients.recorder.aside("", "client silent", client)
                    self._lose(client, f"was silent for {silent_s:.1f} s", why="silent", silent_s=round(silent_s, 3))
        if self.clients:
            self._look_later()

    def _lives(self, client: bytes) -> bool:
        """Whether its process is seen to live, and may still speak on this connection: after a loss it uses another."""
        return client in self._pid_of and self.clients.transport.peer(client) is not None

    def _ended(self, pid: int) -> None:
        for client in list(self._processes[pid].clients):
            self.clients.recorder.aside("", "client ended", client)
            self._lose(client, "ended with its process", why="its process has ended")

    def _lose(self, client: bytes, how: str, **why: object) -> None:
        log.warning("client gone", engine=self.clients.engine_of(client), client=client.decode(), **why)
        self.lost += 1
        self.forget(client, how)
