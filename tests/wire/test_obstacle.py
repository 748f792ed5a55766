"""What keeps a client from its daemon is named, each cause by a real socket that has it."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import zmq

from transferd.config import ServerSection
from transferd.config.sections import CurveSection
from transferd.wire import obstacle
from transferd.wire.curve import ClientCurve
from transferd.wire.obstacle import NO_SOCKET, NOBODY_LISTENS, SILENT, find_obstacle, obstacle_at
from transferd.wire.transport import ZmqClientTransport, ZmqServerTransport

SERVER_PUBLIC, SERVER_SECRET = zmq.curve_keypair()
KNOWN, STRANGER = zmq.curve_keypair(), zmq.curve_keypair()
NOBODY = 64123  # a uid and a gid without a name
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


async def why(endpoint: str, curve: ClientCurve | None = None, *, in_vain: bool = False) -> str:
    """in_vain: the attempt gets no answer, so it need not wait for one as long as a busy machine may take."""
    with patch.object(obstacle, "TRY_S", 0.5 if in_vain else 60.0):
        return await ZmqClientTransport(endpoint, curve=curve).obstacle()


@pytest.fixture
def listener() -> Iterator[Path]:
    """A unix socket that listens, reachable by every user as far as directories go: those above tmp_path may not be."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listening:
        path = Path(directory, "d.sock")
        path.parent.chmod(0o755)
        listening.bind(str(path))
        listening.listen(1)
        yield path


def as_nobody(path: Path) -> str:
    """obstacle_at, as a user who is in no group of ours."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.write(writing, obstacle_at(str(path)).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as told:
        return told.read()


async def test_missing_stale_and_foreign_files_at_a_path_have_their_own_reasons(tmp_path: Path, listener: Path) -> None:
    assert await why(f"ipc://{tmp_path}/none") == "there is no such socket; is the daemon running?"
    assert obstacle_at(str(tmp_path / "none" / "deeper")) == "there is no such socket; is the daemon running?"
    (tmp_path / "file").write_text("")
    assert await why(f"ipc://{tmp_path}/file") == "the path is not a socket"
    assert obstacle_at(str(tmp_path / "file" / "deeper")) == "Not a directory"
    stale = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    assert await why(f"ipc://{stale}") == NOBODY_LISTENS
    assert await why("ipc://@transferd-nobody") == NOBODY_LISTENS
    assert obstacle_at(str(listener)) == ""


async def test_the_path_gives_the_reason_before_libzmq_does(tmp_path: Path, listener: Path) -> None:
    """On a busy machine its thread may be late. A command would then wait for a daemon that is not there."""
    with socket.socket(socket.AF_UNIX) as left, patch.object(obstacle, "TRY_S", 0.0):
        left.bind(str(tmp_path / "stale"))
        for path, why_not in ((tmp_path / "none", NO_SOCKET), (tmp_path / "stale", NOBODY_LISTENS), (listener, SILENT)):
            assert await ZmqClientTransport(f"ipc://{path}").obstacle() == why_not


def test_a_daemon_that_accepts_no_connection_is_reported(tmp_path: Path) -> None:
    path = str(tmp_path / "full")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(path)
            assert obstacle_at(path) == "the daemon does not accept connections; it may be suspended or overloaded"


@as_root
def test_permission_denied_names_who_may(listener: Path) -> None:
    listener.chmod(0o660)
    os.chown(listener, 0, 0)
    assert as_nobody(listener) == (
        f"permission denied: {listener} (mode 0660) allows group root, but user {NOBODY} is not in it "
        f"(usermod -aG root {NOBODY})"
    )
    os.chown(listener, NOBODY + 1, NOBODY + 1)
    assert f"allows group {NOBODY + 1}, but" in as_nobody(listener)
    listener.chmod(0o600)
    assert as_nobody(listener).endswith(f"allows user {NOBODY + 1}, but this process runs as user {NOBODY}")
    listener.chmod(0o666)
    assert as_nobody(listener) == ""


@as_root
def test_a_directory_that_denies_is_named_instead_of_the_socket(listener: Path) -> None:
    listener.chmod(0o666)
    listener.parent.chmod(0o750)
    assert as_nobody(listener).startswith(f"permission denied: {listener.parent} (mode 0750) allows group root, but")
    assert as_nobody(listener.parent / "none").startswith("permission denied: ")


@as_root
async def test_a_user_who_is_not_allowed(tmp_path: Path) -> None:
    server = ZmqServerTransport(ServerSection(endpoint=f"ipc://{tmp_path}/d", allowed_uids=[NOBODY]))
    server.start(lambda _peer, _payload: None)
    assert await why(f"ipc://{tmp_path}/d") == "the daemon refuses user root (server.allowed_uids)"
    server.close()


async def test_a_tcp_address_without_a_listener_or_a_reply_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert await why(endpoint) == NOBODY_LISTENS
        taken.listen()
        silent = "the handshake got no reply; the host, its firewall or the daemon is silent"
        assert await why(endpoint, in_vain=True) == silent


async def test_keys_are_missing_wrong_or_not_asked_for(tmp_path: Path) -> None:
    secret, clients = tmp_path / "secret", tmp_path / "clients"
    secret.write_bytes(SERVER_SECRET)
    secret.chmod(0o600)
    clients.mkdir()
    (clients / "engine").write_bytes(KNOWN[0])
    curve = CurveSection(secret_key_file=str(secret), client_keys_dir=str(clients))
    server = ZmqServerTransport(ServerSection(endpoint="tcp://127.0.0.1:*", curve=curve))
    server.start(lambda _peer, _payload: None)
    [endpoint] = server.endpoints
    stuck = "the daemon accepts connections but does not answer; it may be suspended or stuck"
    assert await why(endpoint, ClientCurve(SERVER_PUBLIC, *KNOWN)) == stuck
    assert "CURVE keys (ClientCurve)" in await why(endpoint)
    unknown = "the daemon refuses this client's key (server.curve.client_keys_dir)"
    assert await why(endpoint, ClientCurve(SERVER_PUBLIC, *STRANGER)) == unknown
    assert "a key other than server_key" in await why(endpoint, ClientCurve(STRANGER[0], *KNOWN))
    server.close()
    plain = ZmqServerTransport(ServerSection(endpoint="tcp://127.0.0.1:*"))
    plain.start(lambda _peer, _payload: None)
    assert await why(plain.endpoints[0]) == stuck
    assert "not use CURVE keys" in await why(plain.endpoints[0], ClientCurve(SERVER_PUBLIC, *KNOWN))
    plain.close()


async def test_without_descriptors_no_obstacle_is_reported() -> None:
    def out_of_descriptors(_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    assert await find_obstacle("ipc:///nowhere", out_of_descriptors, keys=False) == ""
