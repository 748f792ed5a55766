"""Joining: dial until somebody listens, one line meanwhile, one error at the end, nothing left behind."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.simulation.pool import SIM_MASTER, SimPool
from transferd.cli.pool.master import free_port
from transferd.config import MooncakeStorageSection, Size
from transferd.errors import ConfigError, StorageUnavailable
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.runtime.compat import timeout
from transferd.storage.mooncake import MooncakeStorage
from transferd.storage.mooncake import join as join_module
from transferd.storage.mooncake.join import Dialled, dial_address, join, reachable
from transferd.storage.mooncake.native_calls import NativeCalls


def config(**section: Any) -> MooncakeStorageSection:
    return MooncakeStorageSection(**section)


async def test_an_absent_master_is_one_line_and_one_clear_error_within_the_connect_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(join_module, "DIAL_INTERVAL_S", 0.001)
    times = iter([100.0, 100.0, 102.9, 103.0])  # the start, and after each of three dials
    clock = replace(SYSTEM_CLOCK, monotonic=lambda: next(times))
    storage = MooncakeStorage(config(master_server_addr="127.0.0.1:1", connect_timeout=3.0), clock=clock)
    with (
        capture_logs() as logs,
        pytest.raises(StorageUnavailable, match=r"join the Mooncake pool at 127.0.0.1:1 within 3 s"),
    ):
        await storage.open()
    await storage.close()
    assert not list(times)
    assert [line["event"] for line in logs] == ["waiting for the Mooncake pool"]
    assert logs[0]["master"] == "127.0.0.1:1"
    assert "refused" in logs[0]["problem"].lower()


async def test_a_master_that_comes_late_is_joined() -> None:
    port, pool = free_port(), SimPool()
    storage = MooncakeStorage(config(master_server_addr=f"127.0.0.1:{port}", connect_timeout=30.0), set_up=pool.set_up)
    with capture_logs() as logs:
        opening = asyncio.ensure_future(storage.open())
        async with timeout(30):
            while not logs:  # noqa: ASYNC110 - a log line tells nobody
                await asyncio.sleep(0.01)
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port):
            await opening
    assert await storage.exists(["x"]) == [False]
    await storage.close()


async def test_a_refused_set_up_is_tried_again_and_a_wrong_configuration_is_not() -> None:
    pool, answers = SimPool(), [StorageUnavailable("let nobody in"), None]

    def set_up(*args: Any) -> Any:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return pool.set_up(*args)

    storage = MooncakeStorage(config(master_server_addr=SIM_MASTER), set_up=set_up)
    await storage.open()
    await storage.close()
    assert not answers
    answers = [ConfigError("storage.backend", "cannot be loaded")]  # type: ignore[list-item]
    with pytest.raises(ConfigError):
        await MooncakeStorage(config(master_server_addr=SIM_MASTER), set_up=set_up).open()


async def test_a_cancelled_join_leaves_no_client_behind() -> None:
    pool, calls = SimPool(), NativeCalls(1.0)
    entered, go_on, made = threading.Event(), threading.Event(), []

    def set_up(*args: Any) -> Any:
        entered.set()
        assert go_on.wait(30)
        made.append(pool.set_up(*args))
        return made[0]

    section = config(master_server_addr=SIM_MASTER)
    joining = asyncio.ensure_future(join(section, calls, SYSTEM_CLOCK, set_up))
    await asyncio.to_thread(entered.wait, 30)
    joining.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert [client.closed for client in made] == [True]
    calls.close(0.0)


async def test_without_an_address_the_configuration_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"storage\.mooncake\.master_server_addr"):
        await MooncakeStorage(config()).open()


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:0", "host:65536", "host:-1", "host:²"])
def test_an_address_that_cannot_be_dialled_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        dial_address(address)


def test_a_port_of_thousands_of_digits_is_refused_as_any_other() -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        dial_address("host:" + "1" * 5000)  # more digits than Python converts


async def test_a_host_name_that_does_not_exist_is_waited_for_like_a_master_that_does_not() -> None:
    for name in ("no..such", "no-such-host.invalid"):
        storage = MooncakeStorage(config(master_server_addr=f"{name}:1", connect_timeout=0.01))
        with pytest.raises(StorageUnavailable, match="could not join"):
            await storage.open()


SEGMENT = Size(64 * 1024**2)


@pytest.mark.parametrize(("lends", "named", "there"), [
    (SEGMENT, "", "10.0.0.1"), (SEGMENT, "10.0.0.2", "10.0.0.1"), (SEGMENT, "127.0.0.1", "127.0.0.1"),
    (SEGMENT, "127.0.0.1", "10.0.0.2"), (Size(0), "127.0.0.1", "10.0.0.1"), (SEGMENT, "node-2", "10.0.0.1"),
])  # fmt: skip
def test_a_node_is_named_by_what_others_can_reach(lends: Size, named: str, there: str) -> None:
    """Loopback is good for a pool on one machine, whatever its master's name, and for who lends nothing."""
    section = config(master_server_addr=f"{there}:1", local_hostname=named, global_segment_size=lends)
    assert reachable(section, Dialled("10.0.0.2", there)).local_hostname == (named or "10.0.0.2")


@pytest.mark.parametrize("named", ["127.0.0.1", "localhost", "::1", "127.3.3.3"])
def test_memory_that_is_lent_at_loopback_to_a_master_elsewhere_is_refused_in_one_line(named: str) -> None:
    section = config(master_server_addr="10.0.0.1:1", local_hostname=named)
    with pytest.raises(ConfigError, match=r"hostname: is loopback, and the master at 10\.0\.0\.1:1 is on another"):
        reachable(section, Dialled("10.0.0.2", "10.0.0.1"))
    assert reachable(section, None) is section, "who is not dialled is not known"


async def test_a_node_without_a_name_joins_by_the_address_at_which_it_reached_the_master() -> None:
    named: list[str] = []

    def set_up(section: MooncakeStorageSection) -> Any:
        named.append(section.local_hostname)
        return SimPool().set_up(section)

    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as master:
        port = master.sockets[0].getsockname()[1]
        storage = MooncakeStorage(config(master_server_addr=f"127.0.0.1:{port}"), set_up=set_up)
        await storage.open()
        await storage.close()
    assert named == ["127.0.0.1"]


def test_without_a_master_to_dial_a_node_has_its_hosts_address() -> None:
    found = reachable(config(master_server_addr="etcd://m:1"), None).local_hostname
    assert found == socket.gethostbyname(socket.gethostname())


def test_addresses_are_dialled_as_written_and_those_of_other_schemes_are_not() -> None:
    assert dial_address("10.0.0.1:50051") == ("10.0.0.1", 50051)
    assert dial_address("[::1]:50051") == ("::1", 50051)
    assert dial_address("etcd://10.0.0.1:2379") is None
