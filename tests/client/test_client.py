"""One Client object over its lives: connected again after a failure or a close, dropped without one, forked."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transferd
from tests.support.wire_daemon import serving
from transferd.client.client import NO_ANSWER_S, Client
from transferd.client.pending import as_seconds
from transferd.errors import Closed, ConfigError, ConnectTimeout, DaemonLost, RequestError, TierError, TransferError
from transferd.tasks import Status, SwapOutTask


def task(task_id: str, **more: object) -> SwapOutTask:
    return SwapOutTask(task_id=task_id, gpu_block_ids=[1], cpu_block_ids=[2], **more)  # type: ignore[arg-type]


def test_errors_of_a_client_can_be_imported_from_the_package() -> None:
    for kind in (ConfigError, Closed, ConnectTimeout, DaemonLost, RequestError, TierError, TransferError):
        assert getattr(transferd, kind.__name__) is kind
        assert kind.__name__ in transferd.__all__


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
        transport = client._conversation._transport
        channel = transport._channel  # type: ignore[attr-defined]
        await client.connect()
        assert transport._channel is channel  # type: ignore[attr-defined]
        assert (await client.submit(task("t"))).status is Status.OK
        await client.close()
    with pytest.raises(Closed):
        await client.submit(task("u"))


async def test_a_second_connect_that_fails_leaves_the_connection(address: str) -> None:
    with serving(address, ready=False):
        async with Client(address, await_ready=False) as client:
            client._await_ready, client._connect_timeout = True, 0.05
            with pytest.raises(ConnectTimeout):
                await client.connect()
            assert (await client.ping())[0] == "boot-1"


async def test_an_endpoint_that_is_none_names_what_would_be_one_and_the_value_once() -> None:
    for endpoint in ("http://foo", "nowhere", "tcp://foo"):
        with pytest.raises(ConfigError) as caught:
            await Client(endpoint).connect()
        assert str(caught.value) == f"endpoint: expected ipc:///path or tcp://host:port ({endpoint!r})"


async def test_a_timeout_says_what_keeps_the_client_out(address: str) -> None:
    with pytest.raises(ConnectTimeout, match=r"no daemon answered within 0\.05 s: there is no such socket; is"):
        await Client(address, connect_timeout=0.05).connect()
    with serving(address, ready=False):
        async with Client(address, connect_timeout=60.0, await_ready=False) as client:  # it has been answered
            client._await_ready, client._connect_timeout = True, 0.05
            with pytest.raises(ConnectTimeout, match=r"not become ready .*no engine has offered"):
                await client.connect()


# --- timeouts -------------------------------------------------------------------------------------

NUMBERS = [120, 120.0, np.float32(120), np.float64(120), np.int16(120), np.float16(120), Fraction(240, 2), Decimal(120)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    where = f"ipc://{tmp_path_factory.mktemp('client')}/d.sock"
    with serving(where):
        yield where


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
async def test_any_real_number_is_a_timeout_here_and_at_the_daemon(served: str, number: Any) -> None:
    async with Client(served, connect_timeout=number) as client:
        name = f"held-{type(number).__name__}-{id(client)}"
        before = client._conversation.now
        future = await client.push(task(name, timeout=number))
        [(_, pending)] = client._conversation._pending.items()
        assert 0 <= pending.deadline - before - 120 - NO_ANSWER_S < 60
        assert type(pending.body.timeout) in (int, float)  # type: ignore[union-attr]
        assert await client.cancel(name)
        assert (await future).status is Status.CANCELLED
        await client.wait_ready(number)


@pytest.mark.parametrize("value", ["30", None, True, 1j])
async def test_a_task_with_a_timeout_that_is_no_number_is_rejected(served: str, value: Any) -> None:
    async with Client(served) as client:
        assert (await client.submit(task("t", timeout=value))).status is Status.REJECTED


@pytest.mark.parametrize("value", [math.nan, -1.0, np.float32("nan"), Decimal("NaN"), Fraction(-1)], ids=repr)
async def test_nan_and_negative_reach_the_daemon_as_they_are(served: str, value: Any) -> None:
    async with Client(served) as client:
        before = client._conversation.now
        asking = asyncio.ensure_future(client.submit(task(f"held-{value!r}-{id(client)}", timeout=value)))
        await asyncio.sleep(0)
        [(_, pending)] = client._conversation._pending.items()
        assert pending.deadline - before - NO_ANSWER_S < 60
        assert not pending.body.timeout > 0, "so the daemon refuses it"  # type: ignore[union-attr]
    await asking


@pytest.mark.parametrize("value", [math.nan, Decimal("sNaN"), "30", True, 1j, 10**400], ids=str)
def test_a_bad_connect_timeout_raises_at_once(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^connect_timeout: expected a number of seconds"):
        Client(connect_timeout=value)


def test_seconds_may_be_anything_real() -> None:
    assert as_seconds(np.float32(0.5)) == 0.5
    assert as_seconds(Fraction(1, 4)) == 0.25
    assert as_seconds(math.inf) == math.inf
    assert [as_seconds(value) for value in (True, "1", None, 1j, 10**400, Decimal("sNaN"), [1.0])] == [None] * 7
