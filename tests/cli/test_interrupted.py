"""Ctrl-C: a command ends at once, with what was done by then, and the exit code of a shell."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.cli.conftest import transferd
from transferd import Status, SyncClient, TaskResult, WriteStorageTask
from transferd.cli import main as command_line
from transferd.cli.asking import INTERRUPTED, AskedDaemon
from transferd.cli.bench import control
from transferd.cli.bench.harness import Row, Rows
from transferd.cli.bench.storage import InProcess
from transferd.cli.replay.command import progress_bar
from transferd.cli.replay.trace import generated_workload
from transferd.cli.verify import verify
from transferd.client import launch
from transferd.client.launch import DaemonProcess, running
from transferd.observability import logs

pytestmark = pytest.mark.one_loop


def test_verify_reports_the_objects_that_it_has_seen(tmp_path: Path) -> None:
    tree = {"cache": {"device_blocks": 8, "host_blocks": 0, "ranks": 1}}
    with running(tree, tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        client.attach(0)
        keys = [f"k{number}" for number in range(6)]
        task = WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=list(range(6)))
        assert client.submit(task).status == "ok"
    seen = 0

    def progress(_: int) -> None:
        nonlocal seen
        seen += 1
        if seen == 4:
            raise KeyboardInterrupt

    report = verify(str(tmp_path / "blocks"), progress=progress)
    assert report.interrupted
    assert 0 < report.objects < 6
    assert not report.good
    assert report.tree()["interrupted"] is True
    assert verify(str(tmp_path / "blocks")).good


def test_a_benchmark_reports_the_rows_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Rows:
        yield Row("first", 1.5, "µs", 1.0, "an echo", 0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "run", run)
    done = CliRunner().invoke(command_line.app, ["bench", "control", "--format", "json"])
    assert done.exit_code == INTERRUPTED
    told = json.loads(done.stdout)
    assert ([row["name"] for row in told["rows"]], told["interrupted"]) == (["first"], True)


def test_a_replay_reports_what_it_has_compared(tmp_path: Path) -> None:
    trace = tmp_path / "long.jsonl"
    encode = msgspec.json.Encoder().encode
    trace.write_bytes(b"".join(encode(request) + b"\n" for request in generated_workload(1, 20_000)))
    tree = {"cache": {"device_blocks": 8, "host_blocks": 8}}
    with running(tree, tmp_path) as daemon, SyncClient(daemon.endpoint) as engine:
        told = _interrupted_replay(trace, daemon, lambda: sum(engine.stats()["tasks"].values()))
    report = json.loads(told)
    assert report["aborted"] == "interrupted"
    assert (report["verify_failures"], report["errors"]) == (0, [])
    assert sum(report["statuses"].values()) > 0


def _interrupted_replay(trace: Path, daemon: DaemonProcess, answered: Callable[[], int]) -> str:
    """What a replay prints that is interrupted when it has heard of some of its tasks."""
    command = [sys.executable, "-m", "transferd", "replay", str(trace), "--endpoint", daemon.endpoint]
    with subprocess.Popen(
        [*command, "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        while answered() < 100:  # more than the replay can have in flight
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        told, complaints = process.communicate(timeout=100)
    assert (process.returncode, complaints) == (INTERRUPTED, "")
    return told


def test_any_other_command_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    said: list[str] = []
    monkeypatch.setattr(logs, "say", said.append)
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # this process has its own
    monkeypatch.setattr(AskedDaemon, "ask", pressed)
    monkeypatch.setattr("sys.argv", ["transferd", "stats"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == INTERRUPTED
    assert said == ["interrupted"]


def test_a_command_that_is_terminated_takes_its_daemon_along(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "transferd", "bench", "control"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not (sockets := list(tmp_path.glob("*/tp1.sock"))):
            assert process.poll() is None, process.communicate()
        process.terminate()
        process.communicate(timeout=100)
    assert process.returncode == INTERRUPTED
    assert not sockets[0].exists()
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_whose_start_is_interrupted_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[DaemonProcess] = []

    def pressed(daemon: DaemonProcess, *, engine: bool) -> None:
        started.append(daemon)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_await_ready", pressed)
    with pytest.raises(KeyboardInterrupt):
        launch.start({"cache": {"device_blocks": 2}}, tmp_path)
    assert started[0].process.poll() is not None


def test_an_answer_that_comes_after_an_interrupt_is_dropped() -> None:
    async def program() -> None:
        transport = InProcess()
        waiting = transport.waiting[1] = asyncio.get_running_loop().create_future()
        waiting.cancel()
        transport.deliver(b"", 1, TaskResult(task_id="t", status=Status.OK))
        assert not transport.waiting

    asyncio.run(program())


def test_the_version_is_printed_without_a_word_of_progress() -> None:
    assert transferd("version").stderr == ""


def test_a_replay_shows_rate_and_time_left_on_a_terminal() -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=80)
    with progress_bar(console, "replaying") as progress:
        bar = progress.add_task("replaying", total=4)
        now = iter((0.0, 1.0, 2.0, 3.0, 3.0, 3.0))
        progress.get_time = lambda: next(now, 3.0)
        for _ in range(2):
            progress.advance(bar)
        progress.refresh()
    assert "2/4" in drawn.getvalue()
    assert re.search(r"\d+/s", drawn.getvalue())
    plain = io.StringIO()
    with progress_bar(Console(file=plain), "replaying") as progress:
        progress.advance(progress.add_task("replaying", total=4))
    assert plain.getvalue() == ""
