"""`transferd replay` for real: a trace file, a daemon in its own process, files on a disk."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.blobs import overwrite
from transferd.cli.replay import own
from transferd.cli.replay.command import replay, run
from transferd.cli.replay.trace import TraceRequest, generated_workload
from transferd.client.launch import running
from transferd.errors import ConfigError, TransferError
from transferd.runtime.compat import timeout
from transferd.tiers.offered import DIRECTORY
from transferd.tiers.segment import PREFIX

pytestmark = pytest.mark.one_loop  # the daemon is in a process of its own; test_wire.py has both loops

SMALL = {"layers": 2, "kv_heads": 1, "head_dim": 16, "block_size": 16, "device_blocks": 48, "host_blocks": 24}
CONFIG = """
[server]
endpoint = "ipc:///nowhere/at/all.sock"
max_queued_tasks = 3
[cache]
ranks = 1
devices = [0]
layers = 2
attention = "mla"
kv_lora_rank = 32
qk_rope_head_dim = 16
block_size = 8
mtp_layers = 1
mtp_blocks = 60
device_blocks = 48
host_blocks = 0
[host]
staging = "1MiB"
[storage]
backend = "memory"
[metrics]
listen = "127.0.0.1:1"
"""


def transferd(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRANSFERD_")}
    command = [sys.executable, "-m", "transferd", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=clean | (env or {}))


def write_trace(path: Path, requests: list[TraceRequest]) -> Path:
    path.write_text("".join(json.dumps({"hash_ids": list(request.hash_ids)}) + "\n" for request in requests))
    return path


def play(requests: list[TraceRequest], **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"endpoint": None, "config": None, "ranks": 2, "concurrency": 4, "quiet": True}
    report = run(requests, **(settings | options))
    assert report.good, report
    return report.tree()


def test_an_own_daemon_serves_every_tier_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    workload = generated_workload(11, 80)
    report = play(workload, cache=SMALL)
    assert report["requests"] == 80
    assert min(report["hit_blocks"].values()) > 0
    assert sum(report["hit_blocks"].values()) == sum(len(request.hash_ids) for request in workload)
    assert set(report["latency_ms"]) == {"read", "write", "swap_in", "swap_out"}
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_file_decides_the_cache_and_not_the_places(tmp_path: Path) -> None:
    """MLA with an MTP layer of its own block count, no host tier, memory storage, a queue of three."""
    config = tmp_path / "own.toml"
    config.write_text(CONFIG)
    report = play(generated_workload(12, 60), config=config, ranks=3, concurrency=16)
    assert report["hit_blocks"]["host"] == 0
    assert report["hit_blocks"]["storage"] > 0


@pytest.mark.parametrize(
    ("text", "line"),
    [("[cache]\nrank = 1\n", r"^cache\.rank: unknown key"), ("[cache\n", "is not TOML")],
)
def test_a_bad_configuration_fails_before_anything_starts(tmp_path: Path, text: str, line: str) -> None:
    config = tmp_path / "own.toml"
    config.write_text(text)
    with pytest.raises(ConfigError, match=line):
        play([], config=config)


def test_a_daemon_that_cannot_start_names_the_reason() -> None:
    with pytest.raises(TransferError, match=r"did not start .*\n.*cache\.attention: expected one of"):
        play([], cache=SMALL | {"attention": "linear"})


async def test_against_a_running_daemon_a_second_replay_finds_what_the_first_stored(tmp_path: Path) -> None:
    workload = generated_workload(13, 40)
    distinct = {content for request in workload for content in request.hash_ids}
    with running({"cache": SMALL | {"ranks": 2}, "storage": {"backend": "file"}}, tmp_path) as daemon:
        first, second = [await replay(daemon.endpoint, workload, 4, Console(quiet=True)) for _ in range(2)]
    assert first.good
    assert second.good
    assert first.hits["none"] == first.blocks_written == len(distinct)
    assert second.hits["none"] == second.blocks_written == 0
    assert second.hits["storage"] >= len(distinct)


async def test_damage_on_the_disk_is_computed_again_and_never_delivered(tmp_path: Path) -> None:
    workload = generated_workload(14, 30)
    with running({"cache": SMALL | {"ranks": 2}, "storage": {"backend": "file"}}, tmp_path) as daemon:
        assert (await replay(daemon.endpoint, workload, 4, Console(quiet=True))).good
        objects = sorted(p for p in (tmp_path / "blocks").rglob("*") if p.is_file() and p.stat().st_size > 1000)
        assert len(objects) > 20
        for path in objects[::5]:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0x40
            overwrite(path, data)
        again = await replay(daemon.endpoint, workload, 4, Console(quiet=True))
    assert again.verify_failures == 0
    assert again.hits["none"] > 0


async def test_a_daemon_that_is_killed_ends_the_replay_with_a_report(tmp_path: Path) -> None:
    requests = generated_workload(15, 2000)
    with running({"cache": SMALL | {"ranks": 2}, "storage": {"backend": "file"}}, tmp_path) as daemon:
        trace = write_trace(tmp_path / "t.jsonl", requests)
        command = ["-m", "transferd", "replay", str(trace), "--endpoint", daemon.endpoint, "--format", "json"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            async with timeout(60):
                while sum(path.is_file() for path in (tmp_path / "blocks").rglob("*")) < 20:
                    assert process.returncode is None
                    await asyncio.sleep(0.01)
                daemon.kill()
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 1, err
    report = json.loads(out)
    assert report["verify_failures"] == 0
    assert report["requests"] < 2000
    assert report["aborted"]


def test_the_text_report_is_for_people_and_shows_no_progress_bar_in_a_pipe(tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text(CONFIG)
    trace = write_trace(tmp_path / "t.jsonl", generated_workload(2, 20))
    done = transferd("replay", str(trace), "--config", str(config), "--requests", "7")
    assert done.returncode == 0, done.stderr
    assert "verify failures" in done.stdout
    assert done.stderr == ""


def test_an_own_daemon_that_ends_badly_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransferError, match=r"exit code -9"), own.own_daemon(own.settings(None, 1, SMALL)) as endpoint:
        _kill_daemon_of(endpoint)


def test_shared_memory_left_behind_is_an_error() -> None:
    left: list[Path] = []
    descriptors: list[int] = []

    def forget_something() -> None:
        with own.own_daemon(own.settings(None, 1, SMALL)) as endpoint:
            left.append(DIRECTORY / f"{PREFIX}{_pid_of(endpoint)}.forgotten")
            descriptors.append(_created_and_locked(left[0]))

    try:
        with pytest.raises(TransferError, match=r"left shared memory behind: transferd\.\d+\.forgotten"):
            forget_something()
    finally:
        for path, descriptor in zip(left, descriptors, strict=True):
            path.unlink()
            os.close(descriptor)


def _created_and_locked(path: Path) -> int:
    """A descriptor of the file. Locked, or any daemon that starts on this machine removes it as a dead daemon's."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _pid_of(endpoint: str) -> int:
    """The process that listens there."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(endpoint.removeprefix("ipc://"))
        pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def _kill_daemon_of(endpoint: str) -> None:
    os.kill(_pid_of(endpoint), signal.SIGKILL)
