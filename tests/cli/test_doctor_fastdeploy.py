"""`transferd doctor --fastdeploy BACKEND`: what FastDeploy will do in this environment."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.test_doctor import Sound
from transferd.cli.doctor import fastdeploy
from transferd.cli.doctor.checks import Diagnosis, Level
from transferd.cli.doctor.fastdeploy import plans

VERSION = {"package": lambda name: "2.6.0" if name == "fastdeploy-gpu" else None}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(fastdeploy, "started_daemons", list)
    return tmp_path


def found(backend: str = "none", variables: dict[str, str] | None = None, **answers: object) -> dict[str, Diagnosis]:
    said = {"FD_PLUGINS": "transferd"} | (variables or {})
    machine = Sound(**VERSION | {"variable": lambda name: said.get(name, "")} | answers)
    return {one.name: one for one in plans(machine, backend)}


@pytest.mark.parametrize(("variables", "version", "level", "told"), [
    ({}, "2.6.0", Level.OK, "fastdeploy-gpu 2.6.0: transferd takes the place of its transfer processes"),
    ({"ENABLE_V1_KVCACHE_MANAGER": "1"}, "2.6.0", Level.OK, "takes the place of its V1 manager's storage"),
    ({}, "3.1.0", Level.WARN, "3.1.0: transferd was run with 2.5, 2.6 and develop"),
    ({}, "", Level.WARN, "is not installed in this environment"),
    ({"FD_PLUGINS": "other"}, "2.6.0", Level.WARN, "FD_PLUGINS does not name transferd"),
])  # fmt: skip
def test_versions_are_told_before_the_start(variables: dict[str, str], version: str, level: Level, told: str) -> None:
    said = found(variables=variables, package=lambda name: version or None if name == "fastdeploy-gpu" else None)
    assert said["FastDeploy"].level is level
    assert told in said["FastDeploy"].found


def test_the_daemon_that_an_engine_would_use_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the first engine starts one" in found()["FastDeploy's daemon"].found
    named = {"TRANSFERD_ENDPOINT": f"ipc://{place}/d.sock"}
    assert "will be started there" in found(variables=named)["FastDeploy's daemon"].found
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{place}/d.sock")
        listening.listen()
        assert "it listens" in found(variables=named)["FastDeploy's daemon"].found
    monkeypatch.setattr(fastdeploy, "started_daemons", lambda: ["ipc:///one"])
    assert "ipc:///one" in found()["FastDeploy's daemon"].found


def test_storage_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found()["FastDeploy's storage"].found == "none: blocks are kept in the CPU cache only"
    assert found("file")["FastDeploy's storage"].found == "file"
    assert "AttentionStore hears nothing" in found("attention_store")["FastDeploy's storage"].found
    monkeypatch.setenv("AS_WRITE_SLICE_TIMEOUT", "soon")
    wrong = found("attention_store")["FastDeploy's storage"]
    assert (wrong.level, "AS_WRITE_SLICE_TIMEOUT" in wrong.found) == (Level.FAIL, True)


def test_a_pool_is_asked_and_the_address_and_size_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as master:
        monkeypatch.setenv("MOONCAKE_MASTER_SERVER_ADDR", f"127.0.0.1:{master.getsockname()[1]}")
        monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", str(2 * 1024**3))
        told = found("mooncake")["FastDeploy's storage"]
    assert told.level is Level.OK
    assert "as 127.0.0.1, lending 2GiB for each rank; the master answers" in told.found
    assert found("mooncake", connects=lambda *_: "refused")["FastDeploy's storage"].level is Level.FAIL
    assert found("mooncake", module=lambda _: False)["FastDeploy's storage"].level is Level.FAIL
    monkeypatch.delenv("MOONCAKE_MASTER_SERVER_ADDR")
    without = found("mooncake")["FastDeploy's storage"]
    assert "master_server_addr: is required" in without.found
