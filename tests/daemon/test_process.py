"""A stop ends in time whatever hangs: it is named, nothing is freed under it, a successor can start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.caches import attached
from tests.support import native
from transferd.client import Client
from transferd.client.launch import DaemonProcess, running, start
from transferd.daemon.process import STILL_RUNNING
from transferd.tasks import ReadStorageTask, Status, WriteStorageTask
from transferd.tiers.offered import DIRECTORY
from transferd.tiers.segment import PREFIX

TREE: dict[str, Any] = {
    "server": {"shutdown_timeout": 3.0},
    "tuning": {"server": {"deadline_slack": 0.2}},
    "cache": {"ranks": 1, "layers": 2, "kv_heads": 2, "head_dim": 8, "block_size": 16, "device_blocks": 16},
    "storage": {"backend": "file"},
}
PATIENT = {name: section for name, section in TREE.items() if name != "server"}  # for a stop in which nothing hangs
IDS = [0, 1, 2, 3]
KEYS = [f"key{i}" for i in IDS]


def segments(daemon: DaemonProcess) -> set[Path]:
    """The shared memory with a name that the daemon's process has open. Empty once the process has ended."""
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it is ending, or has ended
        for fd in Path(f"/proc/{daemon.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.add(fd.readlink())
    return {path for path in found if path.parent == DIRECTORY and path.name.startswith(PREFIX)}


def left_of(names: set[Path]) -> list[Path]:
    return [path for path in names if path.exists()]


def events(daemon: DaemonProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]


async def end(daemon: DaemonProcess, *, twice: bool = False) -> int:
    daemon.signal(signal.SIGTERM)
    if twice:
        daemon.signal(signal.SIGTERM)
    return await asyncio.to_thread(daemon.process.wait, 25)


@pytest.mark.parametrize(("call", "twice"), [("pread", False), ("pread", True), ("open", False)])
async def test_a_read_that_never_returns_ends_with_its_deadline_and_the_daemon_with_its_budget(
    tmp_path: Path, call: str, twice: bool
) -> None:
    with running(TREE, tmp_path) as before:
        async with attached(before.endpoint) as client:
            stored = await client.submit(WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=IDS))
            assert stored.status is Status.OK
    hang = native.under(f"{call}:0:1:{native.NEVER}", "/objects/demo")
    daemon = await asyncio.to_thread(start, TREE, tmp_path, name="hanging", prefix=hang)
    try:
        async with attached(daemon.endpoint) as client:
            read = await client.submit(ReadStorageTask(task_id="r", keys=KEYS, gpu_block_ids=IDS, timeout=0.3))
            assert read.status is Status.EXPIRED
        made = segments(daemon)
        assert left_of(made)
        assert await end(daemon, twice=twice) == STILL_RUNNING
    finally:
        daemon.kill()
    assert left_of(made) == []
    told = events(daemon)
    [last] = [event for event in told if event["event"].startswith("stopped with hanging work; ")]
    assert any("transferd-file-in-" in what and "load of 4 objects, demo/" in what for what in last["hanging"]), last[
        "hanging"
    ]
    assert not [event for event in told if event["event"] == "stopped"]
    with running(PATIENT, tmp_path, name="hanging") as successor:  # on the same socket and the same store
        async with attached(successor.endpoint) as client:
            again = await client.submit(ReadStorageTask(task_id="r", keys=KEYS, gpu_block_ids=IDS))
            assert again.status is Status.OK
        assert successor.stop() == 0


async def test_a_write_that_never_returns_leaves_no_half_object(tmp_path: Path) -> None:
    hang = native.under(f"pwrite:0:1:{native.NEVER}", "/objects/demo")
    daemon = await asyncio.to_thread(start, TREE, tmp_path, prefix=hang)
    try:
        async with attached(daemon.endpoint) as client:
            task = WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=IDS, timeout=0.3)
            assert (await client.submit(task)).status in (Status.EXPIRED, Status.PARTIAL)
        assert await end(daemon) == STILL_RUNNING
    finally:
        daemon.kill()
    with running(TREE, tmp_path) as successor:
        async with attached(successor.endpoint) as client:
            assert (
                await client.submit(WriteStorageTask(task_id="w2", keys=KEYS, gpu_block_ids=IDS))
            ).status is Status.OK
            read = await client.submit(ReadStorageTask(task_id="r", keys=KEYS, gpu_block_ids=IDS))
            assert read.status is Status.OK


async def test_a_scan_that_hangs_at_the_start_does_not_keep_a_stop(tmp_path: Path) -> None:
    (tmp_path / "blocks" / "objects").mkdir(parents=True)
    hang = native.under(f"open:0:1:{native.NEVER}", "/objects/probe")
    daemon = await asyncio.to_thread(start, TREE, tmp_path, prefix=hang, wait=False)
    try:
        async with Client(daemon.endpoint, connect_timeout=30, await_ready=False) as client:
            await client.ping()  # it listens
        assert await end(daemon) == STILL_RUNNING
    finally:
        daemon.kill()
    assert any("open of the store" in str(event.get("hanging")) for event in events(daemon))
    with running(PATIENT, tmp_path) as successor:
        assert successor.stop() == 0


@pytest.mark.parametrize("room", [0, 3, 20])
async def test_without_threads_a_start_is_refused_in_one_line(tmp_path: Path, room: int) -> None:
    """As under TasksMax= or RLIMIT_NPROC; the library refuses, since limits do not hold for root."""
    refuse = native.under(f"pthread_create:{room}:-1:11")
    daemon = await asyncio.to_thread(start, TREE, tmp_path, prefix=refuse, wait=False)
    made: set[Path] = set()
    give_up = time.monotonic() + 30
    while (code := daemon.process.poll()) is None:
        assert time.monotonic() < give_up
        made |= segments(daemon)
        await asyncio.sleep(0.005)
    lines = [line for line in daemon.log.splitlines() if line.strip()]
    assert code in (1, 2)
    assert len(lines) == 1, daemon.log
    assert "thread" in lines[0]
    assert left_of(made) == []


async def test_a_daemon_that_is_up_needs_no_more_threads(tmp_path: Path) -> None:
    """Whatever it is asked for then. It may start 140 threads, 96 of them probes, which is more than it needs."""
    tree = PATIENT | {"cache": TREE["cache"] | {"host_blocks": 16}}
    refuse = native.under("pthread_create:140:-1:11")
    with running(tree, tmp_path, prefix=refuse) as daemon:
        async with attached(daemon.endpoint) as client:
            for round_ in range(20):
                keys = [f"{round_}-{key}" for key in KEYS]
                stored = await client.submit(WriteStorageTask(task_id=f"w{round_}", keys=keys, gpu_block_ids=IDS))
                loaded = await client.submit(ReadStorageTask(task_id=f"r{round_}", keys=keys, gpu_block_ids=IDS))
                assert (stored.status, loaded.status) == (Status.OK, Status.OK)
        assert daemon.stop() == 0
