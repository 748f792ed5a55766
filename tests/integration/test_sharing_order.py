"""The order that keeps memory of two processes right: whoever made it, no copy meets a block that somebody else uses.

Copies are held half-way, on one rank, and everything that could go wrong meanwhile is tried: the result, the
next task on the same block, a clear, the engine's end. (docs/adr/0012; FastDeploy saw wrong bytes here, #6144.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.integration.own_memory import OwnMemory
from transferd import Client, Status, SwapInTask, SwapOutTask, WriteStorageTask
from transferd.blocks.layout import build_layout
from transferd.config import Config, from_tree
from transferd.daemon.daemon import Daemon
from transferd.runtime.compat import timeout, wait_for
from transferd.runtime.threads import CLOSE_S, Direction, ThreadPools
from transferd.tiers.segment import attach_arrays

T = TypeVar("T")
RANKS = 2
# 512 KiB a block: too large to be copied on the loop, so that a copy can be held.
CACHE = {"ranks": RANKS, "layers": 2, "kv_heads": 8, "head_dim": 64, "block_size": 128, "device_blocks": 8}


class HeldThreads:
    """Threads that begin a copy when the test lets them, in the order in which it was given."""

    def __init__(self) -> None:
        self._threads = ThreadPools(2)
        self.held: list[asyncio.Event] = []
        self.holding = False

    def open(self) -> None:
        self._threads.open()

    def run(self, direction: Direction, function: Callable[[], T], what: object = None) -> asyncio.Future[T]:
        if not self.holding or direction is Direction.SETUP:
            return self._threads.run(direction, function, what)
        gate = asyncio.Event()
        self.held.append(gate)

        async def later() -> T:
            await gate.wait()
            return await self._threads.run(direction, function, what)

        return asyncio.get_running_loop().create_task(later())

    def release(self) -> None:
        self.holding = False
        for gate in self.held:
            gate.set()

    def under_way(self) -> list[str]:
        return self._threads.under_way()

    def close(self, within: float = CLOSE_S) -> list[str]:
        return self._threads.close(within)


class World:
    """A daemon whose copies can be held, an engine that created the memory or not, and a client."""

    def __init__(self, tmp_path: Path, ownership: str) -> None:
        self.config: Config = from_tree(
            {
                "server": {"endpoint": f"ipc://{tmp_path}/t.sock"},
                "cache": CACHE | {"ownership": ownership},
                "host": {"staging": "8MiB"},
                "storage": {"backend": "memory"},
                "metrics": {"listen": ""},
            }
        )
        self.threads = HeldThreads()
        self.daemon = Daemon(self.config, threads=self.threads)
        self.client = Client(f"ipc://{tmp_path}/t.sock", await_ready=False)
        self._engine: OwnMemory | None = None
        self.caches: list[dict[str, list[np.ndarray[Any, Any]]]] = []

    async def open(self) -> None:
        await self.daemon.open()
        await self.client.connect()
        if self.config.geometry.ownership == "attach":
            self._engine = await OwnMemory(build_layout(self.config.geometry), RANKS).__aenter__()
            for rank in range(RANKS):
                early = await self.client.submit(swap_out("early", 0, 0))
                assert early.error is not None
                assert early.error.code == "starting", "nothing is swapped before every rank is attached"
                await self.client.offer(rank, self._engine.handle(rank))
        await self.client.wait_ready()
        for rank in range(RANKS):
            self.caches.append(attach_arrays(self.daemon.default.cache.handle(b"test", rank).data))

    async def close(self) -> None:
        self.threads.release()
        await self.client.close()
        await self.daemon.stop(lambda: 5.0)
        if self._engine is not None:
            await self._engine.__aexit__()

    def paint(self, block: int, colour: int) -> None:
        for cache in self.caches:
            for arrays in cache.values():
                for array in arrays:
                    array[block].view(np.uint8)[...] = colour

    def colour(self, block: int) -> set[int]:
        """Every byte value in a block, on any rank, plane and layer."""
        arrays = [array for cache in self.caches for layers in cache.values() for array in layers]
        return {int(value) for array in arrays for value in np.unique(array[block].view(np.uint8))}

    async def held(self, count: int) -> None:
        """Wait until so many copies are held."""
        async with timeout(20):
            while len(self.threads.held) < count:  # noqa: ASYNC110 - the daemon tells nobody
                await asyncio.sleep(0.002)

    async def everything_heard(self) -> None:
        """What was on its way to the daemon, and from it, has arrived."""
        for _ in range(3):
            await self.client.ping()


@pytest.fixture(params=["create", "attach"])
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made = World(tmp_path, request.param)
    await made.open()
    yield made
    made.caches.clear()
    await made.close()


def swap_out(task_id: str, gpu: int, cpu: int) -> SwapOutTask:
    return SwapOutTask(task_id=task_id, gpu_block_ids=[gpu], cpu_block_ids=[cpu])


def swap_in(task_id: str, gpu: int, cpu: int) -> SwapInTask:
    return SwapInTask(task_id=task_id, gpu_block_ids=[gpu], cpu_block_ids=[cpu])


async def test_a_result_comes_after_the_last_copy_of_the_last_rank_so_a_block_can_be_used_at_once(
    world: World,
) -> None:
    world.paint(3, 0x11)
    world.threads.holding = True
    result = asyncio.ensure_future(world.client.submit(swap_out("o", 3, 5)))
    await world.held(RANKS)
    world.threads.held[0].set()
    await world.everything_heard()
    assert not result.done(), "rank 0 is done, rank 1 is not"
    world.threads.release()
    assert (await result).status is Status.OK
    world.paint(3, 0x22)
    assert (await world.client.submit(swap_in("i", 4, 5))).status is Status.OK
    assert world.colour(4) == {0x11}


async def test_the_next_task_on_a_block_starts_when_every_rank_has_let_go_of_it(world: World) -> None:
    world.paint(6, 0x66)
    assert (await world.client.submit(swap_out("fill", 6, 6))).status is Status.OK
    world.paint(3, 0x11)
    world.threads.holding = True
    out = await world.client.push(swap_out("o", 3, 5))
    await world.held(RANKS)
    back = await world.client.push(swap_in("i", 3, 6))
    stored = await world.client.push(WriteStorageTask(task_id="w", keys=["k"], gpu_block_ids=[2]))
    async with timeout(20):
        assert (await stored).status is Status.OK, "a task on other blocks waits for nobody"
    world.threads.held[0].set()
    await world.everything_heard()
    assert len(world.threads.held) == RANKS, "the next task on this block has not started"
    assert not out.done()
    world.threads.release()
    assert [(await future).status for future in (out, back)] == [Status.OK] * 2
    assert world.colour(3) == {0x66}
    assert (await world.client.submit(swap_in("check", 4, 5))).status is Status.OK
    assert world.colour(4) == {0x11}, "the first task read what was there before the second"


async def test_memory_is_not_cleared_under_a_copy(world: World) -> None:
    world.paint(3, 0x11)
    world.threads.holding = True
    result = asyncio.ensure_future(world.client.submit(swap_out("o", 3, 5)))
    await world.held(RANKS)
    clearing = asyncio.ensure_future(world.client.clear_cache())
    await world.everything_heard()
    assert not clearing.done()
    assert all(worker.context.device.statistics()["open"] for worker in world.daemon.default.coordinator.workers)
    world.threads.release()
    assert (await result).status is Status.OK
    await clearing
    assert not any(worker.context.device.statistics()["open"] for worker in world.daemon.default.coordinator.workers)


async def test_memory_is_not_unmapped_under_a_copy_when_its_engine_leaves(tmp_path: Path) -> None:
    world = World(tmp_path, "attach")
    await world.open()
    world.paint(3, 0x11)
    async with Client(world.client.endpoint) as other:
        world.threads.holding = True
        result = await other.push(swap_out("o", 3, 5))
        await world.held(RANKS)
        await world.client.close()
        for _ in range(3):
            await other.ping()
        assert world.daemon.default.cache.missing == []
        assert all(worker.context.device.statistics()["open"] for worker in world.daemon.default.coordinator.workers)
        world.threads.release()
        answer = await wait_for(result, 20)
        assert answer.status in (Status.OK, Status.CANCELLED)
        async with timeout(20):
            while world.daemon.default.cache.missing != [0, 1]:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
    world.caches.clear()
    await world.close()
