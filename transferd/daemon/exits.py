"""Ends of processes on this machine, noticed at once: an engine that is restarted needs the memory of the one before.

A pidfd becomes readable when its process ends. Where the kernel tells no pid (another PID namespace, tcp) or gives no
pidfd, the silence of its client tells later, after `server.client_timeout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

MOST = 256  # processes watched at once, each by a descriptor; engines have one for each rank


class Exits:
    """The processes of clients whose memory is mapped here. ended: called once with each client whose process ended."""

    def __init__(self, ended: Callable[[bytes], None]) -> None:
        self._ended = ended
        self._watched: dict[bytes, int] = {}  # clients, and the pidfd of each

    def watch(self, client: bytes, pid: int | None) -> None:
        """Watch this client's process. pid: None or 0 if it is not known; nothing happens then."""
        if not pid or client in self._watched or len(self._watched) >= MOST:
            return
        with contextlib.suppress(OSError):
            fd = self._watched[client] = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(fd, self._exited, client)

    def forget(self, client: bytes) -> None:
        fd = self._watched.pop(client, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        for client in list(self._watched):
            self.forget(client)

    def _exited(self, client: bytes) -> None:
        self.forget(client)
        self._ended(client)
