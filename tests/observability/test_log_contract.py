"""What the log does when its reader sleeps, dies or is full: one suite over the real writer and the simulated one.

Logging returns at once and never raises, each line arrives whole and in its order or is counted as dropped, and what
waits is bounded.
"""

from __future__ import annotations

import fcntl
import os
import random
import threading
from collections.abc import Iterator

import pytest

from tests.support.simulation.clock import SimClock
from tests.support.simulation.effects import SimLog
from tests.support.simulation.faults import LogFaults
from tests.support.simulation.loop import SimLoop
from transferd.observability.logs import Log, LogWriter

LIMIT = 8192
WAIT_S = 30.0
LINES = [f"{number:03d} " + "x" * 200 for number in range(200)]  # more than the queue and a pipe hold


class Kind:
    """A log, and what becomes of its reader. Nobody reads until `arrived`."""

    log: Log
    writer: LogWriter

    def stall(self) -> None:
        """The reader's buffer is full: no line leaves the queue before `arrived`."""
        raise NotImplementedError

    def die(self) -> None:
        """Nothing is taken from now on."""
        raise NotImplementedError

    def fill_up(self, lines: int) -> None:
        """The next lines are refused, and those behind them are taken."""
        raise NotImplementedError

    def arrived(self) -> list[str]:
        """Read all that is not dropped."""
        raise NotImplementedError

    def close(self) -> None:
        """Give everything back."""


class Real(Kind):
    """LogWriter on a pipe of one page."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, 4096)
        self._refusals = 0
        self._dead = False
        self.writer = LogWriter(self._writing, limit=LIMIT, write=self._write)
        self.log = Log(self.writer)

    def _write(self, fd: int, data: memoryview) -> int:
        if self._refusals:
            self._refusals -= 1
            with open("/dev/full", "wb", buffering=0) as full:
                return os.write(full.fileno(), data)
        return os.write(fd, data)

    def stall(self) -> None:
        os.write(self._writing, b"\n" * fcntl.fcntl(self._writing, fcntl.F_GETPIPE_SZ))

    def die(self) -> None:
        os.close(self._reading)
        self._dead = True

    def fill_up(self, lines: int) -> None:
        self._refusals = lines

    def arrived(self) -> list[str]:
        if self._dead:
            assert self.writer.flush(WAIT_S)
            return []
        got = bytearray()

        def read() -> None:
            while data := os.read(self._reading, 1 << 16):
                got.extend(data)

        reader = threading.Thread(target=read)
        reader.start()
        assert self.writer.flush(WAIT_S)
        os.close(self._writing)
        self._writing = -1
        reader.join(WAIT_S)
        return [line for line in got.decode().splitlines() if line]  # without those of `stall`

    def close(self) -> None:
        if self._writing >= 0:
            if not self._dead:
                self.die()  # a thread that hangs in a write ends with this
            self.writer.flush(WAIT_S)
            os.close(self._writing)
        elif not self._dead:
            os.close(self._reading)


class Simulated(Kind):
    """SimLog, as a simulated daemon has it."""

    def __init__(self) -> None:
        self._loop = SimLoop(0)  # type: ignore[abstract] # as in new_loop()
        self._sim = SimLog(SimClock(self._loop), random.Random(0))
        self.writer = self._sim
        self.log = self._sim._log

    def stall(self) -> None:
        """Nothing to do: it keeps all lines in its queue until `arrived`."""

    def die(self) -> None:
        self._sim.faults = LogFaults(refuse=1.0)

    def fill_up(self, lines: int) -> None:
        self._sim.dice.script("put", *["refuse"] * lines)

    def arrived(self) -> list[str]:
        lines = [self._sim._lines.get() for _ in range(self._sim._lines.qsize())]
        return [line.decode().rstrip("\n") for line in lines if isinstance(line, bytes)]

    def close(self) -> None:
        self._loop.close()


@pytest.fixture(params=[Real, Simulated], ids=["real", "simulated"])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    made: Kind = request.param()
    yield made
    made.close()


def say(kind: Kind, lines: list[str]) -> None:
    for line in lines:
        kind.log.say("info", line)


def test_lines_that_fit_arrive_whole_and_in_order(kind: Kind) -> None:
    say(kind, LINES[:10])
    assert kind.arrived() == LINES[:10]
    assert kind.writer.dropped == 0


def test_without_a_reader_waiting_lines_are_bounded_and_others_counted(kind: Kind) -> None:
    kind.stall()  # or the writer's thread, which may come late on a busy machine, makes room for later lines
    say(kind, LINES)
    assert kind.writer._waiting <= LIMIT
    dropped = kind.writer.dropped
    assert dropped > 0
    arrived = kind.arrived()
    assert arrived == LINES[: len(arrived)], "the oldest stay: they tell how it began"
    assert len(arrived) + dropped == len(LINES)
    assert kind.writer.dropped == dropped, "what waited was not lost when somebody read again"


def test_a_dead_reader_costs_lines_and_nothing_else(kind: Kind) -> None:
    kind.die()
    say(kind, LINES[:30])
    assert kind.arrived() == []
    assert kind.writer.dropped == 30
    assert kind.writer._waiting == 0


def test_a_full_disk_costs_the_lines_that_met_it(kind: Kind) -> None:
    kind.fill_up(3)
    say(kind, LINES[:8])
    assert kind.arrived() == LINES[3:8]
    assert kind.writer.dropped == 3


def test_without_a_thread_lines_wait_within_the_bound(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        say(kind, LINES)
    assert kind.writer._waiting <= LIMIT
    kept = len(LINES) - kind.writer.dropped
    assert 0 < kept < len(LINES)
    kind.log.say("info", "")  # does not fit either, or starts the thread
    assert [line for line in kind.arrived() if line] == LINES[:kept]


def test_a_value_that_cannot_be_rendered_costs_one_line(kind: Kind) -> None:
    class Hostile:
        def __str__(self) -> str:
            raise ValueError("not to be shown")

    kind.log.take("error", "hostile", {"event": "here", "what": Hostile()})
    say(kind, LINES[:1])
    assert kind.arrived() == LINES[:1]
    assert kind.writer.dropped == 1
