"""A daemon is killed and started again under an engine that keeps what it has mapped and goes on.

Real processes, real shared memory, a real store: every key that a result calls stored is read back in the end and
compared with the bytes that the engine had when it pushed the write.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.caches import Caches, attach, attached
from tests.support.waits import stats_until, until
from transferd import Client, ReadStorageTask, Status, SwapInTask, SwapOutTask, SyncClient, WriteStorageTask
from transferd.client.launch import DaemonProcess, start
from transferd.runtime.compat import wait_for
from transferd.tasks import TaskResult

RANKS = 2
TREE: dict[str, Any] = {
    "cache": {"ranks": RANKS, "layers": 2, "kv_heads": 1, "head_dim": 16, "block_size": 16}
    | {"device_blocks": 8, "host_blocks": 8},
    "host": {"staging": "64KiB"},
}
WRITES = 60  # before the kill, and again after it
SAMPLE = 20  # keys read back of each time


@contextlib.contextmanager
def daemons(directory: Path) -> Iterator[list[DaemonProcess]]:
    """The first one runs; append those that follow it."""
    running = [start(TREE, directory)]
    try:
        yield running
    finally:
        running[-1].stop()


def colour(caches: Caches, block: int, number: int) -> None:
    for cache in caches:
        for arrays in cache.values():
            for array in arrays:
                array[block].view(np.uint8)[...] = number % 251 + 1


def holds(caches: Caches, block: int, number: int) -> bool:
    layers = (array for cache in caches for arrays in cache.values() for array in arrays)
    return all(bool((array[block].view(np.uint8) == number % 251 + 1).all()) for array in layers)


def outcome(result: TaskResult) -> tuple[Status, str]:
    return result.status, result.error.code if result.error is not None else ""


class Engine:
    """Colours a block, writes it under a key of its own, and remembers what was called stored."""

    def __init__(self, client: Client, caches: Caches) -> None:
        self.client = client
        self.caches = caches
        self.stored: dict[str, int] = {}
        self.told: list[tuple[Status, str]] = []
        self._number = 0

    async def write(self, block: int = 3) -> TaskResult:
        self._number += 1
        number, key = self._number, f"key-{self._number}"
        colour(self.caches, block, number)
        task = WriteStorageTask(task_id=f"w{number}", keys=[key], gpu_block_ids=[block], timeout=60.0)
        result = await self.client.submit(task)
        self.told.append(outcome(result))
        if result.block_ids:
            self.stored[key] = number
        return result

    async def wrong_keys(self) -> list[str]:
        """Of a sample of what was called stored; those whose bytes are others than were written."""
        wrong = []
        for key, number in [*self.stored.items()][:SAMPLE] + [*self.stored.items()][-SAMPLE:]:
            colour(self.caches, 5, number + 1)
            task = ReadStorageTask(task_id=f"r {key} {self.client.boot_id}", keys=[key], gpu_block_ids=[5])
            if not (await self.client.submit(task)).block_ids or not holds(self.caches, 5, number):
                wrong.append(key)
        return wrong


async def test_an_engine_that_goes_on_after_a_kill_stores_nothing_wrong(tmp_path: Path) -> None:
    with daemons(tmp_path) as running:
        async with Client(running[0].endpoint) as client:
            engine = Engine(client, await attach(client, RANKS))
            heard = asyncio.Event()
            client.on_new_boot = heard.set
            for _ in range(WRITES):
                await engine.write()
            going_on = asyncio.ensure_future(engine.write())
            running[0].kill()
            running.append(await asyncio.to_thread(start, TREE, tmp_path))
            await going_on
            await wait_for(heard.wait(), 60)
            for _ in range(WRITES):
                await engine.write()
            assert set(engine.told[-WRITES:]) == {(Status.REJECTED, "not_attached")}
            assert client.outdated == list(range(RANKS))
            renewed = await client.reattach(60)
            assert sorted(renewed) == list(range(RANKS))
            engine.caches = [renewed[rank] for rank in range(RANKS)]
            for _ in range(WRITES):
                assert (await engine.write()).status is Status.OK
            assert await engine.wrong_keys() == []


async def test_the_daemon_refuses_a_process_that_pushes_while_no_process_has_attached(tmp_path: Path) -> None:
    """As FastDeploy does it: workers attach, the scheduler pushes."""
    with daemons(tmp_path) as running:
        async with Client(running[0].endpoint) as scheduler, attached(running[0].endpoint) as worker:
            task = SwapOutTask(task_id="o", gpu_block_ids=[1], cpu_block_ids=[2])
            assert (await scheduler.submit(task)).status is Status.OK
            told = asyncio.Event()
            scheduler.on_new_boot = told.set
            running[0].kill()
            running.append(await asyncio.to_thread(start, TREE, tmp_path))
            await wait_for(told.wait(), 60)
            await scheduler.wait_ready(60)
            write = WriteStorageTask(task_id="w", keys=["k"], gpu_block_ids=[1])
            assert outcome(await scheduler.submit(write)) == (Status.REJECTED, "not_attached")
            report = await scheduler.stats()
            assert report["rejects"]["not_attached"] == 1
            assert report["cache"]["unmapped"] == list(range(RANKS))
            await until(lambda: "not_attached" in running[1].log, within=30)  # a thread writes the log
            await worker.reattach(60)
            back = SwapInTask(task_id="i", gpu_block_ids=[1], cpu_block_ids=[2])
            assert outcome(await scheduler.submit(back)) == (Status.REJECTED, "empty_block")
            write = WriteStorageTask(task_id="w2", keys=["k"], gpu_block_ids=[1])
            assert (await scheduler.submit(write)).status is Status.OK


async def test_an_engine_that_has_gone_has_nothing_mapped(tmp_path: Path) -> None:
    with daemons(tmp_path) as running:
        async with Client(running[0].endpoint) as client:
            write = WriteStorageTask(task_id="w", keys=["k"], gpu_block_ids=[1])
            assert outcome(await client.submit(write)) == (Status.REJECTED, "not_attached")
            async with attached(running[0].endpoint):
                assert (await client.submit(write)).status is Status.OK
            # Two connections have no order between them: a task may overtake the goodbye of another client.
            await stats_until(client, lambda stats: stats["cache"]["unmapped"] == list(range(RANKS)), within=60)
            again = WriteStorageTask(task_id="w2", keys=["k"], gpu_block_ids=[1])
            assert outcome(await client.submit(again)) == (Status.REJECTED, "not_attached")


def test_the_blocking_client_hears_of_it_and_may_reattach_from_there(tmp_path: Path) -> None:
    with daemons(tmp_path) as running, SyncClient(running[0].endpoint) as client:
        for rank in range(RANKS):
            client.attach(rank)
        done = threading.Event()
        found: list[dict[int, Any]] = []

        def again() -> None:
            found.append(client.reattach(60))
            done.set()

        client.on_new_boot = again
        assert client.on_new_boot is again
        running[0].kill()
        running.append(start(TREE, tmp_path))
        assert done.wait(90)
        assert sorted(found[0]) == list(range(RANKS))
        assert client.outdated == []
        write = WriteStorageTask(task_id="w", keys=["k"], gpu_block_ids=[1])
        assert client.submit(write).status is Status.OK
