"""SimNetwork: order, latency, breaks, and names, as the transport contract has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.simulation.faults import Latency, NetworkFaults
from tests.support.simulation.loop import START, SimLoop, simulate
from tests.support.simulation.network import SimClientTransport, SimNetwork, SimServerTransport
from transferd.errors import Closed, ConfigError


class Wire:
    """A server and a client that write down what they hear and when."""

    def __init__(self, loop: SimLoop, faults: NetworkFaults) -> None:
        self.loop = loop
        self.network = SimNetwork(faults=faults, rng=loop.stream("network"))
        self.server = self.network.server()
        self.client = self.network.client("engine")
        self.at_server: list[tuple[bytes, int]] = []
        self.at_client: list[int] = []
        self.times: list[float] = []

    def both_up(self) -> tuple[SimServerTransport, SimClientTransport]:
        self.start_server()
        self.client.start(lambda payload: self.at_client.append(payload[0]))
        return self.server, self.client

    def start_server(self) -> None:
        def heard(peer: bytes, payload: bytes) -> None:
            self.at_server.append((peer, payload[0]))
            self.times.append(self.loop.time() - START)

        self.server.start(heard)

    @property
    def heard(self) -> list[int]:
        return [number for _, number in self.at_server]


def run(program: Callable[[Wire], Coroutine[Any, Any, None]], seed: int = 0, **faults: Any) -> None:
    async def main(loop: SimLoop) -> None:
        await program(Wire(loop, NetworkFaults(**faults)))

    simulate(main, seed)


SECOND = Latency(1.0, 1.0)


def test_messages_arrive_in_order_after_their_latency_both_ways() -> None:
    async def program(wire: Wire) -> None:
        server, client = wire.both_up()
        for number in range(50):
            assert client.send(bytes([number]))
        await asyncio.sleep(3)
        assert wire.heard == list(range(50))
        assert {peer for peer, _ in wire.at_server} == {b"engine/1"}
        assert wire.times == sorted(wire.times)
        assert wire.times[0] >= 1
        assert wire.times[-1] <= 2
        for number in range(50):
            assert server.send(b"engine/1", bytes([number]))
        await asyncio.sleep(3)
        assert wire.at_client == list(range(50))

    for seed in range(10):
        run(program, seed, latency=Latency(1.0, 2.0))


async def test_the_simulated_network_works_on_real_loops() -> None:
    network, heard = SimNetwork(), list[bytes]()
    server, client = network.server(), network.client("engine")
    server.start(lambda _, payload: heard.append(payload))
    client.start(heard.append)
    client.send(b"1")
    while not heard:  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0)
    server.send(b"engine/1", b"2")
    while len(heard) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert heard == [b"1", b"2"]


def test_messages_wait_for_the_daemon() -> None:
    async def program(wire: Wire) -> None:
        wire.client.start(lambda _: None)
        assert wire.client.send(b"\x01")
        await asyncio.sleep(5)
        assert wire.at_server == []
        wire.start_server()
        wire.client.send(b"\x02")
        await asyncio.sleep(1)
        assert wire.heard == [1, 2]

    run(program)


def test_a_message_that_the_network_refuses_is_counted_at_either_end() -> None:
    async def program(wire: Wire) -> None:
        server, client = wire.both_up()
        wire.network.faults = NetworkFaults(refuse=1.0)
        assert not client.send(b"\x01")
        assert not server.send(b"engine/1", b"\x02")
        assert (wire.network.refused, set(wire.network.refused_at)) == (2, {b"engine/1"})
        wire.network.faults = NetworkFaults()
        assert client.send(b"\x03")
        assert server.send(b"engine/1", b"\x04")
        await asyncio.sleep(1)
        assert (wire.heard, wire.at_client) == ([3], [4])

    run(program)


def test_a_new_connection_has_a_new_name_and_the_old_one_goes_nowhere() -> None:
    async def program(wire: Wire) -> None:
        server, client = wire.both_up()
        assert not server.send(b"stranger", b"x")
        wire.network.cut("engine")
        assert not server.send(b"engine/1", b"\x01")
        wire.network.mend("engine")
        wire.network.mend("engine")
        assert not server.send(b"engine/1", b"\x02")
        assert server.send(b"engine/2", b"\x03")
        await asyncio.sleep(1)
        client.close()
        assert not server.send(b"engine/2", b"\x04")
        assert wire.at_client == [3]

    run(program)


def test_a_break_without_loss_lets_arrive_what_was_sent() -> None:
    async def program(wire: Wire) -> None:
        _, client = wire.both_up()
        client.send(b"\x01")
        wire.network.cut("engine")
        client.send(b"\x02")
        await asyncio.sleep(10)
        assert wire.at_server == [(b"engine/1", 1)]
        wire.network.mend("engine")
        await asyncio.sleep(2)
        assert wire.at_server == [(b"engine/1", 1), (b"engine/2", 2)]
        assert wire.network.lost == wire.network.duplicated == 0

    run(program, latency=SECOND)


def test_a_break_loses_the_tail_of_what_was_on_its_way() -> None:
    prefixes: set[int] = set()

    async def program(wire: Wire) -> None:
        server, client = wire.both_up()
        client.send(b"\x63")
        await asyncio.sleep(2)
        for number in range(5):
            client.send(bytes([number]))
            server.send(b"engine/1", bytes([number]))
        await asyncio.sleep(0.5)
        wire.network.cut("engine")
        wire.network.mend("engine")
        await asyncio.sleep(2)
        assert wire.heard[0] == 99
        assert wire.heard[1:] == list(range(len(wire.heard) - 1))
        assert wire.at_client == list(range(len(wire.at_client)))
        assert wire.network.lost == 10 - (len(wire.heard) - 1) - len(wire.at_client)
        prefixes.add(len(wire.at_client))

    for seed in range(20):
        run(program, seed, latency=SECOND, lose=0.3)
    assert len(prefixes) > 2


def test_a_client_may_send_again_what_had_arrived() -> None:
    async def program(wire: Wire) -> None:
        _, client = wire.both_up()
        client.send(b"\x01")
        client.send(b"\x02")
        await asyncio.sleep(2)
        wire.network.cut("engine")
        client.send(b"\x03")
        wire.network.mend("engine")
        await asyncio.sleep(2)
        assert wire.heard == [1, 2, 1, 2, 3]
        assert wire.network.duplicated == 2

    run(program, latency=SECOND, duplicate=1.0)


def test_a_daemon_that_closes_lingers_and_the_next_one_takes_over() -> None:
    async def program(wire: Wire) -> None:
        server, client = wire.both_up()
        client.send(b"\x01")
        server.send(b"engine/1", b"\x02")
        second = wire.network.server()
        with pytest.raises(ConfigError, match="another daemon"):
            second.start(lambda *_: None)
        server.close()
        server.close()
        assert not server.send(b"engine/1", b"\x03")
        await asyncio.sleep(2)
        assert wire.heard == []
        assert wire.at_client == [2]
        heard: list[bytes] = []
        second.start(lambda _, payload: heard.append(payload))
        client.send(b"\x04")
        await asyncio.sleep(2)
        assert heard == [b"\x04"]

    run(program, latency=SECOND)


def test_messages_of_a_client_that_leaves_arrive_and_it_receives_none() -> None:
    async def program(wire: Wire) -> None:
        server, client = wire.both_up()
        client.send(b"\x01")
        server.send(b"engine/1", b"\x02")
        client.close()
        client.close()
        await asyncio.sleep(2)
        assert wire.heard == [1]
        assert wire.at_client == []
        with pytest.raises(Closed):
            client.send(b"\x03")

    run(program, latency=SECOND)


def test_two_clients_of_one_name_are_refused() -> None:
    async def program(wire: Wire) -> None:
        wire.both_up()
        with pytest.raises(ConfigError, match="another client"):
            wire.network.client("engine").start(lambda _: None)

    run(program)
