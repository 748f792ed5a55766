"""Checks of the whole daemon on this GPU: two ranks on one device, over its real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.machine.gpu.machine import DEADLINE_S, Bytes, Failed, Machine, within
from tests.machine.gpu.processes import LARGE, peer
from transferd.blocks.layout import build_layout
from transferd.client.client import Client
from transferd.client.launch import running
from transferd.client.launch import start as start_daemon
from transferd.client.timeline import Timeline
from transferd.config import CacheSection
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, WriteStorageTask
from transferd.tiers.cuda import engine
from transferd.tiers.cuda.engine import Attached, DeviceArray

CACHE: dict[str, Any] = {
    "ranks": 2,
    "layers": 6,
    "kv_heads": 2,
    "head_dim": 64,
    "block_size": 32,
    "device_blocks": 32,
    "host_blocks": 32,
}
LOST_WITHIN_S = 6.0  # the contract says 5


class Engine:
    """The engine in this process: it has mapped both ranks' caches, and reads and writes them by plain copies."""

    def __init__(self, machine: Machine, ranks: list[Attached]) -> None:
        self.machine = machine
        self.driver = machine.driver
        self.ranks = ranks

    def _move(self, array: DeviceArray, block: int, content: Bytes, *, write: bool) -> None:
        size = array.nbytes // array.shape[0]
        there, here = array.address + block * size, content.ctypes.data
        context = self.driver.retain(self.machine.index)
        with self.driver.current(context):
            self.driver.copy(there if write else here, here if write else there, size, 0)
            self.driver.synchronize_stream(0)
        self.driver.release(self.machine.index)

    def arrays(self, rank: int) -> list[DeviceArray]:
        return [array for arrays in self.ranks[rank].caches.values() for array in arrays]

    def read(self, block: int) -> list[Bytes]:
        """A block on every rank, array by array."""
        found = []
        for rank in range(len(self.ranks)):
            for array in self.arrays(rank):
                found.append(np.empty(array.nbytes // array.shape[0], dtype=np.uint8))
                self._move(array, block, found[-1], write=False)
        return found

    def fill(self, block: int, rng: np.random.Generator | None) -> None:
        """Random bytes on every rank; zeros without a generator."""
        for rank in range(len(self.ranks)):
            for array in self.arrays(rank):
                size = array.nbytes // array.shape[0]
                content = np.zeros(size, dtype=np.uint8) if rng is None else rng.integers(0, 256, size, dtype=np.uint8)
                self._move(array, block, content, write=True)


def tree(machine: Machine) -> dict[str, Any]:
    device = "tests.support.cuda.tier:FakeCudaTier" if machine.fake else "cuda"
    return {
        "cache": CACHE | {"device": device, "devices": [machine.index] * 2},
        "host": {"staging": "16MiB"},
        "storage": {"backend": "file"},
    }


async def attached(machine: Machine, client: Client) -> Engine:
    handles = [await client.device_handle(rank) for rank in range(2)]
    for handle in handles:
        if handle["kind"] != "cuda_ipc":
            raise Failed(f"the daemon hands out memory of kind {handle['kind']}")
    return Engine(machine, [engine.attach(handle["data"]) for handle in handles])


async def done(client: Client, task: Task) -> None:
    result = await within(client.submit(task), type(task).__name__)
    if result.status is not Status.OK:
        raise Failed(f"{type(task).__name__} ended {result.status}: {result.error}")


async def a_daemon_moves_blocks_of_two_ranks(machine: Machine) -> str:
    """Write, read, swap out and in through sockets, storage on files; every byte of every rank compared."""
    directory = _directory(machine, "serving")
    with running(tree(machine), directory) as daemon:
        async with Client(daemon.endpoint) as client:
            cache = await attached(machine, client)
            rng = machine.rng()
            ids = rng.permutation(32)[:8].tolist()
            others = [block for block in range(32) if block not in ids][:8]
            for block in ids:
                cache.fill(block, rng)
            before = [cache.read(block) for block in ids]
            keys = [f"key {number}" for number in range(8)]
            await done(client, WriteStorageTask(task_id="write", keys=keys, gpu_block_ids=ids))
            await done(client, SwapOutTask(task_id="out", gpu_block_ids=ids, cpu_block_ids=list(range(8))))
            for how, task in (
                ("read", ReadStorageTask(task_id="read", keys=keys, gpu_block_ids=others)),
                ("swapped in", SwapInTask(task_id="in", gpu_block_ids=others, cpu_block_ids=list(range(8)))),
            ):
                for block in others:
                    cache.fill(block, None)
                await done(client, task)
                for number, block in enumerate(others):
                    if any(not np.array_equal(a, b) for a, b in zip(cache.read(block), before[number], strict=True)):
                        raise Failed(f"block {block}, {how}, is not what was written")
            stats = await client.stats()
            if not machine.fake and (stats["degraded"] or not stats["host"]["pinned"]):
                raise Failed(f"the daemon is degraded: {stats['degraded']}")
            loose = [rank["tier"]["unregistered"] for rank in stats["ranks"]]
            if any(loose):
                raise Failed(f"copies from or to memory that is not registered, by rank: {loose}")
            cache.ranks.clear()
    return f"{json.dumps(stats['tasks'])}"


async def a_task_waits_for_the_timelines_of_both_ranks(machine: Machine) -> str:
    """Pushed before either rank has computed; rank 1 gets there later. Over sockets, through client.timelines."""
    driver = machine.driver
    with running(tree(machine), _directory(machine, "ordered")) as daemon:
        async with Client(daemon.endpoint) as client:
            cache = await attached(machine, client)
            words = [await client.timelines(rank) for rank in range(2)]
            if None in words:
                raise Failed("the daemon's ranks have no timelines")
            timeline, context = Timeline(3), driver.retain(machine.index)
            with driver.current(context):
                stream = driver.create_stream()
            for value in range(1, 6):
                after = timeline.next()
                task = SwapOutTask(task_id=f"out {value}", gpu_block_ids=[5], cpu_block_ids=[6], after=after)
                waiting = await client.push(task)
                for rank in range(2):
                    await asyncio.sleep(0.005)
                    if waiting.done():
                        raise Failed(f"the task ended before rank {rank} had computed: {waiting.result()}")
                    with driver.current(context):
                        for array in cache.arrays(rank):
                            driver.fill(array.address, value, array.nbytes, stream)
                    words[rank].advance(after, stream)
                    with driver.current(context):
                        driver.synchronize_stream(stream)
                result = await within(waiting, "a task whose ranks have computed")
                if result.status is not Status.OK:
                    raise Failed(f"the task ended {result.status}: {result.error}")
                await done(client, SwapInTask(task_id=f"in {value}", gpu_block_ids=[9], cpu_block_ids=[6]))
                if any((part != value).any() for part in cache.read(9)):
                    raise Failed("the copy has bytes that nobody had computed when it was pushed")
            with driver.current(context):
                driver.destroy_stream(stream)
            driver.release(machine.index)
            words.clear()
            cache.ranks.clear()
    return "5 tasks"


async def a_daemon_maps_what_the_engine_offers(machine: Machine) -> str:
    """ownership = attach, over the wire: both ranks' caches are this process's, exported and offered."""
    directory = _directory(machine, "offered")
    sections = tree(machine)
    sections["cache"] |= {"ownership": "attach"}
    layout = build_layout(CacheSection(**CACHE))
    sizes = [layout.device_blocks_of(part.layer) * part.nbytes for part in layout.segments]
    driver, allocations, ranks = machine.driver, [], []
    context = driver.retain(machine.index)
    try:
        with driver.current(context):
            for _ in range(2):
                allocations.append(driver.allocate(sum(size + 256 for size in sizes)))
                caches: dict[str, list[DeviceArray]] = {}
                start = allocations[-1]
                for part, size in zip(layout.segments, sizes, strict=True):
                    shape = (layout.device_blocks_of(part.layer), *part.plane.shape)
                    array = DeviceArray(start, shape, part.plane.numpy_dtype.name, machine.index, None)
                    caches.setdefault(part.plane.name, []).append(array)
                    start += (size + 255) // 256 * 256
                ranks.append(Attached(caches, None))
        daemon = start_daemon(sections, directory, wait=False)
        try:
            async with Client(daemon.endpoint, await_ready=False, connect_timeout=DEADLINE_S) as client:
                for rank, attached_rank in enumerate(ranks):
                    data = engine.export(attached_rank.caches, device=machine.index)
                    await within(client.offer(rank, {"kind": "cuda_ipc", "data": data}), f"the offer of rank {rank}")
                await client.wait_ready(DEADLINE_S)
                cache, rng = Engine(machine, ranks), machine.rng()
                for block in (3, 4, 30):
                    cache.fill(block, rng)
                before = [cache.read(block) for block in (3, 4, 30)]
                await done(client, SwapOutTask(task_id="out", gpu_block_ids=[3, 4, 30], cpu_block_ids=[9, 0, 2]))
                await done(client, SwapInTask(task_id="in", gpu_block_ids=[10, 0, 29], cpu_block_ids=[9, 0, 2]))
                for number, block in enumerate((10, 0, 29)):
                    if any(not np.array_equal(a, b) for a, b in zip(cache.read(block), before[number], strict=True)):
                        raise Failed(f"block {block} of memory that was offered is not what was swapped out")
        finally:
            if daemon.stop():
                raise Failed(f"the daemon did not stop well; its log ends:\n{daemon.log[-2000:]}")
    finally:
        with driver.current(context):
            for address in allocations:
                driver.free(address)
        driver.release(machine.index)
    return "both ranks"


async def a_daemon_is_killed(machine: Machine) -> str:
    """kill -9 with swaps in flight: the engine hears of it, the GPU's memory comes back, the next one serves."""
    directory = _directory(machine, "killed")
    before = machine.free()
    daemon = start_daemon(tree(machine), directory)
    async with Client(daemon.endpoint) as client:
        mapped = await attached(machine, client)
        pending = [
            await client.push(
                SwapOutTask(task_id=f"t{i}", gpu_block_ids=list(range(32)), cpu_block_ids=list(range(32)))
            )
            for i in range(64)
        ]
        daemon.kill()
        killed = time.monotonic()
        results = await within(asyncio.gather(*pending), "futures after the daemon was killed", LOST_WITHIN_S)
        waited = time.monotonic() - killed
        codes = {result.error.code for result in results if result.error is not None}
        if codes - {"daemon_lost"}:
            raise Failed(f"tasks of a daemon that was killed ended with {sorted(codes)}")
        mapped.ranks.clear()  # unmapped, or the memory could not come back
    await _comes_back(machine, before)
    with running(tree(machine), directory) as again:
        async with Client(again.endpoint) as client:
            mapped = await attached(machine, client)
            await done(client, SwapOutTask(task_id="t", gpu_block_ids=[1], cpu_block_ids=[2]))
            mapped.ranks.clear()
    lost = sum(result.error is not None for result in results)
    return f"{lost} of {len(results)} were lost, told after {waited:.1f} s; memory is back"


async def an_engine_is_killed_while_a_copy_waits_for_it(machine: Machine) -> str:
    """kill -9 of an engine that has recorded the event and not got there: what the daemon's copy does then.

    In a daemon of its own, that is killed at the end: a copy that waits for ever would keep this process's memory.
    """
    sections = tree(machine)
    sections["cache"] |= {"ranks": 1, "devices": [machine.index]} | ({} if machine.fake else LARGE)
    blocks, seconds = list(range(8)), 1.0 if machine.fake else 15.0
    before = machine.free()
    daemon = start_daemon(sections, _directory(machine, "orphaned"))
    try:
        async with Client(daemon.endpoint) as client:
            data = (await client.device_handle(0))["data"]
            if not data["event"]:
                return "this device shares no events"
            async with peer(machine) as other:
                await other.ask("attach", data=data)
                await other.ask("late_fill", value=1, before=1 if machine.fake else 200)
                task = SwapOutTask(task_id="waits", gpu_block_ids=blocks, cpu_block_ids=blocks)
                waiting = await client.push(task)
                await other.kill()
            ended, _ = await asyncio.wait({waiting}, timeout=seconds)
            what = f"it ends: {waiting.result().status}" if ended else f"it has not ended after {seconds:.0f} s"
    finally:
        daemon.kill()
    await _comes_back(machine, before)
    return f"{what}; the daemon was killed and its memory is back"


async def _comes_back(machine: Machine, before: int) -> None:
    """Wait until as much device memory is free as before, nearly."""
    give_up = time.monotonic() + DEADLINE_S
    while not machine.fake and before - machine.free() > 8 << 20:
        if time.monotonic() > give_up:
            raise Failed(f"{before - machine.free()} bytes of device memory did not come back")
        await asyncio.sleep(0.1)


def _directory(machine: Machine, name: str) -> Path:
    directory = machine.work / name
    directory.mkdir()
    return directory


CHECKS = (
    a_daemon_moves_blocks_of_two_ranks,
    a_task_waits_for_the_timelines_of_both_ranks,
    a_daemon_maps_what_the_engine_offers,
    a_daemon_is_killed,
    an_engine_is_killed_while_a_copy_waits_for_it,
)
