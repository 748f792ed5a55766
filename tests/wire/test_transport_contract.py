"""The contract of wire/transport.py, over real sockets and the simulated network, failures included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from tests.support.named_peers import send
from tests.support.simulation import network
from tests.support.simulation.faults import Latency, NetworkFaults
from tests.support.simulation.network import SimNetwork
from tests.support.waits import until
from transferd.config import ServerSection
from transferd.errors import Closed, ConfigError
from transferd.wire.transport import (
    ClientTransport,
    ServerTransport,
    ZmqClientTransport,
    ZmqServerTransport,
)

HWM = 16
LARGE = bytes(1 << 20)
MOST = 4096  # sends after which whoever takes everything has no bound


class Kind:
    """One implementation: makes both ends, breaks what is between them, and does not read."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self._endpoint = f"ipc://{directory}/t.sock"
        self._network = SimNetwork()
        self._peers: list[tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]] = []
        self._names = iter(range(100))

    def server(self) -> ServerTransport:
        if self.name == "simulated":
            return self._network.server()
        return ZmqServerTransport(ServerSection(endpoint=self._endpoint))

    def client(self) -> ClientTransport:
        if self.name == "simulated":
            return self._network.client(f"engine{next(self._names)}")
        return ZmqClientTransport(self._endpoint)

    def peer_that_does_not_read(self) -> None:
        """Say one thing, and read nothing that is answered."""
        if self.name == "simulated":
            client = self.client()
            client.start(lambda _: None)
            client.send(b"hello")
            self._network.faults = NetworkFaults(Latency(3600.0, 3600.0))  # after the test is as good as never
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        socket.send(b"hello")
        self._peers.append((context, socket))

    def close(self) -> None:
        for context, socket in self._peers:
            socket.close(0)
            context.term()


@pytest.fixture(params=["zmq", "simulated"])
async def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kind]:
    monkeypatch.setattr(ZmqClientTransport, "SEND_HWM", HWM)
    monkeypatch.setattr(ZmqServerTransport, "MOST_UNREAD", HWM * len(LARGE))
    monkeypatch.setattr(network, "SEND_HWM", HWM)
    made = Kind(request.param, tmp_path)
    yield made
    made.close()


class Ends:
    """A daemon's end and a client's, and what each has heard."""

    def __init__(self, kind: Kind) -> None:
        self.server, self.client = kind.server(), kind.client()
        self.at_server: list[tuple[bytes, bytes]] = []
        self.at_client: list[bytes] = []
        self.inside = False  # a call of ours

    def start_server(self) -> None:
        self.server.start(self._server_heard)

    def start_client(self) -> None:
        self.client.start(self._client_heard)

    def _server_heard(self, peer: bytes, payload: bytes | memoryview) -> None:
        assert not self.inside
        self.at_server.append((peer, bytes(payload)))

    def _client_heard(self, payload: bytes | memoryview) -> None:
        assert not self.inside
        self.at_client.append(bytes(payload))

    async def meet(self) -> bytes:
        """Both up, and the client's name at the daemon."""
        self.start_server()
        self.start_client()
        assert self.client.send(b"hello")
        await until(lambda: bool(self.at_server), within=30)
        return self.at_server[-1][0]

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
async def ends(kind: Kind) -> AsyncIterator[Ends]:
    made = Ends(kind)
    yield made
    made.close()


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0.002)


async def test_messages_arrive_whole_and_in_order_both_ways(ends: Ends) -> None:
    peer = await ends.meet()
    sent = [bytes([number]) * size for number, size in enumerate((1, 300, 100_000, 70_000, 5))]
    for payload in sent:
        assert ends.client.send(payload)
        assert send(ends.server, peer, payload)
    await until(lambda: len(ends.at_server) == 6 and len(ends.at_client) == 5, within=30)
    assert ends.at_server == [(peer, b"hello"), *((peer, payload) for payload in sent)]
    assert ends.at_client == sent


async def test_no_callback_runs_inside_a_call(ends: Ends) -> None:
    peer = await ends.meet()
    for _ in range(5):
        ends.inside = True
        ends.client.send(b"1")
        send(ends.server, peer, b"2")
        ends.inside = False
        await turns()
    await until(lambda: len(ends.at_server) == 6 and len(ends.at_client) == 5, within=30)


