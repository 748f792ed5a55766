"""Which nodes answer: found out when a call takes long, remembered, asked again, and forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import pytest

from tests.support.waits import until
from transferd.errors import StorageUnavailable
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.mooncake import connections
from transferd.storage.mooncake import peers as module
from transferd.storage.mooncake.connections import Address
from transferd.storage.mooncake.handshake import Gone
from transferd.storage.mooncake.peers import Call, Peers

T = TypeVar("T")

NODE, OTHER = "10.0.0.2:15000", "10.0.0.3:15000"


class Nodes:
    """What nodes answer. silent: those that do not, and why."""

    def __init__(self) -> None:
        self.silent: dict[str, StorageUnavailable] = {}
        self.asked: list[str] = []

    async def ask(self, endpoint: str, within: float) -> frozenset[Address]:
        assert within > 0
        self.asked.append(endpoint)
        await asyncio.sleep(0)
        if (error := self.silent.get(endpoint)) is not None:
            raise error
        host = endpoint.rpartition(":")[0]
        return frozenset({(host, 15000), (host, 16000)})


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture
async def peers(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Peers]:
    for name in ("SUSPECT_S", "PROBE_S", "CUT_S", "ASK_AGAIN_S"):
        monkeypatch.setattr(module, name, 0.005)
    ended: list[frozenset[tuple[str, int]]] = []
    monkeypatch.setattr(connections, "end", lambda addresses: ended.append(addresses) or 1)

    async def in_thread(work: Callable[[], T]) -> T:
        return work()

    made = Peers(SYSTEM_CLOCK, in_thread, nodes.ask)
    made.ended = ended  # type: ignore[attr-defined]
    yield made
    await made.close()


async def test_a_call_that_ends_in_time_asks_no_node(peers: Peers, nodes: Nodes) -> None:
    call = Call(frozenset({NODE}))
    peers.watch(call)
    call.end()
    await asyncio.sleep(0.02)
    assert nodes.asked == []


async def test_a_silent_node_goes_down_its_connections_end_and_it_comes_back(peers: Peers, nodes: Nodes) -> None:
    peers.met({NODE, OTHER})
    await until(lambda: len(nodes.asked) == 2)
    nodes.silent[NODE] = StorageUnavailable("no answer")
    call = Call(frozenset({NODE, OTHER}))
    peers.watch(call)
    await until(lambda: peers.cut > 1, "until the call ends")
    assert peers.down == {NODE: "no answer"}
    assert set(peers.ended) == {frozenset({("10.0.0.2", 15000), ("10.0.0.2", 16000)})}  # type: ignore[attr-defined]
    with pytest.raises(StorageUnavailable, match=rf"the Mooncake node {NODE}, which holds it, does not answer"):
        await peers.verdict(NODE)
    await peers.verdict(OTHER)
    call.end()
    nodes.silent.clear()
    await until(lambda: not peers.down)
    await peers.verdict(NODE)
    assert peers.opened == 1


async def test_a_node_that_answers_and_is_slow_keeps_its_call(peers: Peers, nodes: Nodes) -> None:
    call = Call(frozenset({NODE}))
    peers.watch(call)
    await until(lambda: nodes.asked.count(NODE) > 3, "it is asked again and again")
    assert (peers.down, peers.cut) == ({}, 0)
    call.end()


async def test_a_node_that_sends_and_loses_our_questions_is_not_down(
    peers: Peers, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends = [True]
    monkeypatch.setattr(connections, "heard", lambda addresses, within: sends[0] and bool(addresses) and within > 0)
    peers.met({NODE})
    await until(lambda: nodes.asked)
    nodes.silent[NODE] = StorageUnavailable("no answer")
    call = Call(frozenset({NODE}))
    peers.watch(call)
    await until(lambda: nodes.asked.count(NODE) > 3, "it is asked again and again")
    assert (peers.down, peers.cut) == ({}, 0)
    sends[0] = False
    await until(lambda: peers.down, "silent altogether")
    call.end()


async def test_a_put_that_fails_finds_who_has_died_and_for_how_long_that_matters(
    peers: Peers, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers.met({NODE, OTHER})
    await until(lambda: len(nodes.asked) == 2)
    nodes.silent[NODE] = Gone("nobody listens there any more")
    peers.put_failed()
    await until(lambda: NODE in peers.down)
    assert peers.in_the_way()
    monkeypatch.setattr(module, "DROPPED_S", 0.0)
    assert not peers.in_the_way(), "the master has dropped it"
    nodes.silent[NODE] = StorageUnavailable("no answer")
    await until(peers.in_the_way, "a node that is silent may be chosen for as long as it is")


async def test_a_gone_node_differs_from_a_silent_one(peers: Peers, nodes: Nodes) -> None:
    nodes.silent |= {NODE: Gone("nobody listens"), OTHER: StorageUnavailable("no answer")}
    call = Call(frozenset({NODE, OTHER}))
    peers.watch(call)
    await until(lambda: len(peers.down) == 2)
    assert [peer.endpoint for peer in peers._known.values() if peer.gone] == [NODE]
    call.end()


async def test_at_most_so_many_nodes_are_remembered_and_one_that_is_down_is_not_forgotten(
    peers: Peers, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    nodes.silent[NODE] = StorageUnavailable("no answer")
    call = Call(frozenset({NODE}))
    peers.watch(call)
    await until(lambda: NODE in peers.down)
    for i in range(5):
        peers.met({f"10.0.1.{i}:15000"})
    assert set(peers._known) == {NODE, "10.0.1.4:15000"}
    call.end()


async def test_a_node_that_is_down_and_not_needed_is_not_asked_for_ever(
    peers: Peers, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORGET_S", 0.05)
    nodes.silent[NODE] = StorageUnavailable("no answer")
    call = Call(frozenset({NODE}))
    peers.watch(call)
    await until(lambda: peers.opened == 1)
    call.end()
    await until(lambda: not peers.down, "it counts as up until a call finds otherwise")
