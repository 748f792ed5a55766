"""What the core remembers: its bounds in bytes, that the bytes counted are the real ones, that tasks are let go."""

from __future__ import annotations

import functools
import gc
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.control.test_dispatcher import CLIENT, Desk, read, write
from tests.support.dispatch import limits
from transferd.control import instructions as do
from transferd.control.admission import ID_BYTES, KEY_BYTES, RESULT_BYTES, TASK_BYTES, ResultCache, argument_bytes
from transferd.control.dispatcher import Dispatcher
from transferd.observability.recorder import Recorder
from transferd.tasks import (
    ErrorInfo,
    RankOutcome,
    RankResult,
    Status,
    SwapOutTask,
    Task,
    TaskResult,
    TokenIds,
    WriteStorageTask,
)

KEYS = 4000
WIDE = limits(device_blocks=10**8, host_blocks=10**8, block_bytes=1, max_queued_tasks=10**6, max_queued_bytes=10**12)


def from_the_wire(task: Task) -> Task:
    """As the daemon holds it: nothing shared with other tasks, integers included."""
    raw = msgspec.msgpack.encode(task, enc_hook=lambda ids: ids.to_bytes())
    return msgspec.msgpack.decode(raw, type=type(task), dec_hook=lambda _, data: TokenIds.from_bytes(data))


def chain(number: int, blocks: int, *, key_length: int = 16, tokens: int = 0, first: int = 1000) -> WriteStorageTask:
    return WriteStorageTask(
        task_id=f"t{number}",
        keys=[f"{number}-{i}".ljust(key_length, ".") for i in range(blocks)],
        gpu_block_ids=list(range(first, first + blocks)),
        token_ids=TokenIds([7] * tokens) if tokens else None,
    )


def swap(number: int, blocks: int) -> SwapOutTask:
    ids = list(range(1000 + number * blocks, 1000 + (number + 1) * blocks))
    return SwapOutTask(task_id=f"t{number}", gpu_block_ids=ids, cpu_block_ids=ids)


