"""One Client object over its lives: connected again after a failure or a close, dropped without one, forked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.wire_daemon import serving
from transferd.client.client import Client
from transferd.errors import Closed, ConnectTimeout
from transferd.tasks import Status, SwapOutTask


def task(task_id: str, **more: object) -> SwapOutTask:
    return SwapOutTask(task_id=task_id, gpu_block_ids=[1], cpu_block_ids=[2], **more)  # type: ignore[arg-type]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/d.sock"


async def test_a_client_that_could_not_connect_connects_once_the_daemon_is_there(address: str) -> None:
    client = Client(address, connect_timeout=0.05)
    for _ in range(2):
        with pytest.raises(ConnectTimeout, match=r"within 0\.05 s"):
            await client.connect()
    client._connect_timeout = 10.0
    with serving(address):
        async with client:
            assert (await client.submit(task("t"))).status is Status.OK


async def test_a_closed_client_knows_nothing_of_the_daemon_it_had(address: str) -> None:
    client = Client(address)
    with serving(address):
        async with client:
            assert client.connected
        assert not client.connected
    client._connect_timeout = 0.2
    with pytest.raises(ConnectTimeout, match=r"within 0\.2 s"):
        await client.connect()
    assert not client.connected
    client._connect_timeout = 10.0
    with serving(address, "boot-2"):
        async with client:
            assert client.boot_id == "boot-2"
            result = await client.submit(task("t"))
            assert (result.status, result.boot_id) == (Status.OK, "boot-2")


async def test_connecting_twice_is_one_connection(address: str) -> None:
    client = Client(address)
    with serving(address):
        await client.connect()
        transport = client._link._transport
        channel = transport._channel  # type: ignore[attr-defined]
        await client.connect()
        assert transport._channel is channel  # type: ignore[attr-defined]
        assert (await client.submit(task("t"))).status is Status.OK
        await client.close()
    with pytest.raises(Closed):
        await client.submit(task("u"))
