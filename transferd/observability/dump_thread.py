"""The thread that dumps the flight recorder. It works even while the event loop is stuck.

SIGUSR1             dump and continue
SIGABRT             dump, write the stack of every thread to stderr, and die by SIGABRT. systemd's watchdog sends
                    it, so a daemon whose loop is stuck reports what it was doing
a failure           an invariant broke, or a callback of the loop raised: dump and continue. Only for the first few
                    failures of a daemon's life: the first one matters most, and disks are finite
a crash             the daemon ends with an exception: dump, then let the exception propagate

Every thread blocks the signals, and one thread receives them with sigwait. The daemon wakes that thread with a
separate signal (WAKE), so that an operator's signal is never mistaken for a wake-up or the reverse. A handler of
the event loop would run only while the loop does, which is when a dump is least needed. Sudden deaths (SIGSEGV,
SIGKILL, abort() in a library) leave no dump; for SIGSEGV and abort() faulthandler still writes stacks to stderr.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from transferd.config.sections import RecorderSection
from transferd.errors import ConfigError
from transferd.observability.dump_file import write_dump
from transferd.observability.logs import STDERR, flush
from transferd.observability.recorder import LONGEST_TEXT, Note, Recorder
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import Self
from transferd.runtime.descriptors import never_waiting
from transferd.runtime.signals import DUMP_SIGNALS, WAKE
from transferd.runtime.threads import current_frames, start_thread
from transferd.runtime.version import VERSION

log = structlog.get_logger(__name__)

END_S = 2.0  # how long the exit waits for a dump in progress
MOST_FAILURES = 3  # dumps of failures per process
MOST_THREADS, MOST_FRAMES = 64, 50


class DumpThread:
    """Context manager around a daemon's life on a running loop. Owns its thread and the loop's exception handler.

    Entering raises NoThreads.
    """

    def __init__(
        self, config: RecorderSection, recorder: Recorder, *, boot_id: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._config = config
        self._recorder = recorder
        self._boot_id = boot_id
        self._clock = clock
        self._failures = 0
        self._pending: deque[Callable[[], None]] = deque()  # what the thread was woken for
        self._ending = False
        self._thread: threading.Thread  # while it is entered
        self.hangs = False  # after the exit: a dump did not end, because its disk hangs

    def __enter__(self) -> Self:
        if not faulthandler.is_enabled():
            faulthandler.enable(never_waiting(STDERR))  # otherwise a slow reader could block a crash
        self._thread = start_thread("flight-recorder", self._wait)
        self._recorder.on_failure = self._failed
        asyncio.get_running_loop().set_exception_handler(self._callback_raised)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _stack: object) -> None:
        asyncio.get_running_loop().set_exception_handler(None)
        self._recorder.on_failure = lambda _: None  # failures are no longer dumped
        if isinstance(error, Exception) and not isinstance(error, ConfigError):
            self._pending.append(self._taken("crash", f"{type(error).__name__}: {error}", error))
        self._ending = True
        self._wake()
        self._thread.join(END_S)
        self.hangs = self._thread.is_alive()
        if self.hangs:
            log.error("flight recorder dump hangs; check the disk", directory=self._config.directory)

    def _failed(self, problem: str) -> None:
        self._failures += 1
        if self._failures <= MOST_FAILURES:
            self._pending.append(self._taken("failure", problem))
            self._wake()

    def _callback_raised(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        problem = f"{type(error).__name__}: {error}" if error is not None else str(context.get("message"))
        log.error("unhandled exception in a callback of the event loop (bug)", problem=problem, exc_info=error)
        self._recorder.failure("", problem)

    def _wait(self) -> None:
        while True:
            number = signal.sigwait(DUMP_SIGNALS)
            if number == signal.SIGABRT:
                self._try(lambda: self._taken("abort")())
                flush()
                # Then the default action, by way of faulthandler: stacks on stderr, and a core dump if enabled.
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGABRT})
                os.abort()
            if number == signal.SIGUSR1:
                self._pending.append(lambda: self._taken("signal")())
            while self._pending:
                self._try(self._pending.popleft())
            if self._ending:
                return

    @staticmethod
    def _try(dump: Callable[[], None]) -> None:
        """Dump, and survive whatever that raises: waking a thread that has ended kills the process (SIGSEGV)."""
        try:
            dump()
        except Exception:
            log.exception("cannot dump the flight recorder (bug)")

    def _wake(self) -> None:
        assert self._thread.ident is not None
        signal.pthread_kill(self._thread.ident, WAKE)

    def _taken(self, reason: str, problem: str = "", error: BaseException | None = None) -> Callable[[], None]:
        """A dump of this moment. Returns what writes it: in the thread, so that the loop does not wait for the disk."""
        header = {
            "version": VERSION,
            "boot_id": self._boot_id,
            "pid": os.getpid(),
            "reason": reason,
            "problem": problem.partition("\n")[0][:LONGEST_TEXT],
            "wall": self._clock.wall(),
            "monotonic": self._clock.monotonic(),
            "threads": _stacks(error),
        }
        return functools.partial(self._write, header, self._recorder.notes())

    def _write(self, header: dict[str, Any], notes: list[Note]) -> None:
        directory, reason = self._config.directory, header["reason"]
        if not directory:
            log.warning("flight recorder not dumped: recorder.directory is not set", reason=reason)
            return
        try:
            path = write_dump(Path(directory), header, notes, keep=self._config.keep)
        except OSError as error:
            log.error("cannot dump the flight recorder", reason=reason, directory=directory, problem=str(error))
        else:
            log.warning("dumped the flight recorder", reason=reason, file=str(path), notes=len(notes))


def _stacks(error: BaseException | None = None) -> dict[str, list[str]]:
    """Each thread's stack, innermost call last; and that of an exception."""

    def lines(stack: traceback.StackSummary) -> list[str]:
        return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in stack]

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        f"{names.get(ident, 'foreign')} {ident}": lines(traceback.extract_stack(frame, MOST_FRAMES))
        for ident, frame in list(current_frames().items())[:MOST_THREADS]
    }
    if error is not None:
        stacks["exception"] = lines(traceback.extract_tb(error.__traceback__, MOST_FRAMES))
    return stacks
