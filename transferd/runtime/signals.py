"""The daemon's signals, and the shutdown budget that they set.

SIGTERM, SIGINT   stop; the whole shutdown may take `shutdown_timeout` seconds
a second one      reduces the rest of that budget to one second: every step still runs, but none waits long
SIGHUP            reload
SIGUSR1, SIGABRT  dump the flight recorder; dump_thread.py has a thread for that, which SIGRTMIN wakes
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from transferd.runtime.compat import Self

HURRY_S = 1.0
WAKE = signal.SIGRTMIN  # from the daemon to its dump thread: write a failure, or end
DUMP_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGABRT, WAKE})


def hold_dump_signals() -> None:
    """Block the dump signals in this thread and in all threads that it starts, so that they wait for the dump thread.

    Call it before any other thread exists, including numpy's: the kernel delivers a process signal to any thread
    that does not block it, and the default action of these signals is to kill the process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, DUMP_SIGNALS)


def stop_when_stdin_ends() -> None:
    """Send this process SIGTERM when standard input ends: a pipe that another process holds open while it lives.

    Call it after `hold_dump_signals`.
    """

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()


class ProcessSignals:
    """Context manager that installs the handlers on the running loop and removes them again.

    stop: a future that completes when a stop is requested.
    received: the first signal's name.
    """

    def __init__(self, shutdown_timeout: float, on_reload: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[None] = self._loop.create_future()
        self.received = ""
        self._shutdown_timeout = shutdown_timeout
        self._stop_by: float | None = None
        self._on_reload = on_reload

    def budget(self) -> float:
        """Seconds left for the shutdown; the full budget before a stop was requested."""
        if self._stop_by is None:
            return self._shutdown_timeout
        return max(0.0, self._stop_by - time.monotonic())

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop_asked, signal.Signals(number).name)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _stop_asked(self, name: str) -> None:
        now = time.monotonic()
        if self._stop_by is None:
            self._stop_by = now + self._shutdown_timeout
            self.received = name
        else:
            self._stop_by = min(self._stop_by, now + HURRY_S)
        if not self.stop.done():
            self.stop.set_result(None)
