"""A user with a crowd of connections leaves room for others: real daemon, a real other user."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine.hostile.accounts import accounts
from tests.machine.hostile.raw_peer import RawPeer
from tests.machine.hostile.test_holds import CACHE, joined
from tests.support.waits import wait_until
from transferd.client.launch import DaemonProcess, running
from transferd.wire import protocol as wire

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

MOST = 40
MIB = 1024**2
ENGINES = 4


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """One with few places for connections and engines, open to all users."""
    with tempfile.TemporaryDirectory(prefix="transferd-crowds-") as path:
        os.chmod(path, 0o755)
        tree = {
            "server": {"endpoint": f"ipc://{path}/s", "socket_mode": "0666", "max_connections": MOST},
            "cache": CACHE,
            "engines": {"max_engines": ENGINES},
            "storage": {"backend": "memory"},
            "metrics": {"listen": ""},
        }
        with running(tree, Path(path)) as started:
            yield started


@contextlib.contextmanager
def crowd(daemon: DaemonProcess, uid: int, count: int, announced: int = 0) -> Iterator[int]:
    """A process of this user with so many connections. How many the daemon let in."""
    command = [
        sys.executable,
        "-m",
        "tests.machine.hostile.crowd",
        str(uid),
        daemon.endpoint,
        str(count),
        str(announced),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            assert process.wait(60) == 0


@contextlib.contextmanager
def registrar(daemon: DaemonProcess, uid: int, name: str, count: int) -> Iterator[list[str]]:
    """A process of this user that registers so many engines. What came of each."""
    command = [sys.executable, "-m", "tests.machine.hostile.registrar", str(uid), daemon.endpoint, name, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield process.stdout.readline().split()
        finally:
            process.stdin.close()
            assert process.wait(60) == 0


def report(peer: RawPeer) -> dict[str, Any]:
    answer = peer.ask(wire.Stats(), 2)
    assert isinstance(answer, wire.Value)
    return dict(answer.value)


def served(peer: RawPeer, keys: list[str]) -> bool:
    return isinstance(peer.ask(wire.Exists(keys), 3), wire.Value)


def test_one_user_takes_no_place_that_another_needs(daemon: DaemonProcess) -> None:
    """Who has most connections loses the newest of them to a user who has fewer. Those who came first stay."""
    with accounts("crowd", "other") as users, joined(daemon.endpoint) as before:
        with crowd(daemon, users["crowd"].uid, 2 * MOST) as there:
            assert there == MOST - 1
            with crowd(daemon, users["other"].uid, MOST) as others:
                assert others == (MOST - 1) // 2, "two crowds have equal shares"
                with contextlib.ExitStack() as stack:
                    mine = [stack.enter_context(joined(daemon.endpoint)) for _ in range(10)]
                    assert all(served(peer, ["k"]) for peer in (before, *mine))
                    assert report(before)["refused"]["too_many_connections"] >= MOST
        wait_until(lambda: report(before)["server"]["clients"] == 1, "the crowds have gone", within=60.0)
        assert served(before, ["k"])


def test_one_user_takes_not_the_last_place_for_engines(daemon: DaemonProcess) -> None:
    """When all places are taken, a user who has none gets one more. There is one more place here, a quarter of 4."""
    full = ["too_many_engines"]
    with accounts("crowd", "other", "third") as users:
        with (
            registrar(daemon, users["crowd"].uid, "crowd", ENGINES + 2) as crowded,
            registrar(daemon, users["other"].uid, "other", 2) as others,
            registrar(daemon, users["third"].uid, "third", 1) as third,
        ):
            assert crowded == [*["ok"] * ENGINES, *full * 2]
            assert others == ["ok", *full]
            assert third == full
        with joined(daemon.endpoint) as mine:
            wait_until(lambda: report(mine)["server"]["clients"] == 1, "the engines have gone", within=60.0)
        with registrar(daemon, users["third"].uid, "third", ENGINES) as third:
            assert third == ["ok"] * ENGINES


def test_one_user_takes_no_room_that_another_needs(daemon: DaemonProcess) -> None:
    """Messages that never arrive fill the room for large ones. Another user's is the next to get room."""
    with accounts("crowd") as users, joined(daemon.endpoint) as mine:
        mine.socket.settimeout(90.0)
        with crowd(daemon, users["crowd"].uid, 30, announced=60 * MIB) as there:
            assert there == 30
            assert served(mine, ["x" * 1000 + str(number) for number in range(100)])
            assert report(mine)["refused"]["stalled_message"] <= 8, "it waited for the whole crowd"
