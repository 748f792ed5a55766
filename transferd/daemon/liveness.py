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

import structlog

from transferd.daemon.clients import Clients
from transferd.observability.recorder import Recorder

log = structlog.get_logger(__name__)

LIVING = 120  # times server.client_timeout, ten minutes by default: a process that lives and is silent so long hangs
MOST_PROCESSES = 256  # watched at once; each takes a descriptor, and engines have one process per rank


class Liveness:
    """Watches `clients`. Used on one event loop.

    forget: called with a lost client, and how it was lost; it must call `left`.

    lost: how many clients were lost.
    """

    def __init__(
        self,
        clients: Clients,
        timeout: float,
        now: Callable[[], float],
        recorder: Recorder,
        forget: Callable[[bytes, str], None],
    ) -> None:
        self.lost = 0
        self._clients = clients
        self._timeout = timeout
        self._now = now
        self._recorder = recorder
        self._forget = forget
        self._processes: dict[bytes, int] = {}  # clients, and the pidfd of each one's process
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def came(self) -> None:
        """Call this after a client was added to `clients`."""
        if self._timer is None:
            self._look_later()

    def watch_process(self, client: bytes) -> None:
        """Watch the process of this client, if the kernel reports its pid."""
        credentials = self._clients[client].credentials
        pid = credentials.pid if credentials is not None else 0
        if not pid or client in self._processes or len(self._processes) >= MOST_PROCESSES:
            return
        with contextlib.suppress(OSError):
            fd = self._processes[client] = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(fd, self._ended, client)

    def left(self, client: bytes) -> None:
        """Stop watching a client that is no longer in `clients`."""
        fd = self._processes.pop(client, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for client in list(self._processes):
            self.left(client)

    def _look_later(self) -> None:
        delay = self._timeout / 2
        self._due = self._now() + delay
        self._timer = asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._now()
        # If we are late, this process was stalled, and messages of clients may be unread in the socket.
        if now - self._due < self._timeout / 4:
            for client in self._clients:
                silent_s = now - self._clients[client].seen_at
                if silent_s > self._timeout * (LIVING if self._lives(client) else 1):
                    self._recorder.aside("", "client silent", client)
                    self._lose(client, f"was silent for {silent_s:.1f} s", why="silent", silent_s=round(silent_s, 3))
        if self._clients:
            self._look_later()

    def _lives(self, client: bytes) -> bool:
        """Whether its process is seen to live, and may still speak on this connection: after a loss it uses another."""
        return client in self._processes and self._clients.transport.peer(client) is not None

    def _ended(self, client: bytes) -> None:
        self._recorder.aside("", "client ended", client)
        self._lose(client, "ended with its process", why="its process has ended")

    def _lose(self, client: bytes, how: str, **why: object) -> None:
        log.warning("client gone", engine=self._clients.engine_of(client), client=client.decode(), **why)
        self.lost += 1
        self._forget(client, how)
