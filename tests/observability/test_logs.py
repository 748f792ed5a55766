"""What becomes of a log call: rendered or left out, escaped, queued, written, or counted as lost."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from tests.support.waits import wait_until
from transferd.config.sections import LogSection
from transferd.observability import logs
from transferd.observability.logs import BURST, LONGEST_LINE, MOST_KINDS, RATE, Log, LogRate, LogStream, LogWriter

WAIT_S = 30.0
EVIL = "\x1b[2J\x1b[31m\u202enot red\x9b\x7f\ud800"


class Page:
    """A descriptor's other end, in memory. refuse: errors that the next writes meet. gate: what writes wait for."""

    def __init__(self) -> None:
        self.written = b""
        self.refuse: list[int] = []
        self.most = 1 << 30  # bytes that one write takes
        self.gate = threading.Event()
        self.gate.set()

    def write(self, fd: int, data: memoryview) -> int:
        assert self.gate.wait(WAIT_S)
        if self.refuse and (code := self.refuse.pop(0)):
            raise OSError(code, os.strerror(code))
        self.written += bytes(data[: self.most])
        return min(self.most, len(data))

    @property
    def lines(self) -> list[str]:
        return self.written.decode().splitlines()


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.fixture
def writer(page: Page) -> Iterator[LogWriter]:
    writer = LogWriter(2, write=page.write)
    yield writer
    page.gate.set()
    assert writer.flush(WAIT_S)


def log_on(writer: LogWriter, format_: str = "json", **more: Any) -> Log:
    return Log(writer, format_=format_, **more)


@pytest.fixture
def installed(writer: LogWriter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """The whole of it, as `serve` has it, but for the descriptor."""
    root, before = logging.getLogger(), (logging.getLogger().handlers[:], logging.getLogger().level)
    monkeypatch.setattr(logs, "_log", log_on(writer))
    logs.configure("info", "auto")
    yield logs._log
    structlog.reset_defaults()
    root.handlers[:], root.level = before
    logging.captureWarnings(capture=False)


# --- the writer -----------------------------------------------------------------------------------


def test_lines_are_written_whole_and_in_order_though_each_write_takes_a_few_bytes(
    page: Page, writer: LogWriter
) -> None:
    page.most = 3
    for number in range(100):
        writer.put(b"line %d\n" % number)
    assert writer.flush(WAIT_S)
    assert page.lines == [f"line {number}" for number in range(100)]
    assert writer.dropped == 0


def test_lines_that_do_not_fit_are_dropped_and_counted_and_no_caller_waits(page: Page) -> None:
    writer = LogWriter(2, write=page.write, limit=1000)
    page.gate.clear()
    for _ in range(1000):
        writer.put(b"x" * 99 + b"\n")
    assert writer.dropped == 990
    assert not writer.flush(0.01)
    began = time.monotonic()
    assert not writer.flush(WAIT_S), "the second flush does not wait again"
    assert time.monotonic() - began < WAIT_S
    page.gate.set()
    wait_until(lambda: len(page.lines) == 10, within=WAIT_S)
    wait_until(lambda: writer._waiting == 0, within=WAIT_S)
    writer.put(b"room again\n")
    wait_until(lambda: "room again" in page.lines, within=WAIT_S)
    assert writer.dropped == 990


@pytest.mark.parametrize("code", [errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF])
def test_a_line_that_cannot_be_written_is_counted_and_the_next_one_is_tried(
    code: int, page: Page, writer: LogWriter
) -> None:
    page.refuse = [0, code]
    for line in (b"one\n", b"two\n", b"three\n"):
        writer.put(line)
    assert writer.flush(WAIT_S)
    assert (page.lines, writer.dropped) == (["one", "three"], 1)


def test_a_line_torn_by_a_full_disk_does_not_spoil_the_next_one(page: Page, writer: LogWriter) -> None:
    page.most, page.refuse = 4, [0, errno.ENOSPC]
    writer.put(b"torn here\n")
    writer.put(b"ok\n")
    assert writer.flush(WAIT_S)
    assert page.lines == ["torn", "ok"]


def test_a_pipe_that_another_process_made_non_blocking_loses_no_line() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    writer = LogWriter(writing)
    lines = [b"%05d" % number + b"." * 994 + b"\n" for number in range(500)]
    for line in lines:
        writer.put(line)
    got = b""
    while len(got) < 500_000:
        got += os.read(reading, 1 << 16)
    assert got == b"".join(lines)
    assert writer.flush(WAIT_S)
    os.close(reading)
    os.close(writing)


def test_without_a_thread_lines_wait_for_the_next_one_or_for_the_flush_at_the_end(
    page: Page, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        writer.put(b"last words\n")
        with pytest.raises(RuntimeError):
            writer.start()
        assert writer.flush(WAIT_S)
        assert page.lines == ["last words"]
        writer.put(b"later\n")
    writer.put(b"told\n")
    assert writer.flush(WAIT_S)
    assert (page.lines, writer.dropped) == (["last words", "later", "told"], 0)


def test_many_threads_may_log_at_once(page: Page, writer: LogWriter) -> None:
    def work(name: int) -> None:
        for number in range(500):
            writer.put(b"%d %d\n" % (name, number))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.flush(WAIT_S)
    for name in range(4):
        assert [line for line in page.lines if line.startswith(f"{name} ")] == [f"{name} {n}" for n in range(500)]
    assert writer._waiting == 0


# --- the rate -------------------------------------------------------------------------------------


def test_a_kind_passes_in_a_burst_then_steadily_and_counts_lines_left_out() -> None:
    now = [100.0]
    rate = LogRate(lambda: now[0])
    passed = [rate.admit("flood") for _ in range(100)]
    assert passed == [0] * int(BURST) + [None] * (100 - int(BURST))
    assert rate.admit("another") == 0
    now[0] += 1 / RATE
    assert rate.admit("flood") == 100 - int(BURST)
    assert rate.admit("flood") is None
    now[0] += 3600
    assert rate.admit("flood") == 1
    assert rate.left_out == 100 - int(BURST) + 1


def test_kinds_are_bounded() -> None:
    rate = LogRate(lambda: 0.0)
    for number in range(10 * MOST_KINDS):
        rate.admit(f"kind {number}")
    assert len(rate._buckets) <= MOST_KINDS + 1
    assert rate.admit("kind 0") == 0


# --- from an event to a line ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format_", "terminal", "json_"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("json", True, True),
        ("console", False, False),
    ],
)
def test_a_terminal_gets_the_console_format_unless_the_format_is_set(
    format_: str, terminal: bool, json_: bool, page: Page, writer: LogWriter
) -> None:
    log_on(writer, format_, terminal=terminal).take("warning", "kind", {"event": "ready", "ranks": 2})
    assert writer.flush(WAIT_S)
    (line,) = page.lines
    if json_:
        assert json.loads(line)["ranks"] == 2
    else:
        assert re.match(r"(\x1b\S+?m)?20\d\d-\d\d-\d\dT", line), "the time comes first"
        assert "{" not in line
    assert LogSection().format == "auto"


