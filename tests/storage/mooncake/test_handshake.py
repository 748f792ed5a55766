"""Asking a node for its segment: what its answer says, and how silence, refusal and nonsense end."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from transferd.cli.pool.master import free_port
from transferd.errors import StorageUnavailable
from transferd.storage.mooncake.handshake import Gone, ask


@asynccontextmanager
async def node(answer: Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]) -> Any:
    """A node that reads one question and does `answer` with it. Yields its endpoint."""

    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            (length,) = struct.unpack("<Q", await reader.readexactly(8))
            await answer(await reader.readexactly(length), writer)
            await reader.read()  # until the one who asked has hung up
            writer.close()
            await writer.wait_closed()
        finally:
            ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await ended.wait()


def saying(body: bytes) -> Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]:
    async def answer(question: bytes, writer: asyncio.StreamWriter) -> None:
        assert question == b"\x01{}\n"
        writer.write(struct.pack("<Q", len(body) + 1) + b"\x01" + body)

    return answer


@pytest.mark.parametrize(
    ("body", "port"),
    [
        (json.dumps({"tcp_data_port": 1234}).encode(), 1234),
        (json.dumps({"protocol": "rdma"}).encode(), None),
        (json.dumps({"tcp_data_port": "1234"}).encode(), None),
        (json.dumps({"tcp_data_port": 70000}).encode(), None),
        (b"[]", None),
        (b"\xff{", None),
    ],
)
async def test_an_answer_says_where_data_goes_if_it_says_anything(body: bytes, port: int | None) -> None:
    async with node(saying(body)) as endpoint:
        asked = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        assert await ask(endpoint, 5.0) == {asked} | ({("127.0.0.1", port)} if port else set())


async def test_a_question_that_is_lost_is_asked_again_over_another_connection() -> None:
    body = json.dumps({"tcp_data_port": 1234}).encode()
    lost = 2  # so many connections carry nothing
    taken: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)
        if len(taken) > lost:
            (length,) = struct.unpack("<Q", await reader.readexactly(8))
            await saying(body)(await reader.readexactly(length), writer)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await ask(f"127.0.0.1:{port}", 10.0) == {("127.0.0.1", port), ("127.0.0.1", 1234)}
        assert len(taken) == lost + 1
        for writer in taken:
            await writer.wait_closed()


async def test_a_node_that_takes_the_question_and_is_silent_has_not_answered() -> None:
    async def silent(_: bytes, __: asyncio.StreamWriter) -> None:
        return

    async with node(silent) as endpoint:
        with pytest.raises(StorageUnavailable, match=r"no answer within 0.05 s") as raised:
            await ask(endpoint, 0.05)
    assert not isinstance(raised.value, Gone)


async def test_a_node_that_hangs_up_has_not_answered() -> None:
    async def hang_up(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()

    async with node(hang_up) as endpoint:
        with pytest.raises(StorageUnavailable, match="0 bytes"):
            await ask(endpoint, 5.0)


async def test_without_a_listener_the_process_is_gone_and_a_bad_address_is_an_error() -> None:
    with pytest.raises(Gone):
        await ask(f"127.0.0.1:{free_port()}", 5.0)
    with pytest.raises(StorageUnavailable, match="no host:port"):
        await ask("node7", 5.0)
