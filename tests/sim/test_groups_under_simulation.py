"""A group over two simulated nodes in any weather: one honest result a task, in time, and every byte on its rank.

Each node is a whole simulated world with chance and weather of its own; the GroupClient and everything beneath it are
the real ones. A node may be cut off for a while, or change its generation before the other.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from tests.support.simulation.blocks import Blocks
from tests.support.simulation.ledger import Ledger
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.weather import CALM, draw_storm
from tests.support.simulation.world import SimWorld, small_config
from transferd.client.group import GroupClient
from transferd.config import Config
from transferd.errors import DaemonLost, TransferError
from transferd.runtime.compat import TaskGroup
from transferd.tasks import ReadStorageTask, Status, Task, TaskResult, WriteStorageTask

SEEDS = min(int(os.environ.get("SEEDS", "20")), 5000)
NODES, RANKS, TASKS = 2, 2, 12
BLOCKS_OF_A_TASK = 3
LOST_S = 6.0  # after so much silence a client has given a node up
CUTS_S = (0.2, 3.0, 8.0)
NOT_FROM_A_DAEMON = ("daemon_lost", "closed", "stale_session")
LEFT_BEHIND = ("expired", "rank_died")  # codes of ranks that had not arrived when their node answered


class GroupStory:
    """One group and its tasks. Each task has blocks of its own, so that no result waits for another's."""

    def __init__(self, loop: SimLoop, **server: Any) -> None:
        self.loop = loop
        self.chance = loop.stream("group")
        self.nodes = [SimWorld(loop, _config(number, **server), node=f"node {number} ") for number in range(NODES)]
        self.group = GroupClient(
            [f"sim://{number}" for number in range(NODES)],
            clock=self.nodes[0].clock,
            transports=[node.network.client("group") for node in self.nodes],
            connect_timeout=60.0,
        )
        self.ledger = Ledger()
        self.device = Blocks.of(self.nodes[0].daemon.default.layout.device, [], [])
        self.seen: Counter[str] = Counter()
        self.generations = 0

    async def open(self) -> None:
        for node in self.nodes:
            await node.open()
        await self.group.connect()
        for node, client in zip(self.nodes, self.group.clients, strict=True):
            self.device.memories += await node.attach(client)

    async def close(self) -> None:
        await self.group.close()
        self.device.memories.clear()
        for node in self.nodes:
            await node.close()

    async def run(self) -> Counter[str]:
        await self.open()
        keys = await self._store_some()
        for node in self.nodes:  # a rank that dies for good ends a group; that is the unit tests' matter
            node.weather = draw_storm(random.Random(f"{self.loop.seed}/{node.node}")).without("device.lost")
        async with TaskGroup() as tasks:
            for number in range(TASKS):
                tasks.create_task(self._task(number, keys, self.loop.stream(f"task {number}")))
            tasks.create_task(self._trouble())
        for node in self.nodes:
            node.weather = CALM
        await asyncio.sleep(LOST_S * 2)
        await self.group.wait_ready(60.0)
        await self._good_times()
        await self.close()
        return self.seen

    async def _store_some(self) -> list[str]:
        keys = [f"old-{i}" for i in range(6)]
        assert (await self._write("before", keys, list(range(6)), 30.0)).status is Status.OK
        return keys

    async def _task(self, number: int, keys: list[str], chance: random.Random) -> None:
        await asyncio.sleep(chance.uniform(0, 2.0))
        blocks = list(range(6 + number * BLOCKS_OF_A_TASK, 6 + (number + 1) * BLOCKS_OF_A_TASK))
        timeout = chance.choice((0.05, 0.5, 5.0, 30.0))
        if chance.random() < 0.2:
            self.loop.call_later(chance.uniform(0, 1.0), self._cancel, f"task-{number}")
        if chance.random() < 0.4:
            await self._write(f"task-{number}", [f"new-{number}-{i}" for i in range(len(blocks))], blocks, timeout)
            return
        for block in blocks:
            self.device.fill(block, "junk")
        wanted = [chance.choice([*keys, "nobody stored this"]) for _ in blocks]
        sparse = chance.random() < 0.5
        task = ReadStorageTask(
            task_id=f"task-{number}", keys=wanted, gpu_block_ids=blocks, timeout=timeout, prefix=not sparse
        )
        result = await self._submit(task)
        loaded = [i for i, block in enumerate(blocks) if block in result.block_ids]
        for i in loaded:
            assert self.device.holds(blocks[i], wanted[i]), f"wrong bytes of {wanted[i]} on some rank: {result}"
            assert self.ledger.may_hold(result.generation, wanted[i]), f"{wanted[i]} was never stored: {result}"
        assert sparse or loaded == list(range(len(loaded))), f"not a prefix: {result}"

    async def _write(self, name: str, keys: list[str], blocks: list[int], timeout: float) -> TaskResult:
        for key, block in zip(keys, blocks, strict=True):
            self.device.fill(block, key)
        self.ledger.begin(keys)
        result = await self._submit(WriteStorageTask(task_id=name, keys=keys, gpu_block_ids=blocks, timeout=timeout))
        known = result.error is None or result.error.code not in (*NOT_FROM_A_DAEMON, "generation_mismatch")
        self.ledger.end(keys, result.generation if known else None)
        claimed = [key for key, block in zip(keys, blocks, strict=True) if block in result.block_ids]
        for rank, node in enumerate(node for node in self.nodes for _ in range(RANKS)):
            objects = node.daemon.default.objects
            names = objects.names(result.generation, objects.ids(claimed), rank)
            for object_name in names:
                there = object_name in node.storage.objects or object_name in node.storage.gone
                assert there, f"{object_name} was not stored on its node: {result}"
        return result

    async def _submit(self, task: Task) -> TaskResult:
        """Push, and check what holds of every result of a group."""
        began = self.loop.time()
        result = await self.group.submit(task)
        took = self.loop.time() - began
        self.seen[str(result.status)] += 1
        if result.error is not None:
            self.seen[result.error.code] += 1
            assert result.error.code != "internal", result
        limit = task.timeout + self.nodes[0].config.server.deadline_slack + 2 * LOST_S + max(CUTS_S)
        assert took <= limit, f"answered after {took:.3f} s: {result}"
        assert (result.status is Status.OK) == (len(result.block_ids) == task.blocks), result
        if result.ranks:
            assert [rank.rank for rank in result.ranks] == list(range(NODES * RANKS)), result
            assert all(rank.blocks >= len(result.block_ids) for rank in result.ranks), result
        else:
            assert not result.block_ids, result
        self._let_go(task, result)
        return result

    def _let_go(self, task: Task, result: TaskResult) -> None:
        """On every node that has answered whole, nobody is at work on the blocks any more."""
        for number, node in enumerate(self.nodes):
            ranks = [rank for rank in result.ranks if rank.rank // RANKS == number]
            codes = [rank.error.code for rank in ranks if rank.error is not None]
            if not ranks or any(code in (*NOT_FROM_A_DAEMON, *LEFT_BEHIND) for code in codes):
                continue
            for block in task.gpu_block_ids:
                for rank in ranks:
                    starts, sizes = self.device.ranges(block, rank.rank)
                    node.watch.leave(node.watch.enter(starts, sizes, writes=True, who=f"the engine after {result}"))

    async def _trouble(self) -> None:
        """A node is cut off, or learns of a generation before the other."""
        for _ in range(self.chance.randint(0, 2)):
            await asyncio.sleep(self.chance.uniform(0, 1.5))
            node = self.chance.choice(self.nodes)
            if self.chance.random() < 0.7:
                self.seen["cut"] += 1
                node.network.cut("group")
                await asyncio.sleep(self.chance.choice(CUTS_S))
                node.network.mend("group")
                continue
            try:
                self.generations += 1
                await self.group.set_generation(f"g{self.generations}")
            except TransferError as error:
                self.loop.note(f"set_generation: {error!r}")

    def _cancel(self, task_id: str) -> None:
        async def cancel() -> None:
            try:
                self.seen["cancel"] += await self.group.cancel(task_id)
            except (DaemonLost, TransferError) as error:
                self.loop.note(f"{task_id}: cancel failed, {error!r}")

        self.loop.create_task(cancel())

    async def _good_times(self) -> None:
        """Faults have stopped: the group serves, and its nodes agree."""
        await self.group.set_generation("next")
        keys, blocks = ["last-0", "last-1"], [0, 1]
        assert (await self._write("last write", keys, blocks, 30.0)).status is Status.OK
        assert await self.group.exists([*keys, "nobody stored this"]) == [True, True, False]
        assert await self.group.match(keys) == 2
        read = ReadStorageTask(task_id="last read", keys=keys, gpu_block_ids=[2, 3])
        assert (await self._submit(read)).status is Status.OK
        assert all(self.device.holds(2 + i, key) for i, key in enumerate(keys))


def _config(number: int, **server: Any) -> Config:
    config = small_config(RANKS, **server)
    assert config.cache is not None
    cache = msgspec.structs.replace(config.cache, first_rank=RANKS * number, group_ranks=RANKS * NODES)
    return msgspec.structs.replace(config, cache=cache)


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_a_group_is_honest_in_any_weather(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, min(first + 10, SEEDS)):

        async def main(loop: SimLoop) -> Counter[str]:
            return await GroupStory(loop).run()

        seen += simulate(main, seed)
    print(seen)
    assert seen["ok"]


@pytest.mark.parametrize("full", range(NODES))
def test_a_task_that_was_busy_on_one_node_and_queued_on_the_other_is_retried_on_both(full: int) -> None:
    async def main(loop: SimLoop) -> None:
        story = GroupStory(loop, max_queued_tasks=1)
        await story.open()
        group = story.group
        await group.pause()
        filler = await group.clients[full].push(WriteStorageTask(task_id="filler", keys=["f"], gpu_block_ids=[0]))
        task = WriteStorageTask(task_id="t", keys=["k"], gpu_block_ids=[1])
        assert (await group.submit(task)).status is Status.BUSY
        insisting = asyncio.ensure_future(group.insist(task))
        await asyncio.sleep(1.0)  # of the simulated clock: it was pushed again, and was busy again
        await group.resume()
        assert (await filler).status is Status.OK
        assert (await insisting).status is Status.OK
        await story.close()

    simulate(main, 0)
