"""Both halves of a transfer: no byte arrives in memory that was not posted or was given back."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.storage.peer.nodes import NAMES, SLOT, WHY, Node, asked, content, failed, joined
from transferd.errors import PeerRefused, TransferError
from transferd.storage.base import Blob, Found, Outcome
from transferd.storage.peer import outbound as inbound_module
from transferd.storage.peer.outbound import Inbound, Outbound
from transferd.tasks import ErrorInfo


async def test_objects_land_in_posted_memory_and_both_sides_get_the_outcome(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    outbound, inbound = await joined(sender, receiver)
    buffers = receiver.blobs(NAMES, first_slot=20)
    getting = asyncio.ensure_future(inbound.get(buffers))
    assert await asked(outbound, 8) == NAMES
    assert {o.found for o in await outbound.put(sender.fill(NAMES))} == {Found.STORED}
    assert {o.found for o in await getting} == {Found.FOUND}
    assert [bytes(buffer.data) for buffer in buffers] == [content(name) for name in NAMES]
    taking = asyncio.ensure_future(outbound.taken())
    inbound.end(None)
    await taking
    outbound.end(None)
    assert await outbound.posted(8) == []


async def test_a_receiver_that_gives_up_keeps_its_buffers_until_the_write_has_ended(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    outbound, inbound = await joined(sender, receiver)
    getting = asyncio.ensure_future(inbound.get(receiver.blobs(NAMES)))
    names = await asked(outbound, 8)
    sender.carrier.gate.clear()
    putting = asyncio.ensure_future(outbound.put(sender.fill(names)))
    inbound.end(WHY)
    with pytest.raises(PeerRefused, match="the receiver cancelled the transfer"):
        await outbound.taken()  # the sender has heard of it
    assert not getting.done()
    sender.carrier.gate.set()
    await putting
    assert {o.found for o in await getting} <= {Found.FOUND, Found.FAILED}
    outbound.end(WHY)
    assert sender.transport.statistics()["sending"] == receiver.transport.statistics()["receiving"] == 0


async def test_a_sender_that_gives_up_says_so_once_nothing_is_being_written(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    outbound, inbound = await joined(sender, receiver)
    getting = asyncio.ensure_future(inbound.get(receiver.blobs(NAMES)))
    names = await asked(outbound, 8)
    sender.carrier.gate.clear()
    putting = asyncio.ensure_future(outbound.put(sender.fill(names[:4])))
    await asyncio.sleep(0)
    outbound.end(ErrorInfo("cancelled", "taken back"))
    assert not getting.done()
    sender.carrier.gate.set()
    await putting
    outcomes = await getting
    assert [o.found for o in outcomes[:4]] == [Found.FOUND] * 4
    assert failed(outcomes[4:], "cancelled")
    inbound.end(WHY)


async def test_a_failed_write_fails_both_sides(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    outbound, inbound = await joined(sender, receiver)
    getting = asyncio.ensure_future(inbound.get(receiver.blobs(NAMES)))
    names = await asked(outbound, 8)
    sender.carrier.broken = True
    assert failed(await outbound.put(sender.fill(names)), "peer_lost")
    assert failed(await getting, "peer_lost")
    outbound.end(WHY)
    inbound.end(WHY)


async def test_memory_that_was_not_asked_for_ends_the_transfer_and_no_other(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    outbound, inbound = await joined(sender, receiver)
    other_out, other_in = await joined(sender, receiver, transfer="other")
    outcomes = await inbound.get(receiver.blobs(["model/layout/gen/other/0"]))
    assert failed(outcomes, "malformed")
    with pytest.raises(PeerRefused):
        await outbound.posted(1)
    getting = asyncio.ensure_future(other_in.get(receiver.blobs(NAMES)))
    await other_out.put(sender.fill(await asked(other_out, 8)))
    assert {o.found for o in await getting} == {Found.FOUND}


async def test_a_done_before_every_object_was_written_is_refused(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    outbound, inbound = await joined(sender, receiver)
    waiting = asyncio.ensure_future(outbound.posted(1))
    inbound.end(None)
    with pytest.raises(PeerRefused, match="before every object was written"):
        await waiting
    outbound.end(WHY)
    assert sender.transport.statistics()["sending"] == 0


async def test_buffers_of_a_write_that_failed_are_held_back_for_a_while(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport says that it failed; what was on the wire of it may arrive all the same."""
    monkeypatch.setattr(inbound_module, "HOLD_S", 3600.0)
    sender, receiver = nodes
    outbound, inbound = await joined(sender, receiver)
    getting = asyncio.ensure_future(inbound.get(receiver.blobs(NAMES)))
    sender.carrier.broken = True
    await outbound.put(sender.fill((await asked(outbound, 8))[:4]))
    outbound.end(WHY)
    while inbound.peer is not None:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    assert not getting.done()
    inbound.end(WHY)
    assert receiver.transport.statistics()["receiving"] == 1
    getting.cancel()


@pytest.mark.parametrize("seed", range(20))
async def test_no_byte_arrives_after_a_buffer_was_given_back(nodes: tuple[Node, Node], seed: int) -> None:
    """Many transfers that end in many ways, in a random order: a get that returned owns its buffers again."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    sender, receiver = nodes

    async def send(outbound: Outbound, slot: int) -> None:
        try:
            while names := await outbound.posted(chance.randint(1, 3)):
                blobs = sender.blobs(names, first_slot=slot)
                for blob in blobs:
                    blob.data[:] = content(blob.name)
                if chance.random() < 0.1:
                    return
                await outbound.put(blobs)
            await outbound.taken()
        except TransferError:
            pass
        finally:
            outbound.end(WHY)

    async def receive(inbound: Inbound, names: list[str], slot: int) -> None:
        whole = True
        gets: list[tuple[list[Blob], asyncio.Future[list[Outcome]]]] = []
        try:
            await inbound.begun()
            for start in (0, 4):
                blobs = receiver.blobs(names[start : start + 4], first_slot=slot + start)
                gets.append((blobs, asyncio.ensure_future(inbound.get(blobs))))
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                inbound.end(WHY)
        except TransferError:
            whole = False
        for blobs, getting in gets:
            for blob, outcome in zip(blobs, await getting, strict=True):
                if outcome.found is Found.FOUND:
                    assert bytes(blob.data) == content(blob.name)
                else:
                    whole = False
                blob.data[:] = bytes(SLOT)  # ours again: whoever writes to it now is caught below
        inbound.end(None if whole else WHY)

    outbounds, sending, receiving = [], [], []
    for number in range(6):
        names = [f"model/layout/gen/{number}-{i}/0" for i in range(8)]
        outbounds.append(sender.transport.outbound(str(number), 0, names))
        sending.append(asyncio.ensure_future(send(outbounds[-1], number * 8)))
        inbound = receiver.transport.inbound(str(number), 0, names, sender.transport.address)
        receiving.append(asyncio.ensure_future(receive(inbound, names, number * 8)))
    for _ in range(chance.randint(0, 30)):
        await asyncio.sleep(0)
        if chance.random() < 0.2:
            sender.carrier.gate.clear()
        elif chance.random() < 0.5:
            sender.carrier.gate.set()
    if chance.random() < 0.3:
        sender.carrier.gate.set()
        await chance.choice((sender, receiver)).transport.hang_up()
    sender.carrier.gate.set()
    await asyncio.gather(*receiving)
    for outbound in outbounds:
        outbound.end(WHY)  # of those whose receiver never came
    await asyncio.gather(*sending)
    await asyncio.sleep(0.05)
    assert not receiver.memory.view.tobytes().strip(b"\0")
