"""KV events of a daemon as a router sees them: a process of its own, real sockets, a real subscriber."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.test_daemon import config
from tests.integration.caches import attached
from tests.integration.subscriber import WAIT_MS, AllBlocksCleared, Subscriber
from tests.support.waits import until, wait_until
from transferd import Client, ReadStorageTask, Status, SwapInTask, SwapOutTask, WriteStorageTask
from transferd.blocks.keys import block_keys
from transferd.client.launch import DaemonProcess, running
from transferd.runtime.compat import timeout
from transferd.tasks import TokenIds
from transferd.wire.kv_events import block_hash

BLOCK = 8  # tokens, as in config()


def with_events(directory: Path, **file: Any) -> dict[str, dict[str, Any]]:
    tree = config()
    tree["storage"]["file"] = {"path": str(directory / "blocks")} | file
    tree["events"] = {"endpoint": f"ipc://{directory}/pub", "replay_endpoint": f"ipc://{directory}/replay"}
    return tree


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with running(with_events(tmp_path), tmp_path) as process:
        yield process


@pytest.fixture
async def client(daemon: DaemonProcess) -> AsyncIterator[Client]:
    async with attached(daemon.endpoint) as connected:
        yield connected


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[Subscriber]:
    follower = Subscriber(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay")
    yield follower
    follower.close()


async def announced(subscriber: Subscriber, client: Client, condition: Callable[[], bool]) -> None:
    """Catch up until it is so. (Not by the live socket alone: it may have joined after the last event.)"""
    async with timeout(WAIT_MS / 1000):
        await asyncio.to_thread(subscriber.catch_up)
        while not condition():
            await client.stats()  # a turn of the daemon's loop
            await asyncio.to_thread(subscriber.catch_up)


def hashes(keys: list[str]) -> set[int]:
    return {block_hash(key) for key in keys}


async def test_a_router_follows_blocks_through_all_media(client: Client, subscriber: Subscriber) -> None:
    tokens = list(range(1000, 1000 + 4 * BLOCK))
    keys = block_keys(tokens, BLOCK)
    blocks = [3, 1, 4, 15]
    await client.submit(WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=blocks, token_ids=TokenIds(tokens)))
    await announced(subscriber, client, lambda: bool(subscriber.index.get("STORAGE")))
    assert subscriber.index == {"STORAGE": hashes(keys)}
    assert await client.match(keys) == 4  # what was announced can be loaded by now
    expected: dict[int, tuple[int | None, list[int]]] = {}
    parent: int | None = None
    for i, key in enumerate(keys):
        expected[block_hash(key)] = (parent, tokens[i * BLOCK : (i + 1) * BLOCK])
        parent = block_hash(key)
    assert subscriber.tokens == expected

    await client.submit(SwapOutTask(task_id="o", gpu_block_ids=blocks, cpu_block_ids=[0, 1, 2, 3]))
    await announced(subscriber, client, lambda: bool(subscriber.index.get("CPU")))
    assert subscriber.index == {"STORAGE": hashes(keys), "CPU": hashes(keys)}

    await client.submit(SwapInTask(task_id="i", gpu_block_ids=[20, 21], cpu_block_ids=[0, 1]))
    await announced(subscriber, client, lambda: bool(subscriber.index.get("GPU")))
    assert subscriber.index == {"STORAGE": hashes(keys), "CPU": hashes(keys[2:]), "GPU": hashes(keys[:2])}

    await client.submit(ReadStorageTask(task_id="r", keys=keys, gpu_block_ids=[5, 6, 7, 8]))
    await announced(subscriber, client, lambda: len(subscriber.index["GPU"]) == 4)

    await client.set_generation("RL-STEP04")
    await announced(subscriber, client, lambda: not subscriber.index)
    assert subscriber.batches[-1].events == [AllBlocksCleared()]
    stats = await client.stats()
    assert stats["events"]["announced"] == {"GPU": 0, "CPU": 0, "STORAGE": 0}


async def test_a_clear_of_the_cache_is_announced_at_once(client: Client, subscriber: Subscriber) -> None:
    await client.submit(WriteStorageTask(task_id="w", keys=["a", "b"], gpu_block_ids=[0, 1]))
    await client.submit(SwapOutTask(task_id="o", gpu_block_ids=[0], cpu_block_ids=[0]))
    await announced(subscriber, client, lambda: bool(subscriber.index.get("CPU")))
    await client.clear_cache()
    await announced(subscriber, client, lambda: not subscriber.index)
    await client.restore_cache("RL-STEP04")
    await client.reattach()
    await client.submit(WriteStorageTask(task_id="again", keys=["a"], gpu_block_ids=[0]))
    await announced(subscriber, client, lambda: subscriber.index == {"STORAGE": hashes(["a"])})


@pytest.mark.parametrize("schema", ["transferd", "fastdeploy"])
async def test_evictions_are_announced_and_announced_blocks_can_be_loaded(
    tmp_path: Path, subscriber: Subscriber, schema: str
) -> None:
    tree = with_events(tmp_path, capacity="160KiB")
    tree["storage"]["key_schema"] = schema  # in FastDeploy's, a block is gone with the first of its objects
    with running(tree, tmp_path) as daemon:
        async with attached(daemon.endpoint) as client:
            everything = []
            for n in range(12):
                keys = [f"sequence-{n}-{i}" for i in range(8)]
                everything += keys
                result = await client.submit(WriteStorageTask(task_id=f"w{n}", keys=keys, gpu_block_ids=list(range(8))))
                assert result.status in (Status.OK, Status.PARTIAL)
            present = [key for key in everything if await client.match([key])]
            assert 0 < len(present) < len(everything)
            await announced(subscriber, client, lambda: subscriber.index.get("STORAGE") == hashes(present))
            assert any(type(event).__name__ == "BlockRemoved" for batch in subscriber.batches for event in batch.events)


async def test_a_daemon_begins_and_ends_with_a_clean_slate(
    daemon: DaemonProcess, client: Client, subscriber: Subscriber
) -> None:
    await client.submit(WriteStorageTask(task_id="w", keys=["a"], gpu_block_ids=[0]))
    async with timeout(WAIT_MS / 1000):
        n = 0
        while not subscriber.live():  # until it is subscribed: the end will only come live
            await client.submit(WriteStorageTask(task_id=f"x{n}", keys=[f"x{n}"], gpu_block_ids=[0]))
            n += 1
    await asyncio.to_thread(subscriber.step)
    assert subscriber.batches[0].events == [AllBlocksCleared()]
    assert subscriber.index["STORAGE"] >= hashes(["a"])
    daemon.stop()
    async with timeout(WAIT_MS / 1000):
        while subscriber.index:
            await asyncio.to_thread(subscriber.step)
    assert subscriber.batches[-1].events == [AllBlocksCleared()]


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_after_a_restart_what_is_on_disk_is_announced_again_with_its_tokens_and_what_is_gone_is_not(
    tmp_path: Path, subscriber: Subscriber, end: str
) -> None:
    tokens = [list(range(start, start + 4 * BLOCK)) for start in (1000, 2000, 3000)]
    keys = [block_keys(one, BLOCK) for one in tokens]
    tree = with_events(tmp_path)
    with running(tree, tmp_path) as first:
        async with attached(first.endpoint) as client:
            for i in range(2):
                writes = WriteStorageTask(
                    task_id=f"w{i}", keys=keys[i], gpu_block_ids=[0, 1, 2, 3], token_ids=TokenIds(tokens[i])
                )
                assert (await client.submit(writes)).status is Status.OK
            await client.purge(keys=keys[1])
            (noted,) = await asyncio.to_thread(noted_in, tmp_path / "blocks")
        if end == "kill":
            first.kill()
    assert noted.stat().st_mode & 0o077 == 0, "it has token ids"
    with noted.open("ab") as file:
        file.write(b"torn")
    with running(tree, tmp_path) as second:
        async with attached(second.endpoint) as client:
            await announced(subscriber, client, lambda: bool(subscriber.index.get("STORAGE")))
            assert subscriber.index == {"STORAGE": hashes(keys[0])}
            assert [subscriber.tokens[block_hash(key)][1] for key in keys[0]] == [
                tokens[0][i : i + BLOCK] for i in range(0, 4 * BLOCK, BLOCK)
            ]
            await client.set_generation("RL-STEP09")
            await announced(subscriber, client, lambda: not subscriber.index)
            again = WriteStorageTask(
                task_id="a", keys=keys[2], gpu_block_ids=[0, 1, 2, 3], token_ids=TokenIds(tokens[2])
            )
            assert (await client.submit(again)).status is Status.OK
            await announced(subscriber, client, lambda: subscriber.index == {"STORAGE": hashes(keys[2])})


def noted_in(directory: Path) -> list[Path]:
    """The file that says what was announced, once something has been noted."""
    wait_until(lambda: any(file.stat().st_size for file in directory.glob("announced-*")), "it is written")
    return list(directory.glob("announced-*"))


async def test_the_metrics_and_the_log_say_that_events_are_published(daemon: DaemonProcess, client: Client) -> None:
    await client.submit(WriteStorageTask(task_id="w", keys=["a"], gpu_block_ids=[0]))
    stats = await client.stats()
    assert stats["events"]["batches"] >= 1
    await until(lambda: "publishing KV events" in daemon.log, within=30)  # a thread writes the log
