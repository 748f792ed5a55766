"""Any local process may look: what looking costs is bounded, and an engine beside it is served first."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

from tests.wire.test_acceptor import Peer
from transferd import Client, TransferError
from transferd.cli.pool.master import free_port
from transferd.client.launch import running
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.observability.report_memory import EVERY_S
from transferd.runtime.clock import Clock
from transferd.wire import protocol as wire

KEYS = [f"{number:064x}" for number in range(65536)]
CACHE = {"ranks": 1, "device_blocks": 8, "host_blocks": 0}


async def page(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer[:200]
    return body


async def test_all_who_scrape_at_once_get_the_same_few_reports(tmp_path: Path) -> None:
    """Each report has its own time, so the number of different answers is that of the reports that were made.

    By this daemon's clock each report is costly. So there is one in EVERY_S, however slow the machine is.
    """
    port = free_port()
    server = {"endpoint": f"ipc://{tmp_path}/s"}
    tree = {
        "server": server,
        "cache": CACHE,
        "storage": {"backend": "none"},
        "metrics": {"listen": f"127.0.0.1:{port}"},
    }
    daemon = Daemon(from_tree(tree), clock=Clock(cpu=map(float, itertools.count()).__next__))
    await daemon.open()
    try:
        for path in ("/metrics", "/status"):
            before = time.monotonic()
            bodies = await asyncio.gather(*(page(port, path) for _ in range(400)))
            assert len(set(bodies)) <= 2 + (time.monotonic() - before) / EVERY_S, path
            assert min(map(len, bodies)) > 1000
        async with Client(server["endpoint"]) as client:
            before = (await client.stats())["uptime_s"]
            await asyncio.sleep(EVERY_S + 0.01)
            assert (await client.stats())["uptime_s"] > before + EVERY_S, "nothing older"
    finally:
        await daemon.stop(lambda: 5.0)


async def test_an_engine_is_answered_before_those_who_ask_for_much(tmp_path: Path) -> None:
    with running({"cache": CACHE, "metrics": {"listen": ""}, "storage": {"backend": "memory"}}, tmp_path) as daemon:
        crowd = [await Client(daemon.endpoint).__aenter__() for _ in range(6)]
        async with Client(daemon.endpoint) as engine:
            answered: list[int] = []

            async def ask(client: Client) -> None:
                for _ in range(2):
                    try:
                        found = await client.exists(KEYS, timeout=60)
                    except TransferError as error:
                        assert error.reason == "too_many_requests"  # noqa: PT017 - either answer will do
                    else:
                        assert found == [False] * len(KEYS)
                    answered.append(1)

            asking = [asyncio.ensure_future(ask(client)) for client in crowd]
            pings = 0
            while not all(one.done() for one in asking):
                await engine.ping()
                pings += 1
            await asyncio.gather(*asking)
            assert len(answered) == 12
            assert pings > 12, "it waited for one of them at a time, at most"
        for client in crowd:
            await client.__aexit__(None, None, None)


async def test_a_connection_that_closed_is_no_client(tmp_path: Path) -> None:
    """They would be silent clients for a minute here."""
    tree = {"cache": CACHE, "metrics": {"listen": ""}, "server": {"client_timeout": 60.0}}
    with running(tree, tmp_path) as daemon:
        async with Client(daemon.endpoint) as engine:
            for number in range(40):
                visitor = Peer(daemon.endpoint)
                visitor.send(wire.encode_request(number, wire.Hello()))
                await visitor.read(100)  # the handshake, and a part of the Welcome
                visitor.socket.close()
            while (await engine.stats())["server"]["clients"] > 1:  # noqa: ASYNC110 - the daemon is another process
                await asyncio.sleep(0.05)
            assert len(await engine.clients()) == 1
