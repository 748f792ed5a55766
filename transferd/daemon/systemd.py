"""Notifies systemd (sd_notify), and feeds its watchdog only while the daemon makes progress.

Protocol: one datagram of `KEY=value` lines to the socket named by NOTIFY_SOCKET (sd_notify(3)).
Nothing here is fatal: an unsupervised daemon behaves the same.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping

import structlog

from transferd.errors import one_line
from transferd.runtime.compat import Self

log = structlog.get_logger(__name__)


class Notifier:
    """Sends states to the supervisor; does nothing without one."""

    def __init__(self, address: str) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Self:
        return cls(env.get("NOTIFY_SOCKET", ""))

    def notify(self, *states: str) -> None:
        """Send e.g. "READY=1", "STATUS=…". Does nothing without a supervisor, and no harm if sending fails.

        Each state stays one line, because a client's text in it must not become a state of its own.
        """
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(map(one_line, states)).encode(), self._address)
        except OSError as error:
            log.debug("cannot notify the supervisor", problem=str(error))

    def reloading(self) -> None:
        """Send RELOADING=1 with the timestamp that Type=notify-reload requires. Follow it with READY=1."""
        self.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


async def feed_watchdog(
    notifier: Notifier, alive: Callable[[], bool], status: Callable[[], str], env: Mapping[str, str] = os.environ
) -> None:
    """Send WATCHDOG=1 twice per interval while `alive()` is True; end at once if the supervisor has no watchdog for us.

    A stuck loop cannot send, and a stuck dispatcher makes `alive` False. Either way the supervisor restarts the daemon.

    status: returns one line, sent with each beat.
    """
    usec, pid = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or not int(usec) or pid not in ("", str(os.getpid())):
        return
    while True:
        if alive():
            notifier.notify("WATCHDOG=1", f"STATUS={status()}")
        else:
            log.error("dispatcher stalled: a deadline is overdue; withholding the watchdog ping")
        await asyncio.sleep(int(usec) / 2e6)
