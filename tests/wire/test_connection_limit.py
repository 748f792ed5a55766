"""A crowd at the door: connections past the bound are closed, those before it never notice."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
import zmq

from transferd.errors import ConfigError
from transferd.runtime import descriptors
from transferd.wire import connection_limit
from transferd.wire.connection_limit import ConnectionLimit

PLACES = 32  # descriptors, of which the first client takes a dozen
WAIT_MS = 10_000


@contextlib.contextmanager
def listening(endpoint: str, places: int) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A router with room for this many connections more than there are descriptors now."""
    with no_gaps():
        yield from _listening(endpoint, places)


@contextlib.contextmanager
def no_gaps() -> Iterator[None]:
    """Take the free numbers between the descriptors that earlier tests left open: the next ones then count up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # about what earlier tests left, not about this one
        gc.collect()  # what they left to the collector must not be closed in the middle of this one
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    taken = [os.dup(0)]
    while taken[-1] < highest:
        taken.append(os.dup(0))
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _listening(endpoint: str, places: int) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    router.setsockopt(zmq.BACKLOG, 128)
    limit = ConnectionLimit(context, router, first_refused=lowest_free() + places)
    try:
        router.bind(endpoint)
        yield router, router.getsockopt_string(zmq.LAST_ENDPOINT)
    finally:
        limit.close()
        limit.close()
        router.close()
        context.term()


def lowest_free() -> int:
    """The number that the next descriptor gets."""
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


def dial(endpoint: str) -> socket.socket:
    scheme, _, address = endpoint.partition("://")
    family = socket.AF_UNIX if scheme == "ipc" else socket.AF_INET
    raw = socket.socket(family)
    raw.settimeout(WAIT_MS / 1000)
    host, _, port = address.rpartition(":")
    raw.connect(address if scheme == "ipc" else (host, int(port)))
    return raw


def ends(connection: socket.socket) -> bool:
    """Whether the listener closes it, its greeting read. A refused connection is closed before a handshake is over."""
    try:
        while connection.recv(64):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_crowd_is_refused_and_a_client_that_was_there_goes_on(scheme: str, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/door" if scheme == "ipc" else "tcp://127.0.0.1:*"
    with listening(endpoint, PLACES) as (router, bound), contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        client = stack.enter_context(context.socket(zmq.DEALER))
        client.setsockopt(zmq.LINGER, 0)
        client.connect(bound)
        client.send(b"first")
        name = router.recv_multipart()[0]
        crowd = [stack.enter_context(dial(bound)) for _ in range(2 * PLACES)]
        # Both ends of each are this process's, so each takes two numbers: all but the first few are too many.
        assert all(ends(connection) for connection in crowd[PLACES:])
        client.send(b"second")
        assert router.recv_multipart() == [name, b"second"]
        for connection in crowd:
            connection.close()
        late = stack.enter_context(context.socket(zmq.DEALER))
        late.setsockopt(zmq.LINGER, 0)
        late.connect(bound)
        late.send(b"there is room again")
        assert router.recv_multipart()[1] == b"there is room again"


class Monitored:
    """A socket whose monitor says what the test says."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)

    def monitor(self, address: str, _events: int) -> None:
        self._monitor.bind(address)

    def says(self, *events: tuple[int, int]) -> None:
        for event, value in events:
            self._monitor.send_multipart([struct.pack("=Hi", event, value), b"endpoint"])

    def disable_monitor(self) -> None:
        self.says((zmq.EVENT_MONITOR_STOPPED, 0))

    def close(self) -> None:
        self._monitor.close()


@pytest.mark.parametrize("number", ["closed", "reused by a file"])
def test_a_failed_handshake_counts_even_if_its_connection_is_gone_before_anybody_looks(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limit, "disable_monitor", Monitored.disable_monitor)
    with zmq.Context() as context, open(tmp_path / "file", "wb") as file:
        gone = file.fileno() if number == "reused by a file" else 1_000_000
        socket = Monitored(context)
        limit = ConnectionLimit(context, cast("Any", socket), first_refused=2_000_000)
        before = len(os.listdir("/proc/self/fd"))
        with structlog.testing.capture_logs() as logs:
            socket.says((zmq.EVENT_ACCEPTED, gone), (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 1))
            socket.says((zmq.EVENT_DISCONNECTED, gone))
            limit.close()
        assert limit.refused == {"handshake_failed": 1, "too_many_connections": 0}
        assert [(line["reason"], line["peer"]) for line in logs] == [
            ("handshake_failed", "unknown, it was closed at once")
        ]
        assert len(os.listdir("/proc/self/fd")) <= before
        socket.close()


BURST = """
import collections, os, signal, socket, sys, threading, time
import zmq
from transferd.runtime.descriptors import UNSEEN
from transferd.wire import connection_limit
from transferd.wire.connection_limit import ConnectionLimit

path = sys.argv[1]
looking, may_look = threading.Event(), threading.Event()

class Slow(ConnectionLimit):
    def _begun(self, descriptor):
        looking.set()
        may_look.wait()
        super()._begun(descriptor)

context = zmq.Context()
router = context.socket(zmq.ROUTER)
limit = Slow(context, router, 512)
router.bind("ipc://" + path)
own = len(os.listdir("/proc/self/fd"))
child = os.fork()
if child == 0:
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(1500)]
    for raw in crowd:
        raw.connect(path)  # waits for a place in the backlog
    signal.pause()
assert looking.wait(30)
counts = collections.deque([0], maxlen=50)
while counts[0] < 900 or len(set(counts)) > 1:  # until libzmq accepts no more
    counts.append(len(os.listdir("/proc/self/fd")) - own)
    time.sleep(0.01)
assert counts[-1] <= UNSEEN, counts[-1]
print("blocked", flush=True)
threading.Timer(0.2, may_look.set).start()  # needs the GIL, which a close must not keep
limit.close()
print("closed", flush=True)
os.kill(child, 9)
os.waitpid(child, 0)
router.close(0)
context.term()
"""


def test_libzmq_waits_for_a_thread_that_falls_behind_and_a_close_lets_it_catch_up(tmp_path: Path) -> None:
    """Otherwise a burst of connections takes the last descriptor, and libzmq aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", BURST, str(tmp_path / "door")], capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stdout.splitlines()  # between them the refusals, logged
    assert (lines[:1], lines[-1:], done.returncode) == (["blocked"], ["closed"], 0), done.stderr


def test_the_limit_is_raised_to_what_the_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 16384)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    assert descriptors.raise_limit() == 16384
    assert limits[-1] == (16384, 16384)
    assert descriptors.first_refused(100) == 100 + descriptors.OTHERS
    assert descriptors.first_refused(100_000) == 8192


def test_a_limit_too_low_to_live_with_is_one_line_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(ConfigError, match=r"RLIMIT_NOFILE: the limit must be at least 2048 file descriptors; .*\(64\)"):
        descriptors.raise_limit()
