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
    # A machine that is busy with other tests may add these.
    found["refused"] = dict.fromkeys(found["refused"], 0)
    found["concerns"] = [one for one in found["concerns"] if one["name"] not in ("refused", "event_loop_late")]
    return found


def transferd(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "transferd", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=env,
    )
