"""Which engines use the packaged daemon, and that looking for it leaves no trace in that daemon's log."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transferd.adapters.common import packaged
from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.directories import own_directory, own_socket
from transferd.adapters.common.packaged import nobody_listens
from transferd.adapters.fastdeploy import companion as fastdeploy
from transferd.adapters.vllm.settings import VLLM

ENDPOINT_VARIABLE = "TRANSFERD_ENDPOINT"

ASKED: dict[str, Any] = {"cache": {"ownership": "attach"}, "storage": {"backend": "none"}}


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    """Where the packaged daemon listens."""
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def listening(tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Takes the packaged daemon's place; accepts nothing."""
    monkeypatch.delenv(ENDPOINT_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(packaged, "DEFAULT_ENDPOINT", endpoint)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(8)
        listener.setblocking(False)
        yield listener


def belongs_to(path: Path, owner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.stat

    def stat(asked: Any, **how: Any) -> os.stat_result:
        told = list(found(asked, **how))
        told[4] = owner if str(asked) == str(path) else told[4]
        return os.stat_result(told)

    monkeypatch.setattr(os, "stat", stat)


def test_a_listening_socket_is_distinguished_from_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert nobody_listens(f"ipc://{path}")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)
        assert not nobody_listens(f"ipc://{path}")
    assert nobody_listens(f"ipc://{path}"), "its process has gone, the file is still there"
    assert not nobody_listens("tcp://127.0.0.1:1"), "cannot be told"
    assert not nobody_listens(f"ipc://{tmp_path}/{'x' * 200}"), "cannot be told"


def test_a_look_is_no_connection(listening: socket.socket, endpoint: str) -> None:
    """The daemon would log and count it as a failed handshake."""
    assert not nobody_listens(endpoint)
    with pytest.raises(BlockingIOError):
        listening.accept()


def test_where_the_kernel_refuses_datagrams_a_connection_finds_the_listener(
    listening: socket.socket, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sandboxed(socket.socket):
        def connect(self, address: str) -> None:  # type: ignore[override]
            if self.type == socket.SOCK_DGRAM:
                raise ConnectionRefusedError
            super().connect(address)

    monkeypatch.setattr(socket, "socket", Sandboxed)
    assert not nobody_listens(endpoint)
    listening.close()
    assert nobody_listens(endpoint)


@pytest.mark.parametrize("gpu", [False, True], ids=["host memory", "GPU memory"])
@pytest.mark.parametrize("whose", ["ours", "root's", "another's", "not writable", "in a directory of others", "gone"])
def test_the_packaged_daemon_is_used_if_it_can_map_our_memory(
    listening: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    whose: str,
    gpu: bool,
) -> None:
    del listening
    path, me, access = str(tmp_path / "s"), os.getuid(), os.access
    belongs_to(tmp_path / "s", {"root's": 0, "another's": me + 4711}.get(whose, me), monkeypatch)
    if whose in ("in a directory of others", "gone"):
        problem = errno.ENOENT if whose == "gone" else errno.EACCES

        def refuse(*_: object) -> os.stat_result:
            raise OSError(problem, os.strerror(problem))

        monkeypatch.setattr(os, "stat", refuse)
    writable = whose != "not writable"
    monkeypatch.setattr(os, "access", lambda asked, how: access(asked, how) and (writable or asked != path))
    with caplog.at_level("INFO"):
        found = packaged.packaged_endpoint("the engine", logging.getLogger("engine"), gpu=gpu)
    used = whose in ("ours", "root's") or (whose == "another's" and not gpu)
    assert found == (f"ipc://{path}" if used else "")
    closed = "may not connect"
    why = {"another's": "another user", "not writable": closed, "in a directory of others": closed}.get(whose, "")
    told = [f"not using the packaged daemon at ipc://{path}: ", why, "run it as the engine's user"]
    told = told if why and not used else []
    assert len(caplog.messages) == bool(told)
    assert all(part in caplog.text for part in told)


def test_neither_engine_uses_another_users_daemon_for_gpu_memory(
    listening: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    belongs_to(tmp_path / "s", os.getuid() + 4711, monkeypatch)
    started: list[str] = []
    monkeypatch.setattr(fastdeploy.Companion, "start", lambda self: started.append(self.endpoint))
    monkeypatch.setattr(fastdeploy.Companion, "await_answer", lambda _: None)
    finder = DaemonFinder(VLLM, gpu=True)
    with caplog.at_level("WARNING"):
        assert {finder.find(), finder.find()} == {own_socket(own_directory("vllm"))}
        fastdeploy.find_or_start(ASKED, port=9100, data_parallel_id=0).close()
    (directory,) = [one for one in own_directory("fastdeploy").iterdir() if one.name.startswith("none-")]
    assert started == [own_socket(directory)]
    assert [record.name for record in caplog.records] == ["vllm.transferd", fastdeploy.__name__]
    assert [name in message for name, message in zip(("vLLM", "FastDeploy"), caplog.messages, strict=True)] == [
        True
    ] * 2
    with pytest.raises(BlockingIOError):
        listening.accept()


@pytest.mark.usefixtures("listening")
def test_both_engines_use_their_own_users_daemon(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(daemon: str) -> dict[str, object]:
        asked.append(daemon)
        return {"configured": {}, "storage": {"backend": "none"}}

    monkeypatch.setattr(fastdeploy, "ask", ask)
    assert DaemonFinder(VLLM).find() == endpoint
    found = fastdeploy.find_or_start(ASKED, port=9100, data_parallel_id=0)
    assert (found.endpoint, found.process, asked) == (endpoint, None, [endpoint])
