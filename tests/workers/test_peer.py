"""Two ranks of two daemons, joined by real connections: blocks go from one device to the other, all or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.support.simulation.carrier import Fabric, MemoryCarrier
from tests.support.waits import until
from tests.workers.rig import KEYS, SOURCE, TARGET, Rig, blocks
from transferd.errors import TierError
from transferd.runtime.compat import timeout
from transferd.storage.peer import outbound
from transferd.storage.peer.carrier import PeerWrite
from transferd.tasks import ReceiveTask, SendTask, Stop


class Node:
    """A daemon with one rank, and its way to other daemons."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        self.carrier: MemoryCarrier = fabric.carrier(name)
        self.rig = Rig(carrier=self.carrier)
        assert self.rig.peer is not None
        self.transport = self.rig.peer.transport

    async def open(self) -> None:
        await self.transport.open()
        await self.rig.open()

    async def close(self) -> None:
        await self.transport.hang_up()
        await self.rig.close()
        await self.transport.close()


Pair = tuple[Node, Node]


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """(sender, receiver)"""
    monkeypatch.setattr(outbound, "HOLD_S", 0.05)
    fabric = Fabric()
    made = Node(fabric, "sender"), Node(fabric, "receiver")
    for node in made:
        await node.open()
    async with timeout(60):
        yield made
    for node in made:
        await node.close()


def send(keys: list[str] = KEYS, ids: list[int] = SOURCE) -> SendTask:
    return SendTask(task_id="s", keys=list(keys), gpu_block_ids=list(ids), transfer_id="t")


def receive(sender: Node, keys: list[str] = KEYS, ids: list[int] = TARGET) -> ReceiveTask:
    return ReceiveTask(
        task_id="r", keys=list(keys), gpu_block_ids=list(ids), transfer_id="t", peer=sender.transport.address
    )


def nothing_is_left(node: Node) -> None:
    """No slot, no call and no transfer."""
    assert node.rig.peer is not None
    assert node.rig.peer.staging.statistics()["used"] == 0
    assert len(node.rig.background) == 0
    assert (node.transport.statistics()["sending"], node.transport.statistics()["receiving"]) == (0, 0)


async def settled(pair: Pair) -> None:
    for node in pair:
        await node.rig.worker.settled()
    sender, _ = pair
    await until(lambda: sender.transport.statistics()["sending"] == 0, "the sender has ended")


@pytest.mark.parametrize("first", ["sender", "receiver"])
async def test_blocks_go_from_device_to_device_whoever_comes_first(pair: Pair, first: str) -> None:
    """More blocks than a chunk has slots, so the receiver posts memory several times."""
    sender, receiver = pair
    untouched = blocks(receiver.rig, [0, 1, 2, 3])
    if first == "sender":
        sending, receiving = sender.rig.start(send()), receiver.rig.start(receive(sender))
    else:
        receiving, sending = receiver.rig.start(receive(sender)), sender.rig.start(send())
    got, sent = await receiver.rig.ended_alone(receiving), await sender.rig.ended_alone(sending)
    assert (list(sent.moved), sent.error, list(got.moved), got.error) == (list(range(6)), None, list(range(6)), None)
    assert sent.bytes == got.bytes == 6 * sender.rig.context.layout.block_bytes
    assert blocks(receiver.rig, TARGET) == blocks(sender.rig, SOURCE)
    assert blocks(receiver.rig, [0, 1, 2, 3]) == untouched
    assert sender.rig.sim_storage.objects == receiver.rig.sim_storage.objects == {}
    await settled(pair)
    nothing_is_left(sender)
    nothing_is_left(receiver)


async def test_other_blocks_end_both_sides_with_the_difference_and_touch_no_device(pair: Pair) -> None:
    sender, receiver = pair
    before = receiver.rig.memory.tobytes()
    sending, receiving = sender.rig.start(send()), receiver.rig.start(receive(sender, ["other", *KEYS[1:]]))
    for outcome in (await sender.rig.ended_alone(sending), await receiver.rig.ended_alone(receiving)):
        assert outcome.error is not None
        assert (list(outcome.moved), outcome.error.code) == ([], "blocks_mismatch")
    assert receiver.rig.memory.tobytes() == before
    await settled(pair)
    nothing_is_left(sender)


