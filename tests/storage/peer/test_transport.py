"""Who meets whom, and what becomes of transfers whose daemon goes."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.storage.peer.nodes import NAMES, WHY, Node, asked, failed, joined
from tests.support.simulation.carrier import Fabric
from transferd.errors import ConfigError, PeerLost, PeerRefused, TransferError
from transferd.storage.base import Found
from transferd.storage.peer.transport import PeerTransport


@pytest.mark.parametrize("first", ["sender", "receiver"])
async def test_either_side_may_come_first(nodes: tuple[Node, Node], first: str) -> None:
    sender, receiver = nodes
    if first == "sender":
        await joined(sender, receiver)
        return
    inbound = receiver.transport.inbound("t", 0, NAMES, sender.transport.address)
    beginning = asyncio.ensure_future(inbound.begun())
    while not sender.transport.statistics()["waiting"]:  # noqa: ASYNC110 - the transport does not report it
        await asyncio.sleep(0)
    sender.transport.outbound("t", 0, NAMES)
    await beginning


@pytest.mark.parametrize(
    ("part", "code"),
    [(0, "model_mismatch"), (1, "layout_mismatch"), (2, "generation_mismatch"), (3, "blocks_mismatch")],
)
async def test_other_objects_are_refused_on_both_sides_with_the_difference(
    nodes: tuple[Node, Node], part: int, code: str
) -> None:
    sender, receiver = nodes
    parts = NAMES[0].split("/")
    parts[part] = "f" * 40
    outbound = sender.transport.outbound("t", 0, NAMES)
    other_rank = sender.transport.outbound("t", 1, NAMES)
    inbound = receiver.transport.inbound("t", 0, ["/".join(parts), *NAMES[1:]], sender.transport.address)
    with pytest.raises(PeerRefused) as refusal:
        await inbound.begun()
    assert refusal.value.reason == code
    for waiting in (outbound, other_rank):
        with pytest.raises(PeerRefused):
            await waiting.posted(1)


async def test_a_rank_that_is_refused_ends_the_others_of_its_transfer_at_once(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    sender.transport.outbound("t", 0, NAMES)
    address = sender.transport.address
    early = receiver.transport.inbound("t", 1, NAMES, address)  # whose sender never comes
    other_transfer = receiver.transport.inbound("u", 1, NAMES, address)
    waiting = [asyncio.ensure_future(inbound.begun()) for inbound in (early, other_transfer)]
    while sender.transport.statistics()["waiting"] != 2:  # noqa: ASYNC110 - the transport does not report it
        await asyncio.sleep(0)
    refused = receiver.transport.inbound("t", 0, ["model/other/gen/x/0"], address)
    with pytest.raises(PeerRefused):
        await refused.begun()
    with pytest.raises(PeerRefused) as failure:
        await waiting[0]
    assert failure.value.reason == "layout_mismatch"
    assert not waiting[1].done()
    for inbound in (refused, early, other_transfer):
        inbound.end(WHY)
    with pytest.raises(PeerRefused):
        await waiting[1]


async def test_a_receiver_with_more_ranks_is_refused(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    inbound = receiver.transport.inbound("t", 2, NAMES, sender.transport.address)
    with pytest.raises(PeerRefused, match="2 ranks"):
        await inbound.begun()


async def test_when_the_sender_goes_the_receiver_fails_and_gets_its_buffers_back(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    _outbound, inbound = await joined(sender, receiver)
    getting = asyncio.ensure_future(inbound.get(receiver.blobs(NAMES)))
    await asyncio.sleep(0)
    await sender.transport.hang_up()
    assert failed(await getting, "peer_lost")
    inbound.end(WHY)
    assert receiver.transport.statistics()["receiving"] == 0


async def test_when_the_receiver_goes_the_sender_fails(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    outbound, _inbound = await joined(sender, receiver)
    await receiver.transport.hang_up()
    with pytest.raises(PeerLost):
        await outbound.posted(1)
    assert failed(await outbound.put(sender.blobs(NAMES[:1])), "peer_lost")


async def test_a_receiver_that_leaves_before_the_sender_came_is_forgotten(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    inbound = receiver.transport.inbound("t", 0, NAMES, sender.transport.address)
    beginning = asyncio.ensure_future(inbound.begun())
    while not sender.transport.statistics()["waiting"]:  # noqa: ASYNC110 - the transport does not report it
        await asyncio.sleep(0)
    inbound.end(WHY)
    with pytest.raises(PeerRefused):
        await beginning
    while receiver.transport.statistics()["receiving"]:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    assert not sender.transport.statistics()["waiting"]


async def test_an_attempt_that_was_given_up_can_be_made_again_at_once(nodes: tuple[Node, Node]) -> None:
    """Whatever is still under way of the first: its write, its answers, its task on the sender's side."""
    sender, receiver = nodes
    first_out, first_in = await joined(sender, receiver)
    first_get = asyncio.ensure_future(first_in.get(receiver.blobs(NAMES, first_slot=0)))
    names = await asked(first_out, 8)
    sender.carrier.gate.clear()
    first_put = asyncio.ensure_future(first_out.put(sender.fill(names)))
    await asyncio.sleep(0)
    first_in.end(WHY)
    again = receiver.transport.inbound("t", 0, NAMES, sender.transport.address)
    beginning = asyncio.ensure_future(again.begun())
    with pytest.raises(PeerRefused):
        await first_out.taken()
    first_out.end(WHY)
    second_out = sender.transport.outbound("t", 0, NAMES)
    await beginning
    second_get = asyncio.ensure_future(again.get(receiver.blobs(NAMES, first_slot=20)))
    posted = await asked(second_out, 8)
    sender.carrier.gate.set()
    await first_put
    await first_get
    assert not second_get.done(), "what landed was of the first attempt"
    await second_out.put(sender.fill(posted))
    assert {o.found for o in await second_get} == {Found.FOUND}
    again.end(None)
    await second_out.taken()


