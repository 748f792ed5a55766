"""The directory of a daemon that an adapter starts is this user's alone, whatever lies in the way."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from transferd.adapters.common.directories import own_directory, own_socket, started_daemons
from transferd.errors import ConfigError


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_each_part_of_it_is_private_and_it_may_be_there_already(base: Path) -> None:
    made = own_directory("vllm", "8004")
    assert made == base / f"transferd-vllm-{os.getuid()}" / "8004"
    assert (mode(made), mode(made.parent)) == (0o700, 0o700)
    made.parent.chmod(0o777)
    assert own_directory("vllm", "8004") == made
    assert mode(made.parent) == 0o700


def test_a_link_in_its_place_is_refused(base: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    base.mkdir()
    (base / f"transferd-vllm-{os.getuid()}").symlink_to(elsewhere)
    for below in ((), ("8004",)):
        with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR: "):
            own_directory("vllm", *below)
    assert not list(elsewhere.iterdir())


def test_another_users_directory_is_refused_and_left_as_it_is(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.getuid() + 1
    (base / f"transferd-vllm-{other}").mkdir(parents=True, mode=0o755)
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(ConfigError, match="belongs to another user"):
        own_directory("vllm", "8004")
    assert mode(base / f"transferd-vllm-{other}") == 0o755


def test_daemons_that_engines_have_started_are_found_while_they_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ours = {own_socket(own_directory("fastdeploy", "file-1")), own_socket(own_directory("vllm"))}
    with contextlib.ExitStack() as stack:
        for endpoint in ours:
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(endpoint.removeprefix("ipc://"))
            listening.listen()
        ended = own_directory("fastdeploy", "file-2") / "transferd.sock"
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(ended))
        assert {endpoint for endpoint in started_daemons() if str(tmp_path) in endpoint} == ours
