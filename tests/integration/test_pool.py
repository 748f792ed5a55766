"""`transferd pool`: a real master in its own process, and what is told of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.caches import attached_sync
from transferd import WriteStorageTask
from transferd.cli.pool.master import free_port, master_command, master_executable
from transferd.cli.pool.status import read_status
from transferd.client.launch import running
from transferd.errors import StorageUnavailable
from transferd.observability.http import HttpServer, Page

needs_mooncake = pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")


def transferd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "transferd", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_master_of_several_keeps_the_log_of_changes_wherever_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked the program for its options, and went without them where that took over ten seconds: on a cold disk."""
    monkeypatch.setattr("transferd.cli.pool.master.master_executable", lambda: "/does/not/answer")
    command = master_command("127.0.0.1", 1, 2, etcd="127.0.0.1:3,127.0.0.1:4")
    assert {"--enable_oplog=true", "--etcd_endpoints=127.0.0.1:3;127.0.0.1:4"} <= set(command)
    assert "--allocation_strategy=local_first" in command


@pytest.fixture
def master(tmp_path: Path) -> Iterator[tuple[int, int, subprocess.Popen[bytes]]]:
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "transferd", "pool", "master"]
    with (tmp_path / "master.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--listen", f"127.0.0.1:{port}", "--metrics-port", str(metrics)], stdout=log, stderr=log
        )
    for _ in range(200):
        try:
            read_status(f"127.0.0.1:{metrics}")
            break
        except StorageUnavailable:
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail((tmp_path / "master.log").read_text())
    yield port, metrics, process
    process.kill()
    process.wait()


def test_a_free_port_is_given_once_and_is_none_that_a_connection_may_have_taken_meanwhile() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert all(20_000 <= port < int(first) for port in ports) or int(first) <= 21_000


@needs_mooncake
def test_a_master_serves_a_daemon_and_its_status_shows_what_that_lends_and_stores(
    master: tuple[int, int, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    port, metrics, process = master
    empty = transferd("pool", "status", "--metrics", f"127.0.0.1:{metrics}")
    assert (empty.returncode, "no node lends memory" in empty.stdout) == (0, True)
    mooncake = {"master_server_addr": f"127.0.0.1:{port}", "global_segment_size": "32MiB", "local_buffer_size": "16MiB"}
    tree = {
        "cache": {"ranks": 1, "layers": 2, "kv_heads": 1, "head_dim": 16, "host_blocks": 0},
        "host": {"staging": "1MiB"},
        "storage": {"backend": "mooncake", "mooncake": mooncake},
    }
    with running(tree, tmp_path) as daemon, attached_sync(daemon.endpoint) as client:
        client.submit(WriteStorageTask(task_id="w", keys=["a", "b"], gpu_block_ids=[0, 1]))
        answer = transferd("pool", "status", "--metrics", f"127.0.0.1:{metrics}", "--keys", "1", "--format", "json")
        report = json.loads(answer.stdout)
        assert (report["health"], report["ready"], len(report["key_names"])) == ("ok", True, 1)
        assert report["keys"] == 3, "two blocks, and the record of the layout that they are in"
        assert [segment["capacity"] for segment in report["segments"]] == [32 * 1024**2]
        assert report["capacity"] == 32 * 1024**2 > report["used"] > 0
        shown = transferd("pool", "status", "--metrics", f"127.0.0.1:{metrics}").stdout
        assert "3 keys" in shown
        assert "32.0 MiB" in shown
    process.send_signal(signal.SIGTERM)
    process.wait(30)


def test_a_pool_that_is_not_there_is_one_line_and_exit_1() -> None:
    answer = transferd("pool", "status", "--metrics", "127.0.0.1:1")
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1
    assert "no Mooncake master answers at 127.0.0.1:1" in answer.stderr


@pytest.mark.one_loop
async def test_something_else_at_the_address_is_not_taken_for_a_master() -> None:
    import asyncio

    server = HttpServer("127.0.0.1:0", {"/health": lambda _: Page(b'{"status": "ok"}')})
    await server.start()
    with pytest.raises(StorageUnavailable, match=r"does not answer like|no Mooncake master"):
        await asyncio.to_thread(read_status, f"127.0.0.1:{server.port}")
    await server.close()


def test_a_listen_address_without_a_port_is_bad_usage() -> None:
    answer = transferd("pool", "master", "--listen", "localhost")
    assert (answer.returncode, answer.stderr.strip()) == (2, "--listen: expected host:port ('localhost')")
