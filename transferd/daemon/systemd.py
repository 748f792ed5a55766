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

from transferd.runtime.compat import Self

log = structlog.get_logger(__name__)


class Notifier:
    """Sends states to the supervisor; does nothing without one."""

    def __init__(self, address: str) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> Self:
        return cls((os.environ if env is None else env).get("NOTIFY_SOCKET", ""))

    def notify(self, *states: str) -> bool:
        """Send e.g. "READY=1", "STATUS=…". Returns False if there is no supervisor or sending failed."""
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(states).encode(), self._address)
        except OSError as error:
            log.debug("cannot notify the supervisor", problem=str(error))
            return False
        return True

    def reloading(self) -> bool:
        """Send RELOADING=1 with the timestamp that Type=notify-reload requires. Follow it with READY=1."""
        return self.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


class Watchdog:
    """Sends WATCHDOG=1 twice per interval from the event loop, while `alive()` is True.

    A stuck loop cannot send, and a stuck dispatcher makes `alive` False. Either way the supervisor restarts the daemon.

    interval: seconds; None for no watchdog.
    status: one line, sent with a beat.
    """

    def __init__(
        self,
        notifier: Notifier,
        interval: float | None,
        alive: Callable[[], bool],
        status: Callable[[], str] | None = None,
    ) -> None:
        self._notifier = notifier
        self._interval = interval
        self._alive = alive
        self._status = status
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def from_environment(
        cls,
        notifier: Notifier,
        alive: Callable[[], bool],
        env: Mapping[str, str] | None = None,
        status: Callable[[], str] | None = None,
    ) -> Self:
        env = os.environ if env is None else env
        usec, pid = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
        mine = not pid or pid == str(os.getpid())
        return cls(notifier, int(usec) / 1e6 if usec.isdecimal() and int(usec) and mine else None, alive, status)

    def start(self) -> None:
        if self._interval is not None:
            self._tick()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        assert self._interval is not None
        if self._alive():
            self._notifier.notify("WATCHDOG=1", *([] if self._status is None else [f"STATUS={self._status()}"]))
        else:
            log.error("dispatcher stalled: a deadline is overdue; withholding the watchdog ping")
        self._timer = asyncio.get_running_loop().call_later(self._interval / 2, self._tick)
