"""A daemon that comes back as something else: another place of its group, another model, another layout.

Two real daemons over one pool that both see. Each rank's bytes are its own, so bytes of another rank cannot pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.caches import Caches
from tests.support.waits import until
from transferd import Client, ReadStorageTask, Status, WriteStorageTask
from transferd.client.group import GroupClient
from transferd.client.launch import DaemonProcess, start
from transferd.errors import ConnectRefused, RequestError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BLOCKS = list(range(8))
KEYS = [f"k{block}" for block in BLOCKS]
CACHE = {"layers": 2, "kv_heads": 1, "head_dim": 16, "block_size": 16, "device_blocks": 16, "host_blocks": 8}
START: dict[str, Any] = {"ranks": 1, "group_ranks": 2}


class Nodes:
    """The daemons of a group of two. Each may come back as something else, at its old address."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.daemons: dict[int, DaemonProcess] = {}

    def start(self, number: int, *, model: str = "m", **cache: Any) -> DaemonProcess:
        place = START | {"first_rank": number} | cache
        tree = {
            "cache": CACHE | place,
            "host": {"staging": "64KiB"},
            "storage": {"backend": "plain_files:PlainFiles", "model": model}
            | {"file": {"path": str(self._directory / "pool")}},
        }
        self.daemons[number] = start(tree, self._directory, name=f"node{number}")
        return self.daemons[number]

    def again(self, number: int, **different: Any) -> None:
        """Kill a node, and start it as something else."""
        self.daemons[number].kill()
        self.start(number, **different)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    made = Nodes(tmp_path)
    try:
        made.start(0)
        made.start(1)
        yield made
    finally:
        for daemon in made.daemons.values():
            daemon.stop()


def colour(caches: Caches, rank: int, blocks: list[int]) -> None:
    for layers in caches[rank].values():
        for array in layers:
            for block in blocks:
                array[block].view("u1")[...] = 100 * rank + block + 1


def holds(caches: Caches, rank: int, blocks: list[int], first: int = 0) -> bool:
    each = [(array, block) for layers in caches[rank].values() for array in layers for block in blocks]
    return all(bool((array[block].view("u1") == 100 * rank + block - first + 1).all()) for array, block in each)


async def attached(group: GroupClient) -> Caches:
    return [await client.attach(0) for client in group.clients]


async def test_a_node_that_comes_back_as_another_place_answers_for_no_block(nodes: Nodes) -> None:
    endpoints = [nodes.daemons[number].endpoint for number in (0, 1)]
    async with GroupClient(endpoints) as group:
        caches = await attached(group)
        for rank in (0, 1):
            colour(caches, rank, BLOCKS)
        written = await group.submit(WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=BLOCKS))
        assert (written.status, written.block_ids) == (Status.OK, BLOCKS)
        read = ReadStorageTask(task_id="r", keys=KEYS, gpu_block_ids=[8 + block for block in BLOCKS])
        assert (await group.submit(read)).status is Status.OK
        assert all(holds(caches, rank, [8 + block for block in BLOCKS], first=8) for rank in (0, 1))

        nodes.again(1, first_rank=0)
        boots = {client.boot_id for client in group.clients}
        other = group.clients[1]
        await until(lambda: other.identity is not None and other.boot_id not in boots)
        assert not other.connected
        for call in (other.attach(0), other.match(KEYS), other.set_generation("x"), other.purge(KEYS)):
            with pytest.raises(RequestError, match="first_rank 0 instead of 1") as refused:
                await call
            assert refused.value.reason == "identity_mismatch"
        host = [0]  # a read that needs no attached memory
        for again in (
            ReadStorageTask(task_id="again", keys=KEYS, gpu_block_ids=BLOCKS),
            ReadStorageTask(task_id="host", keys=KEYS[:1], cpu_block_ids=host),
            WriteStorageTask(task_id="write", keys=["new"], gpu_block_ids=[0]),
        ):
            result = await group.submit(again)
            assert (result.status is not Status.OK, result.block_ids) == (True, []), result
            assert result.error is not None
            assert (result.error.code, endpoints[1] in result.error.message) == ("identity_mismatch", True)
        with pytest.raises(ConnectRefused, match="first_rank 0 instead of 1") as waited:
            await group.wait_ready()
        assert waited.value.reason == "identity_mismatch"
        assert (await other.stats())["engines"]["default"]["first_rank"] == 0, "reports are answered"

        nodes.again(1)  # as it was
        await group.wait_ready(60.0)
        caches[1] = (await other.reattach())[0]
        read = ReadStorageTask(task_id="r2", keys=KEYS, gpu_block_ids=read.gpu_block_ids)
        assert (await group.submit(read)).status is Status.OK
        assert holds(caches, 1, [8 + block for block in BLOCKS], first=8)


@pytest.mark.parametrize(
    ("different", "said"),
    [({"model": "another"}, "model 'another' instead of 'm'"), ({"head_dim": 32}, "fingerprint ")],
    ids=["model", "layout"],
)
async def test_a_client_is_not_served_by_another_engine(nodes: Nodes, different: dict[str, Any], said: str) -> None:
    async with Client(nodes.daemons[0].endpoint) as looking, Client(nodes.daemons[0].endpoint) as client:
        await client.attach(0)
        before = client.boot_id
        nodes.again(0, **different)
        await until(lambda: "" != client.boot_id != before and "" != looking.boot_id != before)
        result = await client.submit(ReadStorageTask(task_id="r", keys=KEYS, gpu_block_ids=BLOCKS))
        assert (result.status, result.error and result.error.code) == (Status.REJECTED, "identity_mismatch")
        with pytest.raises(ConnectRefused, match=said):
            await client.reattach()
        result = await client.submit(ReadStorageTask(task_id="h", keys=KEYS[:1], cpu_block_ids=[0]))
        assert (result.status, result.error and result.error.code) == (Status.REJECTED, "identity_mismatch")
        assert await looking.match(KEYS) == 0, "who has used nothing may use this one"
        await client.close()
        await client.connect()  # afresh: it serves this engine from now on
        assert await asyncio.wait_for(client.match(KEYS), 60.0) == 0