async def test_a_block_that_arrives_damaged_makes_the_whole_sequence_useless(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides: the receiver says which, and the sender does not count the others."""
    sender, receiver = pair
    real = MemoryCarrier.write

    async def damaging(self: MemoryCarrier, peer: str, writes: Sequence[PeerWrite]) -> None:
        await real(self, peer, writes)
        assert receiver.rig.peer is not None
        staging = receiver.rig.peer.staging.memory
        if self.writes == 1:
            staging.view[writes[-1].target - staging.address + 5] ^= 1

    monkeypatch.setattr(MemoryCarrier, "write", damaging)
    receiving, sending = receiver.rig.start(receive(sender)), sender.rig.start(send())
    got, sent = await receiver.rig.ended_alone(receiving), await sender.rig.ended_alone(sending)
    for outcome in (got, sent):
        assert outcome.error is not None
        assert (list(outcome.moved), outcome.error.code) == ([], "damaged")
    assert got.error is not None
    assert got.error.message == "1 objects arrived damaged"
    assert receiver.rig.worker.corrupt == 1
    assert sender.rig.worker.corrupt == 0
    await settled(pair)
    nothing_is_left(receiver)


@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_a_stopped_peer_reports_its_stop_to_the_other_peer(pair: Pair, who: str) -> None:
    sender, receiver = pair
    sender.carrier.gate.clear()  # while bytes are about to be written
    receiving, sending = receiver.rig.start(receive(sender)), sender.rig.start(send())
    await until(lambda: _used(sender), "the sender has gathered")
    (sending if who == "sender" else receiving).stop.set(Stop.CANCELLED)
    await asyncio.sleep(0)
    sender.carrier.gate.set()
    sent, got = await sender.rig.ended_alone(sending), await receiver.rig.ended_alone(receiving)
    assert (list(sent.moved), list(got.moved)) == ([], [])
    stopped, other = (sent, got) if who == "sender" else (got, sent)
    assert stopped.stop is Stop.CANCELLED
    assert other.error is not None
    assert (other.stop, other.error.code) == (None, "cancelled")
    await settled(pair)
    nothing_is_left(sender)
    nothing_is_left(receiver)


def _used(node: Node) -> bool:
    assert node.rig.peer is not None
    return bool(node.rig.peer.staging.statistics()["used"])


async def test_a_sender_that_is_stopped_while_it_waits_for_the_last_word_counts_nothing(pair: Pair) -> None:
    sender, receiver = pair
    receiver.rig.sim_device.gate.hold()  # every byte has landed, and no block is on the device
    receiving = receiver.rig.start(receive(sender, KEYS[:2], TARGET[:2]))
    sending = sender.rig.start(send(KEYS[:2], [0, 1]))
    await until(lambda: sender.carrier.writes == 1, "the blocks were written")
    sending.stop.set(Stop.EXPIRED)
    sent = await sender.rig.ended_alone(sending)
    assert (list(sent.moved), sent.stop) == ([], Stop.EXPIRED)
    receiver.rig.sim_device.gate.release()
    await receiver.rig.ended_alone(receiving)
    await settled(pair)
    nothing_is_left(sender)


@pytest.mark.parametrize("operation", ["copy_out", "copy_in"])
async def test_a_copy_that_fails_ends_both_sides_with_its_cause(pair: Pair, operation: str) -> None:
    sender, receiver = pair
    failing, other = (sender, receiver) if operation == "copy_out" else (receiver, sender)
    failing.rig.sim_device.dice.script(operation, "fail")
    jobs = {sender: sender.rig.start(send()), receiver: receiver.rig.start(receive(sender))}
    outcome, theirs = await failing.rig.ended_alone(jobs[failing]), await other.rig.ended_alone(jobs[other])
    assert outcome.error is not None
    assert theirs.error is not None
    assert (list(outcome.moved), outcome.error.code) == ([], TierError.code)
    assert (list(theirs.moved), theirs.error.code) == ([], "peer_refused"), "it is not this daemon's device"
    await settled(pair)
    nothing_is_left(sender)
    nothing_is_left(receiver)


async def test_a_daemon_that_goes_ends_the_other_and_gives_its_slots_back(pair: Pair) -> None:
    sender, receiver = pair
    sender.carrier.gate.clear()
    receiving, sending = receiver.rig.start(receive(sender)), sender.rig.start(send())
    await until(lambda: _used(sender), "the sender has gathered")
    await sender.transport.hang_up()
    got = await receiver.rig.ended_alone(receiving)
    assert got.error is not None
    assert (list(got.moved), got.error.code) == ([], "peer_lost")
    sender.carrier.gate.set()
    await sender.rig.ended_alone(sending)
    await settled(pair)
    nothing_is_left(receiver)
