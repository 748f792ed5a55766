"""A start that takes minutes tells systemd that it moves, and only while it does; and a person what it does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from transferd.daemon import process, start_progress
from transferd.daemon.start_progress import StartProgress
from transferd.observability import logs
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.runtime.compat import wait_for
from transferd.tiers import populate

GIB = 1024**3


class Told:
    """A notifier that keeps what it is told, and lets somebody wait for it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, ...]] = []
        self.told = asyncio.Event()

    def notify(self, *states: str) -> bool:
        self.lines.append(states)
        self.told.set()
        return True


async def test_more_time_is_asked_for_whenever_memory_was_populated_or_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_progress, "EXTEND_S", 2)
    monkeypatch.setattr(process, "LOOK_S", 0.001)
    progress = populate.Progress()
    monkeypatch.setattr(process, "PROGRESS", progress)
    told = Told()

    async def opens() -> None:
        for made in ({"populated": 3 * GIB}, {"populated": 5 * GIB}, {"pinned": GIB}, {"pinned": GIB}):
            await told.told.wait()
            told.told.clear()
            progress.add(**made)
        await told.told.wait()

    signals: Any = SimpleNamespace(stop=asyncio.get_running_loop().create_future())
    daemon: Any = SimpleNamespace(open=opens, host_bytes=8 * GIB, clock=SYSTEM_CLOCK)
    assert await wait_for(process._started(daemon, told, signals), 30)  # type: ignore[arg-type]
    assert [lines[0] for lines in told.lines] == ["EXTEND_TIMEOUT_USEC=2000000"] * 5
    assert [lines[1] for lines in told.lines] == [
        f"STATUS=starting: {populated} of 8.0 GiB of host memory populated, {pinned} pinned"
        for populated, pinned in (
            ("0 B", "0 B"),
            ("3.0 GiB", "0 B"),
            ("8.0 GiB", "0 B"),
            ("8.0 GiB", "1.0 GiB"),
            ("8.0 GiB", "2.0 GiB"),
        )
    ]


async def test_a_start_that_stands_still_asks_for_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOOK_S", 0.001)
    monkeypatch.setattr(process, "PROGRESS", populate.Progress())
    told, go, looks = Told(), asyncio.Event(), 0

    async def wait(*arguments: Any, **options: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 5:
            go.set()
        return await asyncio.wait(*arguments, **options)

    async def opens() -> None:
        await go.wait()

    monkeypatch.setattr(process, "asyncio", SimpleNamespace(**vars(asyncio) | {"wait": wait}))
    signals: Any = SimpleNamespace(stop=asyncio.get_running_loop().create_future())
    daemon: Any = SimpleNamespace(open=opens, host_bytes=8 * GIB, clock=SYSTEM_CLOCK)
    assert await wait_for(process._started(daemon, told, signals), 30)  # type: ignore[arg-type]
    assert len(told.lines) == 1
    assert looks >= 5


class Screen:
    """A terminal, or none: what it shows, and what is logged instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
        self.shown: list[str] = []
        self.logged: list[dict[str, Any]] = []
        self.now = 100.0
        self._terminal = terminal
        log = SimpleNamespace(info=lambda event, **more: self.logged.append({"event": event, **more}))
        monkeypatch.setattr(start_progress, "log", log)

    def show(self, text: str) -> bool:
        self.shown.append(text)
        return self._terminal

    def progress(self) -> StartProgress:
        return StartProgress(Told(), 8 * GIB, lambda: self.now, self.show)  # type: ignore[arg-type]


def test_a_terminal_shows_how_much_memory_is_made_how_fast_and_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen(monkeypatch, terminal=True)
    progress = screen.progress()
    screen.now += 3
    progress.making_memory(0, 0)
    progress.making_memory(6 * GIB, GIB)
    progress.making_memory(8 * GIB, GIB)
    progress.making_memory(8 * GIB, 8 * GIB)
    progress.waiting("no engine has offered the memory of rank 1")
    progress.done()
    assert screen.shown == [
        "starting, 3.0 s",
        "██████░░ 6.0 GiB of 8.0 GiB of host memory, 2.0 GiB/s, 1.0 s left",
        "█░░░░░░░ 1.0 GiB of 8.0 GiB of host memory pinned",
        "starting, 3.0 s",
        "waiting for 3.0 s: no engine has offered the memory of rank 1",
        "",
    ]
    assert not screen.logged


def test_a_log_has_a_line_now_and_then_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch, terminal=False)
    progress = screen.progress()
    for second in range(3600):
        screen.now = 100.0 + second
        progress.waiting("no engine has offered the memory of rank 1")
    assert [line["waited_s"] for line in screen.logged] == [5, 10, 20, 40, 80, 160, 320, 640, 1240, 1840, 2440, 3040]
    screen.logged.clear()
    began, progress = screen.now, screen.progress()
    for second in range(8):
        screen.now = began + second
        progress.making_memory(second * GIB, 0)
    assert screen.logged == [
        {"event": "starting", "populated": 5 * GIB, "of": 8 * GIB, "bytes_per_s": GIB, "left_s": 3},
    ]


@pytest.mark.one_loop
def test_a_terminal_shows_what_a_starting_daemon_waits_for(tmp_path: Path) -> None:
    settings = ["cache.device_blocks=2", "cache.host_blocks=2", "cache.ownership=attach", "metrics.listen="]
    settings += ["storage.backend=memory", f"server.endpoint=ipc://{tmp_path}/d"]
    command = [sys.executable, "-m", "transferd", "serve", *(word for one in settings for word in ("--set", one))]
    ours, theirs = pty.openpty()
    seen = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as daemon:
        os.close(theirs)
        while b"no engine has offered the memory of rank" not in seen.partition(b"waiting for ")[2]:
            seen += os.read(ours, 4096)
        daemon.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
            while more := os.read(ours, 4096):
                seen += more
    os.close(ours)
    assert daemon.returncode == 0
    *_, last = seen.decode().splitlines()
    assert "stopped" in last
    assert "{" not in last, "a terminal gets the console format"
    assert seen.decode().rpartition("waiting for ")[2].count(logs.ERASE.decode()) >= 1, "the line is removed at the end"
