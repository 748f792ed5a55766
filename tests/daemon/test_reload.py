"""A reload: what takes effect, what is said to need a restart, and what a refusal leaves behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from tests.observability.test_metrics import NoTransport
from transferd.config import Config, LevelSection, from_tree
from transferd.config.loading import TAKES_EFFECT, takes_effect
from transferd.daemon.daemon import Daemon
from transferd.daemon.reload import Reloader
from transferd.daemon.systemd import Notifier
from transferd.errors import ConfigError
from transferd.observability import logs

TREE: dict[str, Any] = {
    "cache": {"device_blocks": 4, "host_blocks": 4},
    "host": {"staging": "2MiB"},
    "storage": {"backend": "memory"},
    "metrics": {"listen": ""},
}


class Told(Notifier):
    def __init__(self) -> None:
        super().__init__("")
        self.lines: list[tuple[str, ...]] = []

    def notify(self, *states: str) -> None:
        self.lines.append(states)


class World:
    """A daemon that was built and is not open, and a file that can be changed."""

    def __init__(self) -> None:
        self.tree = msgspec.to_builtins(TREE)
        self.transport = NoTransport()
        self.daemon = Daemon(from_tree(TREE), transport=self.transport)
        self.told = Told()
        self.reload = Reloader(self.daemon, self.told, self.read)
        self.reload.serving = True

    def read(self) -> Config:
        return from_tree(self.tree)


@pytest.fixture
def world() -> Iterator[World]:
    yield World()
    logs.set_level("info")


def test_changed_keys_and_keys_that_need_a_restart_are_logged_and_stay_in_the_status(world: World) -> None:
    world.tree |= {"log": {"level": "warning"}, "server": {"lane_depth": 3, "endpoint": "ipc:///elsewhere"}}
    with structlog.testing.capture_logs() as lines:
        world.reload()
    line = next(line for line in lines if line["event"] == "reloaded")
    assert line["changed"] == {"log.level": ["info", "warning"]}
    assert line["needs_restart"] == ["server.endpoint", "tuning.server.lane_depth"]
    assert world.reload.status().endswith("; needs a restart: server.endpoint, tuning.server.lane_depth")
    assert world.told.lines[-1][0] == "READY=1"
    del world.tree["server"]
    with structlog.testing.capture_logs() as lines:
        world.reload()
    assert [(line["changed"], line["needs_restart"]) for line in lines] == [({}, [])]
    assert "restart" not in world.reload.status()


def test_a_refused_reload_stays_in_the_status_until_a_good_one(world: World) -> None:
    world.tree["log"] = {"level": "loud"}
    world.reload()
    assert world.reload.status().startswith("reload refused: log.level: expected one of debug, error, info, warning")
    begun, ended = world.told.lines
    assert begun[0] == "RELOADING=1"
    assert begun[1].startswith("MONOTONIC_USEC=")
    assert ended == ("READY=1", f"STATUS={world.reload.status()}")
    del world.tree["log"]
    world.reload()
    assert not world.reload.status().startswith("reload refused")


def test_keys_that_cannot_be_read_refuse_the_whole_reload(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[int, int]:
        raise ConfigError("server.curve.client_keys_dir", "cannot be read: No such file or directory")

    monkeypatch.setattr(world.transport, "read_keys", broken)
    world.tree["log"] = {"level": "error"}
    with structlog.testing.capture_logs() as lines:
        world.reload()
    assert [line["event"] for line in lines] == ["reload refused"]
    assert "client_keys_dir" in world.reload.status()


def test_a_reload_before_readiness_does_not_notify_the_supervisor(world: World) -> None:
    world.reload.serving = False
    world.reload()
    assert world.told.lines == [], "READY=1 would be a lie"


async def test_the_name_of_a_holder_is_no_order_to_the_supervisor(tmp_path: Path) -> None:
    daemon = Daemon(from_tree(TREE), transport=NoTransport())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(60)
        try:
            await daemon.default.cache.open()
            daemon.default.dispatcher.hold(daemon.clock.monotonic(), "pause", b"client", "x\nSTOPPING=1\ny")
            reload = Reloader(daemon, Notifier(supervisor.getsockname()), lambda: daemon.config)
            reload.serving = True
            reload()
            _, (ready, status) = (supervisor.recv(4096).decode().splitlines() for _ in range(2))
        finally:
            await daemon.stop(lambda: 5.0)
    assert ready == "READY=1"
    assert status.startswith(r"STATUS=paused by x\nSTOPPING=1\ny for ")


def test_only_settings_that_exist_take_effect(world: World) -> None:
    for key in TAKES_EFFECT:
        section: Any = world.daemon.config
        for name in key.split("."):
            assert name in section.__struct_fields__, key
            section = getattr(section, name)


def test_settings_of_a_level_take_effect(world: World) -> None:
    assert all(takes_effect(f"storage.level.file.{key}") for key in LevelSection.__struct_fields__)
    assert takes_effect("tuning.storage.level.file.recheck")
    assert takes_effect("storage.level.file.promote")
    assert takes_effect("storage.level.some.module:Class.write")
    assert not takes_effect("storage.levels")
    world.tree["storage"] = {"levels": ["memory", "file"], "level": {"file": {"promote": 3}}}
    world.reload()
    assert world.reload.status().endswith("needs a restart: storage.backend, storage.levels")
    world.tree["storage"] = {"backend": "memory"}
    world.reload()
    assert "restart" not in world.reload.status()


def test_whether_the_daemon_would_start_again_is_known_without_a_reload(world: World) -> None:
    would_not_start = world.daemon.engines.acts.would_not_start
    assert would_not_start() == ""
    world.tree["log"] = {"level": "loud"}
    assert would_not_start().startswith("log.level: expected one of")
    world.tree["log"] = {"level": "info"}
    world.tree["server"] = {"endpoint": "ipc:///no/such/folder/socket"}  # what only the machine knows counts as well
    assert would_not_start().startswith("server.endpoint")
    assert world.daemon.engines.acts.reload_refused == "", "nothing was tried"
