"""Nothing sick reads "all is well": sick daemons, made so for real, as their operator sees them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine.faults.resources import SMALL_DISK, fill, in_own_mounts
from tests.support.waits import wait_until
from transferd import SyncClient, WriteStorageTask
from transferd.client.launch import DaemonProcess, running
from transferd.observability.concerns import LAG_S, concerns
from transferd.observability.report import read

CACHE = {"ranks": 1, "device_blocks": 64, "host_blocks": 0}


def named(client: SyncClient, but: str = "event_loop_late") -> dict[str, dict[str, Any]]:
    """The concerns by name. but: one that a loaded machine may add to any."""
    return {concern["name"]: concern for concern in client.stats()["concerns"] if concern["name"] != but}


@contextlib.contextmanager
def attached(process: DaemonProcess) -> Iterator[SyncClient]:
    with SyncClient(process.endpoint) as client:
        client.attach(0)
        yield client


def test_a_daemon_that_got_no_cpu_time_says_that_its_loop_was_late(tmp_path: Path) -> None:
    with running({"cache": CACHE, "storage": {"backend": "memory"}}, tmp_path) as process, attached(process) as client:
        assert named(client) == {}
        for _ in range(30):  # a pulse is late only if it was under way; three of the last ten must be
            process.signal(signal.SIGSTOP)
            time.sleep(1 + 2 * LAG_S)  # the cause itself: it stands still for longer than its pulse and the bound
            process.signal(signal.SIGCONT)
            stats = client.stats()
            if "event_loop_late" in [concern["name"] for concern in stats["concerns"]]:
                break
        (line,) = [one for one in concerns(read(stats)) if "late" in one]
        assert "Give the daemon CPU time" in line


def test_a_disk_that_others_fill_is_said_and_named(tmp_path: Path) -> None:
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    mounts = in_own_mounts(f"mount -t tmpfs -o size={SMALL_DISK} tmpfs {blocks}")
    tree = {"cache": CACHE, "storage": {"backend": "file", "file": {"path": str(blocks), "capacity": "1GiB"}}}
    with running(tree, tmp_path, prefix=mounts) as process, attached(process) as client:
        assert "disk_nearly_full" in named(client), "the capacity is larger than the disk"
        ballast = Path(f"/proc/{process.pid}/root{blocks}/ballast")
        fill(ballast)
        result = client.submit(WriteStorageTask(task_id="w", keys=["a", "b"], gpu_block_ids=[0, 1]))
        assert result.error is not None
        assert result.error.code == "storage_full", result
        found = named(client)
        assert found["disk_full"]["times"] >= 1
        assert "larger storage.file.capacity does not help" in found["disk_full"]["action"]
        ballast.unlink()
        assert client.submit(WriteStorageTask(task_id="x", keys=["c"], gpu_block_ids=[2])).error is None


def test_strangers_at_the_socket_are_counted_and_said(tmp_path: Path) -> None:
    with running({"cache": CACHE, "storage": {"backend": "memory"}}, tmp_path) as process, attached(process) as client:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(process.endpoint.removeprefix("ipc://"))
                stranger.sendall(os.urandom(4096))
                stranger.settimeout(30)
                while stranger_still_there(stranger):
                    pass
        wait_until(lambda: named(client).get("refused", {}).get("times") == 3, within=60)
        wait_until(lambda: '"concern": "refused"' in process.log, "events are logged at once", within=60)


def stranger_still_there(stranger: socket.socket) -> bool:
    try:
        return bool(stranger.recv(4096))
    except ConnectionError:
        return False


@pytest.mark.parametrize("ends", ["resume", "leave"])
def test_a_hold_is_a_concern_until_it_ends(tmp_path: Path, ends: str) -> None:
    with running({"cache": CACHE, "storage": {"backend": "memory"}}, tmp_path) as process, attached(process) as client:
        with SyncClient(process.endpoint) as holder:
            holder.pause()
            assert named(client)["held"]["action"].startswith("`transferd resume` ends it")
            if ends == "resume":
                holder.resume()
        wait_until(lambda: named(client) == {}, within=60)
