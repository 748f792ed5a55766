"""Does a task get dearer with more tasks queued, a block with more blocks, and does memory stay bounded?

    python benchmarks/growth.py [--format json]
    python benchmarks/growth.py --tasks 100000 [--format json]

Three questions, each row against its smallest case:

* dispatch: the real dispatcher alone, no I/O; n tasks are queued behind a pause, then all run to their end;
* swap: one task of n blocks to a daemon in a process of its own;
* memory of such a daemon after it was flooded again and again with more tasks than its queue takes.

With --tasks a fourth one instead: a daemon's memory after so many tasks of 4,000 keys each, against after 1,000.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from transferd.cli.bench.harness import RUNS, Row, machine, report, row
from transferd.client.client import Client
from transferd.client.launch import running
from transferd.control import events as ev
from transferd.control.admission import Limits
from transferd.control.dispatcher import Dispatcher
from transferd.daemon.process import quiet_collector
from transferd.tasks import RankOutcome, Status, SwapOutTask, TokenIds, WriteStorageTask

QUEUES = (100, 1_000, 10_000, 100_000)
LEAST_TASKS = 20_000  # per measurement: a small queue is filled and emptied that often
KEYS = 4_000  # of a large task
FEW = 1_000  # large tasks, after which memory should have found its level
AT_ONCE = 8
SWAPS = (16, 64, 256, 1024)  # blocks of a task
FLOOD = 20_000  # tasks pushed at once
FLOOD_RANKS = 2
FLOODS = 10
QUEUE_BOUND = 1024


def per_task_us(queued: int) -> float:
    """Microseconds per task, from submission to answer, with so many queued at once."""
    gc.collect()
    rounds = max(1, LEAST_TASKS // queued)
    return statistics.median(_queue_and_run(queued) for _ in range(rounds)) / queued * 1e6


def _limits(queued: int) -> Limits:
    """Room for this many small swaps, each of a block of its own; the end of one starts the next."""
    much = 2**40
    return Limits(
        ranks=1,
        device_blocks=queued,
        host_blocks=queued,
        block_bytes=65536,
        storage=False,
        direct=False,
        token_block=0,
        only_flush=False,
        max_queued=queued,
        max_queued_bytes=much,
        max_bytes=much,
        lane_depth=4,
        deadline_slack=1.0,
        result_ttl=60.0,
        max_results=1024,
        max_result_bytes=much,
    )


def _queue_and_run(queued: int) -> float:
    dispatcher = Dispatcher(_limits(queued))
    dispatcher.handle(ev.PauseRequested(0.0))
    tasks = [SwapOutTask(task_id=str(i), gpu_block_ids=[i], cpu_block_ids=[i]) for i in range(queued)]
    before = time.perf_counter()
    for seq, task in enumerate(tasks):
        dispatcher.handle(ev.TaskSubmitted(b"c", seq, task, 0.0))
    started = [i for i in dispatcher.handle(ev.ResumeRequested(0.0)) if isinstance(i, ev.Start)]
    while started:
        start = started.pop()
        merged = start.task.merge([RankOutcome(0, range(1), 1)])
        instructions = dispatcher.handle(ev.RoundMerged(start.task.task_id, merged, (), 0.0))
        started += [i for i in instructions if isinstance(i, ev.Start)]
    seconds = time.perf_counter() - before
    assert dispatcher.empty
    return seconds


def grow(sizes: Sequence[int], measure: Callable[[int], float], name: str, unit: str) -> list[Row]:
    """All sizes in turn, RUNS times; each against the smallest."""
    values: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(RUNS + 1):
        for size in sizes:
            value = measure(size)
            if number:  # the first is warm-up
                values[size].append(value)
    smallest = statistics.median(values[sizes[0]])
    return [row(name.format(size), values[size], unit, smallest, f"{unit} at {sizes[0]:,}") for size in sizes]


def swap_rows() -> list[Row]:
    """Microseconds per block of a swap task, the way there and back included."""
    blocks = max(SWAPS)
    tree = {
        "cache": {"ranks": 1, "layers": 4, "block_size": 16, "device_blocks": 2 * blocks, "host_blocks": 2 * blocks},
        "storage": {"backend": "none"},
    }
    number = iter(range(10**9))
    with (
        tempfile.TemporaryDirectory(prefix="transferd-bench-") as directory,
        running(tree, Path(directory)) as daemon,
        asyncio.Runner() as runner,
    ):
        client = Client(daemon.endpoint)
        runner.run(client.connect())
        runner.run(client.attach(0))

        async def swap(count: int) -> float:
            ids = list(range(0, 2 * count, 2))  # none beside another
            seconds: list[float] = []
            for _ in range(10):
                task = SwapOutTask(task_id=f"t{next(number)}", gpu_block_ids=ids, cpu_block_ids=ids[::-1])
                before = time.perf_counter()
                result = await client.submit(task)
                seconds.append(time.perf_counter() - before)
                assert result.status is Status.OK, result
            return statistics.median(seconds) / count * 1e6

        rows = grow(SWAPS, lambda count: runner.run(swap(count)), "swap task of {:,} blocks of 64 KiB", "us/block")
        runner.run(client.close())
    return rows


def memory_rows() -> list[Row]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--tasks", type=int, help="measure memory after so many large tasks, and nothing else")
    arguments = parser.parse_args()
    form = arguments.format
    before = machine()
    if arguments.tasks is not None:
        rows = task_rows(arguments.tasks)
    else:
        rows = swap_rows() + memory_rows()
        quiet_collector()  # as in the daemon; here it is this process that dispatches
        rows = grow(QUEUES, per_task_us, "dispatch, {:,} tasks queued", "us/task") + rows
    tree = report("growth", before, rows)
    if form == "json":
        print(json.dumps(tree))
    else:
        from rich.console import Console

        from transferd.cli.bench.harness import show

        show(tree, Console())


if __name__ == "__main__":
    main()
