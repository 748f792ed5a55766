"""The dispatcher alone, without I/O: many tasks are queued behind a pause, then all run to their end."""

from __future__ import annotations

import gc
import statistics
import time

from benchmarks.growth.axis import Axis
from transferd.config import ServerSection, Size
from transferd.control import instructions as do
from transferd.control.admission import Limits
from transferd.control.dispatcher import Dispatcher
from transferd.tasks import RankOutcome, SwapOutTask

QUEUED = Axis("tasks queued", "dispatch, {} tasks queued", "us/task", (100, 1_000, 10_000, 100_000))
LEAST_TASKS = 20_000  # per measurement: a small queue is filled and emptied that often


def per_task_us(queued: int) -> float:
    """Microseconds per task, from submission to answer, with so many queued at once."""
    gc.collect()
    rounds = max(1, LEAST_TASKS // queued)
    return statistics.median(_queue_and_run(queued) for _ in range(rounds)) / queued * 1e6


def _limits(queued: int) -> Limits:
    """Room for this many small swaps, each of a block of its own; the end of one starts the next."""
    much = Size(2**40)
    return Limits(
        ranks=1,
        device_blocks=queued,
        host_blocks=queued,
        block_bytes=65536,
        storage=False,
        direct=False,
        token_block=0,
        only_flush=False,
        server=ServerSection(
            max_queued_tasks=queued,
            max_queued_bytes=much,
            max_inflight_bytes=much,
            lane_depth=4,
            deadline_slack=1.0,
            result_ttl=60.0,
            max_results=1024,
            max_result_bytes=much,
        ),
    )


def _queue_and_run(queued: int) -> float:
    dispatcher = Dispatcher(_limits(queued))
    dispatcher.hold(0.0, "pause")
    tasks = [SwapOutTask(task_id=str(i), gpu_block_ids=[i], cpu_block_ids=[i]) for i in range(queued)]
    before = time.perf_counter()
    for seq, task in enumerate(tasks):
        dispatcher.submit(0.0, b"c", seq, task)
    started = [i for i in dispatcher.resume(0.0) if isinstance(i, do.Start)]
    while started:
        start = started.pop()
        merged = start.task.merge([RankOutcome(0, range(1), 1)])
        instructions = dispatcher.round_merged(0.0, start.task.task_id, merged, ())
        started += [i for i in instructions if isinstance(i, do.Start)]
    seconds = time.perf_counter() - before
    assert dispatcher.empty
    return seconds
