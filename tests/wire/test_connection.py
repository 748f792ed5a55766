"""One connection: the commands that it answers itself, messages of several frames, and what it refuses to send."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.waits import until
from tests.wire.test_acceptor import HANDSHAKE, MIB, READY, Peer, Place
from transferd.wire import connection as module
from transferd.wire.connection import JOINED, ZmtpConnection
from transferd.wire.zmtp import COMMAND, MORE, command, header


class Listening(Place):
    """Tells the flags of each frame, too."""

    def __init__(self, directory: Path) -> None:
        self.frames: list[tuple[int, bytes]] = []
        super().__init__(directory)

    def _received(self, peer: ZmtpConnection, flags: int, body: bytes | memoryview) -> None:
        self.frames.append((flags, bytes(body)))
        super()._received(peer, flags, body)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Listening]:
    made = Listening(tmp_path)
    yield made
    made.close()


async def joined(place: Place) -> tuple[Peer, ZmtpConnection]:
    """A peer that has read the handshake, and the daemon's end."""
    peer = place.peer()
    (connection,) = await place.joined(1)
    greeting = await peer.read(64 + 2)
    await peer.read(greeting[65])
    return peer, connection


def stalled(connection: ZmtpConnection) -> int:
    """Send until the peer, which reads nothing, has at least half of the 1 MiB unread that it may have. How much."""
    while connection.unread < MIB // 2:
        assert connection.send(bytes(MIB // 4))
        connection.flush()
    assert connection._events & module.OUT
    return connection.unread


def say(peer: Peer, name: bytes, data: bytes = b"") -> None:
    body = command(name, data)
    peer.socket.sendall(header(COMMAND, len(body)) + body)


@pytest.mark.parametrize("context", [b"", b"context", b"c" * 16, b"c" * 17])
async def test_a_ping_is_answered_with_up_to_16_bytes_of_its_context(place: Listening, context: bytes) -> None:
    peer, _ = await joined(place)
    say(peer, b"PING", b"\0\x0a" + context)
    body = command(b"PONG", context[:16])
    answer = header(COMMAND, len(body)) + body
    assert await peer.read(len(answer)) == answer
    assert place.frames == []


async def test_a_pong_is_nobodys_business_and_other_commands_are_the_doors(place: Listening) -> None:
    peer, connection = await joined(place)
    say(peer, b"PONG")
    say(peer, b"SUBSCRIBE", b"a")
    peer.send(b"a message")
    await until(lambda: len(place.frames) == 2)
    assert place.frames == [(COMMAND, command(b"SUBSCRIBE", b"a")), (0, b"a message")]
    assert not connection.closed


async def test_only_a_handshake_has_to_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 600.0)  # a good handshake may take its time here
    place = Listening(tmp_path)
    try:
        peer, connection = await joined(place)
        assert not connection._patience
        monkeypatch.setattr(module, "HANDSHAKE_S", 0.1)
        await place.peer(b"").ends()
        peer.send(b"still there")
        await until(lambda: place.frames == [(0, b"still there")])
        assert not connection.closed
        assert place.acceptor.refused["handshake_failed"] == 1
    finally:
        place.close()


@pytest.mark.parametrize(("said", "failed"), [(b"", 0), (HANDSHAKE[:10], 1), (HANDSHAKE, 1)])
async def test_whoever_leaves_within_the_handshake_counts_once_it_has_spoken(
    place: Listening, said: bytes, failed: int
) -> None:
    await joined(place)
    leaving = place.peer(said)
    await leaving.read(10)  # it was accepted
    leaving.socket.close()
    await until(lambda: not place.acceptor._shaking)
    assert place.acceptor.refused["handshake_failed"] == failed


async def test_a_message_before_the_end_of_the_handshake_ends_the_connection(place: Listening) -> None:
    body = READY[2:]
    early = place.peer(HANDSHAKE + header(0, len(body)) + body)
    await early.ends()
    assert place.acceptor.refused["handshake_failed"] == 1
    assert len(place.acceptor.connections) == 0


async def test_an_error_ends_the_connection(place: Listening) -> None:
    peer, connection = await joined(place)
    say(peer, b"ERROR", b"\x03bad")
    await peer.ends()
    assert connection.closed
    assert place.frames == []


async def test_a_peer_that_reads_nothing_gets_no_pong(place: Listening) -> None:
    peer, connection = await joined(place)
    unread = stalled(connection)
    say(peer, b"PING", b"\0\x0a")
    peer.send(b"read")
    await until(lambda: place.frames == [(0, b"read")])
    assert connection.unread == unread


@pytest.mark.parametrize("sizes", [(3,), (0, 5), (2, 300, 1), (1, JOINED, 2), (JOINED, JOINED)])
async def test_a_message_arrives_frame_by_frame_whatever_the_sizes(place: Listening, sizes: tuple[int, ...]) -> None:
    peer, connection = await joined(place)
    frames = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    assert connection.send(*frames)
    last = len(frames) - 1
    expected = b"".join(header(MORE * (i < last), len(frame)) + frame for i, frame in enumerate(frames))
    assert await peer.read(len(expected)) == expected
    await until(lambda: connection.unread == 0)


async def test_all_frames_of_a_message_count_against_what_may_be_unread(place: Listening) -> None:
    _, connection = await joined(place)
    unread = stalled(connection)
    assert not connection.send(b"small", bytes(MIB))
    assert not connection.send(bytes(MIB))
    assert connection.unread == unread, "nothing of them was taken"
    assert connection.send(b"small", b"small")
