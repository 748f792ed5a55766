"""Who may listen at a path: never in the place of somebody who is there."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from transferd.errors import ConfigError
from transferd.wire.credentials import user_name
from transferd.wire.endpoint import EndpointLock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.sock"


def identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_ino, found.st_mode


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
def test_a_living_programs_socket_is_in_use_and_stays(path: Path, kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(path))
        if kind is not socket.SOCK_DGRAM:
            other.listen(1)
        before = identity(path)
        with pytest.raises(ConfigError, match="in use by another program"):
            EndpointLock(f"ipc://{path}")
        assert identity(path) == before


def test_a_listener_whose_backlog_is_full_is_in_use_and_nobody_waits_for_it(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen(0)
        with ExitStack() as waiting:
            for _ in range(4):
                one = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                one.setblocking(False)
                one.connect_ex(str(path))
            with pytest.raises(ConfigError, match="in use by another program"):
                EndpointLock(f"ipc://{path}")


def test_a_socket_that_nobody_listens_on_is_taken(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
        dead.listen(1)
    lock = EndpointLock(f"ipc://{path}")
    listening = lock.listen(0o660)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with pytest.raises(ConfigError, match="in use by another daemon"):
        EndpointLock(f"ipc://{path}")
    listening.close()
    lock.release()
    assert not path.exists()


class Forbidding(socket.socket):
    """What a user other than root meets at a socket of mode 0600."""

    def connect_ex(self, _: object, /) -> int:
        return errno.EACCES


def test_a_socket_that_denies_the_probe_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
    monkeypatch.setattr(socket, "socket", Forbidding)
    with pytest.raises(ConfigError, match="permission denied on the existing socket"):
        EndpointLock(f"ipc://{path}")
    assert path.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_a_path_that_is_not_a_socket_is_not_removed(path: Path, tmp_path: Path, kind: str) -> None:
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    before = identity(path)
    with pytest.raises(ConfigError, match="not a socket"):
        EndpointLock(f"ipc://{path}")
    assert identity(path) == before


def test_the_error_about_another_users_lock_file_names_its_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root leaves it that ran the daemon once, on a path that another user has from then on."""
    lock = path.with_name(f"{path.name}.lock")
    lock.touch()

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    owner = user_name(os.getuid())
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 4711)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}; remove it if no daemon uses it"):
        EndpointLock(f"ipc://{path}")
    lock.unlink()
    with pytest.raises(ConfigError, match="cannot create the lock file"):
        EndpointLock(f"ipc://{path}")


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://127.0.0.1:*", r"tcp://127\.0\.0\.1:[1-9]\d*"),
        ("tcp://localhost:*", r"tcp://127\.0\.0\.1:[1-9]\d*"),
        ("tcp://*:*", r"tcp://0\.0\.0\.0:[1-9]\d*"),
        ("tcp://lo:*", r"tcp://127\.0\.0\.1:[1-9]\d*"),
        ("tcp://[::1]:*", r"tcp://\[::1\]:[1-9]\d*"),
        ("ipc://*", r"ipc:///.*/transferd-.*/socket"),
    ],
)
def test_wildcards_names_and_interfaces_are_filled_in(endpoint: str, bound: str) -> None:
    lock = EndpointLock(endpoint)
    with lock.listen(0o600):
        assert re.fullmatch(bound, lock.endpoint)
    lock.release()
    assert not endpoint.startswith("ipc") or not Path(lock.endpoint.removeprefix("ipc://")).parent.exists()


@pytest.mark.parametrize("endpoint", ["tcp://192.0.2.1:5", "tcp://no-such-host.invalid:5"])
def test_an_address_that_is_not_here_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^server\.endpoint: cannot bind: .*"):
        EndpointLock(endpoint).listen(0o600)


def test_a_connection_inherits_keep_alive() -> None:
    lock = EndpointLock("tcp://127.0.0.1:*")
    with lock.listen(0) as listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
