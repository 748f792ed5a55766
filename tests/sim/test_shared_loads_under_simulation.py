"""Engines that want the same objects at the same time, from a storage that fails: each has its own honest answer.

Three engines of one identity read, and store again, the same few keys all the time. Tasks are cancelled or run out of
time, an engine leaves in the middle, and storage delivers wrong bytes, errors, nothing, or does not answer. Checked:
what a result claims is what belongs to the key, no buffer is used by two at once, every lease comes back, and calls
were joined in every seed.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest

from tests.sim.test_engines_under_simulation import SHAPE, Story
from tests.support.simulation.blocks import Blocks
from tests.support.simulation.faults import Latency, StorageFaults
from tests.support.simulation.loop import simulate
from tests.support.simulation.network import ENDPOINT
from transferd.client.client import Client
from transferd.client.engines import Engine
from transferd.runtime.compat import TaskGroup
from transferd.tasks import ReadStorageTask, Status, WriteStorageTask

SEEDS = min(int(os.environ.get("SEEDS", "8")), 2000)
CROWD = 3
KEYS = [f"1-{key}" for key in range(5)]
ROUNDS = 8


class Crowd(Story):
    """One seed."""

    def joins(self) -> bool:
        return True

    async def run(self) -> Counter[str]:
        await self.daemon.open()
        clients = [await self.come(number) for number in range(CROWD)]
        await self.round(clients[:1], "fill", reads=False)
        latency = Latency(0.005, 0.03)
        self.storage.faults = StorageFaults(latency, 0.05, error=0.05, full=0.05, missing=0.05, flip=0.05, short=0.05)
        for number in range(ROUNDS):
            if number == ROUNDS // 2:
                leaving = self.loop.create_task(clients.pop().unregister())
            reads = number % 4 != 3
            if not reads:
                self.storage.objects.clear()  # so that all of them store
            await self.round(clients, f"{number}", reads=reads)
        await leaving
        report = self.daemon.stats()["storage"]
        self.seen["loads"], self.seen["stores"] = report["shared_loads"], report["shared_stores"]
        for client in clients:
            await client.unregister()
        for client in self.clients:
            await client.close()
        await self.daemon.engines.settled()
        assert self.daemon.stats()["staging"]["used"] == 0
        assert self.storage.watch.conflicts == []
        assert len(self.storage.watch) == 0
        assert await self.daemon.stop(lambda: 10.0) == []
        return self.seen

    async def come(self, number: int) -> Client:
        link = f"crowd-{number}"
        transport = self.network.client(link)
        client = Client(
            ENDPOINT, clock=self.clock, transport=transport, name=link, engine=f"e{number}", await_ready=False
        )
        self.clients.append(client)
        await client.connect()
        await client.register(Engine(ranks=1, model="m", layout=SHAPE | {"ownership": "create"}))
        await client.wait_ready(5)
        return client

    async def round(self, clients: list[Client], name: str, *, reads: bool) -> None:
        async with TaskGroup() as group:
            for number, client in enumerate(clients):
                group.create_task(self.turn(client, f"{name}-{number}", reads=reads))

    async def turn(self, client: Client, name: str, *, reads: bool) -> None:
        """All keys in two tasks, so that batches cross; one of them may be given up."""
        chance = self.loop.stream(name)
        address = (await client.device_handle(0))["data"]["address"]
        blocks = self._mapped(client._conversation.engine, [address])
        keys = chance.sample(KEYS, len(KEYS))
        named = chance.sample(range(SHAPE["device_blocks"]), len(KEYS))
        await asyncio.gather(
            *(
                self.task(client, blocks, f"{name}-{part}", keys[part::2], named[part::2], reads=reads)
                for part in range(2)
            )
        )

    async def task(
        self, client: Client, blocks: Blocks, name: str, keys: list[str], named: list[int], *, reads: bool
    ) -> None:
        chance = self.loop.stream(f"task {name}")
        timeout = 0.01 if name != "fill-0-0" and chance.random() < 0.2 else 5.0
        task: ReadStorageTask | WriteStorageTask
        if reads:
            task = ReadStorageTask(task_id=name, keys=keys, gpu_block_ids=named, prefix=False, timeout=timeout)
        else:
            for key, block in zip(keys, named, strict=True):
                blocks.fill(block, key)
            task = WriteStorageTask(task_id=name, keys=keys, gpu_block_ids=named, timeout=timeout)
        pushed = self.loop.create_task(client.submit(task))
        if chance.random() < 0.2:
            await asyncio.sleep(chance.uniform(0, 0.02))
            await client.cancel(name)
        result = await pushed
        self.seen[str(result.status)] += 1
        for key, block in zip(keys, named, strict=True):
            assert not reads or block not in result.block_ids or blocks.holds(block, key), f"wrong bytes: {result}"
        if result.status is Status.OK:
            assert result.block_ids == named


@pytest.mark.parametrize("part", range(2))
def test_engines_that_want_the_same_objects_at_once(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SEEDS, 2):
        one = simulate(lambda loop: Crowd(loop).run(), seed)
        assert one["loads"], f"seed {seed}: no load was shared"
        seen += one
    assert {"ok", "partial", "stores"} <= set(seen), f"too little has happened: {seen}"
