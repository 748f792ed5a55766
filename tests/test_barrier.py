"""The eight properties of RankBarrier, one after the other; then what else it promises."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from transferd.barrier import RankBarrier, Round
from transferd.errors import InvariantError
from transferd.runtime.compat import wait_for
from transferd.tasks import ErrorInfo, RankOutcome, ReadStorageTask, Status, Stop, SwapOutTask, TaskResult

READ = ReadStorageTask(task_id="t", keys=["a", "b", "c"], gpu_block_ids=[10, 11, 12])
SWAP = SwapOutTask(task_id="t", gpu_block_ids=[1, 2], cpu_block_ids=[5, 6])


def came(rank: int, moved: int = 3) -> RankOutcome:
    return RankOutcome(rank, moved=range(moved), bytes=moved)


def failed(rank: int, code: str = "tier_error") -> RankOutcome:
    return RankOutcome(rank, error=ErrorInfo(code, "the copy went wrong"))


class Log:
    """Counts what must happen once: merges and completions."""

    def __init__(self) -> None:
        self.merges: list[list[int]] = []
        self.completed: list[str] = []

    def merge(self, outcomes: Sequence[RankOutcome]) -> TaskResult:
        self.merges.append([o.rank for o in outcomes])
        return READ.merge(outcomes)

    def on_complete(self, round_: Round) -> None:
        assert round_.merged is not None, "the listener hears of a round that has its answer"
        self.completed.append(round_.task_id)


@pytest.fixture
def log() -> Log:
    return Log()


def merged_of(round_: Round) -> TaskResult:
    assert round_.merged is not None
    return round_.merged


# --- 1. a round completes exactly once ------------------------------------------------------------


def test_1_the_last_arrival_completes_the_round_with_one_merge_in_order_of_arrival(log: Log) -> None:
    barrier = RankBarrier(3)
    round_ = barrier.open("t", log.merge, log.on_complete)
    assert barrier.arrive("t", came(2))
    assert barrier.arrive("t", came(0))
    assert round_.merged is None
    assert log.completed == []
    assert barrier.arrive("t", came(1, moved=2))
    assert log.merges == [[2, 0, 1]]
    assert log.completed == ["t"]
    assert merged_of(round_).block_ids == [10, 11]


def test_1_nothing_completes_a_round_again(log: Log) -> None:
    barrier = RankBarrier(2)
    round_ = barrier.open("t", log.merge, log.on_complete)
    barrier.arrive("t", came(0))
    barrier.arrive("t", came(1))
    answer = round_.merged
    assert not barrier.arrive("t", came(1))
    assert barrier.expire("t") == ()
    barrier.rank_died(0, "gone")
    assert round_.merged is answer
    assert log.completed == ["t"]
    assert len(log.merges) == 1
    with pytest.raises(InvariantError, match="ended twice"):
        barrier._end(round_)


def test_1_a_group_of_one_rank_completes_with_its_one_arrival(log: Log) -> None:
    barrier = RankBarrier(1)
    barrier.open("t", log.merge, log.on_complete)
    assert barrier.arrive("t", came(0))


def test_1_a_merge_that_raises_completes_the_round_as_failed_and_tells_the_bug() -> None:
    def broken(_: Sequence[RankOutcome]) -> TaskResult:
        raise ZeroDivisionError("oops")

    completed: list[Round] = []
    barrier = RankBarrier(2)
    round_ = barrier.open("t", broken, completed.append)
    barrier.arrive("t", failed(1))
    barrier.arrive("t", came(0))
    merged = merged_of(round_)
    assert completed == [round_]
    assert merged.status is Status.FAILED
    assert merged.block_ids == []
    assert merged.bytes == 3
    assert [(r.rank, r.status, r.blocks) for r in merged.ranks] == [(0, Status.FAILED, 0), (1, Status.FAILED, 0)]
    assert merged.ranks[1].error == failed(1).error
    assert merged.error is not None
    assert merged.error.code == "internal"
    assert "ZeroDivisionError: oops" in merged.error.message
    assert barrier.statistics()["open"] == 0


# --- 2. a second arrival is an error naming both --------------------------------------------------


def test_2_a_second_arrival_names_both_and_the_first_counts(log: Log) -> None:
    barrier = RankBarrier(2)
    round_ = barrier.open("t", log.merge)
    barrier.arrive("t", came(1))
    with pytest.raises(InvariantError) as caught:
        barrier.arrive("t", failed(1))
    assert str(caught.value) == (
        "rank 1 arrived twice at 't': first with 3 blocks, then with 0 blocks and error tier_error: the copy went wrong"
    )
    assert barrier.missing("t") == (0,)
    barrier.arrive("t", came(0))
    assert merged_of(round_).status is Status.OK


# --- 3. an arrival for a closed round is counted and dropped --------------------------------------


def test_3_an_arrival_for_an_ended_or_unknown_round_is_counted_and_dropped(log: Log) -> None:
    barrier = RankBarrier(2)
    round_ = barrier.open("t", log.merge)
    barrier.arrive("t", came(0))
    barrier.expire("t")
    answer = round_.merged
    assert not barrier.arrive("t", came(1))
    assert not barrier.arrive("never", came(0))
    assert barrier.statistics()["late"] == 2
    assert round_.merged is answer


# --- 4. a failed rank still arrives ---------------------------------------------------------------


def test_4_a_failed_rank_arrives_with_its_failure(log: Log) -> None:
    barrier = RankBarrier(2)
    round_ = barrier.open("t", log.merge)
    assert barrier.arrive("t", failed(0))
    assert barrier.arrive("t", came(1))
    merged = merged_of(round_)
    assert merged.status is Status.FAILED
    assert merged.error == ErrorInfo("tier_error", "rank 0: the copy went wrong")
    assert [r.status for r in merged.ranks] == [Status.FAILED, Status.OK]


# --- 5. a deadline completes the round and names the missing --------------------------------------


def test_5_expiry_completes_the_round_and_names_the_missing_ranks(log: Log) -> None:
    barrier = RankBarrier(4)
    round_ = barrier.open("t", log.merge, log.on_complete)
    barrier.arrive("t", came(2))
    barrier.arrive("t", came(0))
    assert barrier.expire("t") == (1, 3)
    assert round_.missing == (1, 3)
    assert log.completed == ["t"]
    merged = merged_of(round_)
    assert merged.status is Status.EXPIRED
    assert merged.error == ErrorInfo("expired", "rank 1: the deadline passed; missing ranks: 1, 3")
    assert [r.status for r in merged.ranks] == [Status.OK, Status.EXPIRED, Status.OK, Status.EXPIRED]
    assert barrier.statistics()["expired"] == 1


def test_5_a_failure_before_the_deadline_is_the_first_cause(log: Log) -> None:
    barrier = RankBarrier(2)
    round_ = barrier.open("t", log.merge)
    barrier.arrive("t", failed(1, "device_lost"))
    barrier.expire("t")
    merged = merged_of(round_)
    assert merged.status is Status.FAILED
    assert merged.error == ErrorInfo("device_lost", "rank 1: the copy went wrong")


def test_5_expiring_what_has_ended_or_never_was_does_nothing() -> None:
    barrier = RankBarrier(2)
    assert barrier.expire("never") == ()
    assert barrier.statistics()["expired"] == 0


# --- 6. a rank's death ----------------------------------------------------------------------------


def test_6_a_death_completes_every_open_round_the_rank_had_not_reached(log: Log) -> None:
    barrier = RankBarrier(3)
    reached = barrier.open("reached", log.merge, log.on_complete)
    unreached = barrier.open("unreached", log.merge, log.on_complete)
    untouched = barrier.open("untouched", log.merge, log.on_complete)
    barrier.arrive("reached", came(2))
    barrier.arrive("unreached", came(0))
    barrier.rank_died(2, "CUDA context lost")
    assert log.completed == ["unreached", "untouched"]
    assert log.merges == [[0, 2, 1], [2, 0, 1]]
    assert reached.merged is None
    for round_ in (unreached, untouched):
        merged = merged_of(round_)
        assert merged.status is Status.FAILED
        assert merged.error == ErrorInfo("rank_died", "rank 2: rank 2 died: CUDA context lost")
        assert [r.rank for r in merged.ranks] == [0, 1, 2]
    # Rank 1 lives, but its round ended without it: it is told of as missing, and its arrival is late.
    assert unreached.missing == (1,)
    assert untouched.missing == (0, 1)
    blamed = merged_of(unreached).ranks[1].error
    assert blamed == ErrorInfo("rank_died", "had not arrived when rank 2 died: CUDA context lost")
    assert not barrier.arrive("unreached", came(1))


def test_6_a_round_the_dead_rank_had_reached_goes_on(log: Log) -> None:
    barrier = RankBarrier(2)
    round_ = barrier.open("t", log.merge)
    barrier.arrive("t", came(0))
    barrier.rank_died(0, "gone")
    assert barrier.arrive("t", came(1))
    assert merged_of(round_).status is Status.OK


def test_6_rounds_opened_after_a_death_are_over_when_open_returns(log: Log) -> None:
    barrier = RankBarrier(2)
    barrier.rank_died(1, "first")
    barrier.rank_died(1, "second")
    round_ = barrier.open("t", log.merge, log.on_complete)
    assert log.completed == ["t"]
    assert merged_of(round_).error == ErrorInfo("rank_died", "rank 1: rank 1 died: first")
    assert round_.missing == (), "nobody began, so nobody was left behind"
    assert not barrier.arrive("t", came(0))
    barrier.open("t", log.merge, log.on_complete)
    assert log.completed == ["t", "t"]


def test_6_with_all_ranks_dead_a_round_still_completes_and_tells_all_causes(log: Log) -> None:
    barrier = RankBarrier(2)
    barrier.rank_died(1, "power")
    barrier.rank_died(0, "fire")
    round_ = barrier.open("t", log.merge, log.on_complete)
    assert log.merges == [[1, 0]]
    assert [r.error for r in merged_of(round_).ranks] == [
        ErrorInfo("rank_died", "rank 0 died: fire"),
        ErrorInfo("rank_died", "rank 1 died: power"),
    ]


def test_6_the_culprit_is_a_rank_that_the_round_missed_not_one_that_died_after_arriving(log: Log) -> None:
    barrier = RankBarrier(3)
    round_ = barrier.open("t", log.merge)
    barrier.arrive("t", came(2))
    barrier.rank_died(2, "first")
    barrier.rank_died(1, "second")
    assert log.merges == [[2, 1, 0]]
    merged = merged_of(round_)
    assert merged.error == ErrorInfo("rank_died", "rank 1: rank 1 died: second")
    assert merged.ranks[2].error is None, "rank 2 had arrived before it died"
    assert merged.ranks[0].error == ErrorInfo("rank_died", "had not arrived when rank 1 died: second")


def test_6_a_listener_that_raises_does_not_keep_other_rounds_open(log: Log) -> None:
    def broken(_: Round) -> None:
        raise KeyError("listener")

    barrier = RankBarrier(2)
    first = barrier.open("first", log.merge, broken)
    second = barrier.open("second", log.merge, log.on_complete)
    with pytest.raises(KeyError, match="listener"):
        barrier.rank_died(0, "gone")
    assert merged_of(first).status is Status.FAILED
    assert log.completed == ["second"]
    assert merged_of(second).status is Status.FAILED
    assert barrier.statistics()["open"] == 0


def test_6_of_several_listeners_that_raise_the_first_is_heard(log: Log) -> None:
    def broken(round_: Round) -> None:
        raise KeyError(round_.task_id)

    barrier = RankBarrier(2)
    barrier.open("first", log.merge, broken)
    barrier.open("second", log.merge, broken)
    with pytest.raises(KeyError, match="first"):
        barrier.rank_died(0, "gone")


def test_6_a_listener_may_end_another_round_of_the_same_death(log: Log) -> None:
    barrier = RankBarrier(2)

    def expire_the_other(_: Round) -> None:
        assert barrier.expire("second") == (1,)

    barrier.open("first", log.merge, expire_the_other)
    second = barrier.open("second", log.merge, log.on_complete)
    third = barrier.open("third", log.merge, log.on_complete)
    barrier.rank_died(0, "gone")
    assert log.completed == ["second", "third"]
    assert merged_of(second).status is Status.EXPIRED
    assert merged_of(third).status is Status.FAILED


def test_6_of_several_dead_ranks_that_a_round_missed_the_first_is_the_culprit(log: Log) -> None:
    barrier = RankBarrier(3)
    barrier.rank_died(2, "power")
    barrier.rank_died(0, "fire")
    merged = merged_of(barrier.open("t", log.merge))
    assert merged.ranks[1].error == ErrorInfo("rank_died", "had not arrived when rank 2 died: power")


# --- 7. cancelling a waiter disturbs nobody -------------------------------------------------------


async def test_7_a_cancelled_waiter_disturbs_neither_the_round_nor_other_waiters(log: Log) -> None:
    barrier = RankBarrier(2)
    round_ = barrier.open("t", log.merge)
    waiters = [asyncio.create_task(round_.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    barrier.arrive("t", came(0))
    waiters[1].cancel()
    await asyncio.sleep(0)
    barrier.arrive("t", came(1))
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert results[0] is results[2] is round_.merged
    assert isinstance(results[1], asyncio.CancelledError)


async def test_7_a_waiter_cancelled_in_the_moment_of_completion_disturbs_nobody(log: Log) -> None:
    barrier = RankBarrier(1)
    round_ = barrier.open("t", log.merge)
    waiters = [asyncio.create_task(round_.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    barrier.arrive("t", came(0))
    assert await wait_for(waiters[1], 5) is round_.merged
    with pytest.raises(asyncio.CancelledError):
        await waiters[0]


async def test_7_a_cancelled_waiter_is_not_kept_until_the_end(log: Log) -> None:
    round_ = RankBarrier(1).open("t", log.merge)
    waiter = asyncio.create_task(round_.wait())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not round_.waiters


async def test_7_whoever_waits_after_the_end_gets_the_answer_at_once(log: Log) -> None:
    barrier = RankBarrier(1)
    round_ = barrier.open("t", log.merge)
    barrier.arrive("t", came(0))
    assert await round_.wait() is round_.merged


async def test_7_waiters_hear_of_deadlines_and_deaths_too(log: Log) -> None:
    barrier = RankBarrier(2)
    late, doomed = barrier.open("late", log.merge), barrier.open("doomed", log.merge)
    waiting = [asyncio.create_task(round_.wait()) for round_ in (late, doomed)]
    await asyncio.sleep(0)
    barrier.expire("late")
    barrier.rank_died(1, "gone")
    answers = await wait_for(asyncio.gather(*waiting), 5)
    assert [m.status for m in answers] == [Status.EXPIRED, Status.FAILED]


# --- 8. rounds of different tasks never mix -------------------------------------------------------


def test_8_interleaved_rounds_keep_their_own_outcomes() -> None:
    barrier = RankBarrier(2)
    rounds = {name: barrier.open(name, SWAP.merge) for name in "abc"}
    barrier.arrive("a", came(0, 2))
    barrier.arrive("b", failed(0))
    barrier.arrive("c", came(1, 2))
    barrier.arrive("b", came(1, 2))
    barrier.arrive("c", came(0, 2))
    barrier.arrive("a", came(1, 1))
    assert {name: merged_of(r).status for name, r in rounds.items()} == {
        "a": Status.FAILED,
        "b": Status.FAILED,
        "c": Status.OK,
    }


def test_8_a_task_id_can_be_used_again_and_gets_a_round_of_its_own(log: Log) -> None:
    barrier = RankBarrier(1)
    first = barrier.open("t", log.merge)
    barrier.arrive("t", came(0))
    second = barrier.open("t", log.merge)
    assert second.merged is None
    barrier.arrive("t", failed(0))
    assert (merged_of(first).status, merged_of(second).status) == (Status.OK, Status.FAILED)


def test_8_an_open_round_cannot_be_opened_again(log: Log) -> None:
    barrier = RankBarrier(2)
    barrier.open("t", log.merge)
    barrier.arrive("t", came(1))
    with pytest.raises(InvariantError, match=r"open already: <Round 't' open, arrived: 1>"):
        barrier.open("t", log.merge)


def test_8_a_straggler_of_an_ended_round_cannot_slip_into_the_next_one(log: Log) -> None:
    barrier = RankBarrier(3)
    barrier.open("t", log.merge)
    barrier.arrive("t", came(0))
    barrier.expire("t")
    with pytest.raises(InvariantError, match="rank 1, 2 has not left its last one"):
        barrier.open("t", log.merge)
    assert not barrier.arrive("t", came(1))
    with pytest.raises(InvariantError, match="rank 2 has not left"):
        barrier.open("t", log.merge)
    assert not barrier.arrive("t", came(2))
    assert barrier.open("t", log.merge).merged is None


def test_8_a_straggler_that_dies_owes_nothing_any_more(log: Log) -> None:
    barrier = RankBarrier(2)
    barrier.open("t", log.merge)
    barrier.arrive("t", came(0))
    barrier.expire("t")
    assert barrier.statistics()["owing"] == 1
    barrier.rank_died(1, "gone")
    assert barrier.statistics()["owing"] == 0
    assert merged_of(barrier.open("t", log.merge)).status is Status.FAILED


# --- what else it promises ------------------------------------------------------------------------


def test_a_listener_may_open_and_complete_the_next_round(log: Log) -> None:
    barrier = RankBarrier(1)

    def next_one(round_: Round) -> None:
        log.on_complete(round_)
        barrier.open("second", log.merge, log.on_complete)
        barrier.arrive("second", came(0))

    barrier.open("first", log.merge, next_one)
    assert barrier.arrive("first", came(0))
    assert log.completed == ["first", "second"]


def test_a_listeners_error_reaches_the_last_arrival_but_the_round_has_ended(log: Log) -> None:
    def broken(_: Round) -> None:
        raise KeyError("listener")

    barrier = RankBarrier(1)
    round_ = barrier.open("t", log.merge, broken)
    with pytest.raises(KeyError, match="listener"):
        barrier.arrive("t", came(0))
    assert merged_of(round_).status is Status.OK
    assert barrier.statistics()["open"] == 0


@pytest.mark.parametrize("rank", [-1, 2, 10**9])
def test_a_rank_that_does_not_exist_is_an_error(rank: int, log: Log) -> None:
    barrier = RankBarrier(2)
    barrier.open("t", log.merge)
    with pytest.raises(InvariantError, match="ranks are 0 … 1"):
        barrier.arrive("t", came(rank))
    with pytest.raises(InvariantError, match="ranks are 0 … 1"):
        barrier.rank_died(rank, "gone")
    assert barrier.missing("t") == (0, 1)


@pytest.mark.parametrize("parties", [0, -1])
def test_a_barrier_without_ranks_is_refused(parties: int) -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        RankBarrier(parties)


def test_missing_names_who_has_not_arrived(log: Log) -> None:
    barrier = RankBarrier(3)
    assert barrier.missing("t") == ()
    barrier.open("t", log.merge)
    assert barrier.missing("t") == (0, 1, 2)
    barrier.arrive("t", came(1))
    assert barrier.missing("t") == (0, 2)
    barrier.expire("t")
    assert barrier.missing("t") == ()


def test_statistics_and_reprs_tell_what_is_going_on(log: Log) -> None:
    barrier = RankBarrier(3)
    round_ = barrier.open("t", log.merge)
    assert repr(round_) == "<Round 't' open, arrived: none>"
    barrier.arrive("t", came(2))
    barrier.arrive("t", came(0))
    assert repr(round_) == "<Round 't' open, arrived: 0, 2>"
    barrier.expire("t")
    assert repr(round_) == "<Round 't' expired, missing: 1>"
    barrier.arrive("t", came(1))
    done = barrier.open("u", log.merge)
    for rank in range(3):
        barrier.arrive("u", came(rank))
    assert repr(done) == "<Round 'u' ok>"
    barrier.open("v", log.merge)
    barrier.rank_died(1, "gone")
    assert barrier.statistics() == {"open": 0, "completed": 3, "expired": 1, "late": 1, "owing": 2}
    assert list(barrier.dead) == [1]


def test_statistics_are_a_snapshot() -> None:
    barrier = RankBarrier(1)
    before = barrier.statistics()
    barrier.arrive("t", came(0))
    assert (before["late"], barrier.statistics()["late"]) == (0, 1)


def test_a_stop_of_a_rank_travels_with_its_outcome(log: Log) -> None:
    barrier = RankBarrier(2)
    round_ = barrier.open("t", log.merge)
    barrier.arrive("t", RankOutcome(0, moved=range(1), stop=Stop.CANCELLED))
    barrier.arrive("t", came(1))
    assert merged_of(round_).status is Status.CANCELLED
    assert merged_of(round_).block_ids == [10]