def test_a_shown_line_stays_below_the_log_of_a_terminal_and_leaves_no_trace(page: Page, writer: LogWriter) -> None:
    log = log_on(writer, "json", terminal=True)
    assert log.show("half \x1b[2J")
    log.say("info", "something happened")
    assert log.show("done")
    assert log.show("")
    log.say("info", "the end")
    assert writer.flush(WAIT_S)
    erase = logs.ERASE.decode()
    half = "half \\x1b[2J"
    assert page.written.decode() == (f"{erase}{half}{erase}something happened\n{half}{erase}done{erase}the end\n")
    page.written = b""
    assert not log_on(writer, "console").show("half")
    assert writer.flush(WAIT_S)
    assert page.written == b""


@pytest.mark.parametrize("format_", ["json", "console"])
@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_from_outside_reaches_a_terminal_raw(
    format_: str, terminal: bool, page: Page, writer: LogWriter
) -> None:
    log = log_on(writer, format_, terminal=terminal)
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        event = {"event": EVIL, "task_id": EVIL, "list": [EVIL, {EVIL: EVIL}], "bytes": EVIL.encode(errors="ignore")}
        log.take("warning", "kind", event | {"error": error, "exc_info": error})
    log.say("error", f"first {EVIL}\nsecond {EVIL}")
    assert writer.flush(WAIT_S)
    text = page.written.decode()
    ours = {"\x1b[0m", "\x1b[1m", "\x1b[2m"} | {f"\x1b[3{color}m" for color in range(8) if color != 1}
    for color in ours if terminal else ():  # EVIL's is red
        text = text.replace(color, "")
    bad = [c for c in text.replace("\n", "") if not c.isprintable()]
    assert not bad, bad
    assert "not red" in text
    if format_ == "json":
        line = json.loads(page.lines[0])
        assert line["task_id"] == EVIL
        assert len(page.lines) == 3
    assert page.lines[-1].startswith("second ")


def test_a_line_is_bounded_whatever_is_logged(page: Page, writer: LogWriter) -> None:
    log = log_on(writer)
    log.take("error", "kind", {"event": "long", "task_id": "x" * 2_000_000, "ranks": list(range(10**6))})
    assert writer.flush(WAIT_S)
    (line,) = map(json.loads, page.lines)
    assert line["task_id"].endswith("(1995904 characters more)")
    assert line["ranks"] == list(range(logs.MOST_ITEMS))


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


