"""Mooncake: the pool's master is a real process, killed, stopped and restarted for real."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.harness import Open
from transferd.config import Config, MooncakeStorageSection, from_tree
from transferd.errors import ConfigError, StorageUnavailable
from transferd.storage.base import Found, Storage
from transferd.storage.mooncake import MooncakeStorage
from transferd.storage.mooncake.environment import membership
from transferd.testing.mooncake import Master, master_executable

needs_mooncake = pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")
SEGMENT = 64 * 1024**2


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    running = Master(tmp_path / "master.log")
    running.start()
    yield running
    running.stop()


def config(master: Master, **more: object) -> Config:
    section = {"master_server_addr": master.address, "global_segment_size": SEGMENT, "local_buffer_size": "16MiB"}
    return from_tree({"storage": {"mooncake": section | {"timeout": 1.0, "probe_interval": 0.2} | more}})


@needs_mooncake
async def test_objects_go_in_and_come_out_whole(master: Master, open_storage: Open) -> None:
    harness = await open_storage(MooncakeStorage(config(master)))
    objects = {f"model/fp//{i}/0": bytes([i]) * (100_000 + i) for i in range(20)}
    assert {o.found for o in await harness.put(*objects.items())} == {Found.STORED}
    assert await harness.storage.exists([*objects, "model/fp//absent/0"]) == [True] * 20 + [False]
    loaded = await harness.get(*((name, len(data)) for name, data in objects.items()))
    assert [(outcome.found, data) for outcome, data in loaded] == [(Found.FOUND, data) for data in objects.values()]


@needs_mooncake
async def test_an_absent_object_and_one_of_another_length_are_missing(master: Master, open_storage: Open) -> None:
    harness = await open_storage(MooncakeStorage(config(master)))
    await harness.put(("short", b"x" * 1000))
    outcomes = [outcome.found for outcome, _ in await harness.get(("absent", 1000), ("short", 2000))]
    assert outcomes == [Found.MISSING, Found.MISSING]
    assert harness.storage.statistics()["wrong_length"] == 1
    assert await harness.storage.exists(["short"]) == [False], "nobody could load it under this name"


@needs_mooncake
async def test_an_object_larger_than_any_segment_is_a_clear_error(master: Master, open_storage: Open) -> None:
    harness = await open_storage(MooncakeStorage(config(master, global_segment_size="16MiB")))
    (outcome,) = await harness.put(("big", bytes(24 * 1024**2)))
    assert outcome.error is not None
    assert outcome.error.reason == "storage_full"


@needs_mooncake
async def test_a_quarantined_object_is_gone(master: Master, open_storage: Open) -> None:
    harness = await open_storage(MooncakeStorage(config(master)))
    await harness.put(("bad", b"x" * 1000))
    await harness.storage.quarantine("bad")
    assert await harness.storage.exists(["bad"]) == [False]


@needs_mooncake
async def test_a_killed_master_is_noticed_fails_fast_and_a_restarted_one_is_used_again(
    master: Master, open_storage: Open
) -> None:
    harness = await open_storage(MooncakeStorage(config(master)))
    await harness.put(("before", b"x" * 1000))
    master.stop()
    with pytest.raises(StorageUnavailable):
        await harness.get(("before", 1000))
    for _ in range(50):  # without a breaker each of these would block for seconds
        with pytest.raises(StorageUnavailable, match="asked again in the background"):
            await harness.storage.exists(["before"])
    assert harness.storage.statistics()["breaker"] in ("open", "half_open")
    master.start()
    await until_closed(harness.storage)
    assert await harness.storage.exists(["before"]) == [False], "a restarted master has forgotten everything"
    async with asyncio.timeout(30):
        while (await harness.put(("after", b"y" * 1000)))[0].found is not Found.STORED:  # noqa: ASYNC110 - as below
            await asyncio.sleep(0.1)  # the segment is mounted again about a second later


@needs_mooncake
async def test_a_stopped_master_opens_the_breaker_while_the_call_still_hangs(
    master: Master, open_storage: Open
) -> None:
    harness = await open_storage(MooncakeStorage(config(master)))
    master.signal(signal.SIGSTOP)
    hanging = asyncio.ensure_future(harness.storage.exists(["x"]))
    async with asyncio.timeout(10):
        while harness.storage.statistics()["breaker"] == "closed":  # noqa: ASYNC110 - as below
            await asyncio.sleep(0.01)
    with pytest.raises(StorageUnavailable):
        await harness.storage.exists(["y"])
    master.signal(signal.SIGCONT)
    async with asyncio.timeout(60):
        await asyncio.wait([hanging])
    hanging.exception()
    await until_closed(harness.storage)


async def until_closed(storage: Storage) -> None:
    async with asyncio.timeout(60):
        while storage.statistics()["breaker"] != "closed":  # noqa: ASYNC110 - a breaker tells nobody
            await asyncio.sleep(0.05)


async def test_an_absent_master_is_one_clear_error_within_the_connect_timeout() -> None:
    section = {"master_server_addr": "127.0.0.1:1", "connect_timeout": 0.3}
    storage = MooncakeStorage(from_tree({"storage": {"mooncake": section}}))
    with pytest.raises(StorageUnavailable, match=r"no Mooncake master at 127\.0\.0\.1:1 within 0\.3 s"):
        await storage.open()
    await storage.close()


async def test_without_an_address_the_configuration_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"storage\.mooncake\.master_server_addr"):
        await MooncakeStorage(from_tree({})).open()


def test_fastdeploys_variables_are_honoured_and_toml_wins() -> None:
    env = {"MOONCAKE_MASTER_SERVER_ADDR": "m:1", "MOONCAKE_PROTOCOL": "rdma", "MOONCAKE_GLOBAL_SEGMENT_SIZE": "123"}
    joining = membership(MooncakeStorageSection(master_server_addr="toml:2"), env)
    assert (joining.master_server_addr, joining.protocol, joining.global_segment_size) == ("toml:2", "rdma", 123)


def test_a_setting_that_equals_the_default_still_wins_over_a_variable() -> None:
    joining = membership(
        MooncakeStorageSection(master_server_addr="toml:2", protocol="tcp"), {"MOONCAKE_PROTOCOL": "rdma"}
    )
    assert joining.protocol == "tcp"


def test_mooncakes_own_names_are_taken_after_fastdeploys() -> None:
    env = {"MOONCAKE_MASTER": "own:1", "MOONCAKE_DEVICE": "mlx5_0", "MOONCAKE_RDMA_DEVICES": "mlx5_1"}
    joining = membership(MooncakeStorageSection(), env)
    assert (joining.master_server_addr, joining.rdma_devices) == ("own:1", "mlx5_1")


def test_a_config_file_replaces_the_variables(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps({"master_server_addr": "file:1", "local_buffer_size": 5}))
    env = {"MOONCAKE_CONFIG_PATH": str(file), "MOONCAKE_PROTOCOL": "rdma"}
    joining = membership(MooncakeStorageSection(), env)
    assert (joining.master_server_addr, joining.protocol, joining.local_buffer_size) == ("file:1", "tcp", 5)


@pytest.mark.parametrize(
    "env",
    [
        {"MOONCAKE_PROTOCOL": "carrier pigeon"},
        {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "much"},
        {"MOONCAKE_CONFIG_PATH": "/nonexistent"},
    ],
)
def test_a_bad_value_is_named(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="MOONCAKE_"):
        membership(MooncakeStorageSection(), env)
