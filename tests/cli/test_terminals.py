"""Reports in a pipe have one row a line; narrow terminals get fewer columns and whole words. Help, usage errors."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.text import Text

from tests.cli.conftest import PATIENTLY, transferd
from tests.support.waits import wait_until
from transferd import SyncClient, WriteStorageTask
from transferd.client.launch import DaemonProcess
from transferd.runtime.compat import tomllib

pytestmark = pytest.mark.one_loop

LONG = "request-" + "0123456789" * 12


def on_terminal(width: int, *arguments: str) -> list[str]:
    """The lines that a command draws on a terminal of this width, without colours.

    Its errors have no terminal: on one, a command shows how long it waits if the daemon is slow.
    """
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "transferd", *arguments, *PATIENTLY]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    drawn = b""
    while True:
        try:
            piece = os.read(mine, 65536)
        except OSError:  # its end, on Linux
            break
        drawn += piece
    _, complaints = process.communicate(timeout=60)
    os.close(mine)
    assert complaints == b""
    return Text.from_ansi(drawn.decode().replace("\r\n", "\n")).plain.split("\n")


@pytest.fixture
def busy(engine: SyncClient) -> SyncClient:
    engine.submit(WriteStorageTask(task_id=LONG, keys=["k"], gpu_block_ids=[1]))
    engine.submit(WriteStorageTask(task_id=LONG + "-refused", keys=["k"], gpu_block_ids=[10_000]))
    return engine


def _alone(client: SyncClient) -> int:
    """How many clients there are once the commands of before have left: the daemon may hear their Bye later."""
    wait_until(lambda: len(client.clients()) == 1)
    return 1


@pytest.mark.parametrize("columns", ["", "40", "80"])
def test_a_pipe_gets_a_line_for_each_row(daemon: DaemonProcess, busy: SyncClient, columns: str) -> None:
    at, env = ("--endpoint", daemon.endpoint), os.environ | {"COLUMNS": columns} if columns else None
    asked: list[tuple[tuple[str, ...], Callable[[], int]]] = [
        (("tasks", "--limit", "1000"), lambda: len(busy.tasks("recent", 1000))),
        (("tasks", "--failed"), lambda: len(busy.tasks("failed", 20))),
        (("clients",), lambda: _alone(busy) + 1),
    ]
    for arguments, counted in asked:
        rows = counted()
        lines = transferd(*arguments, *at, env=env).stdout.splitlines()
        assert len(lines) == rows + 1, lines
        assert not [line for line in lines if line != line.rstrip()]
    found, *_ = [line for line in transferd("tasks", *at, env=env).stdout.splitlines() if line.startswith(LONG)]
    assert re.search(r"  write +ok +1/1 .+ ago$", found)
    found, *_ = [
        line for line in transferd("tasks", "--failed", *at, env=env).stdout.splitlines() if line.startswith(LONG)
    ]
    assert re.search(r"-refused +- +rejected .* id_out_of_range: .*10000.* ago$", found)
    for line in transferd("doctor", *at, env=env).stdout.splitlines():
        assert line.split()[0] in ("ok", "warn", "fail"), line
    stats = transferd("stats", *at, env=env).stdout
    assert [line for line in stats.splitlines() if line.startswith("write ")]
    assert not re.search(r" $", stats, re.MULTILINE)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_terminal_gets_whole_words_within_its_edges(daemon: DaemonProcess, busy: SyncClient, width: int) -> None:
    at = ("--endpoint", daemon.endpoint)
    for arguments in (("tasks",), ("tasks", "--failed"), ("clients",), ("stats",), ("doctor",)):
        lines = on_terminal(width, *arguments, *at)
        assert max(map(len, lines)) <= width, arguments
        text = "\n".join(lines)
        if arguments[0] == "tasks":
            assert lines[0].split()[0] == "task"
            rows = len(busy.tasks("failed" if "--failed" in arguments else "recent", 20))
            assert len(re.findall(r" (?:ok|miss|partial|rejected) ", text)) == rows, text
        if arguments == ("stats",):
            (lane,) = [line for line in lines if line.startswith("lane ")]
            assert ("moved" in lane) == (width >= 72)
            assert "failed" in lane
            assert [line for line in lines if line.startswith("swap_out ")]
    header = on_terminal(width, "clients", *at)[0].split()
    assert header[0] == "client"
    assert ("silent" in header) == (width >= 72)


@pytest.mark.parametrize("arguments", [(), ("pool",), ("stats",), ("config", "init"), ("generation",), ("bench",)])
def test_minus_h_is_help(arguments: tuple[str, ...]) -> None:
    short, long = transferd(*arguments, "-h"), transferd(*arguments, "--help")
    assert (short.returncode, short.stdout) == (0, long.stdout)
    assert "Usage: " in short.stdout


@pytest.mark.parametrize("arguments", [(), ("pool",)])
def test_a_bare_command_prints_its_help_and_nothing_else(arguments: tuple[str, ...]) -> None:
    done = transferd(*arguments)
    assert (done.returncode, done.stderr.strip()) == (2, "")
    assert "Usage: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem", "way_on"),
    [
        (("xyzzy",), "No such command 'xyzzy'", "`transferd --help`"),
        (("pool", "xyzzy"), "No such command 'xyzzy'", "`transferd pool --help`"),
        (("tasks", "--limit", "abc"), "'abc' is not a whole number", "`transferd tasks --help`"),
        (("ping", "--timeout", "soon"), "'soon' is not a number", "`transferd ping --help`"),
        (("stats", "--nope"), "No such option: --nope", "`transferd stats --help`"),
        (("explain",), "Missing argument", "`transferd explain --help`"),
    ],
)
def test_a_mistake_is_one_line_with_what_was_typed_and_a_way_on(
    arguments: tuple[str, ...], problem: str, way_on: str
) -> None:
    done = transferd(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert problem in line
    assert f"(in: {' '.join(arguments)}; {way_on} says what there is)" in line


def test_a_pool_that_is_not_there_is_said_in_plain_words() -> None:
    done = transferd("pool", "status", "--metrics", "127.0.0.1:1")
    assert done.returncode == 1
    assert "no Mooncake master answers at 127.0.0.1:1: Connection refused; is it its metrics port?" in done.stderr


def test_each_line_of_config_init_is_valid_when_it_is_uncommented(tmp_path: Path) -> None:
    text = transferd("config", "init", "--store", str(tmp_path)).stdout
    settings = re.findall(r"^(?:# )?([a-z_]+ = .*)$", text, re.MULTILINE)
    assert len(settings) > 50
    for setting in settings:
        assert tomllib.loads(setting)
    assert tomllib.loads(re.sub(r"^# (?=[a-z_]+ = |\[)", "", text, flags=re.MULTILINE))
    assert ".py" not in text
