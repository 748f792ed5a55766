"""Merging nodes says what merging all of their ranks at once would say; refusals and losses name the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferd.client.group import NodeResult, merge_nodes
from transferd.tasks import (
    ErrorInfo,
    RankOutcome,
    ReadStorageTask,
    Status,
    Stop,
    SwapOutTask,
    Task,
    TaskResult,
    WriteStorageTask,
)

BROKEN = ErrorInfo("storage_error", "disk")
A, B = "tcp://a:1", "tcp://b:1"


def read(blocks: int = 4, *, prefix: bool = True) -> ReadStorageTask:
    return ReadStorageTask(
        task_id="r",
        keys=[f"k{i}" for i in range(blocks)],
        gpu_block_ids=[100 + i for i in range(blocks)],
        prefix=prefix,
    )


def sparse(blocks: int = 4) -> ReadStorageTask:
    return read(blocks, prefix=False)


def write(blocks: int = 4) -> WriteStorageTask:
    return WriteStorageTask(
        task_id="w", keys=[f"k{i}" for i in range(blocks)], gpu_block_ids=[100 + i for i in range(blocks)]
    )


def swap(blocks: int = 4) -> SwapOutTask:
    return SwapOutTask(task_id="s", gpu_block_ids=[100 + i for i in range(blocks)], cpu_block_ids=list(range(blocks)))


def answer(task: Task, outcomes: Sequence[RankOutcome], generation: str = "g") -> TaskResult:
    """What a daemon answers whose ranks had these outcomes."""
    merged = task.merge(outcomes)
    return TaskResult(
        task_id=task.task_id,
        status=merged.status,
        block_ids=merged.block_ids,
        ranks=merged.ranks,
        error=merged.error,
        bytes=merged.bytes,
        generation=generation,
        boot_id="boot",
    )


def ended(status: Status, code: str, **more: float) -> TaskResult:
    """What a daemon, or the client for it, answers without any rank."""
    return msgspec.structs.replace(
        TaskResult(task_id="t", status=status, error=ErrorInfo(code, "why"), generation="g", boot_id="boot"), **more
    )


def nodes(*results: TaskResult, ranks: int = 2, taken_back: Sequence[int] = ()) -> list[NodeResult]:
    return [
        NodeResult(f"tcp://{chr(97 + i)}:1", range(i * ranks, (i + 1) * ranks), result, i in taken_back)
        for i, result in enumerate(results)
    ]


@st.composite
def groups(draw: st.DrawFn) -> tuple[Task, list[list[RankOutcome]]]:
    """A task, and by node the outcomes of its ranks, numbered within the node."""
    blocks = draw(st.integers(1, 5))
    makers: list[Callable[[int], Task]] = [read, sparse, write, swap]
    task = draw(st.sampled_from(makers))(blocks)
    reason = draw(st.none() | st.sampled_from(list(Stop)))
    group = []
    for _ in range(draw(st.integers(1, 3))):
        outcomes = []
        for rank in range(draw(st.integers(1, 3))):
            moved: Sequence[int] = draw(st.sets(st.integers(0, blocks - 1)).map(sorted) | st.just(range(blocks)))
            whole = len(moved) == blocks
            error = None if whole else draw(st.none() | st.just(BROKEN))
            stop = None if whole else reason
            if error is None and stop is None and not whole and not isinstance(task, ReadStorageTask):
                error = BROKEN  # a rank that stores or swaps less than all says why
            outcomes.append(RankOutcome(rank, moved, bytes=len(moved), error=error, stop=stop))
        group.append(outcomes)
    return task, group


@given(groups())
def test_a_group_says_what_one_daemon_with_all_of_its_ranks_would_say(
    case: tuple[Task, list[list[RankOutcome]]],
) -> None:
    task, group = case
    everybody, parts, first = [], [], 0
    for number, outcomes in enumerate(group):
        everybody += [msgspec.structs.replace(outcome, rank=first + outcome.rank) for outcome in outcomes]
        ranks = range(first, first + len(outcomes))
        parts.append(NodeResult(f"tcp://node-{number}:1", ranks, answer(task, outcomes)))
        first = ranks.stop
    at_once, merged = task.merge(everybody), merge_nodes(task, parts, 1.0)
    assert merged.block_ids == at_once.block_ids
    assert merged.status == at_once.status
    assert merged.bytes == at_once.bytes
    assert [(rank.rank, rank.status, rank.blocks, rank.bytes) for rank in merged.ranks] == [
        (rank.rank, rank.status, rank.blocks, rank.bytes) for rank in at_once.ranks
    ]
    assert (merged.error is None) == (at_once.error is None)
    if merged.error is not None and at_once.error is not None:
        assert merged.error.code == at_once.error.code


def test_a_group_of_one_node_says_what_the_node_says() -> None:
    result = answer(read(), [RankOutcome(0, range(4), bytes=8), RankOutcome(1, range(2), bytes=4)])
    assert merge_nodes(read(), nodes(result), 0.0) == result


def test_ranks_have_the_numbers_of_the_group_and_errors_name_rank_and_node() -> None:
    good = answer(write(), [RankOutcome(0, range(4)), RankOutcome(1, range(4))])
    bad = answer(write(), [RankOutcome(0, range(4)), RankOutcome(1, [0, 2], error=BROKEN)])
    merged = merge_nodes(write(), nodes(good, bad), 1.0)
    assert (merged.status, merged.block_ids) == (Status.PARTIAL, [100, 102])
    assert merged.error == ErrorInfo("storage_error", f"rank 3: {B}: disk")
    assert [rank.rank for rank in merged.ranks] == [0, 1, 2, 3]
    assert [rank.error for rank in merged.ranks] == [None, None, None, ErrorInfo("storage_error", f"{B}: disk")]


@pytest.mark.parametrize("task", [read(), sparse(), write(), swap()], ids=["read", "sparse", "write", "swap"])
def test_a_lost_node_is_failed_and_named(task: Task) -> None:
    good = answer(task, [RankOutcome(0, range(4)), RankOutcome(1, range(4))])
    for lost in (0, 1):
        results = [ended(Status.FAILED, "daemon_lost") if i == lost else good for i in range(2)]
        merged = merge_nodes(task, nodes(*results), 1.0)
        assert (merged.status, merged.block_ids) == (Status.FAILED, [])
        assert merged.error is not None
        assert merged.error.code == "daemon_lost"
        assert (A, B)[lost] in merged.error.message
        assert [rank.rank for rank in merged.ranks] == [0, 1, 2, 3]
        expected = [Status.FAILED if rank // 2 == lost else Status.OK for rank in range(4)]
        assert [rank.status for rank in merged.ranks] == expected


def test_a_cancel_after_the_loss_of_another_node_is_not_the_cause() -> None:
    """The rest of the group was told to stop: the answer is the loss, not the cancel."""
    ran = answer(read(), [RankOutcome(0, [0], stop=Stop.CANCELLED), RankOutcome(1, (), stop=Stop.CANCELLED)])
    never = ended(Status.CANCELLED, "cancelled")
    for other in (ran, never):
        merged = merge_nodes(read(), nodes(other, ended(Status.FAILED, "daemon_lost"), taken_back=[0]), 1.0)
        assert merged.status is Status.FAILED
        assert merged.error is not None
        assert merged.error.code == "daemon_lost"
        assert B in merged.error.message


@pytest.mark.parametrize(("status", "code"), [(Status.CANCELLED, "cancelled"), (Status.EXPIRED, "expired")])
@pytest.mark.parametrize("task", [read(), sparse(), write(), swap()], ids=["read", "sparse", "write", "swap"])
def test_a_task_that_ended_before_any_node_began_it_names_the_reason(task: Task, status: Status, code: str) -> None:
    merged = merge_nodes(task, nodes(ended(status, code), ended(status, code)), 1.0)
    assert (merged.status, merged.block_ids, merged.bytes) == (status, [], 0)
    assert merged.error == ErrorInfo(code, f"rank 0: {A}: why")


def test_a_refusal_is_a_refusal_only_where_no_node_began() -> None:
    good = answer(read(), [RankOutcome(0, range(4)), RankOutcome(1, range(4))])
    busy, soon = ended(Status.BUSY, "queue_full", retry_after=0.5), ended(Status.BUSY, "queue_full", retry_after=0.1)
    rejected, never = ended(Status.REJECTED, "not_attached"), ended(Status.CANCELLED, "cancelled")
    both = merge_nodes(read(), nodes(soon, busy), 1.0)
    assert (both.status, both.retry_after, both.ranks) == (Status.BUSY, 0.5, [])
    assert both.error == ErrorInfo("queue_full", f"{A}: why")
    worst = merge_nodes(read(), nodes(busy, rejected), 1.0)
    assert (worst.status, worst.error) == (Status.REJECTED, ErrorInfo("not_attached", f"{B}: why"))
    idle = merge_nodes(read(), nodes(never, busy, taken_back=[0]), 1.0)
    assert (idle.status, idle.retry_after) == (Status.BUSY, 0.5)
    begun = merge_nodes(read(), nodes(good, busy), 1.0)
    assert (begun.status, begun.block_ids) == (Status.FAILED, [])
    assert begun.error is not None
    assert (begun.error.code, B in begun.error.message) == ("queue_full", True)
    lost = merge_nodes(read(), nodes(busy, ended(Status.FAILED, "daemon_lost")), 1.0)
    assert lost.status is Status.FAILED, "a lost node may have touched something"


def test_blocks_of_two_generations_are_no_blocks() -> None:
    """A rank with other weights: the node has changed its generation a moment before the other."""
    whole = [RankOutcome(0, range(4)), RankOutcome(1, range(4))]
    old, new = answer(read(), whole, "old"), answer(read(), whole, "new")
    merged = merge_nodes(read(), nodes(old, new), 1.0)
    assert (merged.status, merged.block_ids) == (Status.FAILED, [])
    assert merged.error is not None
    assert merged.error.code == "generation_mismatch"
    assert "'new', 'old'" in merged.error.message
    none = answer(read(), [RankOutcome(0), RankOutcome(1)], "new")
    assert merge_nodes(read(), nodes(old, none), 1.0).status is Status.MISS, "nothing of the other one was moved"


def test_a_block_that_a_write_names_twice_counts_only_where_both_were_stored() -> None:
    task = WriteStorageTask(task_id="w", keys=["a", "b", "c"], gpu_block_ids=[7, 7, 8])
    whole = answer(task, [RankOutcome(0, range(3))])
    once = answer(task, [RankOutcome(0, [1, 2], error=BROKEN)])
    assert once.block_ids == [7, 8]
    merged = merge_nodes(task, nodes(whole, once, ranks=1), 1.0)
    assert (merged.status, merged.block_ids) == (Status.PARTIAL, [8])


def test_a_node_that_answers_for_other_ranks_than_before_is_refused() -> None:
    whole = answer(read(), [RankOutcome(0, range(4)), RankOutcome(1, range(4))])
    less = answer(read(), [RankOutcome(0, range(4))])
    merged = merge_nodes(read(), nodes(whole, less), 1.0)
    assert (merged.status, merged.block_ids) == (Status.FAILED, [])
    assert merged.error is not None
    assert merged.error.code == "group_mismatch"
