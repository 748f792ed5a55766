"""What connections may hold and take together: places, turns, memory. Real sockets, small bounds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from tests.support.waits import until
from transferd.runtime import loop_turns
from transferd.runtime.compat import timeout, wait_for
from transferd.wire import acceptor as module
from transferd.wire import connection, shares
from transferd.wire.acceptor import Acceptor
from transferd.wire.connection import Door, ZmtpConnection
from transferd.wire.zmtp import COMMAND, command, greeting, header, properties

DEALERS = frozenset((b"DEALER",))
MIB = 1024**2
HANDSHAKE = greeting(b"NULL", as_server=False)
READY = command(b"READY", properties({b"Socket-Type": b"DEALER"}))
READY = header(COMMAND, len(READY)) + READY


class Peer:
    """A plain socket that reads what it is told to read."""

    def __init__(self, endpoint: str, handshake: bytes = HANDSHAKE + READY) -> None:
        scheme, _, address = endpoint.partition("://")
        self.socket = socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET)
        host, _, port = address.rpartition(":")
        self.socket.connect(address if scheme == "ipc" else (host, int(port)))
        self.socket.sendall(handshake)
        self.socket.setblocking(False)

    def send(self, body: bytes) -> None:
        self.socket.sendall(header(0, len(body)) + body)

    async def read(self, count: int) -> bytes:
        loop, found = asyncio.get_running_loop(), b""
        async with timeout(30):
            while len(found) < count:
                more = await loop.sock_recv(self.socket, min(count - len(found), 1 << 20))
                if not more:
                    raise EOFError
                found += more
        return found

    async def ends(self) -> None:
        """Read until the other end closes."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                await self.read(1)


class Place:
    """An acceptor at a unix socket, and what it received."""

    def __init__(self, directory: Path, *, most: int = 100, limit: int = 100 * MIB, unread: int = MIB) -> None:
        self.heard: list[tuple[ZmtpConnection, bytes]] = []
        self.by_turn = [0]
        self.acceptor = Acceptor(most, 0)
        door = Door(b"ROUTER", DEALERS, limit, self._received, unread=unread)
        self.endpoint = self.acceptor.listen(f"ipc://{directory}/a", "server.endpoint", door, 0o600)
        self.tcp = self.acceptor.listen("tcp://127.0.0.1:*", "server.endpoint", door, 0)
        self.peers: list[Peer] = []

    def _received(self, peer: ZmtpConnection, _flags: int, body: bytes | memoryview) -> None:
        self.heard.append((peer, bytes(body[:100])))
        self.by_turn[-1] += 1

    def count_turns(self) -> None:
        self.by_turn.append(0)
        asyncio.get_running_loop().call_soon(self.count_turns)

    def peer(self, handshake: bytes = HANDSHAKE + READY, endpoint: str = "") -> Peer:
        self.peers.append(Peer(endpoint or self.endpoint, handshake))
        return self.peers[-1]

    async def joined(self, count: int) -> list[ZmtpConnection]:
        await until(lambda: len(self.acceptor.connections) == count, within=30)
        return list(self.acceptor.connections.values())

    def close(self) -> None:
        self.acceptor.close()
        for peer in self.peers:
            peer.socket.close()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


# --- places -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_a_crowd_is_refused_and_a_client_that_was_there_goes_on(tmp_path: Path, scheme: str) -> None:
    place = Place(tmp_path, most=8)
    endpoint = place.endpoint if scheme == "ipc" else place.tcp
    first = place.peer(endpoint=endpoint)
    await place.joined(1)
    with structlog.testing.capture_logs() as logs:
        crowd = []
        for _ in range(40):
            with contextlib.suppress(ConnectionError):  # refused while it was still speaking
                crowd.append(place.peer(b"", endpoint))
        await until(lambda: place.acceptor.refused["too_many_connections"] == 33, within=30)
    assert [line["reason"] for line in logs] == ["too_many_connections"] * 33
    for peer in crowd[7:]:
        await peer.ends()
    first.send(b"still there")
    await until(lambda: bool(place.heard), within=30)
    assert place.heard[0][1] == b"still there"
    for peer in crowd:
        peer.socket.close()
    await until(lambda: not place.acceptor._shaking, within=30)
    place.peer(endpoint=endpoint).send(b"there is room again")
    await until(lambda: len(place.heard) == 2, within=30)
    place.close()


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_an_unfinished_handshake_gives_its_place_to_a_newcomer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Peers without a key, or who say nothing, never hold a client's place."""
    monkeypatch.setattr(module, "SHAKES_S", 0.0)
    monkeypatch.setattr(connection, "HANDSHAKE_S", 600.0)
    place = Place(tmp_path, most=8)
    endpoint = place.endpoint if scheme == "ipc" else place.tcp
    first = place.peer(endpoint=endpoint)
    await place.joined(1)
    silent = [place.peer(b"", endpoint) for _ in range(7)]
    await until(lambda: len(place.acceptor._shaking) == 7, within=30)
    place.peer(endpoint=endpoint).send(b"in")
    await until(lambda: len(place.heard) == 1, within=30)
    await silent[0].ends()
    assert place.acceptor.refused["too_many_connections"] == 1
    assert len(place.acceptor._shaking) == 6
    first.send(b"still there")
    await until(lambda: len(place.heard) == 2, within=30)
    place.close()


