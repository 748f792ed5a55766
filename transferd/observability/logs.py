"""Logs: structlog and the standard library's logging, one JSON object a line or console text, to stderr.

    log.warning(…) → level → rate of its kind → rendered → queue → a thread → file descriptor 2

A caller only puts a line into the queue: it never waits, and logging never raises. Lost lines are counted
(`statistics`). Text is rendered before it is queued, so that later changes do not affect it, and it is escaped: text
from outside reaches a terminal only as printable characters.

Under systemd each line begins with its priority (sd-daemon(3)), for `journalctl -p warning`.

Output that C libraries write directly to descriptor 2 (Mooncake's glog) does not pass through here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import logging
import os
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from transferd.errors import one_line
from transferd.runtime.bucket import Bucket

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

STDERR = 2
ERASE = b"\r\x1b[K"  # erases the cursor's line
FLUSH_S = 0.5  # how long the end of the process waits for a reader that does not read
LONGEST_TEXT = 4096  # characters of one value; of a traceback, LONGEST_TRACEBACK
LONGEST_TRACEBACK = 16384
MOST_ITEMS = 64  # of one list

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}  # sd-daemon(3)

Event = dict[str, Any]


MAX_WAITING_BYTES = 1 << 20  # about 3,000 lines: a reader may sleep through a burst


LONGEST_LINE = 64 << 10  # text without a line end is cut at this length


class LogWriter:
    """Hands lines to a file descriptor. `put` may be called from any thread, any signal handler and any destructor.

    write: os.write, or a test's replacement.
    dropped: how many lines were lost.
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

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, fd: int, put: Callable[[str], None]) -> None:
        self._fd = fd
        self._put = put
        self._begun = ""  # an unfinished line

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


RATE = 2.0  # lines a second of one kind


BURST = 20.0


MOST_KINDS = 1000  # kinds are places in code; beyond this bound they share one allowance


_OTHERS = object()


class LogRate:
    """Decides which lines pass. A kind is an event's name, or the place in code that logged it; never its details.

    clock: monotonic seconds.
    left_out: lines of all kinds that did not pass, since the start.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.left_out = 0
        self._clock = clock
        self._buckets: dict[Hashable, Bucket] = {}
        self._left_out: Counter[Hashable] = Counter()  # since the last line of a kind that passed
        self._lock = threading.RLock()

    def admit(self, kind: Hashable) -> int | None:
        """Returns how many lines of this kind were left out since the last one that passed; None to leave this out."""
        now = self._clock()
        with self._lock:
            if kind not in self._buckets:
                kind = kind if len(self._buckets) < MOST_KINDS else _OTHERS
                self._buckets.setdefault(kind, Bucket(RATE, BURST))
            if self._buckets[kind].take(now):
                return self._left_out.pop(kind, 0)
            self._left_out[kind] += 1
            self.left_out += 1
            return None


class Log:
    """From an event to a line in the writer's queue. `take` never blocks and never raises."""

    def __init__(
        self,
        writer: LogWriter,
        *,
        level: str = "info",
        format_: str = "auto",
        terminal: bool = False,
        journal: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set what passes and how a line looks.

        level, format_: as in [log] of the configuration.
        terminal: use colors; "auto" is then the console format.
        journal: begin each line with its priority.
        """
        self.level = _LEVELS[level]
        self.writer = writer
        self.rate = LogRate(clock)
        self._journal = journal
        self._terminal = terminal
        self._shown = b""
        self._json = format_ == "json" or (format_ == "auto" and not terminal)

    def take(self, level: str, kind: Hashable, event: Event) -> None:
        """Log an event. kind: the lines with which it shares a rate limit; see LogRate."""
        try:
            if _LEVELS.get(level, logging.ERROR) < self.level:
                return
            left_out = self.rate.admit(kind)
            if left_out is None:
                return
            if left_out:
                event["left_out"] = left_out
            self._put(level, self._line(level, event))
        except Exception:  # noqa: BLE001 - a value whose str() raises, or no memory: a log call must not raise
            self.writer.drop()

    def say(self, level: str, text: str) -> None:
        """Write plain text for people, line by line, with non-printable characters escaped."""
        try:
            self._put(level, "\n".join(map(one_line, text.split("\n"))))
        except Exception:  # noqa: BLE001 - as in `take`
            self.writer.drop()

    def show(self, text: str) -> bool:
        """Keep one line below the log on a terminal; "" removes it. Returns False, and does nothing, elsewhere."""
        if self._terminal:
            self._shown = one_line(text)[: _columns() - 1].encode(errors="backslashreplace")
            self.writer.put(ERASE + self._shown)
        return self._terminal

    def _put(self, level: str, text: str) -> None:
        if self._journal:  # each line becomes an entry of its own
            priority = f"<{_PRIORITIES.get(level, 3)}>"
            text = priority + text.replace("\n", f"\n{priority}")
        line = f"{text}\n".encode(errors="backslashreplace")
        self.writer.put(ERASE + line + self._shown if self._shown else line)

    @functools.cached_property
    def _processors(self) -> tuple[Processor, Processor, Processor]:
        """The processors that add the traceback, add the time, and make a line."""
        from structlog import dev, processors

        plain = dev.plain_traceback
        render: Processor = processors.JSONRenderer()
        if not self._json:
            render = dev.ConsoleRenderer(colors=self._terminal, timestamp_key="ts", exception_formatter=plain)
        return processors.format_exc_info, processors.TimeStamper(fmt="iso", utc=True, key="ts"), render

    def _line(self, level: str, event: Event) -> str:
        add_traceback, stamp, render = self._processors
        given: Any = add_traceback(None, level, event)
        traceback = given.pop("exception", None)
        shown = {key: self._value(value) for key, value in given.items() if key != "event"}
        # The console does not quote the event, so it is escaped in both formats.
        event = {**shown, "event": one_line(_clipped(str(given.get("event")))), "level": level}
        stamp(None, level, event)
        if traceback is not None:
            lines = _clipped(traceback, LONGEST_TRACEBACK).split("\n")
            event["exception"] = "\n".join(map(one_line, lines))
        line = render(None, level, event)
        assert isinstance(line, str)
        return line.replace("\x7f", "\\u007f")  # the one control character that JSON leaves alone

    def _value(self, value: Any) -> Any:
        """The value as plain data: bounded, and safe in either format."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {one_line(str(key)): self._value(item) for key, item in islice(value.items(), MOST_ITEMS)}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._value(item) for item in islice(value, MOST_ITEMS)]
        text = _clipped(str(value))
        return text if self._json else one_line(text)


def _columns() -> int:
    try:
        return os.get_terminal_size(STDERR).columns or 80
    except OSError:
        return 80


def _clipped(text: str, longest: int = LONGEST_TEXT) -> str:
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text) - longest} characters more)"


