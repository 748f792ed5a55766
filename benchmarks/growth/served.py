"""What daemons in processes of their own take for a unit of work, as what they serve grows."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.growth.axis import Axis, grow
from transferd.cli.bench.harness import Row
from transferd.client.client import Client
from transferd.client.engines import Engine
from transferd.client.launch import running
from transferd.runtime.compat import Runner
from transferd.tasks import ReadStorageTask, Status, SwapOutTask, Task, WriteStorageTask

BLOCKS = Axis("blocks of a swap", "swap, blocks of 256 B: {}", "us/block", (1, 10, 100, 1_000, 10_000, 100_000))
RANKS = Axis("ranks", "swap of a block, ranks: {}", "us/rank", (1, 2, 4, 8, 16))
ENGINES = Axis("engines", "swaps at once, engines: {}", "us/task", (1, 2, 4, 8, 16))
CLIENTS = Axis("clients", "swaps at once, clients: {}", "us/task", (1, 4, 16, 64))
KEYS = Axis("keys of a lookup", "lookup, keys: {}", "us/key", (1, 10, 100, 1_000, 10_000, 65_536))
OBJECT_KIB = Axis("KiB of an object", "read of 16 MiB, KiB of an object: {}", "us/MiB", (4, 64, 1_024, 16_384))

TINY = {"layers": 1, "kv_heads": 1, "head_dim": 16, "block_size": 4}  # blocks of 256 bytes
ASKED = 10  # times in one measurement, of which the median counts
PIPELINED = 400  # tasks of all engines or clients together, in one measurement
READ_MIB = 16

numbers = itertools.count()


def swap(gpu_blocks: Sequence[int], cpu_blocks: Sequence[int]) -> SwapOutTask:
    return SwapOutTask(task_id=f"t{next(numbers)}", gpu_block_ids=list(gpu_blocks), cpu_block_ids=list(cpu_blocks))


class Served:
    """Clients of daemons that live until the end of one axis, on one event loop."""

    def __init__(self, runner: Runner, parts: contextlib.ExitStack) -> None:
        self.run = runner.run
        self._parts = parts

    def daemon(self, tree: dict[str, Any]) -> str:
        """Start one. Returns its endpoint."""
        directory = self._parts.enter_context(tempfile.TemporaryDirectory(prefix="transferd-bench-"))
        return self._parts.enter_context(running(tree, Path(directory))).endpoint

    async def client(self, endpoint: str, ranks: int = 1) -> Client:
        """Connect one that has mapped the memory of `ranks` ranks."""
        client = Client(endpoint)
        await client.connect()
        self._parts.callback(lambda: self.run(client.close()))
        for rank in range(ranks):
            await client.attach(rank)
        return client

    async def engine(self, endpoint: str, name: str) -> Client:
        """Connect one that has registered an engine of one rank."""
        client = Client(endpoint, engine=name, await_ready=False)
        await client.connect()
        self._parts.callback(lambda: self.run(client.close()))
        layout = TINY | {"device_blocks": 64, "ownership": "create"}
        await client.register(Engine(ranks=1, model=name, layout=layout, host_blocks=64))
        await client.wait_ready(60)
        await client.attach(0)
        return client


@contextlib.contextmanager
def serving() -> Iterator[Served]:
    with Runner() as runner, contextlib.ExitStack() as parts:
        yield Served(runner, parts)


async def ok(client: Client, task: Task) -> None:
    result = await client.submit(task)
    if result.status is not Status.OK:
        raise RuntimeError(f"a task was answered {result}")


async def median_us(ask: Callable[[], Awaitable[object]]) -> float:
    seconds = []
    for _ in range(ASKED):
        before = time.perf_counter()
        await ask()
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds) * 1e6


async def together_us(clients: Sequence[Client]) -> float:
    """Microseconds per task if all clients push at once, PIPELINED tasks together."""
    share = PIPELINED // len(clients)
    tasks = [(client, swap([i % 64], [i % 64])) for client in clients for i in range(share)]
    before = time.perf_counter()
    await asyncio.gather(*(ok(client, task) for client, task in tasks))
    return (time.perf_counter() - before) / len(tasks) * 1e6


def block_rows() -> list[Row]:
    most = max(BLOCKS.sizes)
    cache = TINY | {"ranks": 1, "device_blocks": 2 * most, "host_blocks": 2 * most}
    with serving() as served:
        client = served.run(served.client(served.daemon({"cache": cache, "storage": {"backend": "none"}})))

        async def swapped(count: int) -> float:
            ids = range(0, 2 * count, 2)  # none beside another
            return await median_us(lambda: ok(client, swap(ids, ids[::-1]))) / count

        return grow(BLOCKS, lambda count: served.run(swapped(count)))


def rank_rows() -> list[Row]:
    with serving() as served:
        clients = {}
        for ranks in RANKS.sizes:
            cache = TINY | {"kv_heads": ranks, "ranks": ranks, "device_blocks": 64, "host_blocks": 64}
            endpoint = served.daemon({"cache": cache, "storage": {"backend": "none"}})
            clients[ranks] = served.run(served.client(endpoint, ranks))

        async def swapped(ranks: int) -> float:
            return await median_us(lambda: ok(clients[ranks], swap([1], [2]))) / ranks

        return grow(RANKS, lambda ranks: served.run(swapped(ranks)))


def engine_rows() -> list[Row]:
    with serving() as served:
        endpoint = served.daemon({"storage": {"backend": "none"}})
        engines = [served.run(served.engine(endpoint, f"e{i}")) for i in range(max(ENGINES.sizes))]
        return grow(ENGINES, lambda count: served.run(together_us(engines[:count])))


def client_rows() -> list[Row]:
    cache = TINY | {"ranks": 1, "device_blocks": 64, "host_blocks": 64}
    with serving() as served:
        endpoint = served.daemon({"cache": cache, "storage": {"backend": "none"}})
        clients = [served.run(served.client(endpoint)) for _ in range(max(CLIENTS.sizes))]
        return grow(CLIENTS, lambda count: served.run(together_us(clients[:count])))


def key_rows() -> list[Row]:
    keys = [f"key {i}" for i in range(max(KEYS.sizes))]
    cache = TINY | {"ranks": 1, "device_blocks": 1_000}
    with serving() as served:
        client = served.run(served.client(served.daemon({"cache": cache, "storage": {"backend": "memory"}})))

        async def fill() -> None:
            for start in range(0, len(keys), 1_000):
                part = keys[start : start + 1_000]
                blocks = list(range(len(part)))
                await ok(client, WriteStorageTask(task_id=f"w{start}", keys=part, gpu_block_ids=blocks))

        async def looked_up(count: int) -> float:
            asked = keys[:count]
            if not all(await client.exists(asked)):
                raise RuntimeError("a key that was stored is not there")
            return await median_us(lambda: client.exists(asked)) / count

        served.run(fill())
        return grow(KEYS, lambda count: served.run(looked_up(count)))


def object_rows() -> list[Row]:
    with serving() as served:
        clients: dict[int, tuple[Client, list[str]]] = {}
        for kib in OBJECT_KIB.sizes:
            count = READ_MIB * 1024 // kib
            cache = {"ranks": 1, "layers": 4, "kv_heads": 1, "head_dim": 64, "block_size": kib, "device_blocks": count}
            endpoint = served.daemon({"cache": cache, "storage": {"backend": "memory"}})
            client = served.run(served.client(endpoint))
            keys = [f"key {i}" for i in range(count)]
            task = WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=list(range(count)))
            served.run(ok(client, task))
            clients[kib] = client, keys

        async def read(kib: int) -> float:
            client, keys = clients[kib]

            async def once() -> None:
                blocks = list(range(len(keys)))
                await ok(client, ReadStorageTask(task_id=f"r{next(numbers)}", keys=keys, gpu_block_ids=blocks))

            return await median_us(once) / READ_MIB

        return grow(OBJECT_KIB, lambda kib: served.run(read(kib)))


AXES: dict[Axis, Callable[[], list[Row]]] = {
    BLOCKS: block_rows,
    RANKS: rank_rows,
    ENGINES: engine_rows,
    CLIENTS: client_rows,
    KEYS: key_rows,
    OBJECT_KIB: object_rows,
}
