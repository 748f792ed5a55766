"""Dynamo's indexer says of every chain exactly what `locate` says: over restarts, gaps, evictions and clears."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.kv_events.test_feed import BLOCK, with_events
from tests.integration.caches import attached
from tests.support.freezing import freeze, thaw
from transferd import Client, Status, WriteStorageTask
from transferd.blocks.keys import block_keys
from transferd.cli.pool.master import free_port
from transferd.client.launch import DaemonProcess, running
from transferd.runtime.compat import timeout
from transferd.tasks import TokenIds

pytestmark = pytest.mark.one_loop
BLOCKS = 4  # of a chain
AGREE_S = 60.0  # a bound, never waited out


class Indexer:
    """Dynamo's, in a process of its own."""

    def __init__(self, log: Path, tree: dict[str, Any]) -> None:
        self._port = free_port()
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port), "--threads", "1"]
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        self._node = {key: tree["events"][key] for key in ("endpoint", "replay_endpoint")} | {"instance_id": 1}

    async def register(self, dp_rank: int = 0) -> None:
        async with timeout(AGREE_S):
            while True:
                with contextlib.suppress(OSError):
                    await self._post("/register", self._node | {"block_size": BLOCK, "dp_rank": dp_rank})
                    return
                await asyncio.sleep(0.1)

    async def blocks_of(self, tokens: list[int]) -> int:
        """How many leading blocks the node has on disk, it says."""
        answer = await self._post("/query", {"token_ids": tokens})
        return int(answer["instances"].get("1", {}).get("disk", 0)) // BLOCK

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            json.dumps(body | {"model_name": "demo"}).encode(),
            {"content-type": "application/json"},
        )

        def post() -> dict[str, Any]:
            with urllib.request.urlopen(asked, timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
                return found

        return await asyncio.to_thread(post)


def chain(number: int) -> list[int]:
    """Tokens; all chains have their first block in common."""
    return [*range(BLOCK), *range(1000 * number, 1000 * number + (BLOCKS - 1) * BLOCK)]


async def write(client: Client, *numbers: int) -> None:
    for number in numbers:
        tokens = chain(number)
        keys = block_keys(tokens, BLOCK)
        ids = list(range(BLOCKS))
        task = WriteStorageTask(task_id=f"w{number}", keys=keys, gpu_block_ids=ids, token_ids=TokenIds(tokens))
        assert (await client.submit(task)).status is Status.OK


async def truth(client: Client, number: int) -> int:
    (found,) = (await client.locate(keys=block_keys(chain(number), BLOCK))).values() or ({},)
    return found.get("any", 0)


async def agree(client: Client, indexer: Indexer, numbers: range) -> int:
    """Wait until the indexer says of each chain what `locate` says. Returns how many blocks that are."""
    expected = [await truth(client, number) for number in numbers]
    async with timeout(AGREE_S):
        while [await indexer.blocks_of(chain(number)) for number in numbers] != expected:  # noqa: ASYNC110 - asked
            await asyncio.sleep(0.05)
    return sum(expected)


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    made: dict[str, Any] = with_events(tmp_path)
    made["events"] = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    return made


@pytest.fixture
def indexer(tree: dict[str, Any], tmp_path: Path) -> Iterator[Indexer]:
    with closing(Indexer(tmp_path / "indexer.log", tree)) as made:
        yield made


@contextlib.contextmanager
def closing(indexer: Indexer) -> Iterator[Indexer]:
    try:
        yield indexer
    finally:
        indexer.process.kill()
        indexer.process.wait()


@contextlib.asynccontextmanager
async def life(tree: dict[str, Any], directory: Path) -> AsyncIterator[tuple[DaemonProcess, Client]]:
    with running(tree, directory) as daemon:
        async with attached(daemon.endpoint) as client:
            yield daemon, client


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_restarted_node_is_known_by_what_it_has_on_disk_and_by_what_comes_after(
    tree: dict[str, Any], tmp_path: Path, indexer: Indexer, end: str
) -> None:
    async with life(tree, tmp_path) as (daemon, client):
        await indexer.register()
        await write(client, *range(1, 21))
        assert await agree(client, indexer, range(1, 31)) == 20 * BLOCKS + 10
        await client.purge(keys=block_keys(chain(7), BLOCK)[1:])
        await asyncio.sleep(1.5)  # a kill loses the last second's announcements
        if end == "kill":
            daemon.kill()
    async with life(tree, tmp_path) as (_, client):
        assert await agree(client, indexer, range(1, 31)) == 19 * BLOCKS + 11
        await write(client, *range(21, 26))
        assert await agree(client, indexer, range(1, 31)) == 24 * BLOCKS + 6
        await client.set_generation("RL-STEP09")
        assert await agree(client, indexer, range(1, 31)) == 0
        await write(client, 28)
        assert await agree(client, indexer, range(1, 31)) == BLOCKS + 29


async def test_a_node_whose_memory_died_with_it_has_no_phantoms(
    tree: dict[str, Any], tmp_path: Path, indexer: Indexer
) -> None:
    tree["storage"] |= {"backend": "memory"}
    async with life(tree, tmp_path) as (daemon, client):
        await indexer.register()
        await write(client, *range(1, 11))
        assert await agree(client, indexer, range(1, 21)) == 10 * BLOCKS + 10
        daemon.kill()
    async with life(tree, tmp_path) as (_, client):
        assert await agree(client, indexer, range(1, 21)) == 0
        await write(client, 15)
        assert await agree(client, indexer, range(1, 21)) == BLOCKS + 19


@pytest.mark.parametrize("kept", [10_000, 3], ids=["kept", "beyond the buffer"])
async def test_who_joins_late_and_who_slept_knows_everything_without_further_events(
    tree: dict[str, Any], tmp_path: Path, indexer: Indexer, kept: int
) -> None:
    tree["events"] |= {"buffer": kept}
    async with life(tree, tmp_path) as (_, client):
        await indexer.register()
        await write(client, *range(1, 11))
        assert await agree(client, indexer, range(1, 31)) == 10 * BLOCKS + 20
        with closing(Indexer(tmp_path / "late.log", tree)) as late:
            await late.register()
            assert await agree(client, late, range(1, 31)) == 10 * BLOCKS + 20
        freeze(indexer.process.pid)
        try:
            await write(client, *range(11, 21))
        finally:
            thaw(indexer.process.pid)
        assert await agree(client, indexer, range(1, 31)) == 20 * BLOCKS + 10


async def test_what_a_full_store_evicts_is_retracted(tree: dict[str, Any], tmp_path: Path, indexer: Indexer) -> None:
    tree["storage"]["file"] |= {"capacity": "1MiB"}
    async with life(tree, tmp_path) as (_, client):
        await indexer.register()
        await write(client, *range(1, 101))
        held = await agree(client, indexer, range(1, 101))
        assert 100 < held < 100 * BLOCKS
