"""Requests that wait take places, and no user keeps others out of them: real daemon, a real other user."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machine.hostile.accounts import accounts
from tests.machine.hostile.raw_peer import RawPeer
from tests.machine.hostile.test_holds import CACHE, joined
from tests.support.waits import wait_until
from transferd.client.launch import running
from transferd.daemon.server import MAX_WAITING_REQUESTS
from transferd.wire import protocol as wire


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="transferd-waiting-") as path:
        os.chmod(path, 0o755)
        yield Path(path)


def waiting(peer: RawPeer) -> int:
    report = peer.ask(wire.Stats(), 2)
    assert isinstance(report, wire.Value)
    return int(report.value["server"]["waiting"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
def test_one_user_keeps_no_other_from_asking(open_directory: Path) -> None:
    """Who guesses the session of a client asks what the daemon can answer only once that client has gone."""
    tree = {
        "server": {"endpoint": f"ipc://{open_directory}/s", "socket_mode": "0666", "client_timeout": 600.0},
        "cache": CACHE,
        "storage": {"backend": "memory"},
        "metrics": {"listen": ""},
    }
    with running(tree, open_directory) as daemon, accounts("waits") as users, joined(daemon.endpoint) as victim:
        welcome = victim.ask(wire.Hello())
        assert isinstance(welcome, wire.Welcome)
        command = [sys.executable, "-m", "tests.machine.hostile.waiter", str(users["waits"].uid), daemon.endpoint]
        waits = subprocess.Popen(
            [*command, str(welcome.session)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with waits:
            assert waits.stdout is not None
            assert waits.stdin is not None
            assert waits.stdout.readline() == "waiting\n"
            wait_until(lambda: waiting(victim) >= MAX_WAITING_REQUESTS, "all places are taken", within=60.0)
            for number in range(20):
                answer = victim.ask(wire.Exists(["k"]), 3 + number)
                assert isinstance(answer, wire.Value), answer
            waits.stdin.close()
            assert waits.wait(30) == 0
