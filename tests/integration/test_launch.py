"""Daemons of demos, replays and benchmarks, started in directories of any kind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transferd import SyncClient
from transferd.cli.bench.control import echo
from transferd.client.launch import running, start
from transferd.runtime.address import LONGEST_SOCKET_PATH, socket_path

CONFIG = {"cache": {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 16, "block_size": 16, "device_blocks": 2}}


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A directory whose path is too long for a socket, as TMPDIR of a batch job may be."""
    directory = tmp_path / ("d" * LONGEST_SOCKET_PATH)
    directory.mkdir()
    return directory


@pytest.mark.parametrize("length", [LONGEST_SOCKET_PATH, LONGEST_SOCKET_PATH + 1])
def test_a_socket_is_elsewhere_only_if_its_path_would_be_too_long(length: int) -> None:
    directory = Path("/" + "d" * (length - len("//a.sock")))
    with socket_path(directory, "a.sock") as path:
        assert (path == directory / "a.sock") == (length == LONGEST_SOCKET_PATH)
        assert len(os.fsencode(path)) <= LONGEST_SOCKET_PATH
        assert path.parent.exists() == (path.parent != directory)
    assert not path.parent.exists()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_daemon_starts_in_a_directory_of_any_depth_and_leaves_no_socket(deep: Path, end: str) -> None:
    daemon = start(CONFIG, deep)
    place = Path(daemon.endpoint.removeprefix("ipc://")).parent
    try:
        with SyncClient(daemon.endpoint) as client:
            assert client.stats()["ranks"]
        assert (deep / "daemon.log").exists()
        assert place.exists()
    finally:
        daemon.kill() if end == "kill" else daemon.stop()
    assert not place.exists()


def test_a_daemon_starts_with_a_retired_setting_and_logs_what_decides_now(tmp_path: Path) -> None:
    with running(CONFIG | {"cuda": {"grid": 3}}, tmp_path) as daemon:
        assert "cuda.grid" in daemon.log
        assert "has no effect any more: the kind of GPU decides" in daemon.log


def test_configured_paths_stay(deep: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/own.sock"
    with running(CONFIG | {"server": {"endpoint": endpoint}}, deep) as daemon:
        assert daemon.endpoint == endpoint


def test_the_echo_of_the_benchmarks_does_too(deep: Path) -> None:
    with echo(deep) as limit:
        assert limit.round_trip_us(3) > 0