async def test_a_sender_that_comes_up_later_is_found_though_an_earlier_connect_failed(nodes: tuple[Node, Node]) -> None:
    _, receiver = nodes
    with socket.socket() as reserved:  # bound to the end, without listening: nobody else gets the port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        early = receiver.transport.inbound("t", 0, NAMES, address)
        connecting = asyncio.ensure_future(early.begun())
        await asyncio.sleep(0)
        early.end(WHY)
        with pytest.raises(PeerLost):
            await connecting
        fabric = Fabric()
        late = PeerTransport(fabric.carrier("late"), address, ranks=1)
        await late.open()
        late.outbound("t", 0, NAMES)
        again = receiver.transport.inbound("t", 0, NAMES, address)
        await again.begun()
        again.end(WHY)
        await late.close()


async def test_a_transfer_is_sent_once_at_a_time_and_to_one_receiver(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    await joined(sender, receiver)
    with pytest.raises(TransferError, match="already"):
        sender.transport.outbound("t", 0, NAMES)
    second = receiver.transport.inbound("t", 0, NAMES, sender.transport.address)
    with pytest.raises(PeerRefused, match="another receiver"):
        await second.begun()


@pytest.mark.parametrize("what", ["nothing was opened", "the carrier does not start", "the address is taken"])
async def test_a_transport_that_did_not_open_closes_without_an_error(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Or its error would hide why the daemon does not start."""
    carrier = Fabric().carrier("late")
    listen = nodes[0].transport.address if what == "the address is taken" else "127.0.0.1:0"
    transport = PeerTransport(carrier, listen, ranks=1)
    if what == "the carrier does not start":

        async def fails() -> None:
            raise ConfigError("pd.protocol", "no such device", "rdma")

        monkeypatch.setattr(carrier, "open", fails)
    if what != "nothing was opened":
        with pytest.raises(ConfigError):
            await transport.open()
    await transport.hang_up()
    await transport.close()
    inbound = transport.inbound("t", 0, NAMES, nodes[0].transport.address)
    with pytest.raises(PeerLost, match="shutting down"):
        await inbound.begun()
    inbound.end(WHY)
    assert transport.statistics()["receiving"] == 0
