"""Results are kept for a while, by age, number and memory, and come back as they were."""

from __future__ import annotations

import msgspec
import pytest

from transferd.control.admission import RESULT_BYTES, ResultCache
from transferd.tasks import ErrorInfo, RankResult, Status, TaskResult


def result(task_id: str, message: str = "") -> TaskResult:
    return TaskResult(task_id=task_id, status=Status.OK, error=ErrorInfo("none", message) if message else None)


def size_of(kept: TaskResult) -> int:
    memory = ResultCache(1.0, 1, 10**6)
    memory.keep(kept, 0, 0, 0.0)
    return memory.nbytes


def test_a_result_comes_back_as_it_was_kept_with_what_it_answered() -> None:
    memory = ResultCache(ttl=10.0, most=5, most_bytes=10**6)
    whole = TaskResult(
        task_id="t",
        status=Status.PARTIAL,
        block_ids=[3, 1],
        ranks=[RankResult(rank=0, status=Status.OK, blocks=2, copy_s=0.5)],
        error=ErrorInfo("tier_error", "rank 1: the copy went wrong"),
        bytes=200,
        duration=1.5,
        generation="g",
        boot_id="b",
    )
    memory.keep(whole, content=17, memory_epoch=3, now=5.0)
    kept = memory.recall("t", 5.0)
    assert kept is not None
    assert (kept.result, kept.content, kept.memory_epoch, kept.expires) == (whole, 17, 3, 15.0)
    assert "t" in memory._kept
    assert "u" not in memory._kept
    assert memory.recall("u", 5.0) is None


def test_a_result_is_forgotten_in_the_moment_its_time_is_over() -> None:
    memory = ResultCache(ttl=10.0, most=5, most_bytes=10**6)
    memory.keep(result("t"), 0, 0, 5.0)
    memory.forget(14.999)
    assert "t" in memory._kept
    memory.forget(15.0)
    assert len(memory) == 0
    assert memory.nbytes == 0


def test_a_result_is_not_recalled_once_its_time_is_over() -> None:
    memory = ResultCache(ttl=10.0, most=5, most_bytes=10**6)
    memory.keep(result("t"), 0, 0, 5.0)
    assert memory.recall("t", 14.999) is not None
    assert memory.recall("t", 15.0) is None


def test_a_result_that_expired_long_ago_is_dropped() -> None:
    memory = ResultCache(ttl=10.0, most=5, most_bytes=10**6)
    memory.keep(result("t"), 0, 0, 5.0)
    memory.forget(1000.0)
    assert "t" not in memory._kept


def test_an_id_that_is_kept_again_once_its_result_expired_counts_once_and_is_the_newest() -> None:
    memory = ResultCache(ttl=10.0, most=5, most_bytes=10**6)
    memory.keep(result("t", "x" * 100), 0, 0, 0.0)
    memory.keep(result("u"), 0, 0, 5.0)
    memory.keep(result("t"), 0, 0, 10.0)
    assert memory.nbytes == size_of(result("t")) + size_of(result("u"))
    memory.forget(15.0)
    assert ("t" in memory._kept, "u" in memory._kept) == (True, False)
    memory.forget(20.0)
    assert (len(memory), memory.nbytes) == (0, 0)


def test_past_the_number_allowed_the_oldest_leaves() -> None:
    memory = ResultCache(ttl=10.0, most=2, most_bytes=10**6)
    for task_id in "abc":
        memory.keep(result(task_id), 0, 0, 0.0)
    assert [task_id in memory._kept for task_id in "abc"] == [False, True, True]
    assert len(memory) == 2


def test_beyond_the_bound_in_bytes_the_oldest_results_leave() -> None:
    size = size_of(result("a"))
    memory = ResultCache(ttl=10.0, most=9, most_bytes=2 * size)
    memory.keep(result("a"), 0, 0, 0.0)
    memory.keep(result("b"), 0, 0, 0.0)
    assert (len(memory), memory.nbytes) == (2, 2 * size)
    memory.keep(result("c"), 0, 0, 0.0)
    assert [task_id in memory._kept for task_id in "abc"] == [False, True, True]
    assert memory.nbytes == 2 * size


def test_a_result_that_passes_the_bound_alone_is_not_kept_and_leaves_nothing_behind() -> None:
    memory = ResultCache(ttl=10.0, most=9, most_bytes=RESULT_BYTES + 200)
    memory.keep(result("small"), 0, 0, 0.0)
    memory.keep(result("large", "x" * 1000), 0, 0, 0.0)
    assert (len(memory), memory.nbytes) == (0, 0)


def test_a_result_counts_its_packed_form_and_550_bytes() -> None:
    packed = len(msgspec.msgpack.encode(result("t", "x" * 100)))
    assert size_of(result("t", "x" * 100)) == 550 + packed


@pytest.mark.parametrize("text", ["\ud800", "half \udcff of a name"])
def test_a_result_that_fits_no_message_is_not_kept(text: str) -> None:
    memory = ResultCache(ttl=10.0, most=9, most_bytes=10**6)
    memory.keep(result("t", text), 0, 0, 0.0)
    assert (len(memory), memory.nbytes) == (0, 0)