async def test_connections_end_where_descriptors_are_scarce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "most_connections", lambda _: 0)
    place = Place(tmp_path)
    await place.peer(b"").ends()
    assert place.acceptor.refused["too_many_connections"] == 1
    place.close()


async def test_descriptors_of_others_close_the_door_to_nobody(place: Place) -> None:
    """A new connection's number says how many descriptors are open, whoever opened them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0) for _ in range(soft * 5 // 8)]
    try:
        place.peer().send(b"in")
        await until(lambda: len(place.heard) == 1, within=30)
    finally:
        for one in held:
            os.close(one)


async def test_a_process_without_descriptors_accepts_again_when_it_has_some(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    [(listening, door), *_] = place.acceptor._listening
    asyncio.get_running_loop().remove_reader(listening.fileno())

    class Exhausted:
        def accept(self) -> None:
            raise OSError(24, "Too many open files")

        def fileno(self) -> int:
            return listening.fileno()

    with structlog.testing.capture_logs() as logs:
        place.acceptor._accept(Exhausted(), door)  # type: ignore[arg-type]
    assert [line["problem"] for line in logs] == ["Too many open files"]
    place.peer()
    await place.joined(1)


async def test_a_peer_with_a_bad_or_no_handshake_is_counted_and_disconnected(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_S", 0.05)
    with structlog.testing.capture_logs() as logs:
        for handshake in (b"", HANDSHAKE, b"GET / HTTP/1.1\r\n\r\n", HANDSHAKE + header(0, 3) + b"abc"):
            await place.peer(handshake).ends()
        place.peer(HANDSHAKE[:20]).socket.close()
        await until(lambda: place.acceptor.refused["handshake_failed"] == 5, within=30)
        place.peer(b"").socket.close()  # somebody who only looked whether we listen
        await until(lambda: not place.acceptor._shaking, within=30)
    assert {(line["event"], line["reason"]) for line in logs} == {("connection refused", "handshake_failed")}
    assert len(logs) == 5
    assert all(line["peer"].startswith("uid ") and line["problem"] for line in logs)
    monkeypatch.undo()
    place.peer()
    await place.joined(1)


# --- turns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, loop_turns.FRAMES, loop_turns.FRAMES + 1, 3000])
async def test_a_burst_is_read_in_order_and_leaves_the_loop_its_turns(place: Place, count: int) -> None:
    peer = place.peer()
    await place.joined(1)
    place.count_turns()
    messages = [str(i).encode() for i in range(count)]
    peer.socket.setblocking(True)
    peer.socket.sendall(b"".join(header(0, len(message)) + message for message in messages))
    await until(lambda: len(place.heard) == count, within=30)
    assert [body for _, body in place.heard] == messages
    assert max(place.by_turn) <= loop_turns.FRAMES + loop_turns.SHARE, "what it reads, and what had waited"


async def test_peers_that_send_without_end_leave_others_their_share(place: Place) -> None:
    flooders = [place.peer() for _ in range(4)]
    await place.joined(4)
    for flooder in flooders:
        flooder.socket.send((header(0, 5) + b"flood") * 5000)
    await until(lambda: len(place.heard) > 100, within=30)
    before = len(place.heard)
    place.peer().send(b"me too")
    await until(lambda: any(body == b"me too" for _, body in place.heard), within=30)
    after = next(number for number, (_, body) in enumerate(place.heard) if body == b"me too")
    assert after - before < 4 * 5000 / 2
    place.count_turns()
    await until(lambda: len(place.heard) == 4 * 5000 + 1, within=30)
    assert max(place.by_turn[1:]) <= 4 * (loop_turns.FRAMES + loop_turns.SHARE)


async def test_of_all_that_are_ready_those_go_first_that_have_cost_least(place: Place) -> None:
    peers = {number: place.peer() for number in range(3)}
    connections = await place.joined(3)
    for one, spent in zip(connections, (3.0, 1.0, 2.0), strict=True):
        one.spent.at = spent
    for number, peer in peers.items():
        peer.socket.send(header(0, 1) + b"%d" % number)
    await until(lambda: len(place.heard) == 3)
    assert [body for _, body in place.heard] == [b"1", b"2", b"0"]


async def test_a_turn_that_is_over_leaves_input_in_the_sockets_and_nothing_is_lost(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = [place.peer() for _ in range(90)]
    connections = await place.joined(90)
    monkeypatch.setattr(loop_turns, "TURN_S", 0.0)  # every turn is over after one socket
    watched = [one._events for one in connections]
    place.count_turns()
    for peer in peers:
        peer.socket.send(header(0, 1) + b"a")
    await until(lambda: len(place.heard) == 90, within=30)
    assert max(place.by_turn) == 1
    assert len({peer for peer, _ in place.heard}) == 90
    assert [one._events for one in connections] == watched


# --- memory for what arrives ------------------------------------------------------------------------


@pytest.fixture
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_RECEIVED", 3 * MIB)


@pytest.mark.usefixtures("small_room")
async def test_large_messages_wait_until_there_is_room_and_all_arrive(tmp_path: Path) -> None:
    place = Place(tmp_path)
    peers = [place.peer() for _ in range(6)]
    await place.joined(6)
    loop, size = asyncio.get_running_loop(), 2 * MIB
    sending = [loop.sock_sendall(peer.socket, header(0, size) + bytes([n]) * size) for n, peer in enumerate(peers)]
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, place.acceptor.room.taken)
            await asyncio.sleep(0)

    watching = asyncio.ensure_future(watch())
    await wait_for(asyncio.gather(*sending), 60)
    await until(lambda: len(place.heard) == 6, within=30)
    watching.cancel()
    assert sorted(body[0] for _, body in place.heard) == list(range(6))
    assert most == size, "one at a time"
    assert place.acceptor.room.taken == 0
    place.close()


@pytest.mark.usefixtures("small_room")
async def test_a_message_that_others_wait_for_must_arrive_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "STALLED_S", 0.2)
    place = Place(tmp_path)
    stalled = place.peer()
    stalled.socket.send(header(0, 2 * MIB) + b"and no more")
    await until(lambda: place.acceptor.room.taken == 2 * MIB, within=30)
    honest = place.peer()
    await wait_for(asyncio.get_running_loop().sock_sendall(honest.socket, header(0, 2 * MIB) + b"x" * 2 * MIB), 30)
    await until(lambda: bool(place.heard), within=30)
    await stalled.ends()
    assert place.acceptor.refused["stalled_message"] == 1
    assert place.heard[0][1] == b"x" * 100
    place.close()


@pytest.mark.usefixtures("small_room")
async def test_room_is_given_back_by_those_that_leave(tmp_path: Path) -> None:
    place = Place(tmp_path)
    holder, waiting = place.peer(), place.peer()
    for peer in (holder, waiting):
        peer.socket.send(header(0, 2 * MIB) + b"begun")
        await until(lambda: place.acceptor.room.taken == 2 * MIB, within=30)
    await until(lambda: bool(place.acceptor.room._waiting), within=30)
    waiting.socket.close()
    small = place.peer()
    small.send(b"small ones never wait")
    await until(lambda: bool(place.heard), within=30)
    holder.socket.close()
    await until(lambda: place.acceptor.room.taken == 0, within=30)
    place.close()


# --- memory for what leaves -------------------------------------------------------------------------


async def test_unread_answers_of_one_peer_are_bounded_and_read_ones_are_whole(place: Place) -> None:
    peer = place.peer()
    [there] = await place.joined(1)
    assert there.send(bytes(5 * MIB)), "a single one may be larger"
    assert not there.send(b"one more")
    assert place.acceptor.unread == there.unread <= 5 * MIB + 10
    await peer.read(64 + 2)
    await peer.read(5 * MIB)
    await until(lambda: not there.unread, within=30)
    assert place.acceptor.unread == 0
    assert there.send(b"room again")


async def test_unread_answers_of_all_peers_are_bounded_by_ending_the_peer_with_most(tmp_path: Path) -> None:
    place = Place(tmp_path, unread=4 * MIB)
    place.acceptor.most_unread = 10 * MIB
    deaf = [place.peer() for _ in range(4)]
    connections = await place.joined(4)
    for number, there in enumerate(connections):
        for _ in range(12 + number):
            there.send(bytes(MIB // 4))
            there.flush()
        assert place.acceptor.unread <= 10 * MIB
    assert place.acceptor.refused["unread_answers"] >= 1
    good = place.peer()
    await until(lambda: place.acceptor.connections.keys() - {one.peer for one in connections}, within=30)
    new = list(place.acceptor.connections.values())[-1]
    assert new.send(b"x" * MIB)
    await good.read(64 + MIB)
    assert len(deaf) > len([one for one in connections if not one.closed])
    place.close()


async def test_answers_of_one_turn_leave_together_and_in_order(place: Place) -> None:
    peer = place.peer()
    [there] = await place.joined(1)
    handshake = 64 + 2 + len(READY)
    await peer.read(handshake - 7)  # a ROUTER's READY is as long as the type of its socket
    sizes = [0, 1, 255, 256, 300, 70_000, 1, 200_000, 3]
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    for body in sent:
        assert there.send(body)
    expected = b"".join(header(0, len(body)) + body for body in sent)
    found = await peer.read(len(expected))
    while not found.endswith(expected[-100:]):  # the rest of the handshake came first
        found += await peer.read(1)
    assert found.endswith(expected)


async def test_a_name_is_never_used_again(place: Place) -> None:
    names = set()
    for number in range(20):
        peer = place.peer()
        [there] = await place.joined(1)
        names.add(there.peer)
        assert len(names) == number + 1
        peer.socket.close()
        await place.joined(0)
        assert not there.send(b"x")