async def test_messages_sent_before_a_daemon_listens_arrive_when_it_does(ends: Ends) -> None:
    ends.start_client()
    for number in range(5):
        assert ends.client.send(bytes([number]))
    await turns()
    ends.start_server()
    await until(lambda: len(ends.at_server) == 5, within=30)
    assert [payload for _, payload in ends.at_server] == [bytes([number]) for number in range(5)]


async def test_messages_that_wait_for_a_daemon_are_bounded_without_an_error(ends: Ends) -> None:
    ends.start_client()
    taken = 0
    while ends.client.send(bytes([taken % 256])) and taken < MOST:
        taken += 1
    assert 0 < taken < MOST
    assert not ends.client.send(b"one more")
    ends.start_server()
    await until(lambda: len(ends.at_server) == taken, within=30)
    assert [payload[0] for _, payload in ends.at_server] == [number % 256 for number in range(taken)]
    assert ends.client.send(b"room again")
    await until(lambda: ends.at_server[-1][1] == b"room again", within=30)


async def test_messages_that_wait_for_a_silent_reader_are_bounded_and_delay_no_other_peer(
    kind: Kind, ends: Ends
) -> None:
    ends.start_server()
    kind.peer_that_does_not_read()
    await until(lambda: bool(ends.at_server), within=30)
    deaf = ends.at_server[-1][0]
    taken = 0
    while send(ends.server, deaf, LARGE) and taken < MOST:
        taken += 1
        await asyncio.sleep(0)
    assert taken < MOST
    if kind.name == "zmq":  # the simulated latency is one for all
        ends.start_client()
        ends.client.send(b"I read")
        await until(lambda: ends.at_server[-1][1] == b"I read", within=30)
        assert send(ends.server, ends.at_server[-1][0], b"told")
        await until(lambda: ends.at_client == [b"told"], within=30)


async def test_a_peer_that_has_gone_or_never_was_is_not_sent_to(ends: Ends) -> None:
    peer = await ends.meet()
    held = ends.server.peer(peer)
    assert held is not None
    assert not send(ends.server, b"nobody", b"x")
    ends.client.close()
    await until(lambda: not send(ends.server, peer, b"x"), within=30)
    assert not held.send(b"x"), "who holds the connection finds out, too"


async def test_a_client_finds_the_next_daemon_by_itself_and_under_another_name(kind: Kind, ends: Ends) -> None:
    before = await ends.meet()
    held = ends.server.peer(before)
    ends.server.close()
    assert held is not None
    assert not held.send(b"after close")
    assert not send(ends.server, before, b"after close")
    heard: list[tuple[bytes, bytes]] = []
    successor = kind.server()
    successor.start(lambda peer, payload: heard.append((peer, bytes(payload))))
    try:
        while not heard:  # a message of the moment between may be lost
            ends.client.send(b"again")
            await turns()
        assert send(successor, heard[-1][0], b"welcome")
        await until(lambda: b"welcome" in ends.at_client, within=30)
    finally:
        successor.close()


async def test_after_a_close_no_callback_runs_and_a_second_close_does_nothing(ends: Ends) -> None:
    peer = await ends.meet()
    send(ends.server, peer, b"1")
    ends.client.close()
    told = list(ends.at_client)
    await turns()
    assert ends.at_client == told
    with pytest.raises(Closed):
        ends.client.send(b"late")
    ends.client.close()
    ends.server.close()
    ends.server.close()
    assert not send(ends.server, peer, b"late")


async def test_messages_sent_before_a_daemon_closed_still_arrive(ends: Ends) -> None:
    peer = await ends.meet()
    for number in range(HWM):
        assert send(ends.server, peer, bytes([number]))
    ends.server.close()
    await until(lambda: len(ends.at_client) == HWM, within=30)
    assert ends.at_client == [bytes([number]) for number in range(HWM)]


async def test_two_daemons_cannot_listen_at_one_place(kind: Kind, ends: Ends) -> None:
    await ends.meet()
    with pytest.raises(ConfigError):
        kind.server().start(lambda _peer, _payload: None)
    assert ends.client.send(b"still there")
    await until(lambda: ends.at_server[-1][1] == b"still there", within=30)
