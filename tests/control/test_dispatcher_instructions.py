"""What the dispatcher says, word for word: instructions in their order, answers in full, and its own figures."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tests.control.test_dispatcher import CLEARED, CLIENT, LIMITS, Desk, read, swap_in, swap_out, write
from tests.support.dispatch import limits, state_of
from transferd.control import instructions as do
from transferd.control.dispatcher import AT_ONCE, MAX_WAITERS, Dispatcher
from transferd.control.gate import DRAINING, Hold
from transferd.control.order import State
from transferd.errors import InvariantError
from transferd.tasks import ErrorInfo, Lane, RankResult, ReadStorageTask, Status, Stop, Task, TaskResult


class Speaker:
    """A dispatcher; `hear` returns what it says."""

    def __init__(self, **more: Any) -> None:
        self.dispatcher = Dispatcher(limits(**more), boot_id="boot", generation="g1")

    def submit(self, task: Task, now: float = 0.0, client: bytes = CLIENT, seq: int = 1) -> list[do.Instruction]:
        return self.dispatcher.submit(now, client, seq, task)

    def merge(self, task_id: str, merged: TaskResult, now: float, *missing: int) -> list[do.Instruction]:
        merged = msgspec.structs.replace(merged, task_id=task_id)
        return self.dispatcher.round_merged(now, task_id, merged, missing)


OK = TaskResult(
    task_id="", status=Status.OK, block_ids=[1], ranks=[RankResult(rank=0, status=Status.OK, blocks=1)], bytes=100
)
LATE = TaskResult(task_id="", status=Status.EXPIRED, error=ErrorInfo("expired", "late"))


# --- instructions ---------------------------------------------------------------------------------


def test_an_admitted_task_asks_to_be_woken_at_its_deadline_and_starts() -> None:
    said = Speaker().submit(write("w", 1, timeout=5.0), now=2.0)
    assert said == [do.WakeAt(7.0), do.Start(write("w", 1, timeout=5.0), "g1", 2.0)]


def test_a_result_goes_to_each_waiter_then_is_published_and_then_the_next_task_starts() -> None:
    speaker = Speaker()
    speaker.submit(write("w", 1), now=1.0)
    speaker.submit(write("w", 1), now=2.0, client=b"other", seq=9)
    speaker.submit(read("r", 1), now=3.0)
    result = TaskResult(
        task_id="w",
        status=Status.OK,
        block_ids=[1],
        ranks=OK.ranks,
        bytes=100,
        duration=3.5,
        generation="g1",
        boot_id="boot",
    )
    assert speaker.merge("w", OK, 4.5) == [
        do.Reply(CLIENT, 1, result),
        do.Reply(b"other", 9, result),
        do.Publish(write("w", 1), result),
        do.Start(read("r", 1), "g1", 3.0),
    ]


def test_a_refusal_says_who_refused_why_and_when_to_ask_again() -> None:
    speaker = Speaker(max_queued_tasks=0)
    assert speaker.submit(write("w", 1), client=b"other", seq=9) == [
        do.Reply(
            b"other",
            9,
            TaskResult(
                task_id="w",
                status=Status.BUSY,
                error=ErrorInfo("queue_full", "the queue is full: 0 tasks are waiting"),
                retry_after=0.005,
                generation="g1",
                boot_id="boot",
            ),
        )
    ]


def test_a_lane_that_took_long_is_to_be_asked_again_later() -> None:
    speaker = Speaker(max_inflight_bytes=1, lane_depth=1)
    speaker.submit(read("r", 1))
    speaker.merge("r", OK, 8.0)
    speaker.submit(read("s", 1))
    [reply] = speaker.submit(read("t", 2))
    assert isinstance(reply, do.Reply)
    assert reply.result.retry_after == 8.0 / 4


def test_a_refusal_that_is_final_has_no_retry_hint() -> None:
    desk = Desk()
    desk.hear(desk.dispatcher.hold(desk.now, "drain"))
    assert desk.answers[desk.submit(write("w", 1))].retry_after is None


def test_while_the_daemon_starts_a_task_is_to_be_asked_again_after_5_seconds() -> None:
    desk = Desk()
    desk.dispatcher = Dispatcher(LIMITS, admitting=False)
    assert desk.answers[desk.submit(write("w", 1))].retry_after == 5.0


def test_a_task_is_stopped_once_and_its_round_expires_once() -> None:
    speaker = Speaker(deadline_slack=1.0)
    speaker.submit(write("w", 1, timeout=5.0))
    assert speaker.dispatcher.deadline_reached(5.0) == [do.StopTask("w", Stop.EXPIRED), do.WakeAt(6.0)]
    assert speaker.dispatcher.cancel(5.5, "w") == []
    assert speaker.dispatcher.deadline_reached(6.0) == [do.ExpireRound("w")]
    assert speaker.dispatcher.deadline_reached(9.0) == []


def test_a_wake_is_requested_only_if_it_is_sooner_than_the_pending_one() -> None:
    speaker = Speaker()
    assert do.WakeAt(9.0) in speaker.submit(write("a", 1, timeout=9.0))
    assert not any(isinstance(said, do.WakeAt) for said in speaker.submit(write("b", 2, timeout=20.0)))
    assert not any(isinstance(said, do.WakeAt) for said in speaker.submit(write("c", 3, timeout=9.0)))
    assert do.WakeAt(5.0) in speaker.submit(write("d", 4, timeout=5.0))


def test_a_wake_that_will_come_for_a_task_that_has_ended_is_enough_for_a_later_one() -> None:
    speaker = Speaker()
    speaker.submit(write("a", 1, timeout=5.0))
    speaker.merge("a", OK, 1.0)
    assert speaker.submit(write("b", 2, timeout=20.0), now=1.0) == [do.Start(write("b", 2, timeout=20.0), "g1", 1.0)]
    assert speaker.dispatcher.deadline_reached(5.0) == [do.WakeAt(21.0)]


def test_ranks_that_hold_on_are_left_behind_however_late_the_wake_comes() -> None:
    speaker = Speaker(deadline_slack=1.0)
    speaker.submit(write("w", 1, timeout=5.0))
    speaker.dispatcher.deadline_reached(5.0)
    assert speaker.dispatcher.deadline_reached(6.5) == [do.ExpireRound("w")]


def test_a_wake_that_comes_too_early_asks_for_the_next_one() -> None:
    speaker = Speaker()
    speaker.submit(write("a", 1, timeout=9.0))
    assert speaker.dispatcher.deadline_reached(4.0) == [do.WakeAt(9.0)]
    later = write("b", 2, timeout=20.0)
    assert speaker.submit(later, now=4.0) == [do.Start(later, "g1", 4.0)], "the one that was asked for will do"


def test_a_round_that_expired_after_a_cancel_does_not_expire_again_at_the_deadline() -> None:
    speaker = Speaker(deadline_slack=1.0)
    speaker.submit(write("w", 1, timeout=5.0))
    speaker.dispatcher.cancel(1.0, "w")
    assert speaker.dispatcher.deadline_reached(2.0) == [do.ExpireRound("w"), do.WakeAt(5.0)]
    assert speaker.dispatcher.deadline_reached(5.0) == []


def test_host_blocks_hold_nothing_once_their_pool_was_given_up() -> None:
    desk = Desk()
    desk.fill_host(3)
    desk.hear(desk.dispatcher.host_emptied(desk.now))
    assert desk.answers[desk.submit(swap_in("i", [2], [3]))].status is Status.REJECTED


def test_no_wake_is_asked_for_when_nothing_is_left() -> None:
    speaker = Speaker()
    speaker.submit(write("w", 1, timeout=9.0))
    speaker.merge("w", OK, 1.0)
    assert speaker.dispatcher.deadline_reached(9.0) == []


def test_a_queued_task_says_whether_it_expired_or_was_cancelled() -> None:
    desk = Desk()
    desk.submit(read("r", 1))
    expired = desk.submit(write("expired", 1, timeout=1.0))
    cancelled = desk.submit(write("cancelled", 1))
    desk.pass_time(1.0)
    desk.hear(desk.dispatcher.cancel(desk.now, "cancelled"))
    assert desk.answers[expired].error == ErrorInfo("expired", "deadline reached while queued")
    assert desk.answers[cancelled].error == ErrorInfo("cancelled", "cancelled while queued")


def test_a_queued_task_fails_with_shutdown_when_the_queue_is_abandoned() -> None:
    desk = Desk()
    desk.submit(read("r", 1))
    queued = desk.submit(write("w", 1))
    desk.hear(desk.dispatcher.shut_down(desk.now))
    desk.hear(desk.dispatcher.abandon_queue(desk.now))
    assert desk.answers[queued].error == ErrorInfo("shutdown", "the daemon shut down before this task started")


def test_a_swap_in_of_a_host_block_that_holds_nothing_is_refused_before_it_waits() -> None:
    desk = Desk()
    refused = desk.answers[desk.submit(swap_in("i", [2], [3]))]
    assert (refused.status, refused.error and refused.error.code) == (Status.REJECTED, "empty_block")


def test_a_flush_needs_no_memory_that_an_engine_has_mapped() -> None:
    desk = Desk()
    desk.dispatcher = Dispatcher(limits(only_flush=True), admitting=False)
    desk.hear(desk.dispatcher.cache_ready(desk.now))
    desk.submit(write("flush", 1))
    assert desk.started == ["flush"]


def test_a_task_behind_one_that_could_not_start_is_started_in_any_lane() -> None:
    desk = Desk()
    desk.submit(swap_out("o", [1], [3]))
    hollow = desk.submit(swap_in("i", [2], [3]))
    desk.submit(swap_out("behind", [2], [4]))
    desk.finish("o", moved=0)
    assert desk.answers[hollow].status is Status.FAILED
    assert desk.started == ["o", "behind"]


def test_a_task_that_cannot_start_says_how_long_it_waited() -> None:
    desk = Desk()
    desk.submit(swap_out("o", [1], [3]))
    desk.now = 1.0
    hollow = desk.submit(swap_in("i", [2], [3]))
    desk.now = 4.5
    desk.finish("o", moved=0)
    assert desk.answers[hollow].duration == 3.5


def test_tasks_that_cannot_start_one_after_another_need_no_deep_stack() -> None:
    desk = Desk(limits(max_queued_tasks=500, block_bytes=1))
    desk.submit(swap_out("o", [1], [3]))
    pushes = [desk.submit(swap_in(f"i{i}", [2], [3])) for i in range(300)]  # each waits for the one before it
    desk.finish("o", moved=0)
    assert {desk.answers[seq].status for seq in pushes} == {Status.FAILED}


# --- pushes of an id that is known ----------------------------------------------------------------


def test_a_task_id_whose_blocks_a_rank_still_holds_is_taken() -> None:
    desk = Desk(limits(max_results=0))  # so that no result is kept that would answer
    desk.submit(read("r", 1, timeout=2.0))
    desk.pass_time(2.0)
    desk.pass_time(1.0)
    desk.finish("r", missing=(1,))
    result = desk.answers[desk.submit(read("r", 1, timeout=2.0))]
    assert (result.status, result.retry_after) == (Status.BUSY, 5.0)
    assert result.error == ErrorInfo("task_id_busy", "this task_id is in use")
    assert not result.settled


def test_a_push_of_a_task_whose_memory_went_says_whether_a_late_rank_is_at_its_blocks() -> None:
    desk = Desk()
    desk.submit(read("r", 1, timeout=2.0))
    desk.pass_time(2.0)
    desk.pass_time(1.0)
    desk.finish("r", missing=(1,))
    desk.hear(desk.dispatcher.withdraw_cache(desk.now, CLEARED, False))
    desk.hear(desk.dispatcher.cache_ready(desk.now))

    def pushed_again(task: ReadStorageTask) -> tuple[str, bool]:
        result = desk.answers[desk.submit(task)]
        assert result.error is not None
        return result.error.code, result.settled

    assert pushed_again(read("r", 1, timeout=2.0)) == ("cache_gone", False)
    assert pushed_again(read("r", 2, timeout=2.0)) == ("task_id_conflict", True), "of this one, no rank has a block"
    desk.hear(desk.dispatcher.rank_left(desk.now, "r", 1))
    assert pushed_again(read("r", 1, timeout=2.0)) == ("cache_gone", True)


def test_at_most_256_pushes_wait_for_one_task() -> None:
    assert MAX_WAITERS == 256
    desk = Desk()
    pushes = [desk.submit(write("w", 1)) for _ in range(257)]
    refused = desk.answers[pushes[-1]]
    assert refused.error == ErrorInfo("task_id_busy", "this task_id is in use")
    desk.finish("w")
    assert [desk.answers[seq].status for seq in pushes[:-1]] == [Status.OK] * 256


def test_a_conflict_names_80_characters_of_the_id() -> None:
    desk = Desk()
    desk.submit(write("x" * 100, 1))
    error = desk.answers[desk.submit(write("x" * 100, 2))].error
    assert error == ErrorInfo("task_id_conflict", f"another task was pushed under the id {'x' * 80!r} before")


# --- rounds ---------------------------------------------------------------------------------------


def test_a_merged_round_of_a_task_that_does_not_run_is_a_bug_with_its_story() -> None:
    speaker = Speaker()
    with pytest.raises(InvariantError, match=r"a round was merged for 'w', which is not running\n\(no notes kept\)"):
        speaker.merge("w", OK, 1.0)
    speaker.submit(read("r", 1))
    speaker.submit(write("w", 1))
    with pytest.raises(InvariantError, match=r"(?s)a round was merged for 'w', which is not running.*waits"):
        speaker.merge("w", OK, 1.0)


def test_a_rank_that_leaves_a_task_that_has_no_stragglers_changes_nothing() -> None:
    speaker = Speaker()
    speaker.submit(write("w", 1))
    assert speaker.dispatcher.rank_left(1.0, "w", 0) == []
    assert state_of(speaker.dispatcher, "w") is State.RUNNING


def test_blocks_are_free_once_the_last_straggler_has_left() -> None:
    speaker = Speaker()
    speaker.submit(read("r", 1))
    speaker.submit(write("w", 1), now=1.0)
    speaker.dispatcher.cancel(2.0, "r")
    speaker.merge("r", LATE, 3.0, 0, 1)
    assert speaker.dispatcher.rank_left(4.0, "r", 0) == []
    assert speaker.dispatcher.rank_left(5.0, "r", 1) == [do.Start(write("w", 1), "g1", 1.0)]


def test_a_straggler_frees_its_place_in_the_lane_at_once() -> None:
    speaker = Speaker(lane_depth=1)
    speaker.submit(read("r", 1))
    speaker.submit(read("next", 2), now=1.0)
    speaker.dispatcher.cancel(2.0, "r")
    assert do.Start(read("next", 2), "g1", 1.0) in speaker.merge("r", LATE, 3.0, 0)


def test_a_rank_that_dies_holds_no_blocks_any_more() -> None:
    speaker = Speaker()
    speaker.submit(read("r", 1))
    speaker.dispatcher.cancel(2.0, "r")
    speaker.merge("r", LATE, 3.0, 1)
    assert not speaker.dispatcher.empty
    speaker.dispatcher.rank_failed(4.0, 1, "gone")
    assert speaker.dispatcher.empty


def test_a_task_that_expired_by_itself_is_not_called_cancelled() -> None:
    speaker = Speaker()
    speaker.submit(read("r", 1, timeout=1.0))
    speaker.dispatcher.deadline_reached(1.0)
    [reply, *_] = speaker.merge("r", LATE, 2.0, 0)
    assert isinstance(reply, do.Reply)
    assert reply.result.status is Status.EXPIRED


def test_a_cancelled_task_that_failed_is_called_failed() -> None:
    speaker = Speaker()
    speaker.submit(read("r", 1))
    speaker.dispatcher.cancel(1.0, "r")
    failed = TaskResult(task_id="", status=Status.FAILED, error=ErrorInfo("storage_error", "disk"))
    [reply, *_] = speaker.merge("r", failed, 2.0)
    assert isinstance(reply, do.Reply)
    assert reply.result.status is Status.FAILED


# --- what can be seen from outside ----------------------------------------------------------------


def test_the_state_of_a_task_is_known_from_its_admission_until_its_result_is_forgotten() -> None:
    desk = Desk()
    assert state_of(desk.dispatcher, "w") is None
    desk.submit(read("before", 1))
    desk.submit(write("w", 1))
    assert state_of(desk.dispatcher, "w") is State.QUEUED
    desk.finish("before")
    assert state_of(desk.dispatcher, "w") is State.RUNNING
    desk.hear(desk.dispatcher.cancel(desk.now, "w"))
    assert state_of(desk.dispatcher, "w") is State.CANCELLING
    desk.finish("w", moved=0)
    assert state_of(desk.dispatcher, "w") is State.DONE
    desk.pass_time(60.0)
    desk.submit(read("later", 2))
    desk.finish("later")
    assert state_of(desk.dispatcher, "w") is None


def test_a_task_that_a_rank_holds_on_to_is_done_even_when_no_result_is_kept() -> None:
    desk = Desk(limits(max_results=0))
    desk.submit(read("r", 1))
    desk.hear(desk.dispatcher.cancel(desk.now, "r"))
    desk.finish("r", missing=(1,))
    assert state_of(desk.dispatcher, "r") is State.DONE


def test_tasks_are_listed_until_they_are_answered() -> None:
    desk = Desk()
    desk.submit(write("a", 1))
    desk.submit(write("b", 1))
    assert [record.task_id for record in desk.dispatcher.records.values()] == ["a", "b"]
    desk.finish("a")
    assert [record.task_id for record in desk.dispatcher.records.values()] == ["b"]


def test_no_task_leaves_its_law_of_states() -> None:
    desk = Desk()
    desk.submit(write("w", 1))
    [record] = desk.dispatcher.records.values()
    with pytest.raises(InvariantError, match=r"(?s)'w' cannot go from running to queued\n.*admitted.*started"):
        desk.dispatcher._move(record, State.QUEUED)


def test_ids_of_tasks_are_known_until_they_are_answered() -> None:
    desk = Desk()
    desk.submit(write("a", 1))
    desk.submit(write("b", 1))
    assert [one.task_id for one in desk.dispatcher.records.values()] == ["a", "b"]
    desk.finish("a")
    assert [one.task_id for one in desk.dispatcher.records.values()] == ["b"]


def test_statistics_count_what_is_under_way_what_has_ended_and_what_was_refused() -> None:
    speaker = Speaker(lane_depth=1, block_bytes=10, ranks=2)
    speaker.submit(write("bad", 99))
    speaker.submit(read("left", 1))
    speaker.dispatcher.cancel(0.0, "left")
    speaker.merge("left", LATE, 1.0, 1)
    speaker.submit(write("done", 2))
    speaker.merge("done", OK, 1.0)
    speaker.submit(write("running", 3))
    speaker.submit(write("queued", 4, 5))
    speaker.dispatcher.hold(7.0, "pause", b"a1", "a")
    dispatcher = speaker.dispatcher
    assert (dispatcher.lanes.queued, dispatcher.lanes.running) == (1, 1)
    assert list(dispatcher.stragglers) == ["left"]
    assert dispatcher.statuses == {"rejected": 1, "cancelled": 1, "ok": 1}
    assert dispatcher.rejects == {"id_out_of_range": 1}
    assert (dispatcher.gate.paused, dispatcher.gate.draining) == (True, False)
    assert dispatcher.lanes.waiting == dict.fromkeys(Lane, 0) | {Lane.WRITE: 1}
    assert dispatcher.gate.held == [Hold("pause", "a", b"a1", 7.0)]
    assert dispatcher.hazards.nbytes > 3 * 1600
    assert len(dispatcher.results) == 2
    assert dispatcher.results.nbytes > 2 * 550


def test_a_dispatcher_is_quiet_when_no_rank_touches_a_block_and_empty_when_nothing_waits_either() -> None:
    speaker = Speaker()
    dispatcher = speaker.dispatcher
    dispatcher.hold(0.0, "pause")
    speaker.submit(read("r", 1))
    assert (dispatcher.quiet, dispatcher.empty) == (True, False)
    dispatcher.resume(0.0)
    assert (dispatcher.quiet, dispatcher.empty) == (False, False)
    dispatcher.cancel(1.0, "r")
    speaker.merge("r", LATE, 2.0, 0)
    assert (dispatcher.quiet, dispatcher.empty) == (False, False)
    dispatcher.rank_left(3.0, "r", 0)
    assert (dispatcher.quiet, dispatcher.empty) == (True, True)


def test_a_dispatcher_says_whether_it_admits_and_whether_it_lives() -> None:
    dispatcher = Speaker().dispatcher
    assert (dispatcher.gate.refusal, dispatcher.gate.alive, dispatcher.alarms.next()) == (None, True, math.inf)
    dispatcher.hold(0.0, "drain")
    assert (dispatcher.gate.refusal, dispatcher.gate.alive) == ((Status.REJECTED, DRAINING), True)
    dispatcher.shut_down(0.0)
    assert (dispatcher.gate.refusal, dispatcher.gate.alive) == ((Status.REJECTED, DRAINING), False)


def test_a_generation_counts_for_what_is_refused_from_then_on() -> None:
    speaker = Speaker()
    speaker.dispatcher.bump_generation(1.0, "g2")
    [reply] = speaker.submit(write("bad", 99))
    assert isinstance(reply, do.Reply)
    assert reply.result.generation == "g2"


# --- work that nobody waits for -------------------------------------------------------------------


def test_a_client_that_goes_takes_back_only_its_own_pushes() -> None:
    desk = Desk()
    mine = desk.submit(write("shared", 1))
    desk.submit(write("shared", 1), client=b"gone")
    desk.submit(swap_out("other", [2], [2]))
    desk.hear(desk.dispatcher.client_gone(desk.now, b"gone"))
    assert desk.stopped == []
    desk.finish("shared")
    assert list(desk.answers) == [mine]


def test_a_client_that_goes_takes_back_each_of_its_pushes() -> None:
    desk = Desk()
    for i, client in enumerate([b"gone", b"stays", b"gone"]):
        desk.submit(read(f"r{i}", i), client=client)
    desk.hear(desk.dispatcher.client_gone(desk.now, b"gone"))
    assert desk.stopped == [("r0", Stop.CANCELLED)]
    assert [one.task_id for one in desk.dispatcher.records.values()] == ["r0", "r1"], "the third was still queued"


def test_an_abandoned_task_is_stopped_only_once() -> None:
    desk = Desk()
    desk.submit(write("w", 1), client=b"gone")
    desk.hear(desk.dispatcher.client_gone(desk.now, b"gone"))
    desk.hear(desk.dispatcher.client_gone(desk.now, b"another"))
    assert desk.stopped == [("w", Stop.CANCELLED)]


def test_a_client_with_many_tasks_takes_them_back_in_steps_the_newest_first() -> None:
    speaker, number = Speaker(max_queued_tasks=1024), 2 * AT_ONCE + 10
    speaker.submit(write("stays", 0), client=b"stays")
    for i in range(number):  # each waits for the one before it
        speaker.submit(swap_out(f"w{i}", [1], [1]), client=b"gone")
    ended, steps = list[str](), 0
    said: list[do.Instruction] = [do.Again(b"gone")]
    while said and isinstance(said[-1], do.Again):
        steps += 1
        assert speaker.dispatcher.waits(b"gone") == number - len(ended)
        said = speaker.dispatcher.client_gone(1.0, said[-1].client)
        ended += [one.task.task_id for one in said if isinstance(one, do.Publish)]
        assert not any(isinstance(one, do.Start) for one in said), "none is started to be stopped"
    assert steps == 3
    assert ended == [f"w{i}" for i in range(number - 1, 0, -1)], "the first one runs"
    assert [one.task_id for one in said if isinstance(one, do.StopTask)] == ["w0"]
    assert [one.task_id for one in speaker.dispatcher.records.values()] == ["stays", "w0"]
    assert speaker.dispatcher.waits(b"gone") == 0


def test_many_tasks_with_one_deadline_end_in_steps_and_each_is_answered_once() -> None:
    speaker, number = Speaker(max_queued_tasks=1024), 2 * AT_ONCE + 10
    for i in range(number):  # each waits for the one before it
        speaker.submit(swap_out(f"w{i}", [1], [1], timeout=2.0), seq=i)
    answered, stopped, steps = list[int](), list[str](), 0
    said: list[do.Instruction] = [do.WakeAt(2.0)]
    while said and said[-1] == do.WakeAt(2.0):
        steps += 1
        said = speaker.dispatcher.deadline_reached(2.0)
        answered += [one.seq for one in said if isinstance(one, do.Reply)]
        stopped += [one.task_id for one in said if isinstance(one, do.StopTask)]
    assert steps == 3
    assert (len(answered), len(set(answered))) == (number - 1, number - 1)
    assert (stopped, list(speaker.dispatcher.records)) == (["w0"], ["w0"])
