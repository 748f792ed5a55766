"""Two transports over real loopback connections; bytes go through memory, and tests decide when."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from tests.support.simulation.carrier import Fabric, MemoryCarrier
from tests.support.waits import until
from transferd.errors import PeerLost, PeerRefused, TransferError
from transferd.runtime.compat import timeout
from transferd.storage.base import Blob, Found, Outcome
from transferd.storage.peer import connection as connection_module
from transferd.storage.peer import outbound as inbound_module
from transferd.storage.peer.messages import Refusal, Want, encode
from transferd.storage.peer.outbound import Inbound, Outbound
from transferd.storage.peer.transport import PeerTransport
from transferd.tasks import ErrorInfo
from transferd.tiers.pinned import HostRegion

SLOT = 4096
NAMES = [f"model/layout/gen/{i:040x}/0" for i in range(8)]
RANKS = "this daemon has 2 ranks"
WHY = ErrorInfo("expired", "the deadline was reached")


@dataclass
class Node:
    """One daemon's transport, its carrier, and the staging that it uses."""

    transport: PeerTransport
    carrier: MemoryCarrier
    memory: HostRegion

    def blobs(self, names: Sequence[str], first_slot: int = 0) -> list[Blob]:
        starts = [(first_slot + i) * SLOT for i in range(len(names))]
        return [Blob(n, self.memory.view[s : s + SLOT]) for n, s in zip(names, starts, strict=True)]

    def fill(self, names: Sequence[str]) -> list[Blob]:
        blobs = self.blobs(names)
        for blob in blobs:
            blob.data[:] = content(blob.name)
        return blobs


def content(name: str) -> bytes:
    return (name.encode() * (SLOT // len(name) + 1))[:SLOT]


@pytest.fixture(autouse=True)
def short_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound_module, "HOLD_S", 0.05)


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, Node]]:
    """(sender, receiver)"""
    fabric = Fabric()
    made = []
    for name in ("sender", "receiver"):
        carrier = fabric.carrier(name)
        node = Node(PeerTransport(carrier, "127.0.0.1:0", ranks=2), carrier, HostRegion(64 * SLOT))
        await node.transport.open()
        carrier.register(node.memory)
        made.append(node)
    async with timeout(30):
        yield made[0], made[1]
    for node in made:
        await node.transport.close()


async def joined(
    sender: Node, receiver: Node, names: list[str] = NAMES, transfer: str = "t", rank: int = 0
) -> tuple[Outbound, Inbound]:
    """A transfer that has begun."""
    outbound = sender.transport.outbound(transfer, rank, names)
    inbound = receiver.transport.inbound(transfer, rank, names, sender.transport.address)
    await inbound.begun()
    return outbound, inbound


async def asked(outbound: Outbound, count: int) -> list[str]:
    names: list[str] = []
    while len(names) < count:
        names += await outbound.posted(count)
    return names


def failed(outcomes: Sequence[Outcome], code: str) -> bool:
    return all(o.found is Found.FAILED and o.error is not None and o.error.reason == code for o in outcomes)


async def test_objects_land_where_they_were_posted_and_both_sides_hear_of_it(nodes: tuple[Node, Node]) -> None:
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


