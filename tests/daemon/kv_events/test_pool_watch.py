"""What routers know of a node with blocks in a Mooncake pool: what `locate` says, also after the pool has evicted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.test_daemon import config
from tests.integration.caches import attached
from tests.integration.subscriber import Subscriber
from transferd import Client, Status, WriteStorageTask
from transferd.blocks.formats import key_digest
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.client.launch import running
from transferd.runtime.compat import timeout
from transferd.wire.kv_events import BlockRemoved, BlockStored, block_hash

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
CHAIN = 16
WAIT_S = 60.0


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    with Master(tmp_path / "master.log", lease_ttl="100ms") as made:
        yield made


def tree(directory: Path, master: Master, levels: list[str]) -> dict[str, Any]:
    """Objects of 48 KiB: the pool has room for some 290 of them, and memory for 40."""
    pool: dict[str, Any] = {"master_server_addr": master.address, "master_pages": f"127.0.0.1:{master.metrics_port}"}
    pool |= {"global_segment_size": "16MiB", "local_buffer_size": 0}
    made = config(layers=3, kv_heads=8, head_dim=64, host_blocks=0)
    made["host"] = {"staging": "2MiB"}
    made["storage"] = {"levels": levels, "memory": {"capacity": "2MiB"}, "mooncake": pool}
    made["events"] = {"endpoint": f"ipc://{directory}/pub", "replay_endpoint": f"ipc://{directory}/replay"}
    return made


def keys_of(chain: int) -> list[str]:
    return [f"{chain}-{number}" for number in range(CHAIN)]


@contextlib.asynccontextmanager
async def subscribed(directory: Path) -> AsyncIterator[Subscriber]:
    follower = Subscriber(f"ipc://{directory}/pub", f"ipc://{directory}/replay")
    try:
        yield follower
    finally:
        follower.close()


async def write(client: Client, chain: int) -> None:
    async with timeout(WAIT_S):
        while True:
            task = WriteStorageTask(task_id=f"w{chain}", keys=keys_of(chain), gpu_block_ids=list(range(CHAIN)))
            if (await client.submit(task)).status is Status.OK:
                return
            await asyncio.sleep(0.05)  # what was stored just now is leased


async def located(client: Client, chains: range) -> set[int]:
    keys = [key for chain in chains for key in keys_of(chain)]
    found = [(await client.locate(keys=[key])) for key in keys]
    return {block_hash(key) for key, nodes in zip(keys, found, strict=True) if nodes}


def in_pool(master: Master, chains: range) -> set[int]:
    """The blocks of which both ranks' objects are there, as the master's own list says."""
    names = {tuple(name.split("/")[-2:]) for name in master._page("/get_all_keys").split()}
    keys = {key: key_digest(key) for chain in chains for key in keys_of(chain)}
    return {block_hash(key) for key, digest in keys.items() if {(digest, "0"), (digest, "1")} <= names}


def retracted_twice(subscriber: Subscriber) -> list[int]:
    """Blocks that were retracted without being announced."""
    announced, wrong = set[int](), list[int]()
    for batch in subscriber.batches:
        for event in batch.events:
            if isinstance(event, BlockStored) and event.medium == "STORAGE":
                announced |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved) and event.medium == "STORAGE":
                wrong += set(event.block_hashes) - announced
                announced -= set(event.block_hashes)
    return wrong


@pytest.mark.parametrize("levels", [["mooncake"], ["memory", "mooncake"]], ids=" ".join)
async def test_what_the_pool_evicts_is_retracted_once_and_what_a_level_loses_is_not(
    master: Master, tmp_path: Path, levels: list[str]
) -> None:
    chains = range(12)
    with running(tree(tmp_path, master, levels), tmp_path) as daemon:
        async with attached(daemon.endpoint) as client, subscribed(tmp_path) as subscriber:
            for chain in chains:
                await write(client, chain)
            assert master.counter("master_evicted_key_count") > 0
            latest = {block_hash(key) for chain in chains[-2:] for key in keys_of(chain)}  # memory has no others
            async with timeout(WAIT_S):
                while True:
                    await asyncio.to_thread(subscriber.catch_up)
                    index, pooled = subscriber.index.get("STORAGE", set()), in_pool(master, chains)
                    if pooled <= index <= pooled | latest:
                        break
                    await asyncio.sleep(0.1)
            truth = await located(client, chains)  # which retracts by itself what it does not find
            assert truth == index
            assert CHAIN < len(truth) < CHAIN * len(chains), "more than memory has, fewer than were written"
            assert retracted_twice(subscriber) == []


async def test_a_look_up_that_finds_nothing_retracts(master: Master, tmp_path: Path) -> None:
    settings = tree(tmp_path, master, ["mooncake"])
    settings["storage"]["mooncake"]["master_pages"] = "127.0.0.1:1"  # nobody answers there
    with running(settings, tmp_path) as daemon:
        async with attached(daemon.endpoint) as client, subscribed(tmp_path) as subscriber:
            for chain in range(12):
                await write(client, chain)
            keys = [key for chain in range(12) for key in keys_of(chain)]
            found = await client.exists(keys)
            assert not all(found)
            there = {block_hash(key) for key, one in zip(keys, found, strict=True) if one}
            async with timeout(WAIT_S):
                while subscriber.index.get("STORAGE", set()) != there:
                    await asyncio.to_thread(subscriber.catch_up)
