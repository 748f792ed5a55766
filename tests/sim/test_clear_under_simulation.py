"""A cache that is cleared and restored in a storm: no copy meets memory that goes, and nothing old comes back.

The simulated device finds out who frees it under a copy, the watch who touches the same bytes at once. On
top of that is checked here: after a clear every rank's memory is gone; when the daemon says ready again all
of it is zero; each push has one answer; a task of the new generation never delivers what only the old one
stored.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import numpy as np
import pytest

from tests.support.dispatch import check_dispatcher
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.weather import CALM, STORM
from tests.support.simulation.world import SimWorld, small_config
from transferd.client.client import Client
from transferd.errors import Closed, TransferError
from transferd.runtime.compat import TaskGroup, wait_for
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, TaskResult, WriteStorageTask

SEEDS = min(int(os.environ.get("SEEDS", "60")), 5000)
PUSHERS = 3
PUSHES = 14


class Story:
    """One seed: engines that push whatever comes to their mind, an operator who clears and restores."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.chance = loop.stream("story")
        self.world = SimWorld(loop, small_config(self.chance.randint(1, 3)))
        self.seen: Counter[str] = Counter()

    async def run(self) -> None:
        await self.world.open()
        core = self.world.daemon.default.coordinator
        announce = core.announce_ready

        def announced() -> None:
            self.check_zero()
            announce()

        core.announce_ready = announced  # type: ignore[method-assign]
        self.world.weather = STORM
        async with TaskGroup() as group:
            group.create_task(self.operate())
            for number in range(PUSHERS):
                group.create_task(self.engine(f"engine-{number}", range(16 * number, 16 * number + 16)))
        self.world.weather = CALM
        await asyncio.sleep(13.0)
        dispatcher = self.world.daemon.default.dispatcher
        assert dispatcher.empty
        check_dispatcher(dispatcher)
        await self.new_work_goes_well()
        await self.world.close()
        assert self.world.watch.conflicts == []

    async def operate(self) -> None:
        async with self.world.client("operator") as client:
            for number in range(1, self.chance.randint(2, 4)):
                await asyncio.sleep(self.chance.uniform(0, 2))
                await client.clear_cache()
                self.check_gone()
                self.seen["cleared"] += 1
                await asyncio.sleep(self.chance.uniform(0, 1))
                await self.restore(client, f"G{number}")

    async def restore(self, client: Client, generation: str) -> None:
        if self.chance.random() < 0.5:
            self.world.devices[-1].dice.script("open", "fail")
            with pytest.raises(TransferError):
                await client.restore_cache(generation)
            self.check_gone()
            self.seen["no room"] += 1
        await client.restore_cache(generation)

    def check_gone(self) -> None:
        for worker in self.world.daemon.default.coordinator.workers:
            assert not worker.context.device.statistics()["open"]
            assert worker.context.host is not None
            assert not worker.context.host.memory.allocated

    def check_zero(self) -> None:
        for worker, device in zip(self.world.daemon.default.coordinator.workers, self.world.devices, strict=True):
            assert not device.memory.any(), "new device memory holds something"
            assert worker.context.host is not None
            assert not np.frombuffer(worker.context.host.memory.view, dtype=np.uint8).any()

    async def engine(self, name: str, blocks: range) -> None:
        chance = self.loop.stream(name)
        async with self.world.client(name) as client:

            async def attach() -> None:
                while True:
                    try:
                        await client.wait_ready(60)
                        await self.world.attach(client)
                    except Closed:
                        return
                    except TransferError:  # it was cleared once more
                        continue
                    return

            client.on_new_boot = attach
            await attach()
            results: list[asyncio.Future[TaskResult]] = []
            tasks: list[Task] = []
            for number in range(PUSHES):
                await asyncio.sleep(chance.uniform(0, 0.6))
                tasks.append(self.some_task(f"{name}-{number}", blocks, chance))
                results.append(asyncio.ensure_future(client.submit(tasks[-1])))
            for task, future in zip(tasks, results, strict=True):
                self.check(task, await wait_for(future, 60))

    def some_task(self, task_id: str, blocks: range, chance: random.Random) -> Task:
        count = chance.randint(1, 5)
        device, host = chance.sample(blocks, count), chance.sample(blocks, count)
        timeout = chance.choice((0.05, 0.5, 5.0))
        keys = chance.sample([f"key-{i}" for i in range(12)], count)
        match chance.randrange(4):
            case 0:
                return WriteStorageTask(task_id=task_id, timeout=timeout, keys=keys, gpu_block_ids=device)
            case 1:
                return ReadStorageTask(task_id=task_id, timeout=timeout, keys=keys, gpu_block_ids=device)
            case 2:
                return SwapOutTask(task_id=task_id, timeout=timeout, gpu_block_ids=device, cpu_block_ids=host)
            case _:
                return SwapInTask(task_id=task_id, timeout=timeout, gpu_block_ids=device, cpu_block_ids=host)

    def check(self, task: Task, result: TaskResult) -> None:
        self.seen[str(result.status)] += 1
        if result.error is not None:
            self.seen[result.error.code] += 1
            assert result.error.code not in ("internal", "rank_died"), result
        if isinstance(task, ReadStorageTask):
            namer, names = self.world.daemon.default.objects, self.world.storage.objects
            for key in task.keys[: len(result.block_ids)]:
                [name] = namer.names(result.generation, namer.ids([key]), 0)
                assert name in names or self.world.storage.counts["quarantined"], f"{key} was never stored: {result}"

    async def new_work_goes_well(self) -> None:
        async with self.world.client("late") as client:
            await self.world.attach(client)
            keys, blocks = ["late-1", "late-2"], [0, 1]
            write = WriteStorageTask(task_id="late-w", keys=keys, gpu_block_ids=blocks)
            assert (await client.submit(write)).status is Status.OK
            read = ReadStorageTask(task_id="late-r", keys=keys, gpu_block_ids=[5, 6])
            assert (await client.submit(read)).status is Status.OK
            closed = [g for g in ("", "G1", "G2") if g != client.generation][:1]
            for generation in closed:
                with pytest.raises(TransferError):
                    await client.set_generation(generation)


def test_a_cache_is_cleared_and_restored_in_a_storm() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        story: list[Story] = []

        async def main(loop: SimLoop, story: list[Story] = story) -> None:
            story.append(Story(loop))
            await story[0].run()

        simulate(main, seed)
        seen += story[0].seen
    for what in ("ok", "miss", "rejected", "cleared", "no room", "expired", "failed", "not_attached", "empty_block"):
        assert seen[what] >= 5, f"{what} hardly ever happened: {seen}"
