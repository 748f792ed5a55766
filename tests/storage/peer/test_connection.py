"""What a peer may do to a connection: say noise, read nothing, go in the middle of a message, not be there."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import weakref

import pytest

from tests.storage.peer.nodes import NAMES, RANKS, WHY, Node, joined
from tests.support.waits import until
from transferd.errors import PeerLost
from transferd.storage.peer import connection as connection_module
from transferd.storage.peer.messages import Refusal, Want, encode
from transferd.tasks import ErrorInfo


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
async def test_a_peers_messages_are_freed_with_it_without_the_collector(nodes: tuple[Node, Node], way: str) -> None:
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


async def test_an_address_without_a_daemon_is_a_lost_peer(nodes: tuple[Node, Node]) -> None:
    _, receiver = nodes
    inbound = receiver.transport.inbound("t", 0, NAMES, "127.0.0.1:1")
    with pytest.raises(PeerLost, match=r"127\.0\.0\.1:1"):
        await inbound.begun()
    inbound.end(WHY)
    assert receiver.transport.statistics()["receiving"] == 0