@pytest.mark.parametrize("format_", ["json", "console"])
def test_a_value_that_cannot_be_shown_costs_a_line_and_no_exception(
    format_: str, page: Page, writer: LogWriter
) -> None:
    log = log_on(writer, format_)
    nested: list[Any] = []
    nested.append(nested)
    for value in (Hostile(), 10**5000, nested):
        log.take("warning", "kind", {"event": "odd", "value": value})
    log.take("warning", "kind", {"event": "good", "value": 1})
    assert writer.flush(WAIT_S)
    assert (len(page.lines), writer.dropped) == (1, 3)


def test_under_the_journal_every_line_has_the_priority_of_its_entry(page: Page, writer: LogWriter) -> None:
    log = log_on(writer, journal=True)
    for level in ("info", "warning", "error", "critical"):
        log.take(level, level, {"event": level})
    log.say("error", "two\nlines")
    assert writer.flush(WAIT_S)
    assert [line[:3] for line in page.lines] == ["<6>", "<4>", "<3>", "<2>", "<3>", "<3>"]


def test_the_journal_is_known_by_the_very_socket() -> None:
    reading, writing = os.pipe()
    status = os.fstat(writing)
    assert logs.under_journal({"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}, writing)
    assert not logs.under_journal({"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino + 1}"}, writing)
    assert not logs.under_journal({}, writing)
    os.close(reading)
    os.close(writing)
    assert not logs.under_journal({}, writing)


# --- all of it ------------------------------------------------------------------------------------


def test_structlog_logging_and_warnings_come_out_as_lines_of_one_form(installed: Log, page: Page) -> None:
    log = structlog.get_logger("test")
    log.debug("too low")
    log.info("said", number=1, nothing=None)
    logging.getLogger("lib").warning("with %s", "arguments")
    wrong = logging.makeLogRecord({"name": "lib", "msg": "with %d", "args": ("wrong ones",), "levelname": "WARNING"})
    logging.getLogger().handlers[0].emit(wrong)
    logging.getLogger("lib").info("too low for a library")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)  # as `take_over_stderr` does
        warnings.warn("careful", stacklevel=1)
    try:
        raise KeyError("k")
    except KeyError:
        log.exception("failed")
    assert logs.flush(WAIT_S)
    lines = [json.loads(line) for line in page.lines]
    assert [line["event"].split(":")[0] for line in lines][:3] == ["said", "with arguments", "with %d"]
    assert [line["level"] for line in lines] == ["info", "warning", "warning", "warning", "error"]
    assert (lines[0]["number"], lines[0]["nothing"]) == (1, None)
    assert lines[1]["logger"] == "lib"
    assert "careful" in lines[3]["event"]
    assert "KeyError: 'k'" in lines[4]["exception"]
    assert all("ts" in line for line in lines)


def test_the_level_takes_effect_at_once_and_libraries_are_counted_by_place(installed: Log, page: Page) -> None:
    log = structlog.get_logger("test")
    logs.set_level("error")
    log.warning("left")
    logs.set_level("debug")
    log.debug("told")
    for number in range(500):
        logging.getLogger("lib").warning(f"a flood in so many words: {number}")
    assert logs.flush(WAIT_S)
    assert json.loads(page.lines[0])["event"] == "told"
    assert len(page.lines) < 300, "a burst, and what its time allows, which is long on a busy machine"
    assert logs.statistics() == {"log_dropped": 0, "log_left_out": 501 - len(page.lines)}


async def test_no_log_call_waits_for_a_reader_that_sleeps(installed: Log, page: Page) -> None:
    page.gate.clear()
    log, ticks = structlog.get_logger("test"), 0
    for number in range(200):
        log.warning(f"kind {number}", text="x" * 4000)
        logging.getLogger("lib").error("also")
        await asyncio.sleep(0)
        ticks += 1
    assert ticks == 200
    for number in range(200):
        log.error(f"kind {number}", text="x" * 4000)
    assert installed.writer.dropped > 0
    page.gate.set()


def test_output_of_python_itself_goes_through_the_queue_line_by_line() -> None:
    lines: list[str] = []
    stream = LogStream(2, lines.append)
    print("one", "line", file=stream)
    print("half", end="", file=stream)
    assert lines == ["one line"]
    print(" and half", file=stream)
    assert lines == ["one line", "half and half"]
    stream.write("x" * (LONGEST_LINE + 1))
    assert len(lines[-1]) == LONGEST_LINE + 1
    stream.flush()
    assert stream.fileno() == 2


def test_a_dying_threads_traceback_goes_through_the_queue(
    installed: Log, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    logs.take_over_stderr()
    try:
        raise RuntimeError(f"in a thread {EVIL}")
    except RuntimeError as error:
        threading.__excepthook__(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
    assert logs.flush(WAIT_S)
    assert "RuntimeError: in a thread \\x1b[2J" in page.lines[-1]