async def test_a_write_that_fails_is_told_to_both_sides(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    outbound, inbound = await joined(sender, receiver)
    getting = asyncio.ensure_future(inbound.get(receiver.blobs(NAMES)))
    names = await asked(outbound, 8)
    sender.carrier.broken = True
    assert failed(await outbound.put(sender.fill(names)), "peer_lost")
    assert failed(await getting, "peer_lost")
    outbound.end(WHY)
    inbound.end(WHY)


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


async def test_done_before_everything_was_written_is_not_believed(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    outbound, inbound = await joined(sender, receiver)
    waiting = asyncio.ensure_future(outbound.posted(1))
    inbound.end(None)
    with pytest.raises(PeerRefused, match="before every object was written"):
        await waiting
    outbound.end(WHY)
    assert sender.transport.statistics()["sending"] == 0


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


async def test_a_sender_that_comes_up_later_is_found_though_an_earlier_connect_failed(nodes: tuple[Node, Node]) -> None:
    _, receiver = nodes
    with socket.socket() as reserved:
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


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "a\0b"])
async def test_a_peer_that_is_no_host_is_a_lost_peer(nodes: tuple[Node, Node], host: str) -> None:
    _, receiver = nodes
    inbound = receiver.transport.inbound("t", 0, NAMES, f"{host}:80")
    with pytest.raises(PeerLost):
        await inbound.begun()
    inbound.end(WHY)
    assert receiver.transport.statistics()["receiving"] == 0


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x05\0\0\0hello", b"\xff\xff\xff\xff", b"\x01\0\0\0"])
async def test_noise_ends_its_own_connection_and_nothing_else(nodes: tuple[Node, Node], noise: bytes) -> None:
    sender, receiver = nodes
    _host, _, port = sender.transport.address.rpartition(":")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    writer.write(noise)
    if noise == b"\x01\0\0\0":
        writer.write_eof()
    assert await _rest(reader) == b""
    writer.close()
    await joined(sender, receiver)


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_of_peers_that_read_nothing_the_one_with_most_unread_is_ended(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = nodes
    monkeypatch.setattr(connection_module, "MAX_UNSENT_OF_ALL", 1024**2)
    port = int(sender.transport.address.rpartition(":")[2])
    (little, asks_little), (_, asks_much) = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    refused = encode(Want("t" * 1000, 99, 1, [], "engine"))
    asks_little.write(refused * 10)
    with pytest.raises(ConnectionError):
        await _ask(asks_much, refused * 100, 400)
    await little.readexactly(10 * len(encode(Refusal("t" * 1000, 99, 1, ErrorInfo("layout_mismatch", RANKS)))))
    for writer in (asks_little, asks_much):
        writer.close()
    await joined(sender, receiver)


async def _ask(writer: asyncio.StreamWriter, question: bytes, times: int) -> None:
    for _ in range(times):
        writer.write(question)
        await writer.drain()


@pytest.mark.parametrize("way", ["closed", "reset", "in the middle of a message"])
async def test_what_a_peer_has_sent_is_gone_with_it_and_waits_for_no_collector(
    nodes: tuple[Node, Node], way: str
) -> None:
    """A name may have megabytes, and the daemon's collector seldom looks at old objects."""
    sender, _ = nodes
    port = int(sender.transport.address.rpartition(":")[2])
    gc.collect()
    gc.disable()
    try:
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.setblocking(False)
            question = encode(Want("nobody sends it", 0, 1, ["x" * 100_000], "engine"))
            if way == "in the middle of a message":
                question = question[:-1]
            await asyncio.get_running_loop().sock_sendall(peer, question)
            heard = "_receivers" if way == "in the middle of a message" else "_parked"
            await until(lambda: getattr(sender.transport, heard), "the daemon has heard of it")
            [gone] = [weakref.ref(connection) for connection in sender.transport._receivers]
            if way == "reset":
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await until(lambda: gone() is None, "nothing keeps the connection")
    finally:
        gc.enable()


async def test_nobody_at_the_peer_address_is_a_lost_peer(nodes: tuple[Node, Node]) -> None:
    _, receiver = nodes
    inbound = receiver.transport.inbound("t", 0, NAMES, "127.0.0.1:1")
    with pytest.raises(PeerLost, match=r"127\.0\.0\.1:1"):
        await inbound.begun()
    inbound.end(WHY)
    assert receiver.transport.statistics()["receiving"] == 0


async def test_a_transfer_is_sent_once_at_a_time_and_to_one_receiver(nodes: tuple[Node, Node]) -> None:
    sender, receiver = nodes
    await joined(sender, receiver)
    with pytest.raises(TransferError, match="already"):
        sender.transport.outbound("t", 0, NAMES)
    second = receiver.transport.inbound("t", 0, NAMES, sender.transport.address)
    with pytest.raises(PeerRefused, match="another receiver"):
        await second.begun()


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
