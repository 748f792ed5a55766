"""Where a normal user's daemon keeps its files, and where that user's clients look for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from transferd.config import load, origins, personal
from transferd.config.loading import PERSONAL
from transferd.config.sections import DEFAULT_ENDPOINT

MINE = {"XDG_RUNTIME_DIR": "/run/user/7", "HOME": "/home/me"}


def nowhere(_: str) -> bool:
    return False


def test_a_user_who_may_not_write_in_the_packages_directories_has_own_ones() -> None:
    assert personal.settings(MINE, nowhere) == {
        "server.endpoint": "ipc:///run/user/7/transferd/transferd.sock",
        "storage.file.path": "/home/me/.cache/transferd/blocks",
        "recorder.directory": "/home/me/.local/state/transferd/flight",
    }
    named = MINE | {"XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/s"}
    assert personal.settings(named, nowhere)["storage.file.path"] == "/c/transferd/blocks"
    assert personal.settings(named, nowhere)["recorder.directory"] == "/s/transferd/flight"


@pytest.mark.parametrize("environment", [{}, {"HOME": "/home/me"}, {"XDG_RUNTIME_DIR": ""}])
def test_without_a_runtime_directory_the_defaults_stay(environment: Mapping[str, str]) -> None:
    assert personal.settings(environment, nowhere) == {}


def test_who_may_use_the_defaults_keeps_them() -> None:
    assert personal.settings(MINE, lambda _: True) == {}
    assert "storage.file.path" not in personal.settings(MINE, lambda path: "/blocks" in path)


def test_a_named_setting_overrides_the_personal_default(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = personal.settings
    monkeypatch.setattr(personal, "settings", lambda environment: settings(environment, nowhere))
    env = MINE | {"TRANSFERD_STORAGE__FILE__PATH": "/mine"}
    config, sources = load(env=env), origins(env=env)
    assert config.storage.file.path == "/mine"
    assert config.server.endpoint == "ipc:///run/user/7/transferd/transferd.sock"
    assert sources["server.endpoint"] == PERSONAL
    assert sources["storage.file.path"] == "TRANSFERD_STORAGE__FILE__PATH"
    named = load(env=env, overrides=["server.endpoint=ipc:///elsewhere"])
    assert named.server.endpoint == "ipc:///elsewhere"


def test_directories_that_can_be_made_count(tmp_path: Path) -> None:
    assert personal.may_make(str(tmp_path / "a" / "b"))
    (tmp_path / "file").touch(mode=0o644)
    assert not personal.may_make(str(tmp_path / "file" / "b"))


@pytest.mark.skipif(os.path.lexists(DEFAULT_ENDPOINT.removeprefix("ipc://")), reason="a packaged daemon is here")
def test_clients_look_for_the_users_own_socket_and_trust_no_other(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert personal.endpoint(environment) == personal.endpoint({}) == DEFAULT_ENDPOINT
    path = tmp_path / personal.SOCKET
    path.parent.mkdir()
    path.touch()
    assert personal.endpoint(environment) == DEFAULT_ENDPOINT, "a file is no socket"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(path))
        assert personal.endpoint(environment) == f"ipc://{path}"
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345)
            assert personal.endpoint(environment) == DEFAULT_ENDPOINT, "it is another user's"