def traced(work: Callable[[], object]) -> int:
    """Bytes that are held after `work` and were not before; what it returns is kept until they are counted."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = work()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        del kept
        return held
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sharing", [1, 2], ids=["blocks of its own", "two tasks name the same blocks"])
@pytest.mark.parametrize(
    "make",
    [
        lambda i: chain(i, 1, first=1000 + i),
        lambda i: chain(i, KEYS, first=1000 + KEYS * i),
        lambda i: chain(i, KEYS, key_length=64, first=1000 + KEYS * i),
        lambda i: chain(i, 4, tokens=100_000, first=1000 + 4 * i),
        lambda i: swap(i, KEYS),
    ],
    ids=["one block", "4,000 blocks", "long keys", "many tokens", "swap"],
)
def test_the_bytes_counted_for_a_task_are_what_it_holds(make: Callable[[int], Task], sharing: int) -> None:
    # A kilobyte that the interpreter keeps for itself is nothing beside many small tasks, nor beside a few large ones.
    count = 200 if len(make(0).gpu_block_ids) < KEYS else 10

    def queue(dispatcher: Dispatcher) -> None:
        for i in range(count):
            task = msgspec.structs.replace(make(i // sharing), task_id=f"t{i}")
            dispatcher.submit(0.0, CLIENT, i, from_the_wire(task))

    rehearsal, *measured = dispatchers = [Dispatcher(WIDE) for _ in range(3)]
    for each in dispatchers:
        each.hold(0.0, "pause")
    queue(rehearsal)  # allocates what is made once, such as coverage's notes on lines: no task holds that
    # The least of two: what other threads of the test run allocate meanwhile only adds.
    held = min(traced(functools.partial(queue, each)) for each in measured)
    dispatcher = measured[0]
    counted = dispatcher.hazards.nbytes
    assert dispatcher.lanes.queued == count
    least = 0.75 if sharing > 1 else 0.4  # the table holds blocks of one task's own more compactly
    assert least * counted <= held <= 1.1 * counted, (held, counted)


@pytest.mark.parametrize("blocks", [1, KEYS])
def test_the_bytes_counted_for_a_kept_result_are_what_it_holds(blocks: int) -> None:
    def result(i: int) -> TaskResult:
        error = ErrorInfo("storage_full", f"{i} no room " + "x" * 300)
        ranks = [RankResult(rank=rank, status=Status.PARTIAL, error=error, copy_s=0.1) for rank in range(8)]
        ids = list(range(1000 + blocks * i, 1000 + blocks * (i + 1)))
        return TaskResult(task_id=f"t{i}", status=Status.PARTIAL, block_ids=ids, ranks=ranks, error=error)

    memory = ResultCache(60.0, 10**6, 10**12)

    def keep() -> None:
        for i in range(200):
            memory.keep(from_the_wire(result(i)), i, 0, 0.0)  # type: ignore[arg-type]

    held = traced(keep)
    assert 0.75 * memory.nbytes <= held <= 1.1 * memory.nbytes, (held, memory.nbytes)
    kept = memory.recall("t3", 0.0)
    assert kept is not None
    assert kept.result == result(3), "packed, and whole again"


def test_a_result_that_no_message_can_hold_is_not_kept_and_breaks_nothing() -> None:
    memory = ResultCache(60.0, 10, 10**6)
    error = ErrorInfo("storage_io", "cannot read /data/\udcff")
    memory.keep(TaskResult(task_id="t", status=Status.FAILED, error=error), 1, 0, 0.0)
    assert (len(memory), memory.nbytes) == (0, 0)


def test_a_task_that_would_pass_the_bound_in_bytes_is_busy_and_one_alone_never_is() -> None:
    size = argument_bytes(write("w", 1))
    assert size == TASK_BYTES + KEY_BYTES + ID_BYTES + len("w-1")
    desk = Desk(limits(max_queued_bytes=2 * size))
    desk.submit(write("a", 1))
    desk.submit(write("b", 2))
    refused = desk.answers[desk.submit(write("c", 3))]
    assert (refused.status, refused.error and refused.error.code) == (Status.BUSY, "queue_full")
    assert refused.error is not None
    assert f"hold {2 * size} bytes" in refused.error.message
    assert refused.retry_after is not None
    desk.finish("a")
    desk.submit(write("c", 3))
    assert desk.started == ["a", "b", "c"], "exactly the bound is within it"
    one_less = Desk(limits(max_queued_bytes=2 * size - 1))
    one_less.submit(write("a", 1))
    assert one_less.answers[one_less.submit(write("b", 2))].status is Status.BUSY
    alone = Desk(limits(max_queued_bytes=1))
    alone.submit(write("a", 1))
    assert alone.started == ["a"]


def test_token_ids_count_although_the_storage_does_not_need_them() -> None:
    plain, with_tokens = chain(1, 3), chain(1, 3, tokens=1000)
    assert argument_bytes(with_tokens) - argument_bytes(plain) == 4000


def test_a_cancelled_tasks_bytes_count_while_others_are_ordered_behind_it() -> None:
    """A client that pushes and cancels for ever, behind a task that runs for long."""
    desk = Desk(limits(max_queued_bytes=20 * argument_bytes(write("w", 1))))
    desk.submit(read("long", 1))
    busy = 0
    for i in range(50):
        seq = desk.submit(write(f"w{i}", 1))
        if seq in desk.answers:
            busy += 1
        else:
            desk.hear(desk.dispatcher.cancel(desk.now, f"w{i}"))
    assert busy >= 30
    assert desk.dispatcher.lanes.queued == 0
    desk.finish("long")
    assert desk.dispatcher.hazards.nbytes == 0


@pytest.mark.parametrize("ending", ["done", "cancelled while queued", "expired", "left behind by a rank"])
def test_a_task_that_is_answered_lets_go_of_its_arguments(ending: str) -> None:
    """Its alarm is set for an hour from now; nothing of the task waits for it."""
    desk = Desk()

    class Watched(TokenIds):
        __slots__ = ("__weakref__",)

    def submit() -> weakref.ref[Watched]:
        tokens = Watched([1, 2, 3])
        desk.submit(write("t", 1, timeout=2.0 if ending == "expired" else 3600.0, token_ids=tokens))
        desk.tasks["t"] = msgspec.structs.replace(desk.tasks["t"], token_ids=None)  # the test lets go, too
        return weakref.ref(tokens)

    if ending in ("cancelled while queued", "expired"):
        desk.submit(read("before", 1, timeout=3600.0))
    watched = submit()
    assert watched() is not None
    match ending:
        case "done":
            desk.finish("t")
        case "cancelled while queued":
            desk.hear(desk.dispatcher.cancel(desk.now, "t"))
        case "expired":
            desk.pass_time(2.0)
        case "left behind by a rank":
            desk.finish("t", moved=0, missing=(1,))
    assert desk.published == ["t"]
    gc.collect()
    assert watched() is None


def test_results_kept_are_bounded_in_bytes() -> None:
    desk = Desk(limits(max_result_bytes=10_000))
    for i in range(20):
        desk.submit(write(f"w{i}", 1))
        desk.finish(f"w{i}")
    results = desk.dispatcher.results
    one = results.nbytes // len(results)
    assert len(results) == 10_000 // one
    again = desk.submit(write("w19", 1))
    assert desk.answers[again].status is Status.OK, "the latest are kept"
    assert desk.started.count("w19") == 1
    desk.submit(write("w0", 1))
    assert desk.started.count("w0") == 2, "the oldest are forgotten"


def test_results_that_fill_the_bound_exactly_are_kept() -> None:
    def kept(most_bytes: int) -> int:
        memory = ResultCache(60.0, 10, most_bytes)
        for i in range(3):
            memory.keep(TaskResult(task_id=f"t{i}", status=Status.OK), i, 0, 0.0)
        return len(memory)

    one = RESULT_BYTES + len(msgspec.msgpack.encode(TaskResult(task_id="t0", status=Status.OK)))
    assert [kept(3 * one), kept(3 * one - 1), kept(one), kept(one - 1)] == [3, 2, 1, 0]


def test_a_result_larger_than_the_bound_is_answered_and_not_kept() -> None:
    desk = Desk(limits(max_result_bytes=100))
    seq = desk.submit(write("w", 1))
    desk.finish("w")
    assert desk.answers[seq].status is Status.OK
    assert (len(desk.dispatcher.results), desk.dispatcher.results.nbytes) == (0, 0)


def test_memory_after_many_large_tasks_is_that_after_few() -> None:
    """The whole of it in a daemon: python -m benchmarks.growth --tasks."""
    few, many, blocks = 50, 200, 500
    dispatcher = Dispatcher(limits(device_blocks=blocks, max_result_bytes=64 * 1024), recorder=Recorder(capacity=16))
    marks: list[int] = []
    gc.collect()
    tracemalloc.start()
    try:
        for i in range(many):
            run_one(dispatcher, chain(i, blocks, first=0, tokens=100))
            if i + 1 in (few, many):
                gc.collect()
                marks.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(dispatcher.results) < few, "the bound in bytes was reached"
    assert marks[1] - marks[0] < 300 * (many - few), "less a task than three of its 500 keys"


def run_one(dispatcher: Dispatcher, task: WriteStorageTask) -> None:
    dispatcher.submit(0.0, CLIENT, 0, from_the_wire(task))
    merged = task.merge([RankOutcome(rank, range(task.blocks), 1) for rank in range(2)])
    answers: list[Any] = dispatcher.round_merged(0.0, task.task_id, merged, ())
    assert any(isinstance(answer, do.Reply) and answer.result.status is Status.OK for answer in answers)
