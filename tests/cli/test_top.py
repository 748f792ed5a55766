"""`transferd top`: what it computes, what it draws, and a run on a terminal of 80 by 24."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import Any

import pytest

from tests.cli.conftest import NASTY, OF_A_BUSY_MACHINE, PATIENTLY, transferd
from transferd import SyncClient
from transferd.cli.top.figures import Samples, waits_by_rank
from transferd.cli.top.screen import KEYS, View, ordered, screen
from transferd.client.launch import DaemonProcess
from transferd.observability.report import read

pytestmark = pytest.mark.one_loop


def row(task_id: str, **known: Any) -> dict[str, Any]:
    blank = {"kind": "read", "status": "ok", "blocks": 1, "done": 1, "bytes": 0, "seconds": 0.0, "ended_s": 0.0}
    blank |= {"queue_s": 0.0, "copy_s": 0.0, "storage_s": 0.0, "waits_for": "", "ranks": [], "code": "", "problem": ""}
    blank["engine"] = "default"
    return blank | {"task_id": task_id} | known


def test_rates_are_the_daemons_and_their_history_is_ours(report: dict[str, Any]) -> None:
    samples = Samples()
    later = json.loads(json.dumps(report))
    later["totals"] |= {"tasks_per_s": 4.0, "bytes_per_s": 500.0}
    later["lanes"]["read"] |= {"tasks_per_s": 3.0, "p50_s": 0.1, "p99_s": None}
    later["storage"]["hit_share_1min"] = 0.75
    first = samples.add(read(report), [])
    figures = samples.add(read(later), [])
    assert figures.tasks_per_s == [first.tasks_per_s[0], 4.0]
    assert figures.bytes_per_s[-1] == 500.0
    kind = figures.kinds["read"]
    assert (kind.tasks_per_s, figures.histories["read"][-1], kind.p50_s, kind.p99_s) == (3.0, 3.0, 0.1, None)
    assert figures.hit_share == 0.75


def test_an_engine_that_has_left_has_nothing_to_show(report: dict[str, Any]) -> None:
    samples = Samples("gone")
    report["totals"] |= {"tasks_per_s": 4.0, "bytes_per_s": 500.0}
    report["lanes"]["read"] |= {"done": 3, "tasks_per_s": 4.0}
    figures = samples.add(read(report), [])
    assert (figures.tasks_per_s, figures.bytes_per_s) == ([0.0], [0.0]), "not the figures of all engines"
    assert not any(kind.done for kind in figures.kinds.values())


def test_another_daemon_begins_anew(report: dict[str, Any]) -> None:
    samples = Samples()
    samples.add(read(report), [])
    samples.add(read(report), [])
    assert len(samples.add(read(report | {"boot_id": "another"}), []).tasks_per_s) == 1


def test_waiting_rounds_are_counted_by_rank_largest_count_first() -> None:
    waiting = [
        row("a", ranks=[{"rank": 1, "step": "fetch"}, {"rank": 0, "step": ""}]),
        row("b", ranks=[{"rank": 1, "step": "copy"}]),
        row("c", ranks=[{"rank": 1, "step": "fetch"}]),
    ]
    assert waits_by_rank(waiting) == ["rank 1: 3 (fetch 2, copy 1)", "rank 0: 1 (no step yet 1)"]
    waiting.append(row("d", engine="b", ranks=[{"rank": 1, "step": "copy"}]))
    assert waits_by_rank(waiting)[-1] == "b rank 1: 1 (copy 1)"


def test_the_order_of_tasks() -> None:
    rows = [
        row("old", seconds=3.0, ended_s=9.0, bytes=1),
        row("new", seconds=1.0, ended_s=2.0, bytes=3),
        row("now", seconds=2.0, ended_s=None),
    ]
    assert [one["task_id"] for one in ordered(rows, "slowest")] == ["old", "now", "new"]
    assert [one["task_id"] for one in ordered(rows, "newest")] == ["now", "new", "old"]
    assert [one["task_id"] for one in ordered(rows, "largest")] == ["new", "old", "now"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 12), (20, 3)])
def test_a_screen_has_exactly_the_terminals_size_at_most(report: dict[str, Any], width: int, height: int) -> None:
    rows = [row(NASTY, waits_for="rank 1 \x1b[31mfetch", ended_s=None)] + [row(str(n)) for n in range(99)]
    views = [View(), View(story=["line " * 99, "\x1b[2J"] * 40, scrolled=3), View(problem="gone\n" * 9)]
    figures = Samples().add(read(report), rows)
    for view in views:
        for known in (figures, None):
            lines = screen(known, view, width, height)
            assert len(lines) == height
            assert all(line.cell_len <= width for line in lines)
            assert all(line.plain.isprintable() for line in lines)
            assert KEYS.startswith(lines[-1].plain.rstrip("…"))


def test_the_parts_of_a_screen(report: dict[str, Any]) -> None:
    rows = [row("slow-one", seconds=2.5, storage_s=2.0, copy_s=0.1), row("quick", seconds=0.1)]
    report["storage"] |= {"breaker": "open"}
    report["concerns"] = [{"name": "storage_silent", "text": "storage file does not answer"}]
    text = "\n".join(line.plain for line in screen(Samples().add(read(report), rows), View(paused=True), 80, 24))
    assert "[paused]" in text
    assert "slow-one                 read     ok            2.5 s  storage 2.0 s, copy " in text
    assert text.index("slow-one") < text.index("quick")
    assert "breaker open" in text
    assert "! storage file does not answer" in text


def test_once_prints_a_screen_or_its_figures(daemon: DaemonProcess, engine: SyncClient) -> None:
    arguments = ["top", "--once", "--interval", "0.1", "--endpoint", daemon.endpoint]
    done = transferd(*arguments)
    assert done.returncode == 0
    assert f"boot {engine.stats()['boot_id'][:12]}" in done.stdout
    assert "slowest first" in done.stdout
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) < 24
    tree = json.loads(transferd(*arguments, "--format", "json").stdout)
    assert {"kinds", "rows", "waits", "tasks_per_s"} <= set(tree)
    assert transferd("top", "--endpoint", daemon.endpoint).returncode == 2  # no terminal


class Terminal:
    """A command on a pseudo-terminal of 80 by 24."""

    def __init__(self, *arguments: str) -> None:
        self.mine, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        command = [sys.executable, "-m", "transferd", *arguments, *PATIENTLY]
        environment = os.environ | {"TERM": "xterm-256color"}
        # As from a terminal, where SIGINT interrupts: a shell's background jobs ignore it, and so do their children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        finally:
            signal.signal(signal.SIGINT, before)
        self.shown = self.all = ""

    def press(self, keys: str) -> None:
        self.shown = ""
        os.write(self.mine, keys.encode())

    def until(self, *texts: str) -> None:
        """Read until one of these was drawn since the last key."""
        give_up = time.monotonic() + 60
        while not any(text in self.shown for text in texts):
            ready, _, _ = select.select([self.mine], [], [], max(0.0, give_up - time.monotonic()))
            assert ready, f"{texts!r} was not drawn in:\n{self.shown[-4000:]}"
            drawn = os.read(self.mine, 65536).decode(errors="replace")
            self.shown += drawn
            self.all += drawn

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self.mine)
        os.close(self.theirs)


def test_a_run_on_a_terminal(daemon: DaemonProcess, engine: SyncClient) -> None:
    terminal = Terminal("top", "--interval", "0.2", "--endpoint", daemon.endpoint)
    try:
        terminal.until("slowest first")
        terminal.until("all is well", *(f"! {text}" for text in OF_A_BUSY_MACHINE.values()))
        terminal.press("s")
        terminal.until("newest first")
        terminal.press("p")
        terminal.until("[paused]")
        terminal.press("p")
        terminal.press("j\r")
        terminal.until("admitted")  # a story
        terminal.press("\x1b")
        terminal.until("newest first")
        terminal.press("q")
        assert terminal.process.wait(30) == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.before
        assert r"evil\x1b[2J\n[red]task" in terminal.all  # what a client named is drawn escaped
        assert "evil\x1b" not in terminal.all
        frames = terminal.all.split("\x1b[H")[1:-1]
        assert len(frames) >= 5
        assert (
            max(frame.count("\n") for frame in frames) == 23
        )  # the last line has no end, or the first would scroll away
    finally:
        terminal.close()


def test_control_c_ends_it_and_leaves_the_terminal_as_it_was(daemon: DaemonProcess, engine: SyncClient) -> None:
    terminal = Terminal("top", "--endpoint", daemon.endpoint)
    try:
        terminal.until("slowest first")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("\x1b[?1049l")  # the screen of before
        assert terminal.process.wait(30) == 0
        assert "Traceback" not in terminal.all
        assert termios.tcgetattr(terminal.theirs) == terminal.before
    finally:
        terminal.close()
