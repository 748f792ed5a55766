"""What a command imports: only what it uses, because importing is nearly all that a short command costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.cli.conftest import PATIENTLY
from tests.support.waits import wait_until
from transferd.cli import main
from transferd.client.launch import running, spawn

# Nobody who only wants a version, or an answer, waits for these.
NEVER = {"prometheus_client", "torch", "paddle", "mooncake", "cuda", "pydantic"}
OF_A_DAEMON = {"structlog", "numpy", "uvloop", "h11", "transferd.daemon", "transferd.workers", "transferd.storage"}
OF_A_CLIENT = {"asyncio", "ssl", "zmq", "msgspec", "transferd.client", "transferd.wire", "transferd.config"}
OF_A_REPORT = {"rich", "pygments"}  # structlog imports them, too


def imported(trace: str) -> set[str]:
    """The modules that a process imported, from what it printed with PYTHONPROFILEIMPORTTIME set."""
    return {line.rsplit("|", 1)[1].strip() for line in trace.splitlines() if line.startswith("import time:")}


def imported_by(place: Path, *arguments: str) -> set[str]:
    """place: the current directory, where a command writes its files."""
    done = subprocess.run(
        [sys.executable, "-m", "transferd", *arguments],
        cwd=place,
        env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    modules = imported(done.stderr)
    assert "transferd.cli.main" in modules, "the trace is read"
    return modules


@pytest.mark.parametrize("arguments", [["--version"], ["version", "--format", "json"], ["files", "unit"]])
def test_a_command_without_a_daemon_imports_neither_client_nor_daemon(tmp_path: Path, arguments: list[str]) -> None:
    assert imported_by(tmp_path, *arguments) & (NEVER | OF_A_DAEMON | OF_A_CLIENT | OF_A_REPORT) == set()


def test_a_question_imports_the_client_and_its_report_and_nothing_of_the_daemon(tmp_path: Path) -> None:
    with running({}, tmp_path) as daemon:
        there = ["--endpoint", daemon.endpoint, *PATIENTLY]
        for question in (["ping"], ["tasks"], ["stats", "--format", "json"], ["clients", "--format", "json"]):
            modules = imported_by(tmp_path, *question, *there)
            assert modules & (NEVER | OF_A_DAEMON | OF_A_REPORT) == set(), question
            assert "transferd.client.client" in modules, "it asked"
        assert (
            imported_by(tmp_path, "clients", *there) & (NEVER | OF_A_DAEMON | {"rich.traceback", "rich.progress"})
            == set()
        )


def test_commands_that_only_ask_do_without_the_logging_of_a_daemon() -> None:
    """A command with an endpoint and no configuration asks a daemon, and runs none."""
    commands = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    options = {name: {option.name for option in command.params} for name, command in commands.items()}
    asking = {name for name, has in options.items() if "endpoint" in has and "config" not in has}
    assert "purge" in asking
    assert asking <= main.ONLY_ASK


def test_a_daemon_imports_nothing_that_only_people_or_scrapes_need(tmp_path: Path) -> None:
    sections = {
        "server": {"endpoint": f"ipc://{tmp_path}/d.sock"},
        "metrics": {"listen": ""},
        "storage": {"backend": "memory"},
        "recorder": {"directory": ""},
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFERD_")}
    daemon = spawn(sections, tmp_path, environment=environment | {"PYTHONPROFILEIMPORTTIME": "1"})
    try:
        wait_until(lambda: '"event": "ready"' in daemon.log_file.read_text(), within=60.0)
    finally:
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
    modules = imported(daemon.log_file.read_text())
    assert "transferd.daemon.daemon" in modules, "the trace is read"
    assert "numpy" in modules, "a large message needs it, and there may be no memory for it then"
    unwanted = {"transferd.storage.mooncake", "transferd.cli.top.loop", "transferd.cli.demo", "wsgiref", "http.server"}
    assert modules & (NEVER | unwanted) == set()
