"""Asks a node of the pool for its segment's description, as the library does before its first transfer to it.

The answer proves that the node's process runs and that its packets come through, and contains the node's data port.
The protocol is the library's own (transfer_metadata_plugin.cpp, `doSendMetadata`): a length of 8 bytes, a byte
for the kind of message, and JSON.

A network that loses packets may keep one connection waiting for seconds. So the question is asked again over another
one, every AGAIN_S, and the first answer counts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct

from transferd.errors import StorageUnavailable
from transferd.runtime.address import host_and_port
from transferd.runtime.compat import timeout
from transferd.storage.mooncake import connections
from transferd.storage.mooncake.connections import Address

_LENGTH = struct.Struct("<Q")
_METADATA = b"\x01"
_LONGEST = 1024**2  # of an answer; the library's own limit
AGAIN_S = 0.3


class Gone(StorageUnavailable):
    """No process listens there any more: the node's process has ended, and its objects are lost."""


async def ask(endpoint: str, within: float) -> frozenset[Address]:
    """Ask the node at `endpoint` (host:port) where it listens: there, and for transfers, if it says at which port.

    Raises Gone, or StorageUnavailable if it does not answer in time.
    """
    address = host_and_port(endpoint)
    if address is None:
        raise StorageUnavailable(f"{endpoint} is no host:port")
    try:
        async with timeout(within):
            return await _first(address)
    except TimeoutError:
        raise StorageUnavailable(f"no answer within {within:g} s") from None
    except ConnectionRefusedError:
        raise Gone("nobody listens there any more") from None
    except (OSError, EOFError, UnicodeError) as error:
        raise StorageUnavailable(f"{error}") from None


async def _first(address: Address) -> frozenset[Address]:
    asking: list[asyncio.Task[frozenset[Address]]] = []
    try:
        while True:
            asking.append(asyncio.ensure_future(_exchange(address)))
            done, _ = await asyncio.wait(asking, timeout=AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return await done.pop()
    finally:
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _exchange(address: Address) -> frozenset[Address]:
    loop = asyncio.get_running_loop()
    family, kind, number, _, place = (await loop.getaddrinfo(*address, type=socket.SOCK_STREAM))[0]
    with socket.socket(family, kind, number) as connection, connections.spared(connection):
        connection.setblocking(False)
        await loop.sock_connect(connection, place)
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            body = _METADATA + b"{}\n"
            writer.write(_LENGTH.pack(len(body)) + body)
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            text = await reader.readexactly(min(length, _LONGEST))
        finally:
            writer.close()
    host = str(place[0])
    return frozenset((host, port) for port in (address[1], *_data_ports(text[1:])))


def _data_ports(text: bytes) -> list[int]:
    """The port for transfers; none if the answer has none (another transport than TCP, or another version)."""
    try:
        port = json.loads(text)["tcp_data_port"]
    except (ValueError, KeyError, TypeError):
        return []
    return [port] if isinstance(port, int) and 0 < port < 65536 else []
