"""A command whose daemon cannot be reached says why, at once where the cause is known."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from transferd.cli import asking
from transferd.cli import main as cli
from transferd.client.client import default_endpoint
from transferd.config import ServerSection
from transferd.config.sections import CurveSection
from transferd.errors import ConfigError, ConnectTimeout
from transferd.observability import logs
from transferd.wire import obstacle
from transferd.wire.obstacle import NO_SOCKET, NOBODY_LISTENS, STUCK, SUSPENDED, is_refusal
from transferd.wire.transport import ZmqServerTransport

FOREVER = 1e6  # seconds: whoever waits for the timeout never ends
VERBS = ["stats", "tasks", "clients", "explain some-task", "top --once", "ping"]

Told = list[str]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    lines: Told = []
    monkeypatch.setattr(logs, "say", lambda text, _level="error": lines.append(text))
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # this process has its own
    return lines


@pytest.fixture
def transferd(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command in this process; returns its exit code."""

    def run(*arguments: str) -> Any:
        monkeypatch.setattr("sys.argv", ["transferd", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code

    return run


@pytest.mark.parametrize("verb", VERBS)
def test_a_missing_socket_ends_a_command_at_once_with_reason_and_remedy(
    verb: str, tmp_path: Path, told: Told, transferd: Callable[..., Any]
) -> None:
    timeout = [] if verb == "ping" else ["--timeout", str(FOREVER)]
    assert transferd(*verb.split(), "--endpoint", f"ipc://{tmp_path}/none", *timeout) == 1
    (only,) = told
    assert only.startswith(f"ipc://{tmp_path}/none: no daemon answered: {NO_SOCKET} Start it (systemctl start ")


def test_a_socket_where_nobody_listens_ends_a_command_at_once(
    tmp_path: Path, told: Told, transferd: Callable[..., Any]
) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/stale")
    assert transferd("stats", "--endpoint", f"ipc://{tmp_path}/stale", "--timeout", str(FOREVER)) == 1
    assert NOBODY_LISTENS in told[0]


@pytest.mark.parametrize("flags", [["--ready", "--timeout", "2"], ["--timeout", "2"]])
def test_a_command_that_waits_says_at_once_what_for(
    flags: list[str], tmp_path: Path, told: Told, transferd: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PROBE_AFTER_S", 0.0)
    assert transferd("ping", *flags, "--endpoint", f"ipc://{tmp_path}/none") == 1
    first, last = told
    assert NO_SOCKET in first
    assert first.endswith(" (waiting up to 2 s)")
    assert f"no daemon answered within 2 s: {NO_SOCKET}" in last


def test_a_daemon_that_may_only_be_slow_is_waited_for(
    tmp_path: Path, told: Told, transferd: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PROBE_AFTER_S", 0.0)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/silent")
        silent.listen()
        assert transferd("stats", "--endpoint", f"ipc://{tmp_path}/silent", "--timeout", "0.3") == 1
    (only,) = told
    assert "no daemon answered within 0.3 s: the handshake got no reply" in only
    assert not any(map(is_refusal, ("", STUCK, SUSPENDED)))


@pytest.fixture
def patient_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look for the reason gets its answer, however slow the machine is: there is only one look."""
    monkeypatch.setattr(obstacle, "TRY_S", 60.0)


@pytest.mark.usefixtures("patient_probe")
async def test_a_command_without_keys_names_their_options_at_once(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(zmq.curve_keypair()[1])
    secret.chmod(0o600)
    curve = CurveSection(secret_key_file=str(secret))
    server = ZmqServerTransport(ServerSection(endpoint="tcp://127.0.0.1:*", curve=curve))
    server.start(lambda _peer, _payload: None)
    try:
        with pytest.raises(ConnectTimeout, match=r"require.* CURVE keys .*; see --key-file and --server-key-file$"):
            async with asking.connected(server.endpoints[0], FOREVER):
                pass
    finally:
        server.close()


@pytest.mark.usefixtures("patient_probe")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root is refused by name here")
async def test_a_refused_user_gets_an_error_at_once(tmp_path: Path) -> None:
    server = ZmqServerTransport(ServerSection(endpoint=f"ipc://{tmp_path}/d", allowed_uids=[64123]))
    server.start(lambda _peer, _payload: None)
    try:
        with pytest.raises(ConnectTimeout, match=r"no daemon answered: the daemon refuses user root"):
            async with asking.connected(f"ipc://{tmp_path}/d", FOREVER):
                pass
    finally:
        server.close()


def test_a_command_without_an_endpoint_asks_the_daemon_that_an_engine_has_started(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.adapters.common.packaged.nobody_listens", lambda _: True)
    monkeypatch.setattr("transferd.adapters.common.directories.started_daemons", lambda: ["ipc:///one"])
    assert asking._found() == "ipc:///one"
    assert told == ["ipc:///one: a daemon that an engine of this user has started"]
    monkeypatch.setattr("transferd.adapters.common.directories.started_daemons", lambda: ["ipc:///one", "ipc:///two"])
    with pytest.raises(ConfigError, match=r"must name one of the daemons .*ipc:///one, ipc:///two"):
        asking._found()
    monkeypatch.setattr("transferd.adapters.common.packaged.nobody_listens", lambda _: False)
    assert asking._found() == default_endpoint(), "the packaged daemon comes first"
