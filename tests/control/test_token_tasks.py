"""Tasks where storage is token-indexed: what is admitted, and what a flush keeps to itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.control.test_dispatcher import LIMITS, Desk
from tests.support.dispatch import limits_but
from transferd.control.admission import check_task, content_hash
from transferd.errors import RequestError
from transferd.tasks import RankOutcome, ReadStorageTask, Status, WriteStorageTask

BLOCK = 4
TOKENS = dataclasses.replace(LIMITS, token_block=BLOCK)
FLUSH = limits_but(TOKENS, only_flush=True, lane_depth=4, max_queued_tasks=10)
PATH = list(range(10 * BLOCK))


def write(*keys: str, task_id: str = "w", ids: list[int] | None = None, **more: Any) -> WriteStorageTask:
    blocks = list(range(len(keys))) if ids is None else ids
    return WriteStorageTask(task_id=task_id, keys=list(keys), gpu_block_ids=blocks, **({"token_ids": PATH} | more))


def read(*keys: str, task_id: str = "r", **more: Any) -> ReadStorageTask:
    blocks = list(range(len(keys)))
    return ReadStorageTask(task_id=task_id, keys=list(keys), gpu_block_ids=blocks, **({"token_ids": PATH} | more))


@pytest.mark.parametrize("make", [write, read])
def test_a_path_is_needed_and_must_reach_the_end_of_the_last_block(make: Any) -> None:
    start = "start_write_block_idx" if make is write else "start_read_block_idx"
    for good in (make("a", "b"), make("a", "b", token_ids=PATH[: 2 * BLOCK]), make("a", **{start: 9})):
        check_task(good, TOKENS)
    for bad, code in (
        (make("a", token_ids=None), "token_ids_required"),
        (make("a", "b", token_ids=PATH[: 2 * BLOCK - 1]), "token_ids_too_short"),
        (make("a", **{start: 10}), "token_ids_too_short"),
        (make("a", **{start: 2**62}), "token_ids_too_short"),
        (make("a", **{start: -1}), "bad_value"),
    ):
        with pytest.raises(RequestError) as refusal:
            check_task(bad, TOKENS)
        assert refusal.value.reason == code
        check_task(make("a", token_ids=None), LIMITS)  # keyed storage does not ask


def test_a_flush_may_name_blocks_that_are_nowhere() -> None:
    check_task(write("a", "b", ids=[]), FLUSH)
    check_task(write("a", "b"), FLUSH)
    check_task(write(*(f"k{i}" for i in range(10)), ids=[]), FLUSH)  # more than the device has
    for bad, limits, code in (
        (write("a", "b", ids=[]), TOKENS, "length_mismatch"),
        (write("a", "b", ids=[1]), FLUSH, "length_mismatch"),
        (write("a", ids=[8]), FLUSH, "id_out_of_range"),
        (write("a", "a", ids=[]), FLUSH, "duplicate_key"),
        (write("a", ids=[], token_ids=None), FLUSH, "token_ids_required"),
        (write("a", "b", ids=[], token_ids=PATH[:BLOCK]), FLUSH, "token_ids_too_short"),
    ):
        with pytest.raises(RequestError) as refusal:
            check_task(bad, limits)
        assert refusal.value.reason == code


def test_a_flush_without_blocks_is_answered_ok_with_none() -> None:
    task = write("a", "b", ids=[])
    everything = [RankOutcome(rank, range(2)) for rank in range(2)]
    merged = task.merge(everything)
    assert (merged.status, merged.block_ids, merged.error) == (Status.OK, [], None)
    assert [rank.blocks for rank in merged.ranks] == [2, 2]


def test_flushes_wait_for_nobody_but_earlier_flushes_of_the_same_keys() -> None:
    desk = Desk(FLUSH)
    desk.submit(read("a", task_id="reading"))
    desk.submit(write("a", task_id="gone", ids=[0], flush_cache_exists=False))
    desk.submit(write("a", task_id="back", ids=[0], flush_cache_exists=True))
    desk.submit(write("b", task_id="other", ids=[0], flush_cache_exists=True))
    assert desk.started == ["reading", "gone", "other"]
    desk.submit(read("x", task_id="second"))
    assert "second" not in desk.started  # it waits for the first read's device block, as ever
    desk.finish("gone")
    assert desk.started[-1] == "back"


def test_an_eviction_of_the_rest_keeps_its_order_with_all_flushes_of_its_tree() -> None:
    """Its one key is not theirs, so the first block of the path says which flushes it may meet."""
    desk = Desk(FLUSH)
    desk.submit(write("a", task_id="finished", ids=[0]))
    desk.submit(write("whole", task_id="evicted", ids=[], flush_cache_exists=False))
    desk.submit(write("b", task_id="finished again", ids=[0]))
    other = [-token for token in PATH]
    desk.submit(write("whole of another", task_id="elsewhere", ids=[], flush_cache_exists=False, token_ids=other))
    assert desk.started == ["finished", "elsewhere"]
    desk.finish("finished")
    assert desk.started[-1] == "evicted"
    desk.finish("evicted")
    assert desk.started[-1] == "finished again"


def test_flushes_count_no_bytes() -> None:
    desk = Desk(FLUSH)
    for i in range(8):  # 8 blocks of 100 bytes on 2 ranks each: far beyond max_bytes, were they moved
        desk.submit(write(*(f"{i}-{n}" for n in range(8)), task_id=f"w{i}"))
    assert len(desk.started) == FLUSH.server.lane_depth
    assert desk.answers == {}


def test_flushes_that_hang_take_half_of_the_queue_and_leave_the_rest_to_others() -> None:
    desk = Desk(FLUSH)
    for i in range(FLUSH.server.lane_depth + FLUSH.server.max_queued_tasks // 2):
        desk.submit(write(f"{i}", task_id=f"w{i}", ids=[]))
    assert desk.answers == {}
    refused = desk.answers[desk.submit(write("one more", task_id="one more", ids=[]))]
    assert (refused.status, refused.error and refused.error.code) == (Status.BUSY, "queue_full")
    for i in range(FLUSH.server.max_queued_tasks // 2):  # the first runs, the others wait for its block
        waiting = desk.submit(read(f"r{i}", task_id=f"r{i}"))
        assert waiting not in desk.answers
    desk.finish("w0")
    assert desk.submit(write("again", task_id="again", ids=[])) not in desk.answers


def test_a_flush_that_says_something_else_is_another_request() -> None:
    says = [content_hash(write("a", ids=[], flush_cache_exists=exists)) for exists in (True, False, None)]
    assert len(set(says)) == 3
    assert content_hash(write("a", start_write_block_idx=1)) != content_hash(write("a"))
    assert content_hash(read("a", start_read_block_idx=1)) != content_hash(read("a"))
