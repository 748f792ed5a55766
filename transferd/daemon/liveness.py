"""Which clients have gone without a word: one that was silent for `server.client_timeout`, or whose process has ended.

The kernel tells the end of a process at once (its pidfd becomes readable). That matters for those that share memory
with us: an engine that is restarted needs the memory of the one before. Where the kernel tells no pid (another PID
namespace, tcp) or gives no pidfd, silence tells. While no client is known, no timer runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

import structlog

from transferd.daemon.clients import Clients
from transferd.observability.recorder import Recorder
from transferd.wire.credentials import process_of

log = structlog.get_logger(__name__)

MOST_PROCESSES = 256  # watched at once, each by a descriptor; engines have one for each rank


class Liveness:
    """Watches `clients`. forget: called with a client that has gone; it calls `left`. Used on one event loop.

    lost: how many clients have gone so.
    """

    def __init__(
        self,
        clients: Clients,
        timeout: float,
        now: Callable[[], float],
        recorder: Recorder,
        forget: Callable[[bytes], None],
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
        """A client has been added to `clients`."""
        if self._timer is None:
            self._look_later()

    def watch_process(self, client: bytes) -> None:
        """Watch the process of this client, if the kernel tells which it is."""
        _, pid = process_of(self._clients.transport.describe(client))
        if not pid or client in self._processes or len(self._processes) >= MOST_PROCESSES:
            return
        with contextlib.suppress(OSError):
            fd = self._processes[client] = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(fd, self._ended, client)

    def left(self, client: bytes) -> None:
        """A client is not in `clients` any more."""
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
        # Late: this process was held up, and what clients said meanwhile lies unread in the socket.
        if now - self._due < self._timeout / 4:
            for client in self._clients:
                silent_s = now - self._clients[client].seen_at
                if silent_s > self._timeout:
                    self._recorder.aside("", "client silent", client)
                    self._lose(client, why="silent", silent_s=round(silent_s, 3))
        if self._clients:
            self._look_later()

    def _ended(self, client: bytes) -> None:
        self._recorder.aside("", "client ended", client)
        self._lose(client, why="its process has ended")

    def _lose(self, client: bytes, **why: object) -> None:
        log.warning("client gone", engine=self._clients.engine_of(client), client=client.hex(), **why)
        self.lost += 1
        self._forget(client)
