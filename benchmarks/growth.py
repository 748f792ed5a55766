"""Does a task get dearer with more tasks queued, and does memory stay bounded?

The real dispatcher alone, no I/O: n tasks are queued behind a pause, then all are run to their end.
Also: the time of one task's plan against its number of blocks.

    python benchmarks/growth.py [--format json]
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from transferd import events as ev
from transferd.admission import Limits
from transferd.bench.harness import Row, machine, report, row
from transferd.config import CacheSection
from transferd.copyplan import plan_copy
from transferd.daemon import quiet_collector
from transferd.dispatch import Dispatcher
from transferd.layout import build_layout
from transferd.tasks import RankOutcome, SwapOutTask

RUNS = 5
QUEUES = (100, 1_000, 10_000, 100_000)
PLANS = (64, 256, 1024)


def per_task_us(queued: int) -> float:
    """Microseconds per task, from submission to answer, with so many queued at once."""
    limits = Limits(ranks=1, device_blocks=1024, host_blocks=1024, block_bytes=1, max_queued=queued, max_results=1024)
    dispatcher = Dispatcher(limits)
    dispatcher.handle(ev.PauseRequested(0.0))
    tasks = [SwapOutTask(task_id=str(i), gpu_block_ids=[i % 1024], cpu_block_ids=[i % 1024]) for i in range(queued)]
    before = time.perf_counter()
    for seq, task in enumerate(tasks):
        dispatcher.handle(ev.TaskSubmitted(b"c", seq, task, 0.0))
    started = [i for i in dispatcher.handle(ev.ResumeRequested(0.0)) if isinstance(i, ev.Start)]
    while started:
        task = started.pop().task
        merged = task.merge([RankOutcome(0, range(1), 1)])
        instructions = dispatcher.handle(ev.RoundMerged(task.task_id, merged, (), 0.0))
        started += [i for i in instructions if isinstance(i, ev.Start)]
    seconds = time.perf_counter() - before
    assert dispatcher.empty
    return seconds / queued * 1e6


def plan_us_per_block(blocks: int) -> float:
    """Microseconds per block to plan a swap of so many scattered blocks."""
    layout = build_layout(CacheSection(device_blocks=2 * blocks, host_blocks=2 * blocks))
    ids = list(range(0, 2 * blocks, 2))
    before = time.perf_counter()
    plan_copy(layout.device, ids, layout.host, ids[::-1])
    return (time.perf_counter() - before) / blocks * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    form = parser.parse_args().format
    before = machine()
    quiet_collector()  # as in the daemon
    rows: list[Row] = []
    fewest = 0.0
    for queued in QUEUES:
        values = [per_task_us(queued) for _ in range(RUNS)]
        rows.append(row(f"dispatch, {queued:,} tasks queued", values, "us/task", fewest or min(values), "us at 100"))
        fewest = fewest or rows[0].value
    smallest = 0.0
    for blocks in PLANS:
        values = [plan_us_per_block(blocks) for _ in range(RUNS + 1)][1:]
        rows.append(row(f"copy plan, {blocks} blocks", values, "us/block", smallest or min(values), "us at 64"))
        smallest = smallest or rows[-1].value
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(row("peak memory of all of it", [peak], "MiB", peak, "itself"))
    tree = report("growth", before, rows)
    if form == "json":
        print(json.dumps(tree))
    else:
        from rich.console import Console

        from transferd.bench.harness import show

        show(tree, Console())


if __name__ == "__main__":
    main()
