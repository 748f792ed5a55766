"""Signals of the daemon process, and the time budget of a shutdown that they set.

SIGTERM, SIGINT   stop; the shutdown has `shutdown_timeout` seconds in all
a second one      the budget shrinks to a second: nothing is skipped, nothing waits long
SIGHUP            reload
SIGUSR1, SIGABRT  dump the flight recorder (dump_thread.py), which has a thread of its own for that, woken with SIGRTMIN
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

HURRY_S = 1.0
WAKE = signal.SIGRTMIN  # from the daemon to its dumper's thread: a failure is to be written, or the end has come
DUMP_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGABRT, WAKE})


def hold_dump_signals() -> None:
    """Block them in the calling thread and in all that it starts, so that they wait for the dumper.

    Call it before any thread exists, numpy's included: the kernel hands a signal of the process to any
    thread that does not block it, and the default of both is death.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, DUMP_SIGNALS)


class Signals:
    """Context manager: installs the handlers on the running loop and removes them again.

    stop: a future that is done once a stop was asked for. received: the first signal's name.
    """

    def __init__(self, shutdown_timeout: float, on_reload: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[None] = self._loop.create_future()
        self.received = ""
        self._shutdown_timeout = shutdown_timeout
        self._stop_by: float | None = None
        self._on_reload = on_reload

    def budget(self) -> float:
        """Seconds that are left for the shutdown; the whole of it before one was asked for."""
        if self._stop_by is None:
            return self._shutdown_timeout
        return max(0.0, self._stop_by - time.monotonic())

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop_asked, signal.Signals(number).name)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.remove_signal_handler(number)

    def _stop_asked(self, name: str) -> None:
        now = time.monotonic()
        if self._stop_by is None:
            self._stop_by = now + self._shutdown_timeout
            self.received = name
        else:
            self._stop_by = min(self._stop_by, now + HURRY_S)
        if not self.stop.done():
            self.stop.set_result(None)
