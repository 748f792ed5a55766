"""Engines that come, go, die and come again on one daemon, and share keys: no byte of one is another's.

Each life of an engine registers, maps its memory, writes and reads keys that all engines share, and ends by word, with
a Bye, or cut off in the middle of its tasks. Checked: what a read delivers is what belongs to the key; device memory
that no task named is as the engine left it; every push has one answer; when the last engine has gone nothing is left.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any

import pytest

from tests.support.simulation.blocks import Blocks
from tests.support.simulation.clock import SimClock
from tests.support.simulation.faults import Latency, StorageFaults, ThreadFaults
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.memory import MemoryWatch
from tests.support.simulation.network import ENDPOINT, SimNetwork
from tests.support.simulation.storage import SimStorage
from tests.support.simulation.threads import SimThreads
from tests.support.simulation.world import daemon_of_engines
from transferd.client.client import Client
from transferd.client.engines import Engine
from transferd.errors import Closed, DaemonLost, TransferError
from transferd.runtime.compat import TaskGroup
from transferd.tasks import ReadStorageTask, Status, WriteStorageTask

SEEDS = min(int(os.environ.get("SEEDS", "12")), 2000)
DEVICE = "tests.support.simulation.device:SimDevice"
SHAPE = {"layers": 2, "kv_heads": 1, "head_dim": 4, "block_size": 4, "device_blocks": 12}
KEYS = 8
LIVES = 3
ENGINES = 4
GONE = {"engine_gone", "unknown_engine", "stale_epoch", "daemon_lost", "closed", "not_attached", "not_ready"}
GONE |= {"cancelled"}  # its client said Bye


class Story:
    """One seed."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop, self.clock = loop, SimClock(loop)
        self.network = SimNetwork(rng=loop.stream("network"))
        self.storage = SimStorage(rng=loop.stream("storage"), watch=MemoryWatch())
        self.storage.slots_at_once = None if self.joins() else 2  # stores are joined in a pool
        self.storage.faults = StorageFaults(latency=Latency(0.001, 0.02))  # so that engines meet at one object
        self.clients: list[Client] = []
        self.seen: Counter[str] = Counter()
        threads = SimThreads(rng=loop.stream("offload"), faults=ThreadFaults(latency=Latency(0.0, 0.002)))
        self.daemon = daemon_of_engines(DEVICE, self.network, threads, self.storage, self.clock)

    def joins(self) -> bool:
        """Whether the daemon joins engines' calls on this storage."""
        return self.loop.seed % 2 == 0

    async def run(self) -> Counter[str]:
        await self.daemon.open()
        async with TaskGroup() as group:
            for number in range(ENGINES):
                group.create_task(self.engine(number))
        await asyncio.sleep(10)  # the dead are given up
        await self.daemon.engines.settled()
        report = self.daemon.stats()
        assert report["engines"] == {}
        assert (report["engines_leaving"], report["staging"]["used"], report["host"]["bytes"]) == (0, 0, 0)
        assert report["storage"]["corrupt"] == 0
        assert report["queued"] == report["running"] == report["straggling"] == 0
        assert await self.daemon.stop(lambda: 10.0) == []
        return self.seen

    async def engine(self, number: int) -> None:
        """Its lives, one after the other. Two engines have one rank, two have two; so there are two identities."""
        ranks = 1 + number % 2
        for life in range(LIVES):
            chance = self.loop.stream(f"engine {number}, life {life}")
            link = f"engine-{number}-{life}"
            client = Client(
                ENDPOINT,
                clock=self.clock,
                transport=self.network.client(link),
                name=link,
                engine=f"e{number}",
                await_ready=False,
            )
            await asyncio.sleep(chance.uniform(0, 0.3))
            await client.connect()
            await self._registered(client, ranks)
            end = chance.choice(("word", "bye", "death"))
            self.seen[end] += 1
            working = self.loop.create_task(self.live(client, f"{number}-{life}", ranks))
            await asyncio.sleep(chance.uniform(0.001, 0.3))
            if end == "word":
                await client.unregister()
            elif end == "death":
                self.network.cut(link)
            await client.close()
            await working

    async def _registered(self, client: Client, ranks: int) -> None:
        """An engine that died is there until its client is given up."""
        layout = SHAPE | {"ownership": "create"}
        while True:
            try:
                await client.register(Engine(ranks=ranks, model="m", layout=layout, host_blocks=2))
            except TransferError as error:
                if error.reason != "engine_exists":
                    raise
                self.seen["exists"] += 1
                await asyncio.sleep(0.5)
            else:
                return

    async def live(self, client: Client, name: str, ranks: int) -> None:
        chance = self.loop.stream(f"tasks of {name}")
        try:
            await client.wait_ready(5)
            memories = [(await client.device_handle(rank))["data"]["address"] for rank in range(ranks)]
            blocks = self._mapped(client._conversation.engine, memories)
            for turn in range(20):
                keys = [f"{ranks}-{key}" for key in chance.sample(range(KEYS), 3)]
                named = chance.sample(range(SHAPE["device_blocks"]), 3)
                rest = [block for block in range(SHAPE["device_blocks"]) if block not in named]
                for block in rest:
                    blocks.fill(block, f"{name} {turn} {block}")
                await self.one(client, blocks, f"{turn}", keys, named, reads=chance.random() < 0.6)
                for block in rest:
                    assert blocks.holds(block, f"{name} {turn} {block}"), "nobody's task named it"
        except (Closed, TransferError) as error:
            if error.reason not in GONE:
                raise
            self.seen[error.reason] += 1

    def _mapped(self, engine: str, addresses: list[int]) -> Blocks:
        hosted = self.daemon.engines.get(engine)
        if hosted is None:
            raise TransferError("it has left", code="engine_gone")
        devices: list[Any] = [worker.context.device for worker in hosted.workers]
        assert addresses == [int(device.memory.ctypes.data) for device in devices]
        return Blocks.of(hosted.layout.device, [device.memory for device in devices], [])

    async def one(
        self, client: Client, blocks: Blocks, task_id: str, keys: list[str], named: list[int], *, reads: bool
    ) -> None:
        task: ReadStorageTask | WriteStorageTask
        if reads:
            task = ReadStorageTask(task_id=task_id, keys=keys, gpu_block_ids=named)
        else:
            for key, block in zip(keys, named, strict=True):
                blocks.fill(block, key)
            task = WriteStorageTask(task_id=task_id, keys=keys, gpu_block_ids=named)
        result = await client.submit(task)
        self.seen[str(result.status)] += 1
        if result.error is not None:
            raise TransferError(result.error.message, code=result.error.code)
        for key, block in zip(keys, result.block_ids, strict=False):
            assert blocks.holds(block, key), f"wrong bytes of {key}: {result}"
        assert result.status in (Status.OK, Status.PARTIAL, Status.MISS), result


