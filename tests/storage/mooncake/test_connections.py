"""The connections of this process, found by address and ended; others' and our own questions are left alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.support.waits import wait_until
from transferd.storage.mooncake import connections


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listening:
        try:
            listening.bind((request.param, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listening.listen()
        yield listening


def address(listening: socket.socket) -> connections.Address:
    host, port, *_ = listening.getsockname()
    return host, port


def test_a_connection_to_the_address_is_ended_and_one_that_is_spared_is_not(listener: socket.socket) -> None:
    there = address(listener)
    with socket.create_connection(there) as one, socket.create_connection(there) as ours:
        with connections.spared(ours):
            assert connections.end({there}) == 1
        assert one.recv(1) == b"", "whoever waits for it gets an end"
        ours.settimeout(0.05)
        with pytest.raises(TimeoutError):
            ours.recv(1)
        assert connections.end({there}) >= 1, "it is spared no more"
        assert ours.recv(1) == b""


def test_bytes_that_came_are_heard_for_a_while_and_those_of_our_own_questions_are_not(listener: socket.socket) -> None:
    there = address(listener)
    with socket.create_connection(there) as one:
        accepted, _ = listener.accept()
        with accepted:
            assert not connections.heard({there}, 60.0), "connected, but the process has said nothing"
            accepted.sendall(b"x")
            assert one.recv(1) == b"x"
            assert connections.heard({there}, 60.0)
            assert not connections.heard({(there[0], there[1] + 1)}, 60.0)
            wait_until(lambda: not connections.heard({there}, 0.01), "silent for longer")
            with connections.spared(one):
                assert not connections.heard({there}, 60.0)


def test_other_addresses_and_the_listener_are_left_alone(listener: socket.socket) -> None:
    host, port = address(listener)
    with socket.create_connection((host, port)) as one:
        assert connections.end({(host, port + 1)}) == 0
        assert (host, port) in connections.remote()
        assert port in connections.listening()
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"x")
            assert one.recv(1) == b"x"
    assert port in connections.listening()
