"""The impaired cable of the tests does what they ask of it, each way, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.impairment import Cable, End, Impairment, netem_cable, netem_is_there, tap_cable
from tests.support.nodes import subnet
from tests.support.waits import wait_until

PORT = 4711
ROOM = 8 * 1024**2
ECHO = f"""
import socket
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, {ROOM})
echo.bind(("", {PORT}))
print(flush=True)
while True:
    data, sender = echo.recvfrom(100)
    echo.sendto(data, sender)
"""
KINDS = [
    pytest.param(
        netem_cable, marks=pytest.mark.skipif(not netem_is_there(), reason="this kernel has no netem"), id="netem"
    ),
    pytest.param(tap_cable, id="tap"),
]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an impaired cable needs root")
_numbers = itertools.count()


class Peer:
    """Somebody at the other end of a cable who sends back each packet."""

    def __init__(self, line: Cable, address: str, device: str) -> None:
        self.line, self.device = line, device
        self._address = (address, PORT)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)

    def close(self) -> None:
        self._socket.close()

    def send(self, count: int) -> None:
        for number in range(count):
            self._socket.sendto(str(number).encode(), self._address)

    def sent_back(self) -> list[int]:
        """Which packets came back, as they came. Nothing overtakes, so they have before a later one has."""
        back: list[int] = []
        self._socket.settimeout(0.1)
        give_up = time.monotonic() + 20
        while time.monotonic() < give_up:
            with contextlib.suppress(TimeoutError):
                self._socket.sendto(b"end", self._address)
                while (data := self._socket.recv(100)) != b"end":
                    back.append(int(data))
                return back
        raise TimeoutError

    def received(self, count: int) -> list[int]:
        self._socket.settimeout(10.0)
        return [int(self._socket.recv(100)) for _ in range(count)]

    def round_trip(self, within: float = 10.0) -> float:
        begun = time.monotonic()
        self._socket.settimeout(within)
        self._socket.sendto(b"0", self._address)
        self._socket.recv(100)
        return time.monotonic() - begun


@contextlib.contextmanager
def connected(kind: object, seed: int = 1) -> Iterator[Peer]:
    number = next(_numbers)
    device = f"tfi{os.getpid() % 100000}n{number}"
    own, other = (f"10.213.{subnet()}.{4 * (number % 60) + host}" for host in (1, 2))
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(subprocess.Popen(["unshare", "--net", "cat"], stdin=-1, stdout=-1))
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        holder.stdout.readline()
        here, there = End(os.getpid(), device), End(holder.pid, "eth0")
        line = stack.enter_context(kind(here, there, seed=seed) if kind is tap_cable else kind(here, there))  # type: ignore[operator]
        here.run("ip", "address", "add", f"{own}/30", "dev", device)
        there.run("ip", "address", "add", f"{other}/30", "dev", "eth0")
        command = ["nsenter", f"--net={there.namespace}", sys.executable, "-S", "-c", ECHO]
        echo = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        stack.callback(echo.kill)
        assert echo.stdout is not None
        echo.stdout.readline()
        peer = Peer(line, other, device)
        stack.callback(peer.close)
        # Packets that wait for the other end's Ethernet address leave from another thread than those after them, which
        # then overtake: both ends know it after this.
        peer.round_trip()
        yield peer


@pytest.mark.parametrize("kind", KINDS)
def test_delay_is_taken_each_way_and_changes_at_run_time(kind: object) -> None:
    with connected(kind) as peer:
        peer.line.impair(Impairment(delay=0.05))
        assert peer.round_trip() >= 0.1
        peer.line.impair(back=Impairment(delay=0.07))
        assert peer.round_trip() >= 0.07
        peer.line.impair()
        assert min(peer.round_trip() for _ in range(100)) < 0.05, "a good cable again"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["there", "back"])
def test_the_share_that_is_asked_for_is_lost_on_that_way(kind: object, way: str) -> None:
    with connected(kind) as peer:
        peer.line.impair(**{way: Impairment(loss=0.2)})
        peer.send(2000)
        back = peer.sent_back()
        assert back == sorted(back), "without jitter the order stays"
        assert 1500 < len(back) < 1700
        peer.line.impair(**{way: Impairment(loss=1.0)})
        with pytest.raises(TimeoutError):
            peer.round_trip(within=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_overtaking_packets_are_not_lost(kind: object) -> None:
    with connected(kind) as peer:
        peer.line.impair(there=Impairment(delay=0.05, reorder=0.1))
        peer.send(500)
        back = peer.received(500)
        assert sorted(back) == list(range(500))
        assert back != sorted(back)


def test_the_same_seed_loses_the_same_packets() -> None:
    runs = []
    for seed in (7, 7, 8):
        with connected(tap_cable, seed) as peer:
            peer.line.impair(Impairment(loss=0.1))
            peer.send(300)
            runs.append(peer.sent_back())
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_when_the_test_has_failed(kind: object) -> None:
    def fails() -> None:
        with connected(kind) as peer:
            devices.append(Path(f"/sys/class/net/{peer.device}"))
            assert devices[0].exists()
            raise ZeroDivisionError

    devices: list[Path] = []
    with pytest.raises(ZeroDivisionError):
        fails()
    wait_until(lambda: not devices[0].exists(), "the device goes")
