"""A daemon whose log cannot be written: closed, full, its reader dead or asleep. It serves, in time, and stops cleanly.

stderr is replaced before the daemon is executed, so everything in its process that writes there meets the same fate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.caches import attach, fill, snapshot
from tests.support.fifo import Fifo
from tests.support.looking import new_stats
from tests.support.sabotage import FILE_VARIABLE, Saboteur
from transferd import Client, ReadStorageTask, Status, SwapOutTask, TaskResult, WriteStorageTask
from transferd.client.launch import DaemonProcess, running
from transferd.observability.logs import BURST, RATE
from transferd.runtime.compat import timeout

pytestmark = pytest.mark.one_loop

ANSWERED_S = 20.0  # far more than any timeout here, and far less than for ever
PAIRS = 32  # twice as many lines of one kind: more than pass in ANSWERED_S, however slow the machine is
assert 2 * PAIRS > BURST + RATE * ANSWERED_S


def config(**log: Any) -> dict[str, dict[str, Any]]:
    return {
        "server": {"shutdown_timeout": 5.0},
        "tuning": {"server": {"deadline_slack": 0.2, "lane_depth": PAIRS}},
        "cache": {"ranks": 2, "layers": 2, "kv_heads": 1, "head_dim": 8, "block_size": 4, "device_blocks": 64}
        | {"host_blocks": 64, "device": "tests.support.sabotage:SabotagedDevice"},
        "host": {"staging": "64KiB"},
        "storage": {"backend": "memory"},
        "log": log,
    }


@dataclass
class Case:
    daemon: DaemonProcess
    saboteur: Saboteur
    fifo: Fifo


@contextlib.contextmanager
def writing_to(stderr: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **log: Any) -> Iterator[Case]:
    """A daemon whose file descriptor 2 is what the shell makes of `stderr`; "fifo" is that of the case."""
    order = tmp_path / "order"
    monkeypatch.setenv(FILE_VARIABLE, str(order))
    fifo = Fifo(tmp_path / "fifo")
    prefix = ["sh", "-c", f'cd {tmp_path} && exec "$0" "$@" {stderr}']
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))
    with running(config(**log), tmp_path, prefix=prefix) as daemon:
        yield Case(daemon, Saboteur(order), fifo)
    fifo.die()


async def pairs_that_expire(case: Case) -> list[TaskResult]:
    """Pairs of tasks on one block: the first expires while it runs, the second while it waits for the first."""
    async with timeout(ANSWERED_S), Client(case.daemon.endpoint) as client:
        await attach(client)
        with case.saboteur.order("copy_out", rank=0, how="stall"):
            pushed = []
            for block in range(PAIRS):
                first = SwapOutTask(task_id=f"a{block}", timeout=0.3, gpu_block_ids=[block], cpu_block_ids=[block])
                second = ReadStorageTask(task_id=f"b{block}", timeout=1.0, keys=["k"], gpu_block_ids=[block])
                pushed += [await client.push(first), await client.push(second)]
            results = list(await asyncio.gather(*pushed))
        await client.drain()  # the ranks that were left behind let go
        await client.resume()
        return results


async def serves(case: Case) -> dict[str, Any]:
    """Write and read back, every byte; returns stats."""
    async with timeout(ANSWERED_S), Client(case.daemon.endpoint) as client:
        caches = await attach(client)
        fill(caches, [40, 41], seed=1)
        before = snapshot(caches, [40, 41])
        write = WriteStorageTask(task_id="w", keys=["x", "y"], gpu_block_ids=[40, 41])
        assert (await client.submit(write)).status is Status.OK
        read = ReadStorageTask(task_id="r", keys=["x", "y"], gpu_block_ids=[50, 51])
        assert (await client.submit(read)).status is Status.OK
        assert snapshot(caches, [50, 51]) == before
        return await new_stats(client)


def stops_cleanly(daemon: DaemonProcess) -> None:
    assert daemon.stop() == 0
    assert not list(Path("/dev/shm").glob(f"transferd.{daemon.pid}.*"))
    assert not list(daemon.config_file.parent.glob("*.sock"))


@pytest.mark.parametrize("reader", ["dead", "asleep", "full", "closed"])
async def test_every_task_is_answered_in_time_though_no_log_line_can_be_written(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = {"dead": "2>fifo", "asleep": "2>fifo", "full": "2>/dev/full", "closed": "2>&-"}[reader]
    with writing_to(stderr, tmp_path, monkeypatch) as case:
        if reader == "dead":
            case.fifo.die()
        elif reader == "asleep":
            case.fifo.fill()
        results = await pairs_that_expire(case)
        assert [result.status for result in results] == [Status.EXPIRED] * (2 * PAIRS)
        stats = await serves(case)
        assert (stats["log_dropped"] > 0) is (reader in ("dead", "full"))
        assert stats["log_left_out"] > 0
        if reader == "asleep":
            assert case.fifo.full
        stops_cleanly(case.daemon)


async def test_a_flood_of_one_kind_is_a_few_lines_that_say_how_many_they_stand_for(tmp_path: Path) -> None:
    tree = config() | {"cache": config()["cache"] | {"device": "shm"}}
    with running(tree, tmp_path) as daemon:
        async with Client(daemon.endpoint) as client:
            await attach(client)
            tasks = [
                ReadStorageTask(task_id=f"none-{number}", timeout=1e-9, keys=["k"], gpu_block_ids=[0])
                for number in range(200)
            ]
            await asyncio.gather(*map(client.submit, tasks))
            assert (await new_stats(client))["log_left_out"] > 0
            await asyncio.sleep(0.6)  # at two a second, the next one passes
            await client.submit(ReadStorageTask(task_id="later", timeout=1e-9, keys=["k"], gpu_block_ids=[0]))
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    told = [line for line in lines if line["event"] == "task ended with an error"]
    assert sum(1 + line.get("left_out", 0) for line in told) == 201
    assert len(told) < 201
    assert "left_out" in told[-1]


def test_an_abort_ends_the_process_though_the_reader_of_its_stacks_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing_to("2>fifo", tmp_path, monkeypatch) as case:
        case.fifo.fill()
        case.daemon.signal(signal.SIGABRT)
        assert case.daemon.process.wait(60) == -signal.SIGABRT
    assert list((tmp_path / "flight").iterdir())
    for left in Path("/dev/shm").glob(f"transferd.{case.daemon.pid}.*"):
        left.unlink()


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-", "2>fifo"])
def test_a_mistake_in_the_configuration_is_exit_code_2_even_if_stderr_fails(stderr: str, tmp_path: Path) -> None:
    fifo = Fifo(tmp_path / "fifo")
    command = f'cd {tmp_path} && exec "$0" -m transferd serve --set cache.ranks=0 {stderr}'
    fifo.fill()
    done = subprocess.run(["sh", "-c", command, sys.executable], stdout=subprocess.PIPE, env=_here(), timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")
    fifo.die()


@pytest.mark.parametrize("closed", [(0, 2), (1,), (0, 1, 2)])
def test_a_daemon_serves_with_standard_descriptors_closed_and_gives_none_of_them_to_a_socket(
    closed: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing_to(" ".join(f"{number}>&-" for number in closed), tmp_path, monkeypatch) as case:
        opened = [os.readlink(f"/proc/{case.daemon.pid}/fd/{number}") for number in closed]
        assert opened == ["/dev/null"] * len(closed)
        stops_cleanly(case.daemon)


@pytest.mark.parametrize(("stdout", "told"), [("fifo", ""), ("/dev/full", "stdout: No space left on device\n")])
def test_a_report_that_cannot_be_written_is_exit_code_1_and_no_traceback(
    stdout: str, told: str, tmp_path: Path
) -> None:
    fifo = Fifo(tmp_path / "fifo")
    with open(tmp_path / "fifo" if stdout == "fifo" else stdout, "wb") as out:
        fifo.die()
        done = subprocess.run(
            [sys.executable, "-m", "transferd", "version"], stdout=out, stderr=subprocess.PIPE, env=_here(), timeout=60
        )
    assert (done.returncode, done.stderr.decode()) == (1, told)


def test_each_line_carries_its_priority_under_the_journal(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    status = os.fstat(theirs.fileno())
    environment = _here() | {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
    command = [sys.executable, "-m", "transferd", "serve", "--config", "daemon.toml"]
    with running(config(), tmp_path, name="daemon") as daemon:  # for its configuration
        pass
    with ours, theirs:
        again = subprocess.Popen(command, cwd=tmp_path, stderr=theirs.fileno(), env=environment)
        refused = subprocess.Popen(
            [*command, "--set", "cache.ranks=0"], cwd=tmp_path, stderr=theirs.fileno(), env=environment
        )
        assert refused.wait(60) == 2
        theirs.close()
        ours.settimeout(60)
        text = b""
        while b'"ready"' not in text:
            text += ours.recv(4096)
        again.terminate()
        while more := ours.recv(4096):
            text += more
        assert again.wait(60) == 0
    lines = text.decode().splitlines()
    assert {line[:3] for line in lines} == {"<3>", "<6>"}
    assert next(line for line in lines if line.startswith("<3>")).startswith("<3>cache.ranks: ")
    assert {json.loads(line[3:])["event"] for line in lines if line.startswith("<6>")} >= {
        "ready",
        "stopping",
        "stopped",
    }
    assert "<" not in daemon.log[:1]


def _here() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
