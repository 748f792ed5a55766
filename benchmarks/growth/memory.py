"""A daemon's memory: after floods of more tasks than its queue takes, and after many large tasks."""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from collections import Counter
from pathlib import Path

from transferd.cli.bench.harness import Row, row
from transferd.client.client import Client
from transferd.client.launch import running
from transferd.tasks import Status, SwapOutTask, TokenIds, WriteStorageTask

KEYS = 4_000  # of a large task
FEW = 1_000  # large tasks, after which memory should have found its level
AT_ONCE = 8
FLOOD = 20_000  # tasks pushed at once
FLOOD_RANKS = 2
FLOODS = 10
QUEUE_BOUND = 1024


def flood_rows() -> list[Row]:
    """A daemon's resident memory after floods of tasks, most of which it has to refuse."""
    tree = {
        "cache": {"ranks": FLOOD_RANKS, "layers": 1, "kv_heads": 1, "head_dim": 16, "block_size": 16},
        "server": {"max_queued_tasks": QUEUE_BOUND, "max_results": QUEUE_BOUND},
        "storage": {"backend": "none"},
    }
    with tempfile.TemporaryDirectory(prefix="transferd-bench-") as directory, running(tree, Path(directory)) as daemon:
        sizes = asyncio.run(_flood(daemon.endpoint, daemon.pid))
    first, half = sizes[0], len(sizes) // 2
    name = f"daemon memory, after {{}} floods of {FLOOD:,} tasks, queue of {QUEUE_BOUND:,}"
    return [
        row(name.format(f"1-{half}"), sizes[:half], "MiB", first, "MiB after the first"),
        row(name.format(f"{half + 1}-{len(sizes)}"), sizes[half:], "MiB", first, "MiB after the first"),
    ]


async def _flood(endpoint: str, pid: int) -> list[float]:
    """MiB after each flood. Every task is answered, once, and none but with ok or busy."""
    sizes: list[float] = []
    async with Client(endpoint) as client:
        for rank in range(FLOOD_RANKS):
            await client.attach(rank)
        for flood in range(FLOODS):
            tasks = [
                SwapOutTask(task_id=f"f{flood}-{i}", gpu_block_ids=[i % 64], cpu_block_ids=[i % 64])
                for i in range(FLOOD)
            ]
            answers = Counter([result.status for result in await asyncio.gather(*map(client.submit, tasks))])
            if set(answers) != {Status.OK, Status.BUSY}:
                raise RuntimeError(f"a flood was answered {answers}")
            sizes.append(_resident_mib(pid))
    return sizes


def task_rows(tasks: int) -> list[Row]:
    """A daemon's resident memory after so many write tasks of KEYS stored keys; all bounds are the default ones."""
    tree = {
        "cache": {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 8, "block_size": 1, "device_blocks": KEYS},
        "storage": {"backend": "memory"},
    }
    with tempfile.TemporaryDirectory(prefix="transferd-bench-") as directory, running(tree, Path(directory)) as daemon:
        marks = asyncio.run(_many_tasks(daemon.endpoint, daemon.pid, tasks))
    few, first = marks[0]
    name = f"daemon memory, after {{:,}} tasks of {KEYS:,} keys"
    return [row(name.format(count), [mib], "MiB", first, f"MiB after {few:,}") for count, mib in marks]


async def _many_tasks(endpoint: str, pid: int, tasks: int) -> list[tuple[int, float]]:
    """MiB after 1,000 tasks, each doubling and all of them, AT_ONCE under way at a time. Every one is ok.

    Each figure goes to stderr at once: the run may take an hour.
    """
    keys, ids = [f"block-{i:011}" for i in range(KEYS)], list(range(KEYS))
    tokens = TokenIds(ids)
    numbers = iter(range(tasks))
    done, marks = 0, {tasks, *itertools.takewhile(lambda mark: mark < tasks, (FEW << i for i in itertools.count()))}
    sizes: list[tuple[int, float]] = []

    async def work(client: Client) -> None:
        nonlocal done
        for number in numbers:
            task = WriteStorageTask(task_id=f"t{number}", keys=keys, gpu_block_ids=ids, token_ids=tokens, timeout=120.0)
            result = await client.submit(task)
            if result.status is not Status.OK:
                raise RuntimeError(f"a task was answered {result}")
            done += 1
            if done in marks:
                sizes.append((done, _resident_mib(pid)))
                print(f"{done:,} tasks: {sizes[-1][1]:.1f} MiB", file=sys.stderr, flush=True)

    async with Client(endpoint) as client:
        await client.attach(rank=0)
        await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))
    return sizes


def _resident_mib(pid: int) -> float:
    """Private memory: shared pools are as large as they were configured."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel does not tell RssAnon")