class _FromLogging(logging.Handler):
    """Takes what the standard library's logging gets: asyncio, warnings, libraries. A kind is a place in code."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event: Event = {"logger": record.name, "event": record.getMessage()}
        except Exception:  # noqa: BLE001 - arguments that do not fit the format
            event = {"logger": record.name, "event": str(record.msg)}
        if record.exc_info:
            event["exc_info"] = record.exc_info
        _log.take(record.levelname.lower(), (record.pathname, record.lineno), event)


_log = Log(LogWriter(STDERR))


def configure(level: str, format_: str) -> None:
    """Set the level and the format, and route the standard library's logging and structlog's into the stream."""
    configure_without_structlog(level, format_)
    import structlog

    def taken(_: object, method: str, event: EventDict) -> str:
        """The only processor. It hands the event to `Log` and drops it, so structlog itself writes nothing."""
        _log.take(method, event.get("event"), dict(event))
        raise structlog.DropEvent

    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, taken],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.ReturnLoggerFactory(),  # the default needs stdout, which may be closed
        cache_logger_on_first_use=False,
    )


def configure_without_structlog(level: str, format_: str) -> None:
    """Like `configure`, for a command that runs no part of a daemon: importing structlog costs 0.12 s of CPU."""
    global _log
    terminal, journal = os.isatty(STDERR), under_journal(os.environ)
    _log = Log(_log.writer, level=level, format_=format_, terminal=terminal, journal=journal)
    root = logging.getLogger()
    root.handlers[:] = [_FromLogging()]
    root.setLevel(logging.WARNING)
    atexit.unregister(flush)
    atexit.register(flush)


def take_over_stderr() -> None:
    """Start the writer and send everything that Python prints on stderr to it. Raises RuntimeError without a thread."""
    _log.writer.start()
    logging.captureWarnings(capture=True)
    sys.stderr = LogStream(STDERR, lambda line: _log.say("warning", line))


def set_level(level: str) -> None:
    """Set the lowest level that is logged, for every logger, at once."""
    _log.level = _LEVELS[level]


def say(text: str, level: str = "error") -> None:
    """Print a plain message on stderr, for the person who started the process."""
    _log.say(level, text)


def show(text: str) -> bool:
    """Keep one line below the log on a terminal; "" removes it. Returns False, and does nothing, elsewhere."""
    return _log.show(text)


def flush(seconds: float = FLUSH_S) -> bool:
    """Wait at most `seconds` until everything logged so far is written. Return whether it is."""
    return _log.writer.flush(seconds)


def statistics() -> dict[str, Any]:
    """Counts of lines that did not appear, as the report has them.

    log_dropped: lines that did not fit or could not be written.
    log_left_out: lines beyond a kind's rate limit.
    """
    return {"log_dropped": _log.writer.dropped, "log_left_out": _log.rate.left_out}


def under_journal(environment: Mapping[str, str], fd: int = STDERR) -> bool:
    """Whether `fd` is connected to the journal: JOURNAL_STREAM names its device and inode (systemd.exec(5))."""
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
