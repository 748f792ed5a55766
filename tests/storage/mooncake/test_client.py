"""The library's client: limits set before it is loaded, its log lines kept off stderr, its codes passed on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.freezing import freeze
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.config import MooncakeStorageSection, from_tree
from transferd.errors import ConfigError, StorageError
from transferd.storage.mooncake import client
from transferd.storage.mooncake import client as glog
from transferd.storage.mooncake.client import Buffer, PoolClient, part_of

needs_mooncake = pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")
LIMITS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "2500",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
}


def section(**more: Any) -> MooncakeStorageSection:
    return from_tree({"storage": {"mooncake": {"timeout": 2.5} | more}}).storage.mooncake


def limits_after(monkeypatch: pytest.MonkeyPatch, before: Mapping[str, str], **more: Any) -> Mapping[str, str]:
    environment = dict(before)
    monkeypatch.setattr(os, "environ", environment)
    client._set_limits(section(**more))
    return environment


def test_every_wait_of_the_library_gets_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_after(monkeypatch, {}) == LIMITS


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_that_the_operator_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert limits_after(monkeypatch, {name: "17"}) == LIMITS | {name: "17"}


def test_a_timeout_below_a_millisecond_does_not_become_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_after(monkeypatch, {}, timeout=0.0001)["MC_RPC_TIMEOUT_MS"] == "1"


@pytest.mark.parametrize(("level", "native"), [("off", "ERROR"), ("warning", "WARNING"), ("info", "INFO")])
def test_the_librarys_log_level_is_a_setting(monkeypatch: pytest.MonkeyPatch, level: str, native: str) -> None:
    assert limits_after(monkeypatch, {}, native_log=level)["MC_LOG_LEVEL"] == native


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 3.0),
        ({"MC_TCP_STATUS_TIMEOUT_SEC": "7"}, 7.0),
        ({"MC_TCP_STATUS_TIMEOUT_SEC": "7", "MC_TCP_PROGRESS_TIMEOUT_SEC": "9"}, 9.0),
        ({"MC_TCP_PROGRESS_TIMEOUT_SEC": "never"}, 3.0),
    ],
)
def test_a_stalled_transfer_is_given_up_after_the_longer_of_two_limits(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], seconds: float
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    assert client.stall_limit() == seconds


# --- replicas and pins ----------------------------------------------------------------------------


def test_replicas_and_pins_are_passed_on() -> None:
    library = SimpleNamespace(ReplicateConfig=SimpleNamespace, SoftPinAction=SimpleNamespace(ENABLE="on"))
    config = client._replicate_config(library, section(replica_num=3, soft_pin=True, hard_pin=True))
    assert (config.replica_num, config.soft_pin_action, config.with_hard_pin) == (3, "on", True)


def test_an_older_version_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(store=SimpleNamespace(ReplicateConfig=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "mooncake", older)
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(ConfigError, match=r"storage\.backend: needs Mooncake 0\.3\.13 or newer"):
        PoolClient(section())


# --- answers --------------------------------------------------------------------------------------


def connected(**calls: Any) -> PoolClient:
    native = object.__new__(PoolClient)
    native._store = SimpleNamespace(**calls)
    native._sections, native._clients = [section()], {0: SimpleNamespace(store=native._store)}  # type: ignore[dict-item]
    return native


def test_a_cpp_exception_is_a_storage_error() -> None:
    def broken(_keys: list[str]) -> list[int]:
        raise RuntimeError("std::bad_alloc")

    with pytest.raises(StorageError, match="bad_alloc"):
        connected(batch_is_exist=broken).exists(["a"])


def test_fewer_answers_than_keys_are_no_answer() -> None:
    with pytest.raises(StorageError, match="1 codes for 2 keys"):
        connected(batch_is_exist=lambda _: [1]).exists(["a", "b"])


def test_a_part_of_a_batch_goes_to_the_library_with_its_own_memory() -> None:
    batch = {"a": Buffer(1, 10), "b": Buffer(2, 20), "c": Buffer(3, 30)}
    given: list[list[object]] = []
    client = connected(batch_get_into=lambda *columns: given.extend(columns) or [10, -704])
    assert client.get(part_of(batch, ["a", "c"])) == {"a": 10, "c": -704}
    assert given == [["a", "c"], [1, 3], [10, 30]]


# --- the library itself, in a process of its own: it reads its settings once ----------------------


def in_a_process(code: str, *arguments: str) -> subprocess.Popen[str]:
    head = """
import os, sys
from transferd.config import from_tree
from transferd.storage.mooncake.client import PoolClient
def join(**more):
    settings = {"master_server_addr": sys.argv[1], "local_hostname": "127.0.0.1", "timeout": 5.0}
    settings |= {"global_segment_size": 0, "local_buffer_size": 0}
    section = from_tree({"storage": {"mooncake": settings | more}}).storage.mooncake
    return PoolClient(section)
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    return subprocess.Popen(
        [sys.executable, "-c", head + code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@needs_mooncake
def test_a_frozen_and_a_dead_master_are_codes_within_the_limit_and_no_noise(tmp_path: Path) -> None:
    """Without its limit the library waits 30 s for a frozen master; without silence it tells stderr about each call."""
    code = """
client = join()
for _ in range(3):
    print(client.exists(["a"])["a"], flush=True)
    sys.stdin.readline()
os._exit(0)  # a close would wait for the master once more
"""
    with Master(tmp_path / "master.log") as master, in_a_process(code, master.address) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "0\n"
            freeze(master.pid)
            process.stdin.write("on\n")
            process.stdin.flush()
            assert process.stdout.readline() == "-901\n"
            master.stop()
            process.stdin.write("on\n")
            process.stdin.flush()
            assert process.stdout.readline() == "-900\n"
            process.stdin.close()
            assert process.wait(60) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


@needs_mooncake
def test_a_set_up_that_failed_is_explained_by_the_next_one(tmp_path: Path) -> None:
    code = """
from transferd.errors import StorageUnavailable
for _ in range(3):
    try:
        join(metadata_server="http://127.0.0.1:1/metadata")
    except StorageUnavailable as error:
        print(error, file=sys.stderr, flush=True)
os._exit(0)
"""
    with Master(tmp_path / "master.log") as master:
        _, stderr = in_a_process(code, master.address).communicate(timeout=60)
    tries = stderr.split("rejected this client")
    assert [".cpp:" in text for text in tries] == [False, True, False, False], "the library says why once"


def test_a_process_without_the_library_has_nothing_to_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_more: "7f00-7f01 r-xp 0 0:0 0 /lib/libc.so.6\n")
    assert not glog.silence()
    assert not glog.silence(but_errors=True)
