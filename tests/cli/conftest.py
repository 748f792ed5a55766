"""One daemon for the commands that look at one, and a story for it to tell."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from transferd import ReadStorageTask, SwapOutTask, SyncClient, WriteStorageTask
from transferd.client.launch import DaemonProcess, running

# Concerns that a machine brings which is busy with other tests: by name, and how their texts begin.
OF_A_BUSY_MACHINE = {
    "refused": "refused connections: ",
    "event_loop_late": "the event loop is late",
    "storage_slow": "1 of 100 tasks of the last minute waited",
    "task_hangs": "a task was admitted ",
}
PATIENTLY = ("--timeout", "60")  # for a command's answer; by default 2 s, for which a busy machine may stand still
ASK = {"clients", "doctor", "engines", "explain", "ping", "record", "stats", "tasks", "top", "why"}  # what takes it
NASTY = "evil\x1b[2J\n[red]task"  # what a client may name a task: it must not reach a terminal as it is


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    tree = {
        "cache": {"device_blocks": 8, "host_blocks": 8},
        "metrics": {"listen": "127.0.0.1:0"},
        "storage": {"file": {"capacity": "1GiB"}},  # fits on any disk, so that nothing is the matter
    }
    with running(tree, tmp_path_factory.mktemp("cli")) as process:
        yield process


@pytest.fixture(scope="session")
def story(daemon: DaemonProcess) -> Iterator[tuple[SyncClient, dict[str, Any]]]:
    """An engine that stays, and the report after its write, read, read of nothing, and rejected swap.

    The report is read before any test asks the daemon for more.
    """
    with SyncClient(daemon.endpoint) as client:
        for rank in range(2):
            client.attach(rank)
        assert client.submit(WriteStorageTask(task_id=NASTY, keys=["k"], gpu_block_ids=[1])).status == "ok"
        assert client.submit(ReadStorageTask(task_id="read-1", keys=["k"], gpu_block_ids=[2])).status == "ok"
        assert client.submit(ReadStorageTask(task_id="read-2", keys=["no"], gpu_block_ids=[3])).status == "miss"
        swap = SwapOutTask(task_id="swap-1", gpu_block_ids=[99], cpu_block_ids=[0])
        assert client.submit(swap).status == "rejected"
        yield client, client.stats()


@pytest.fixture(scope="session")
def engine(story: tuple[SyncClient, dict[str, Any]]) -> SyncClient:
    return story[0]


@pytest.fixture
def report(story: tuple[SyncClient, dict[str, Any]]) -> dict[str, Any]:
    found = copy.deepcopy(story[1])
    found["refused"] = dict.fromkeys(found["refused"], 0)
    found["concerns"] = [one for one in found["concerns"] if one["name"] not in OF_A_BUSY_MACHINE]
    return found


def transferd(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command. One that asks the daemon of a test does so patiently."""
    at = "--endpoint" in arguments or "--config" in arguments or "TRANSFERD_ENDPOINT" in (env or {})
    patiently = PATIENTLY if at and arguments[0] in ASK and "--timeout" not in arguments else ()
    return subprocess.run(
        [sys.executable, "-m", "transferd", *arguments, *patiently],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=env,
    )
