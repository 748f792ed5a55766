"""What a flood of one engine costs another: its p99 with and without a neighbour that floods, in one daemon.

python benchmarks/engines.py [--rounds 5] [--tasks 200]

Two engines of one rank register with one daemon (file store, temporary directory). The quiet one writes and reads one
block at a time; the other keeps 64 tasks of 16 blocks under way. Rounds alternate, alone and flooded, in one run; the
figure is the median of the rounds' ratios, so that what else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from transferd import Client, Engine, ReadStorageTask, Status, WriteStorageTask
from transferd.client.launch import running

LAYOUT = {"layers": 8, "kv_heads": 4, "head_dim": 128, "block_size": 64, "device_blocks": 256, "ownership": "create"}
UNDER_WAY, BLOCKS = 64, 16
numbers = itertools.count()


@contextlib.asynccontextmanager
async def engine(endpoint: str, name: str) -> AsyncIterator[Client]:
    async with Client(endpoint, engine=name, await_ready=False) as client:
        await client.register(Engine(ranks=1, model=name, layout=LAYOUT))
        await client.wait_ready(30)
        await client.attach(0)
        yield client


async def quiet(client: Client, tasks: int) -> float:
    """Seconds: the p99 of one write and one read of a block, one at a time."""
    took = []
    for _ in range(tasks):
        number = next(numbers)
        for task in (
            WriteStorageTask(task_id=f"w{number}", keys=[f"q{number}"], gpu_block_ids=[number % 256]),
            ReadStorageTask(task_id=f"r{number}", keys=[f"q{number}"], gpu_block_ids=[number % 256]),
        ):
            before = time.perf_counter()
            result = await client.submit(task)
            took.append(time.perf_counter() - before)
            assert result.status is Status.OK, result
    return statistics.quantiles(took, n=100)[98]


async def flood(client: Client, lane: int) -> None:
    """One of the tasks that are always under way; a full queue is what it asks for."""
    while True:
        number = next(numbers)
        keys = [f"f{number}-{i}" for i in range(BLOCKS)]
        blocks = [(lane * BLOCKS + i) % 256 for i in range(BLOCKS)]
        await client.insist(WriteStorageTask(task_id=f"f{number}", keys=keys, gpu_block_ids=blocks, timeout=60))


async def measure(endpoint: str, rounds: int, tasks: int) -> None:
    async with engine(endpoint, "quiet") as one, engine(endpoint, "floods") as other:
        await quiet(one, 20)
        ratios = []
        for _ in range(rounds):
            alone = await quiet(one, tasks)
            floods = [asyncio.ensure_future(flood(other, lane)) for lane in range(UNDER_WAY)]
            await asyncio.sleep(1)
            flooded = await quiet(one, tasks)
            for task in floods:
                task.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
            await other.drain()
            await other.resume()
            ratios.append(flooded / alone)
            print(f"p99 alone {alone * 1e3:.2f} ms, flooded {flooded * 1e3:.2f} ms, ratio {ratios[-1]:.1f}", flush=True)
        print(f"median ratio {statistics.median(ratios):.1f} (from {min(ratios):.1f} to {max(ratios):.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=200)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="transferd-engines-") as directory:
        tree = {"storage": {"backend": "file", "file": {"capacity": "2GiB"}}}
        with running(tree, Path(directory)) as daemon:
            asyncio.run(measure(daemon.endpoint, asked.rounds, asked.tasks))


if __name__ == "__main__":
    main()