@pytest.mark.parametrize("part", range(3))
def test_engines_come_go_die_and_share(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SEEDS, 3):
        seen += simulate(lambda loop: Story(loop).run(), seed)
    assert {"word", "bye", "death", "ok", "miss"} <= set(seen), f"too little has happened: {seen}"


@pytest.mark.parametrize("silent_s", [0.0, 60.0])
def test_a_registration_whose_answer_was_lost_goes_on(silent_s: float) -> None:
    async def run(loop: SimLoop) -> None:
        story = Story(loop)
        await story.daemon.open()
        link = story.network.client("link")
        client = Client(ENDPOINT, clock=story.clock, transport=link, name="link", engine="e", await_ready=False)
        await client.connect()
        engine = Engine(ranks=1, model="m", layout=SHAPE | {"ownership": "create"})
        registering = loop.create_task(client.register(engine))
        while story.daemon.engines.get("e") is None:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.0001)
        story.network.cut("link")
        if silent_s:
            with pytest.raises(DaemonLost):
                await registering
        story.network.mend("link")
        await asyncio.sleep(2 * bool(silent_s))  # until the client has found the daemon again
        epoch = await client.register(engine) if silent_s else await registering
        await client.wait_ready(5)
        assert await client.register(engine) == epoch, "it is the same registration"
        await client.unregister()
        await client.close()
        assert await story.daemon.stop(lambda: 10.0) == []

    simulate(run, 0)
