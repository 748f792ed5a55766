"""Merging is honest, statuses follow API.md's table, token ids and tasks survive the wire unchanged."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bodies import tag_of
from transferd.tasks import (
    DEVICE,
    TASK_TYPES,
    ErrorInfo,
    Footprint,
    Lane,
    RankOutcome,
    RankResult,
    ReadStorageTask,
    ReceiveTask,
    SendTask,
    Status,
    Stop,
    SwapInTask,
    SwapOutTask,
    Task,
    TaskResult,
    TokenIds,
    WriteStorageTask,
)

BROKEN = ErrorInfo("tier_error", "the copy went wrong")
LATE = ErrorInfo("expired", "not arrived by the deadline")


def read(blocks: int) -> ReadStorageTask:
    return ReadStorageTask(
        task_id="r", keys=[f"k{i}" for i in range(blocks)], gpu_block_ids=[100 + i for i in range(blocks)]
    )


def sparse(blocks: int) -> ReadStorageTask:
    return msgspec.structs.replace(read(blocks), prefix=False)


def write(blocks: int) -> WriteStorageTask:
    return WriteStorageTask(
        task_id="w", keys=[f"k{i}" for i in range(blocks)], gpu_block_ids=[100 + i for i in range(blocks)]
    )


def swap(blocks: int) -> SwapOutTask:
    return SwapOutTask(task_id="s", gpu_block_ids=[100 + i for i in range(blocks)], cpu_block_ids=list(range(blocks)))


def ranks(*moved: Sequence[int]) -> list[RankOutcome]:
    return [RankOutcome(rank, moved=positions, bytes=10 * len(positions)) for rank, positions in enumerate(moved)]


# --- what is claimed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moved", "claimed", "status"),
    [
        ([range(4), range(4)], [100, 101, 102, 103], Status.OK),
        ([range(4), range(2)], [100, 101], Status.PARTIAL),
        ([range(4), [0, 1, 3]], [100, 101], Status.PARTIAL),
        ([range(4), [1, 2, 3]], [], Status.MISS),
        ([range(4), range(1, 4)], [], Status.MISS),
        ([[0, 2], [0, 1]], [100], Status.PARTIAL),
        ([range(0, 4, 2), range(4)], [100], Status.PARTIAL),
        ([range(0), range(0)], [], Status.MISS),
    ],
)
def test_a_read_claims_the_shortest_prefix(moved: list[Sequence[int]], claimed: list[int], status: Status) -> None:
    merged = read(4).merge(ranks(*moved))
    assert (merged.block_ids, merged.status, merged.error) == (claimed, status, None)


@pytest.mark.parametrize(
    ("moved", "claimed"),
    [
        ([range(4), range(4)], [100, 101, 102, 103]),
        ([range(4), [1, 3]], [101, 103]),
        ([[0, 1, 3], [0, 2, 3]], [100, 103]),
        ([[0, 1], [2, 3]], []),
    ],
)
def test_a_write_claims_what_every_rank_stored(moved: list[Sequence[int]], claimed: list[int]) -> None:
    assert write(4).merge(ranks(*moved)).block_ids == claimed


@pytest.mark.parametrize(
    ("moved", "claimed"), [([range(3), range(3)], [100, 101, 102]), ([range(3), range(2)], []), ([[], []], [])]
)
def test_a_swap_claims_all_or_nothing(moved: list[Sequence[int]], claimed: list[int]) -> None:
    assert swap(3).merge(ranks(*moved)).block_ids == claimed


@pytest.mark.parametrize(
    ("moved", "claimed", "status"),
    [
        ([range(4), range(4)], [100, 101, 102, 103], Status.OK),
        ([range(4), range(2)], [100, 101], Status.PARTIAL),
        ([range(4), [0, 1, 3]], [100, 101, 103], Status.PARTIAL),
        ([[1, 3], [0, 3], range(4)], [103], Status.PARTIAL),
        ([[0, 2], [1, 3]], [], Status.MISS),
        ([range(0), range(4)], [], Status.MISS),
    ],
)
def test_a_sparse_read_claims_every_block_that_all_ranks_loaded(
    moved: list[Sequence[int]], claimed: list[int], status: Status
) -> None:
    merged = sparse(4).merge(ranks(*moved))
    assert (merged.block_ids, merged.status, merged.error) == (claimed, status, None)


def test_a_sparse_read_that_a_rank_fails_in_part_keeps_the_rest_and_says_why() -> None:
    outcomes = [RankOutcome(0, range(4)), RankOutcome(1, [0, 3], error=BROKEN)]
    merged = sparse(4).merge(outcomes)
    assert (merged.block_ids, merged.status) == ([100, 103], Status.PARTIAL)
    assert merged.error == ErrorInfo("tier_error", "rank 1: the copy went wrong")


def test_extra_gpu_blocks_of_a_read_are_never_claimed() -> None:
    task = ReadStorageTask(task_id="r", keys=["a"], gpu_block_ids=[7, 8, 9])
    assert task.merge(ranks([0], [0])).block_ids == [7]
    assert task.footprint().writes.get("device", ()) == [7]


@pytest.mark.parametrize("task", [read(2), write(2), swap(2)])
def test_without_ranks_nothing_is_claimed(task: Task) -> None:
    merged = task.merge([])
    assert merged.block_ids == []
    assert merged.status is not Status.OK


def test_bytes_and_ranks_are_told_as_they_were_even_where_blocks_are_not_claimed() -> None:
    outcomes = [
        RankOutcome(1, moved=[0], bytes=5, error=BROKEN, queue_s=1, copy_s=2, storage_s=3),
        RankOutcome(0, moved=[0, 1], bytes=7),
    ]
    merged = swap(2).merge(outcomes)
    assert merged.bytes == 12
    assert merged.ranks == [
        RankResult(rank=0, status=Status.OK, blocks=2, bytes=7),
        RankResult(rank=1, status=Status.PARTIAL, blocks=1, bytes=5, error=BROKEN, queue_s=1, copy_s=2, storage_s=3),
    ]


# --- the status table -----------------------------------------------------------------------------

OK, PARTIAL, MISS, FAILED = Status.OK, Status.PARTIAL, Status.MISS, Status.FAILED
EXPIRED, CANCELLED = Status.EXPIRED, Status.CANCELLED


def one(
    moved: int, error: ErrorInfo | None = None, stop: Stop | None = None, other: int = 3
) -> tuple[RankOutcome, RankOutcome]:
    """Rank 0 as told, rank 1 with `other` blocks and no trouble."""
    return RankOutcome(0, moved=range(moved), error=error, stop=stop), RankOutcome(1, moved=range(other))


@pytest.mark.parametrize(
    ("outcomes", "of_read", "of_write", "of_swap", "code"),
    [
        (one(3), OK, OK, OK, None),
        (one(3, BROKEN), OK, OK, OK, None),
        (one(3, stop=Stop.CANCELLED), OK, OK, OK, None),
        (one(2, BROKEN), PARTIAL, PARTIAL, FAILED, "tier_error"),
        (one(0, BROKEN), FAILED, FAILED, FAILED, "tier_error"),
        (one(2, stop=Stop.EXPIRED), PARTIAL, PARTIAL, EXPIRED, "expired"),
        (one(0, stop=Stop.EXPIRED), EXPIRED, EXPIRED, EXPIRED, "expired"),
        (one(0, LATE, Stop.EXPIRED), EXPIRED, EXPIRED, EXPIRED, "expired"),
        (one(0, BROKEN, Stop.EXPIRED), FAILED, FAILED, FAILED, "tier_error"),
        (one(2, stop=Stop.CANCELLED), CANCELLED, CANCELLED, CANCELLED, "cancelled"),
        (one(0, stop=Stop.CANCELLED), CANCELLED, CANCELLED, CANCELLED, "cancelled"),
    ],
)
def test_the_status_table(
    outcomes: tuple[RankOutcome, ...], of_read: Status, of_write: Status, of_swap: Status, code: str | None
) -> None:
    for task, status in ((read(3), of_read), (write(3), of_write), (swap(3), of_swap)):
        merged = task.merge(outcomes)
        assert (merged.status, merged.error.code if merged.error else None) == (status, code), task.kind


def test_a_read_that_finds_nothing_without_trouble_is_a_miss_and_has_no_error() -> None:
    merged = read(3).merge(one(0))
    assert (merged.status, merged.error) == (Status.MISS, None)
    assert [r.status for r in merged.ranks] == [Status.MISS, Status.OK]


def test_the_first_cause_names_its_rank_and_comes_before_the_deadline_it_led_to() -> None:
    outcomes = [
        RankOutcome(2, error=LATE, stop=Stop.EXPIRED),
        RankOutcome(1, error=BROKEN),
        RankOutcome(0, error=ErrorInfo("storage_error", "later")),
    ]
    assert read(3).merge(outcomes).error == ErrorInfo("tier_error", "rank 1: the copy went wrong")


def test_a_deadline_or_cancel_without_a_failure_names_the_ranks_at_work() -> None:
    outcomes = [
        RankOutcome(0, moved=range(2), stop=Stop.EXPIRED),
        RankOutcome(1, moved=range(3)),
        RankOutcome(2, stop=Stop.EXPIRED),
    ]
    assert read(3).merge(outcomes).error == ErrorInfo(
        "expired", "the deadline passed while ranks 0, 2 were still working"
    )
    taken_back = read(3).merge([RankOutcome(0, stop=Stop.CANCELLED)])
    assert taken_back.error == ErrorInfo("cancelled", "the task was cancelled while rank 0 was still working")


@pytest.mark.parametrize("task", [write(3), swap(3)])
def test_a_rank_that_lost_blocks_without_a_cause_is_told_as_our_own_bug(task: Task) -> None:
    merged = task.merge(ranks(range(3), []))
    assert merged.status is Status.FAILED
    assert merged.error is not None
    assert merged.error.code == "internal"
    assert "rank 1" in merged.error.message


# --- properties over everything that ranks may bring ----------------------------------------------

ERRORS = st.none() | st.sampled_from([BROKEN, ErrorInfo("storage_error", "disk"), ErrorInfo("rank_died", "gone")])


@st.composite
def tasks_and_outcomes(draw: st.DrawFn) -> tuple[Task, list[RankOutcome]]:
    blocks = draw(st.integers(1, 6))
    makers: list[Callable[[int], Task]] = [read, sparse, write, swap]
    task = draw(st.sampled_from(makers))(blocks)
    outcomes = []
    reason = draw(st.sampled_from(list(Stop)))  # every rank of a task is told the same
    for rank in draw(st.permutations(range(draw(st.integers(1, 4))))):
        moved = draw(st.sets(st.integers(0, blocks - 1)).map(sorted) | st.just(range(blocks)))
        stop = reason if draw(st.booleans()) else None
        outcomes.append(RankOutcome(rank, moved, bytes=len(moved), error=draw(ERRORS), stop=stop))
        if draw(st.integers(0, 9)) == 0:  # what the barrier puts in for a rank that did not come
            outcomes[-1] = RankOutcome(rank, error=LATE, stop=Stop.EXPIRED)
    return task, outcomes


@given(tasks_and_outcomes())
def test_a_result_never_claims_a_block_that_some_rank_lacks(case: tuple[Task, list[RankOutcome]]) -> None:
    task, outcomes = case
    claimed = task.merge(outcomes).block_ids
    positions = [task.gpu_block_ids.index(block) for block in claimed]
    assert positions == sorted(set(positions)), "in task order, each once"
    for outcome in outcomes:
        assert set(positions) <= set(outcome.moved)
    if isinstance(task, ReadStorageTask) and task.prefix:
        assert positions == list(range(len(positions))), "a prefix"
    if isinstance(task, SwapOutTask):
        assert len(claimed) in (0, task.blocks), "all or nothing"


@given(tasks_and_outcomes())
def test_a_result_claims_every_block_it_may(case: tuple[Task, list[RankOutcome]]) -> None:
    task, outcomes = case
    everywhere = set.intersection(*(set(outcome.moved) for outcome in outcomes))
    merged = task.merge(outcomes)
    if isinstance(task, WriteStorageTask) or (isinstance(task, ReadStorageTask) and not task.prefix):
        assert len(merged.block_ids) == len(everywhere)
    elif isinstance(task, ReadStorageTask):
        assert len(merged.block_ids) == task.blocks or len(merged.block_ids) not in everywhere
    elif len(everywhere) == task.blocks:
        assert len(merged.block_ids) == task.blocks


@given(tasks_and_outcomes())
def test_every_status_says_the_same_as_the_blocks_and_the_error(case: tuple[Task, list[RankOutcome]]) -> None:
    task, outcomes = case
    merged = task.merge(outcomes)
    _check_status(merged, task)
    assert [r.rank for r in merged.ranks] == sorted(o.rank for o in outcomes)
    assert merged.bytes == sum(o.bytes for o in outcomes)


@given(tasks_and_outcomes(), st.randoms(use_true_random=False))
def test_the_claim_does_not_depend_on_who_arrives_first(case: tuple[Task, list[RankOutcome]], order: Any) -> None:
    task, outcomes = case
    shuffled = list(outcomes)
    order.shuffle(shuffled)
    assert task.merge(shuffled).block_ids == task.merge(outcomes).block_ids
    assert task.merge(shuffled).ranks == task.merge(outcomes).ranks


def _check_status(merged: TaskResult, task: Task) -> None:
    blocks, error = len(merged.block_ids), merged.error
    match merged.status:
        case Status.OK:
            assert blocks == task.blocks
            assert error is None
        case Status.PARTIAL:
            assert 0 < blocks < task.blocks
            assert error is not None or isinstance(task, ReadStorageTask)
        case Status.MISS:
            assert isinstance(task, ReadStorageTask)
            assert blocks == 0
            assert error is None
        case Status.FAILED:
            assert blocks == 0
            assert error is not None
            assert error.code not in ("expired", "cancelled")
        case Status.EXPIRED:
            assert blocks == 0
            assert error is not None
            assert error.code == "expired"
        case Status.CANCELLED:
            assert blocks < task.blocks
            assert error is not None
        case _:
            pytest.fail(f"ranks cannot decide {merged.status}")


# --- tasks as data --------------------------------------------------------------------------------


def test_each_task_states_its_lane_its_kind_and_what_it_touches() -> None:
    back = SwapInTask(task_id="i", gpu_block_ids=[1, 2], cpu_block_ids=[3, 4])
    assert sorted(t.lane for t in TASK_TYPES) == sorted(Lane)
    assert [str(t.lane) for t in TASK_TYPES] == [tag_of(t) for t in TASK_TYPES]
    assert [t.kind for t in (read(1), write(1), swap(1), back)] == ["read", "write", "swap_out", "swap_in"]
    assert [t.blocks for t in (read(1), write(2), swap(3), back)] == [1, 2, 3, 2]
    assert read(1).footprint().reads.get("storage", ()) == ["k0"]
    assert read(1).footprint().writes.get("device", ()) == [100]
    assert write(1).footprint().writes.get("storage", ()) == ["k0"]
    assert write(1).footprint().reads.get("device", ()) == [100]
    assert (swap(1).footprint().reads.get("device", ()), swap(1).footprint().writes.get("host", ())) == (
        [100],
        [0],
    )
    assert (back.footprint().reads.get("host", ()), back.footprint().writes.get("device", ())) == (
        [3, 4],
        [1, 2],
    )


def test_statuses_compare_as_their_names() -> None:
    assert Status("ok") is Status.OK
    assert {Status.OK: 1}["ok"] == 1  # type: ignore[index]
    assert str(Status.BUSY) == "busy"
    assert {str(status) for status in Status} == {
        *("ok", "partial", "miss", "failed", "expired", "cancelled", "rejected", "busy")
    }


def test_an_error_reads_as_an_object_and_as_a_mapping() -> None:
    assert BROKEN.code == BROKEN["code"] == "tier_error"
    assert BROKEN["message"] == "the copy went wrong"
    with pytest.raises(KeyError):
        BROKEN["cause"]
    with pytest.raises(KeyError):
        BROKEN["__class__"]


def test_a_task_takes_30_seconds_and_begins_at_its_first_block_unless_it_says_otherwise() -> None:
    assert [task.timeout for task in (read(1), write(1), swap(1))] == [30.0, 30.0, 30.0]
    assert (read(1).start_read_block_idx, write(1).start_write_block_idx) == (0, 0)


def test_what_a_rank_and_a_result_do_not_say_is_nothing() -> None:
    assert msgspec.structs.astuple(RankOutcome(3)) == (3, (), 0, None, False, None, 0.0, 0.0, 0.0, 0)
    assert msgspec.structs.astuple(RankResult(rank=3, status=Status.OK)) == (3, "ok", 0, 0, 0.0, 0.0, 0.0, None)
    result = TaskResult(task_id="t", status=Status.OK)
    assert msgspec.structs.astuple(result) == ("t", "ok", [], [], None, None, 0, 0.0, "", "", True, 0)


def test_a_result_says_on_the_wire_only_what_is_not_usual() -> None:
    ranks = [RankResult(rank=0, status=Status.OK)]
    said = msgspec.to_builtins(TaskResult(task_id="t", status=Status.OK, ranks=ranks))
    assert said == {"task_id": "t", "status": "ok", "ranks": [{"rank": 0, "status": "ok"}]}


FROZEN: list[tuple[msgspec.Struct, str]] = [
    (read(1), "keys"), (write(1), "keys"), (swap(1), "cpu_block_ids"),
    (SwapInTask(task_id="i", gpu_block_ids=[], cpu_block_ids=[]), "cpu_block_ids"),
    (SendTask(task_id="s", keys=[], gpu_block_ids=[], transfer_id="t"), "transfer_id"),
    (ReceiveTask(task_id="c", keys=[], gpu_block_ids=[], transfer_id="t", peer="h:1"), "peer"),
    (Footprint(), "reads"), (BROKEN, "code"), (RankOutcome(0), "bytes"),
    (RankResult(rank=0, status=Status.OK), "bytes"), (TaskResult(task_id="t", status=Status.OK), "bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "field"), FROZEN, ids=lambda value: type(value).__name__)
def test_tasks_results_and_their_parts_never_change(value: msgspec.Struct, field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(value, field, getattr(value, field))


@pytest.mark.parametrize("kind", [*TASK_TYPES, RankResult, TaskResult], ids=lambda kind: kind.__name__)
def test_tasks_and_results_are_made_by_the_names_of_their_fields_only(kind: type) -> None:
    with pytest.raises(TypeError, match="Extra positional arguments"):
        kind("t")


def test_results_and_their_parts_are_no_work_for_the_garbage_collector() -> None:
    error = ErrorInfo("code", "message")
    rank = RankResult(rank=0, status=Status.FAILED, error=error)
    result = TaskResult(task_id="t", status=Status.FAILED, ranks=[rank], error=error)
    assert [gc.is_tracked(value) for value in (error, rank, result)] == [False, False, False]


def test_an_error_of_a_stopped_task_names_the_ranks_that_were_at_work() -> None:
    for stop, what in ((Stop.EXPIRED, "the deadline passed"), (Stop.CANCELLED, "the task was cancelled")):
        outcomes = [RankOutcome(0, range(2)), RankOutcome(1, [0], stop=stop), RankOutcome(2, [0], stop=stop)]
        merged = read(2).merge(outcomes)
        assert merged.error == ErrorInfo(str(stop), f"{what} while ranks 1, 2 were still working")


def test_ranks_that_lose_blocks_without_a_cause_are_named() -> None:
    merged = write(2).merge(ranks([0, 1], [0], [1]))
    lost = "returned fewer blocks than requested and reported no error (bug)"
    assert merged.error == ErrorInfo("internal", f"rank 1, 2 {lost}")
    disjoint = swap(2).merge([])
    assert disjoint.error == ErrorInfo("internal", f"rank none {lost}")


def test_a_direct_transfer_touches_device_blocks_alone() -> None:
    send = SendTask(task_id="s", keys=["a"], gpu_block_ids=[7], transfer_id="t")
    receive = ReceiveTask(task_id="c", keys=["a"], gpu_block_ids=[7, 8], transfer_id="t", peer="h:1")
    assert send.footprint() == Footprint({DEVICE: [7]})
    assert receive.footprint() == Footprint(writes={DEVICE: [7]})


# --- token ids ------------------------------------------------------------------------------------

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">i2", "u2", "<i4", ">i4", "u4", "<i8", ">i8", "u8"])
def test_token_ids_take_a_numpy_array_of_any_integer_type(dtype: str) -> None:
    ids = TokenIds(np.array([0, 1, 127], dtype=dtype))
    assert ids == [0, 1, 127]
    assert ids.array.dtype == np.dtype("<i4")


@given(st.lists(INT32) | st.lists(INT64))
def test_token_ids_survive_their_bytes(values: list[int]) -> None:
    ids = TokenIds(values)
    back = TokenIds.from_bytes(ids.to_bytes())
    assert back == ids == values == list(back)
    assert hash(back) == hash(ids)
    assert len(ids.to_bytes()) == 1 + len(values) * ids.array.itemsize
    assert not ids.array.flags.writeable


@pytest.mark.parametrize(("value", "width"), [(2**31 - 1, 4), (2**31, 8), (-(2**31), 4), (-(2**31) - 1, 8)])
def test_token_ids_are_as_narrow_as_their_values_allow(value: int, width: int) -> None:
    assert TokenIds([value]).to_bytes()[:1] == str(width).encode()
    assert list(TokenIds([value])) == [value]


def test_token_ids_hold_the_largest_signed_integer_even_of_an_unsigned_array() -> None:
    assert TokenIds(np.array([2**63 - 1], dtype="u8")) == [2**63 - 1]


def test_token_ids_own_their_values() -> None:
    source = np.array([1, 2, 3], dtype="<i4")
    ids = TokenIds(source)
    source[0] = 9
    assert ids == [1, 2, 3]


def test_token_ids_are_a_sequence() -> None:
    ids = TokenIds([5, 6, 7])
    assert (ids[0], ids[-1], len(ids), 6 in ids) == (5, 7, 3, True)
    assert type(ids[0]) is int
    assert ids[1:] == TokenIds([6, 7]) == [6, 7]
    assert repr(ids) == "TokenIds(<3 ids>)"
    assert ids != [5, 6]
    assert ids != [5, 6, 8]
    assert ids != "567"
    assert ids != (5, 6, 7), "a tuple has a hash of its own, so it cannot be equal"
    with pytest.raises(IndexError):
        ids[3]


@pytest.mark.parametrize(
    "bad",
    [[1.5], ["a"], [[1, 2], [3, 4]], [None], [True], np.zeros((2, 2), dtype=int), np.array(3), [2**70], [2**63]],
    ids=repr,
)
def test_token_ids_refuse_what_is_not_a_list_of_64_bit_integers(bad: Any) -> None:
    with pytest.raises((TypeError, OverflowError)):
        TokenIds(bad)


@pytest.mark.parametrize("bad", [b"", b"5", b"4\x00", b"8" + b"\x00" * 7, b"x" * 9, b"2\x00\x00", b"\x04" * 5])
def test_other_bytes_are_not_token_ids(bad: bytes) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        TokenIds.from_bytes(bad)


# --- the wire -------------------------------------------------------------------------------------


def _encode(value: Any) -> Any:
    assert isinstance(value, TokenIds)
    return value.to_bytes()


def _decode(kind: type, value: Any) -> Any:
    assert kind is TokenIds
    return TokenIds.from_bytes(value)


def through_the_wire(value: Any, kind: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=_encode), type=kind, dec_hook=_decode)


IDS = st.lists(st.integers(0, 2**40), max_size=4)
TEXT = st.text(max_size=8)
TASKS = st.one_of(
    st.builds(
        WriteStorageTask,
        task_id=TEXT,
        keys=st.lists(TEXT, max_size=4),
        gpu_block_ids=IDS,
        token_ids=st.none() | st.lists(INT64, max_size=4),
        flush_cache_exists=st.none() | st.booleans(),
    ),
    st.builds(ReadStorageTask, task_id=TEXT, keys=st.lists(TEXT, max_size=4), gpu_block_ids=IDS, prefix=st.booleans()),
    st.builds(
        SwapOutTask,
        task_id=TEXT,
        gpu_block_ids=IDS,
        cpu_block_ids=IDS,
        swap_node_ids=st.tuples(st.integers(0, 9), TEXT),
    ),
    st.builds(SwapInTask, task_id=TEXT, gpu_block_ids=IDS, cpu_block_ids=IDS, timeout=st.floats(0.1, 100)),
)


@given(TASKS)
def test_a_task_arrives_as_it_was_pushed(task: Task) -> None:
    assert through_the_wire(task, Task) == task


def test_token_ids_travel_as_raw_bytes_whatever_they_were_given_as() -> None:
    for given_as in ([1, 2, 3], (1, 2, 3), np.arange(1, 4), TokenIds([1, 2, 3])):
        task = WriteStorageTask(task_id="t", keys=[], gpu_block_ids=[], token_ids=given_as)  # type: ignore[arg-type]
        assert isinstance(task.token_ids, TokenIds)
        assert b"4\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00" in msgspec.msgpack.encode(task, enc_hook=_encode)


@given(
    st.builds(
        TaskResult,
        task_id=TEXT,
        status=st.sampled_from(Status),
        block_ids=IDS,
        ranks=st.lists(st.builds(RankResult, rank=st.integers(0, 7), status=st.sampled_from(Status), error=ERRORS)),
        error=ERRORS,
        retry_after=st.none() | st.floats(0, 5),
    )
)
def test_a_result_arrives_as_it_was_sent(result: TaskResult) -> None:
    assert through_the_wire(result, TaskResult) == result


def masked(task: Task, block_ids: list[int], status: Status = Status.PARTIAL) -> list[bool]:
    return TaskResult(task_id=task.task_id, status=status, block_ids=block_ids).mask(task)


def test_a_mask_says_of_each_block_whether_every_rank_moved_it() -> None:
    keys = ["a", "b", "c"]
    longer = ReadStorageTask(task_id="t", keys=keys, gpu_block_ids=[7, 8, 9, 10])
    assert masked(longer, [7, 8, 9], Status.OK) == [True, True, True, False], "the last id has no key"
    assert masked(longer, [7, 8]) == [True, True, False, False]
    assert masked(longer, [], Status.MISS) == [False] * 4
    sparse = ReadStorageTask(task_id="t", keys=keys, gpu_block_ids=[7, 8, 9], prefix=False)
    assert masked(sparse, [7, 9]) == [True, False, True]
    write = WriteStorageTask(task_id="t", keys=keys, gpu_block_ids=[7, 7, 9])
    assert masked(write, [7, 7]) == [True, True, False]
    assert masked(write, [7, 9]) == [False, False, True], "for which of its two keys is not said"
    swap = SwapOutTask(task_id="t", gpu_block_ids=[1, 2], cpu_block_ids=[3, 4])
    assert masked(swap, [1, 2], Status.OK) == [True, True]
    assert masked(swap, [], Status.FAILED) == [False, False]
    evicted = WriteStorageTask(
        task_id="t", keys=keys, gpu_block_ids=[], token_ids=TokenIds([1]), flush_cache_exists=False
    )
    assert masked(evicted, [], Status.OK) == [True] * 3
    assert masked(evicted, [], Status.FAILED) == [False] * 3
    with pytest.raises(ValueError, match="not of 'u'"):
        TaskResult(task_id="t", status=Status.OK).mask(SwapOutTask(task_id="u", gpu_block_ids=[], cpu_block_ids=[]))


def refusing(rank: int, moved: range | tuple[int, ...], count: int) -> RankOutcome:
    error = ErrorInfo("not_admitted", "nothing failed")
    return RankOutcome(rank, moved, bytes=len(moved), error=error, not_admitted=count)


def test_blocks_that_were_not_admitted_are_no_failure() -> None:
    task = WriteStorageTask(task_id="w", keys=["a", "b"], gpu_block_ids=[3, 4])
    none = task.merge([refusing(0, (), 2), refusing(1, (), 2)])
    assert (none.status, none.block_ids, none.not_admitted) == (Status.PARTIAL, [], 2)
    assert none.error is not None
    assert none.error.code == "not_admitted"
    assert [rank.status for rank in none.ranks] == [Status.PARTIAL, Status.PARTIAL]
    some = task.merge([refusing(0, (1,), 1), refusing(1, (1,), 1)])
    assert (some.status, some.block_ids, some.not_admitted) == (Status.PARTIAL, [4], 1)


def test_a_failure_beside_what_was_not_admitted_is_the_first_cause() -> None:
    task = WriteStorageTask(task_id="w", keys=["a", "b"], gpu_block_ids=[3, 4])
    failed = RankOutcome(1, (), error=ErrorInfo("storage_full", "no room"), not_admitted=1)
    merged = task.merge([refusing(0, (), 1), failed])
    assert (merged.status, merged.error and merged.error.code) == (Status.FAILED, "storage_full")
    assert merged.not_admitted == 1
