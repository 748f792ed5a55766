"""Writes log lines from a separate thread, so that logging never waits for a pipe, a disk or a terminal.

The queue between them is bounded in bytes. A line that does not fit, or that cannot be written, is dropped and
counted. The thread may hang in write(2) for as long as it likes: it is a daemon thread, and `flush` has a limit.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import threading
from collections.abc import Callable
from queue import SimpleQueue

MAX_WAITING_BYTES = 1 << 20  # about 3,000 lines: a reader may sleep through a burst
LONGEST_LINE = 64 << 10  # text without a line end is cut at this length


class LogWriter:
    """Hands lines to a file descriptor. `put` may be called from any thread, any signal handler and any destructor.

    write: os.write, or a test's replacement. dropped: how many lines were lost.
    """

    def __init__(
        self, fd: int, *, limit: int = MAX_WAITING_BYTES, write: Callable[[int, memoryview], int] = os.write
    ) -> None:
        self.dropped = 0
        self._fd = fd
        self._limit = limit
        self._write = write
        self._lines: SimpleQueue[bytes | threading.Event] = SimpleQueue()  # its put never waits, and is re-entrant
        self._waiting = 0  # bytes queued and being written
        self._torn = False  # the last line was cut off in the middle
        self._hung = False  # a flush ran out of time, so later ones do not wait
        self._lock = threading.RLock()  # held for a few instructions; a destructor that logs may re-enter
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread now rather than with the first line. Raises RuntimeError if it cannot start."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
                thread.start()
                self._thread = thread

    def put(self, line: bytes) -> None:
        """Queue one line, newline included. Never blocks, never raises."""
        with self._lock:
            if self._waiting + len(line) > self._limit:
                self.dropped += 1
                return
            self._waiting += len(line)
            self._lines.put(line)
            with contextlib.suppress(RuntimeError):  # no thread is available; the next line tries again
                self.start()

    def drop(self) -> None:
        """Count a line that was lost before it reached the queue."""
        with self._lock:
            self.dropped += 1

    def flush(self, seconds: float) -> bool:
        """Wait at most `seconds` until every line queued so far is written. Return whether it is."""
        if self._thread is None:
            return self._flush_here(seconds)
        if self._hung:
            return False
        reached = threading.Event()
        self._lines.put(reached)
        self._hung = not reached.wait(seconds)
        return not self._hung

    def _flush_here(self, seconds: float) -> bool:
        """No thread could be started: write in the caller's thread, as long as the reader reads."""
        with self._lock:
            while self._lines.qsize():
                if not select.select([], [self._fd], [], seconds)[1]:
                    return False
                line = self._lines.get()
                if isinstance(line, bytes):
                    self._waiting -= len(line)
                    self.dropped += not self._written(line)
        return True

    # --- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            item = self._lines.get()
            if isinstance(item, threading.Event):
                self._hung = False
                item.set()
                continue
            written = self._written(item)
            with self._lock:
                self._waiting -= len(item)
                self.dropped += not written

    def _written(self, line: bytes) -> bool:
        """Write one line, however long that takes. False if it could not be written."""
        rest = memoryview(b"\n" + line if self._torn else line)
        try:
            while rest:
                try:
                    done = self._write(self._fd, rest)
                except BlockingIOError:  # another process that shares this pipe or terminal made it non-blocking
                    select.select([], [self._fd], [])
                    continue
                self._torn = done < len(rest)
                rest = rest[done:]
        except (OSError, ValueError):
            return False
        return True


class LogStream(io.TextIOBase):
    """Replaces sys.stderr, so that what Python itself prints goes through the queue, line by line.

    Python prints warnings, errors in destructors and threads, and the traceback that ends a process. put: takes one
    line.
    """

    def __init__(self, fd: int, put: Callable[[str], None]) -> None:
        self._fd = fd
        self._put = put
        self._begun = ""  # an unfinished line

    @property
    def encoding(self) -> str:  # type: ignore[override] # a plain attribute in typeshed
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, text: str, /) -> int:
        *lines, begun = (self._begun + text).split("\n")
        if len(begun) > LONGEST_LINE:
            lines, begun = [*lines, begun], ""
        self._begun = begun
        for line in lines:
            self._put(line)
        return len(text)
