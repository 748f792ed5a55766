"""The dispatcher, one situation a test: events in, instructions out, nothing around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.dispatch import check_dispatcher, limits, state_of
from transferd.control import instructions as do
from transferd.control.admission import Limits
from transferd.control.dispatcher import Dispatcher
from transferd.control.order import TRANSITIONS, State
from transferd.errors import InvariantError
from transferd.tasks import (
    ErrorInfo,
    RankOutcome,
    ReadStorageTask,
    Status,
    Stop,
    SwapInTask,
    SwapOutTask,
    Task,
    TaskResult,
    WriteStorageTask,
)

LIMITS = limits(
    ranks=2,
    device_blocks=8,
    host_blocks=8,
    block_bytes=100,
    max_queued_tasks=3,
    max_inflight_bytes=2000,
    lane_depth=2,
    max_results=4,
)
CLIENT = b"engine"


class Desk:
    """A dispatcher and the paper around it: what was started, what was answered, what time it is."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.dispatcher = Dispatcher(limits, boot_id="boot", generation="g1")
        self.now = 0.0
        self.seq = 0
        self.started: list[str] = []
        self.stopped: list[tuple[str, Stop]] = []
        self.expired: list[str] = []
        self.answers: dict[int, TaskResult] = {}
        self.published: list[str] = []
        self.wake_at: float | None = None
        self.tasks: dict[str, Task] = {}

    def hear(self, instructions: list[do.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case do.Start(task):
                    self.started.append(task.task_id)
                case do.StopTask(task_id, reason):
                    self.stopped.append((task_id, reason))
                case do.ExpireRound(task_id):
                    self.expired.append(task_id)
                case do.Reply(_, seq, result):
                    assert seq not in self.answers, "a waiter is answered once"
                    self.answers[seq] = result
                case do.Publish(task, _):
                    self.published.append(task.task_id)
                case do.WakeAt(when):
                    self.wake_at = when
        check_dispatcher(self.dispatcher)

    def submit(self, task: Task, client: bytes = CLIENT) -> int:
        self.seq += 1
        self.tasks[task.task_id] = task
        self.hear(self.dispatcher.submit(self.now, client, self.seq, task))
        return self.seq

    def finish(self, task_id: str, *, moved: int | None = None, missing: tuple[int, ...] = ()) -> None:
        task = self.tasks[task_id]
        count = task.blocks if moved is None else moved
        stop = next((reason for stopped, reason in self.stopped if stopped == task_id), None)
        late = ErrorInfo("expired", "late")
        outcomes = [
            RankOutcome(rank, error=late, stop=Stop.EXPIRED)
            if rank in missing
            else RankOutcome(rank, range(count), count * 100, stop=stop if count < task.blocks else None)
            for rank in range(2)
        ]
        self.hear(self.dispatcher.round_merged(self.now, task_id, task.merge(outcomes), missing))

    def fill_host(self, *blocks: int) -> None:
        """A swap-out fills host blocks, and leaves no trace in `started`."""
        for block in blocks:
            self.submit(swap_out(f"fill {block}", [block], [block]))
            self.finish(f"fill {block}")
        self.started.clear()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.wake_at is not None and self.wake_at <= self.now:
            self.wake_at = None
            self.hear(self.dispatcher.deadline_reached(self.now))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def write(task_id: str, *ids: int, **more: Any) -> WriteStorageTask:
    return WriteStorageTask(task_id=task_id, keys=[f"{task_id}-{i}" for i in ids], gpu_block_ids=list(ids), **more)


def read(task_id: str, *ids: int, **more: Any) -> ReadStorageTask:
    return ReadStorageTask(task_id=task_id, keys=[f"{task_id}-{i}" for i in ids], gpu_block_ids=list(ids), **more)


def swap_out(task_id: str, gpu: list[int], cpu: list[int], **more: Any) -> SwapOutTask:
    return SwapOutTask(task_id=task_id, gpu_block_ids=gpu, cpu_block_ids=cpu, **more)


def swap_in(task_id: str, gpu: list[int], cpu: list[int], **more: Any) -> SwapInTask:
    return SwapInTask(task_id=task_id, gpu_block_ids=gpu, cpu_block_ids=cpu, **more)


def test_a_task_starts_at_once_and_its_result_goes_to_the_pusher(desk: Desk) -> None:
    seq = desk.submit(write("w", 1, 2))
    assert desk.started == ["w"]
    assert state_of(desk.dispatcher, "w") is State.RUNNING
    desk.now = 2.5
    desk.finish("w")
    result = desk.answers[seq]
    assert (result.status, result.block_ids, result.bytes, result.duration) == (Status.OK, [1, 2], 400, 2.5)
    assert (result.generation, result.boot_id) == ("g1", "boot")
    assert desk.published == ["w"]
    assert desk.dispatcher.empty


def test_every_state_of_the_table_can_be_left_as_it_says_and_in_no_other_way() -> None:
    assert set(TRANSITIONS) == set(State)
    assert TRANSITIONS[State.DONE] == frozenset()
    desk = Desk()
    desk.submit(write("w", 1))
    desk.finish("w")
    with pytest.raises(InvariantError, match=r"(?s)not running.*admitted.*started.*done"):
        desk.finish("w")


@pytest.mark.parametrize(
    ("task", "code"),
    [
        (WriteStorageTask(task_id="t", keys=["a"], gpu_block_ids=[1, 2]), "length_mismatch"),
        (WriteStorageTask(task_id="t", keys=["a", "b"], gpu_block_ids=[1]), "length_mismatch"),
        (WriteStorageTask(task_id="t", keys=["a", "a"], gpu_block_ids=[1, 2]), "duplicate_key"),
        (WriteStorageTask(task_id="t", keys=[f"{i}" for i in range(9)], gpu_block_ids=[1] * 9), "too_many_blocks"),
        (ReadStorageTask(task_id="t", keys=["a", "b"], gpu_block_ids=[1]), "length_mismatch"),
        (ReadStorageTask(task_id="t", keys=["a"], gpu_block_ids=[-1]), None),
        (ReadStorageTask(task_id="t", keys=["a"], gpu_block_ids=[8]), None),
        (ReadStorageTask(task_id="t", keys=["a"], gpu_block_ids=[10**30]), None),
        (ReadStorageTask(task_id="t", keys=["a", "b"], gpu_block_ids=[1, 1]), None),
        (ReadStorageTask(task_id="t", keys=["a"], gpu_block_ids=[1], start_read_block_idx=-1), "bad_value"),
        (swap_out("t", [1, 2], [1]), "length_mismatch"),
        (swap_out("t", [1, 2], [3, 3]), None),
        (swap_in("t", [1, 1], [3, 4]), None),
        (swap_in("t", [1], [8]), None),
        (write("", 1), "bad_value"),
        (write("x" * 1025, 1), "bad_value"),
        (write("t", 1, timeout=0), "bad_value"),
        (write("t", 1, timeout=float("nan")), "bad_value"),
        (write("t", 1, timeout=float("inf")), "bad_value"),
    ],
)
def test_an_impossible_task_is_rejected_with_a_code_and_touches_nothing(task: Task, code: str | None) -> None:
    desk = Desk()
    seq = desk.submit(task)
    result = desk.answers[seq]
    assert result.status is Status.REJECTED
    assert result.error is not None
    assert code is None or result.error.code == code
    assert desk.started == []
    assert desk.dispatcher.empty
    assert desk.dispatcher.rejects == {result.error.code: 1}


def test_a_read_may_name_more_blocks_than_keys() -> None:
    desk = Desk()
    seq = desk.submit(ReadStorageTask(task_id="r", keys=["a"], gpu_block_ids=[5, 6]))
    desk.finish("r")
    assert desk.answers[seq].block_ids == [5]


def test_tasks_on_the_same_block_run_in_the_order_of_submission(desk: Desk) -> None:
    desk.submit(read("r", 1))
    desk.submit(swap_out("o", [1], [1]))
    desk.submit(swap_in("i", [2], [1]))
    assert desk.started == ["r"]
    desk.finish("r")
    assert desk.started == ["r", "o"]
    desk.finish("o")
    assert desk.started == ["r", "o", "i"]


def test_loads_never_wait_behind_stores(desk: Desk) -> None:
    for i in range(4):
        desk.submit(write(f"w{i}", i))
    assert desk.started == ["w0", "w1"], "two places in the lane"
    desk.submit(read("r", 7))
    assert desk.started[-1] == "r"


def test_past_the_queue_bound_the_answer_is_busy_with_a_hint_and_the_id_may_be_pushed_again(desk: Desk) -> None:
    for i in range(5):
        desk.submit(write(f"w{i}", i))
    refused = desk.submit(write("w5", 5))
    result = desk.answers[refused]
    assert result.status is Status.BUSY
    assert result.error is not None
    assert result.error.code == "queue_full"
    assert result.retry_after is not None
    assert 0 < result.retry_after <= 5
    desk.finish("w0")
    again = desk.submit(write("w5", 5))
    assert again not in desk.answers, "admitted this time"


def test_past_the_bytes_in_flight_the_answer_is_busy_but_one_task_alone_may_be_larger() -> None:
    desk = Desk(limits(host_blocks=0, block_bytes=100, max_inflight_bytes=2000))
    big = desk.submit(write("big", *range(20)))
    assert big not in desk.answers
    small = desk.submit(write("small", 30))
    refusal = desk.answers[small].error
    assert refusal is not None
    assert refusal.code == "bytes_in_flight"
    other_lane = desk.submit(read("r", 40))
    assert other_lane not in desk.answers


def test_pushing_a_running_task_again_joins_it(desk: Desk) -> None:
    first = desk.submit(write("w", 1))
    second = desk.submit(write("w", 1), client=b"other")
    desk.finish("w")
    assert desk.answers[first] is desk.answers[second]
    assert desk.started == ["w"]
    assert desk.published == ["w"]


def test_pushing_a_finished_task_again_returns_its_result_until_the_ttl(desk: Desk) -> None:
    first = desk.submit(write("w", 1))
    desk.finish("w")
    second = desk.submit(write("w", 1, timeout=5.0))
    assert desk.answers[second] == desk.answers[first]
    desk.pass_time(61)
    third = desk.submit(write("w", 1))
    assert third not in desk.answers, "it runs anew"


def test_another_task_under_a_known_id_is_rejected(desk: Desk) -> None:
    desk.submit(write("w", 1))
    assert desk.answers[desk.submit(write("w", 2))].error == ErrorInfo(
        "task_id_conflict", "another task was pushed under the id 'w' before"
    )
    desk.finish("w")
    assert desk.answers[desk.submit(read("w", 1))].status is Status.REJECTED


def test_results_kept_are_bounded_in_number(desk: Desk) -> None:
    for i in range(10):
        desk.submit(write(f"w{i}", 1))
        desk.finish(f"w{i}")
    assert len(desk.dispatcher.results) == 4


def test_a_queued_task_expires_at_its_deadline_without_having_touched_anything(desk: Desk) -> None:
    desk.submit(read("r", 1))
    waiting = desk.submit(write("w", 1, timeout=2.0))
    desk.pass_time(2.0)
    assert desk.answers[waiting].status is Status.EXPIRED
    assert desk.stopped == []


def test_a_running_task_is_stopped_at_its_deadline_and_returns_the_prefix_done_so_far(desk: Desk) -> None:
    seq = desk.submit(read("r", 1, 2, 3, timeout=2.0))
    desk.pass_time(2.0)
    assert desk.stopped == [("r", Stop.EXPIRED)]
    assert state_of(desk.dispatcher, "r") is State.CANCELLING
    desk.finish("r", moved=2)
    result = desk.answers[seq]
    assert (result.status, result.block_ids) == (Status.PARTIAL, [1, 2])
    assert result.error is not None
    assert result.error.code == "expired"


def test_a_rank_that_does_not_let_go_is_left_behind_and_its_blocks_stay_claimed(desk: Desk) -> None:
    seq = desk.submit(read("r", 1, timeout=2.0))
    behind = desk.submit(write("w", 1))
    desk.pass_time(2.0)
    assert desk.expired == []
    desk.pass_time(1.0)
    assert desk.expired == ["r"]
    desk.finish("r", moved=1, missing=(1,))
    assert desk.answers[seq].status is Status.EXPIRED
    assert not desk.answers[seq].settled
    assert not desk.dispatcher.settled("r")
    assert desk.started == ["r"], "block 1 may still be written by rank 1"
    assert not desk.dispatcher.quiet
    desk.hear(desk.dispatcher.rank_left(desk.now, "r", 1))
    assert desk.dispatcher.settled("r")
    assert desk.answers[desk.submit(read("r", 1, timeout=2.0))].settled, "the kept result"
    assert desk.started == ["r", "w"]
    assert behind not in desk.answers


def test_the_result_of_a_dead_rank_is_settled_once_that_rank_is_done(desk: Desk) -> None:
    """A rank that has died is not missing, but may still be in a copy of another task."""
    seq = desk.submit(read("r", 1))
    merged = TaskResult(task_id="r", status=Status.FAILED, error=ErrorInfo("rank_died", "rank 1 died"))
    desk.hear(desk.dispatcher.round_merged(desk.now, "r", merged, (), settled=False))
    assert not desk.answers[seq].settled
    assert not desk.dispatcher.settled("r")
    assert not desk.answers[desk.submit(read("r", 1))].settled
    desk.hear(desk.dispatcher.task_settled(desk.now, "r"))
    assert desk.dispatcher.settled("r")
    assert desk.answers[desk.submit(read("r", 1))].settled


def test_cancel_answers_a_queued_task_at_once_and_keeps_its_place_for_those_behind(desk: Desk) -> None:
    desk.fill_host(2)
    desk.submit(swap_out("reader", [1], [1]))
    cancelled = desk.submit(read("r", 1))
    desk.submit(swap_in("i", [1], [2]))
    desk.hear(desk.dispatcher.cancel(desk.now, "r"))
    assert desk.answers[cancelled].status is Status.CANCELLED
    assert desk.started == ["reader"], "the swap-in still waits for the swap-out before the cancelled task"
    desk.finish("reader")
    assert desk.started == ["reader", "i"]


def test_a_queued_task_cancelled_to_be_pushed_anew_runs_under_its_id_and_a_started_one_does_not(desk: Desk) -> None:
    desk.hear(desk.dispatcher.hold(desk.now, "pause"))
    desk.submit(read("r", 1))
    desk.hear(desk.dispatcher.cancel(desk.now, "r", anew=True))
    again = desk.submit(read("r", 1))
    desk.hear(desk.dispatcher.resume(desk.now))
    assert desk.started == ["r"]
    desk.hear(desk.dispatcher.cancel(desk.now, "r", anew=True))
    desk.finish("r", moved=0)
    assert desk.answers[again] == desk.answers[desk.submit(read("r", 1))]
    assert desk.started == ["r"]


def test_cancel_of_a_running_task_stops_it_and_says_cancelled(desk: Desk) -> None:
    seq = desk.submit(read("r", 1, 2))
    desk.hear(desk.dispatcher.cancel(desk.now, "r"))
    desk.hear(desk.dispatcher.cancel(desk.now, "r"))
    assert desk.stopped == [("r", Stop.CANCELLED)]
    desk.finish("r", moved=1)
    assert (desk.answers[seq].status, desk.answers[seq].block_ids) == (Status.CANCELLED, [1])


def test_the_deadline_of_a_cancelled_task_does_not_cut_its_slack_short(desk: Desk) -> None:
    seq = desk.submit(read("r", 1, timeout=2.0))
    desk.pass_time(1.9)
    desk.hear(desk.dispatcher.cancel(desk.now, "r"))
    desk.pass_time(0.1)
    assert desk.expired == []
    desk.pass_time(0.9)
    assert desk.expired == ["r"]
    desk.finish("r", missing=(0, 1))
    assert desk.answers[seq].status is Status.CANCELLED


def test_a_cancel_of_an_unknown_task_changes_nothing(desk: Desk) -> None:
    desk.hear(desk.dispatcher.cancel(desk.now, "nobody"))
    assert desk.dispatcher.empty


def test_tasks_without_a_waiting_client_are_cancelled(desk: Desk) -> None:
    desk.submit(write("mine", 1), client=b"gone")
    desk.submit(write("shared", 2), client=b"gone")
    kept = desk.submit(write("shared", 2), client=b"stays")
    desk.submit(write("queued", 1), client=b"gone")
    desk.hear(desk.dispatcher.client_gone(desk.now, b"gone"))
    assert desk.stopped == [("mine", Stop.CANCELLED)]
    desk.finish("mine")
    desk.finish("shared")
    assert list(desk.answers) == [kept]
    assert desk.dispatcher.empty


def test_pause_admits_and_starts_nothing_and_resume_goes_on(desk: Desk) -> None:
    desk.submit(write("a", 1))
    desk.hear(desk.dispatcher.hold(desk.now, "pause"))
    desk.submit(write("b", 2))
    assert not desk.dispatcher.quiet
    desk.finish("a")
    assert desk.dispatcher.quiet
    assert desk.started == ["a"]
    desk.hear(desk.dispatcher.resume(desk.now))
    assert desk.started == ["a", "b"]


def pause(desk: Desk, holder: str, client: bytes) -> None:
    desk.hear(desk.dispatcher.hold(desk.now, "pause", client, holder))


def test_a_pause_ends_with_the_client_that_asked_for_it(desk: Desk) -> None:
    pause(desk, "a", b"a1")
    desk.submit(write("w", 1), client=b"b1")
    desk.hear(desk.dispatcher.client_gone(desk.now, b"b2"))
    assert desk.started == [], "somebody else has gone"
    desk.hear(desk.dispatcher.client_gone(desk.now, b"a1"))
    assert desk.started == ["w"]
    assert desk.dispatcher.gate.held == []


def test_a_drain_ends_with_the_client_that_asked_for_it(desk: Desk) -> None:
    desk.hear(desk.dispatcher.hold(desk.now, "drain", b"a1", "a"))
    assert desk.answers[desk.submit(write("w", 1), client=b"b1")].status is Status.REJECTED
    desk.hear(desk.dispatcher.client_gone(desk.now, b"a1"))
    desk.submit(write("w", 1), client=b"b1")
    assert desk.started == ["w"]


def test_several_pauses_end_one_by_one(desk: Desk) -> None:
    pause(desk, "a", b"a1")
    pause(desk, "b", b"b1")
    pause(desk, "c", b"c1")
    pause(desk, "c", b"c1")
    desk.submit(write("w", 1), client=b"d1")
    desk.hear(desk.dispatcher.resume(desk.now, "a"))
    desk.hear(desk.dispatcher.client_gone(desk.now, b"b1"))
    assert desk.started == [], "c still holds"
    assert [hold.holder for hold in desk.dispatcher.gate.held] == ["c"]
    desk.hear(desk.dispatcher.resume(desk.now, "c"))
    assert desk.started == ["w"]


def test_a_resume_by_a_client_without_holds_ends_all_pauses_and_drains(desk: Desk) -> None:
    pause(desk, "a", b"a1")
    desk.hear(desk.dispatcher.hold(desk.now, "drain", b"b1", "b"))
    desk.hear(desk.dispatcher.resume(desk.now, "operator"))
    desk.submit(write("w", 1), client=b"d1")
    assert desk.started == ["w"]
    desk.hear(desk.dispatcher.client_gone(desk.now, b"a1"))
    assert desk.stopped == []


def test_a_holder_that_comes_back_by_another_connection_does_not_lose_its_pause_with_the_old_one(desk: Desk) -> None:
    pause(desk, "a", b"a1")
    desk.pass_time(1.0)
    pause(desk, "a", b"a2")
    desk.submit(write("w", 1), client=b"d1")
    desk.hear(desk.dispatcher.client_gone(desk.now, b"a1"))
    assert desk.started == []
    [hold] = desk.dispatcher.gate.held
    assert hold.since == 0.0, "it has been paused since the first"
    desk.hear(desk.dispatcher.resume(desk.now, "a"))
    assert desk.started == ["w"]


def test_the_end_of_a_pause_starts_queued_tasks_except_those_of_lost_clients(desk: Desk) -> None:
    pause(desk, "a", b"a1")
    mine = desk.submit(write("mine", 1), client=b"a1")
    desk.submit(write("other", 2), client=b"b1")
    desk.hear(desk.dispatcher.client_gone(desk.now, b"a1"))
    assert desk.started == ["other"]
    assert mine not in desk.answers


def test_a_shutdown_does_not_end_with_a_client(desk: Desk) -> None:
    desk.hear(desk.dispatcher.hold(desk.now, "drain", b"a1", "a"))
    desk.hear(desk.dispatcher.shut_down(desk.now))
    desk.hear(desk.dispatcher.client_gone(desk.now, b"a1"))
    assert desk.dispatcher.gate.draining
    assert desk.answers[desk.submit(write("late", 7), client=b"b1")].status is Status.REJECTED


def test_a_paused_task_still_expires(desk: Desk) -> None:
    desk.hear(desk.dispatcher.hold(desk.now, "pause"))
    seq = desk.submit(write("a", 1, timeout=1.0))
    desk.pass_time(1.0)
    assert desk.answers[seq].status is Status.EXPIRED


def test_a_push_that_will_be_resent_gets_no_refusal_and_its_resend_may_be_admitted(desk: Desk) -> None:
    task = write("t", 1)
    desk.tasks["t"] = task
    desk.hear(desk.dispatcher.hold(desk.now, "drain", CLIENT, ""))
    desk.hear(desk.dispatcher.submit(desk.now, CLIENT, 7, task, again=True))
    assert desk.answers == {}
    desk.hear(desk.dispatcher.resume(desk.now, ""))
    desk.hear(desk.dispatcher.submit(desk.now, CLIENT, 7, task))
    assert desk.started == ["t"]
    desk.finish("t")
    assert desk.answers[7].status is Status.OK


def test_drain_rejects_new_tasks_finishes_the_admitted_and_resume_admits_again(desk: Desk) -> None:
    for i in range(3):
        desk.submit(write(f"w{i}", i))
    desk.hear(desk.dispatcher.hold(desk.now, "drain"))
    refused = desk.answers[desk.submit(write("late", 7))]
    assert (refused.status, refused.error and refused.error.code) == (Status.REJECTED, "draining")
    for i in range(3):
        desk.finish(f"w{i}")
    assert desk.dispatcher.empty
    desk.hear(desk.dispatcher.resume(desk.now))
    desk.submit(write("late", 7))
    assert desk.started[-1] == "late"


def test_shutdown_starts_nothing_more_and_fails_the_queue_with_a_result_each(desk: Desk) -> None:
    for i in range(4):
        desk.submit(write(f"w{i}", i))
    desk.hear(desk.dispatcher.shut_down(desk.now))
    desk.finish("w0")
    assert desk.started == ["w0", "w1"]
    desk.hear(desk.dispatcher.abandon_queue(desk.now))
    failed = [result for result in desk.answers.values() if result.status is Status.FAILED]
    assert [result.error and result.error.code for result in failed] == ["shutdown", "shutdown"]
    desk.finish("w1")
    assert desk.dispatcher.empty
    desk.hear(desk.dispatcher.resume(desk.now))
    assert desk.answers[desk.submit(write("late", 7))].status is Status.REJECTED


def test_a_dead_rank_fails_the_queue_and_every_later_task_and_is_named(desk: Desk) -> None:
    desk.submit(write("running", 1))
    queued = desk.submit(read("queued", 1))
    desk.hear(desk.dispatcher.rank_failed(desk.now, 1, "context lost"))
    desk.finish("running", moved=0, missing=(0,))
    later = desk.submit(write("later", 3))
    for seq in (queued, later):
        error = desk.answers[seq].error
        assert error == ErrorInfo("rank_died", "rank 1 died: context lost")
    desk.hear(desk.dispatcher.rank_left(desk.now, "running", 0))
    assert desk.dispatcher.empty


CLEARED = ErrorInfo("cleared", "the cache was cleared")


def test_without_memory_tasks_are_rejected_and_what_was_admitted_is_finished(desk: Desk) -> None:
    running = desk.submit(write("running", 1))
    queued = desk.submit(read("queued", 1))
    desk.hear(desk.dispatcher.withdraw_cache(desk.now, CLEARED, False))
    refused = desk.answers[desk.submit(write("late", 7))]
    assert (refused.status, refused.error) == (Status.REJECTED, CLEARED)
    assert desk.dispatcher.gate.refusal is not None
    joined = desk.submit(write("running", 1))
    desk.finish("running")
    desk.finish("queued")
    assert {desk.answers[seq].status for seq in (running, queued, joined)} == {Status.OK}, "joining goes on"
    assert desk.dispatcher.empty
    desk.hear(desk.dispatcher.resume(desk.now))
    assert desk.dispatcher.gate.refusal is not None, "a resume brings no memory back"
    desk.hear(desk.dispatcher.cache_ready(desk.now))
    desk.submit(write("late", 7))
    assert desk.started[-1] == "late"


def test_memory_that_goes_with_its_engine_fails_the_queue_and_stops_what_runs(desk: Desk) -> None:
    gone = ErrorInfo("engine_gone", "the engine has gone")
    running = desk.submit(write("running", 1))
    queued = desk.submit(read("queued", 1))
    desk.hear(desk.dispatcher.withdraw_cache(desk.now, gone, True))
    assert (desk.answers[queued].status, desk.answers[queued].error) == (Status.FAILED, gone)
    assert desk.stopped == [("running", Stop.CANCELLED)]
    desk.finish("running", moved=0)
    assert (desk.answers[running].status, desk.answers[running].error) == (Status.FAILED, gone), "nobody cancelled it"
    assert desk.dispatcher.empty


def test_a_task_that_was_cancelled_before_its_memory_went_is_cancelled(desk: Desk) -> None:
    running = desk.submit(write("running", 1))
    desk.hear(desk.dispatcher.cancel(desk.now, "running"))
    desk.hear(desk.dispatcher.withdraw_cache(desk.now, ErrorInfo("engine_gone", "the engine has gone"), True))
    desk.finish("running", moved=0)
    assert desk.answers[running].status is Status.CANCELLED


def test_a_result_is_not_repeated_once_its_memory_was_taken_away(desk: Desk) -> None:
    first = desk.submit(write("before", 1))
    desk.submit(write("during", 2))
    desk.finish("before")
    again = desk.submit(write("before", 1))
    assert desk.answers[again] == desk.answers[first]
    desk.hear(desk.dispatcher.withdraw_cache(desk.now, CLEARED, False))
    desk.finish("during")
    desk.hear(desk.dispatcher.cache_ready(desk.now))
    for task in (write("before", 1), write("during", 2)):
        refused = desk.answers[desk.submit(task)]
        assert (refused.status, refused.error and refused.error.code) == (Status.REJECTED, "cache_gone")
    conflict = desk.answers[desk.submit(write("before", 3))]
    assert conflict.error is not None
    assert conflict.error.code == "task_id_conflict"


def drain(dispatcher: Dispatcher, now: float) -> list[do.Instruction]:
    return dispatcher.hold(now, "drain")


@pytest.mark.parametrize("against", [drain, Dispatcher.shut_down])
def test_memory_alone_does_not_admit(desk: Desk, against: Callable[[Dispatcher, float], list[do.Instruction]]) -> None:
    desk.hear(against(desk.dispatcher, desk.now))
    desk.hear(desk.dispatcher.withdraw_cache(desk.now, CLEARED, False))
    desk.hear(desk.dispatcher.cache_ready(desk.now))
    error = desk.answers[desk.submit(write("late", 7))].error
    assert error is not None
    assert error.code == "draining"


def test_a_dead_rank_stays_dead_with_new_memory(desk: Desk) -> None:
    desk.hear(desk.dispatcher.rank_failed(desk.now, 1, "context lost"))
    desk.hear(desk.dispatcher.withdraw_cache(desk.now, CLEARED, False))
    desk.hear(desk.dispatcher.cache_ready(desk.now))
    assert not desk.dispatcher.gate.alive
    error = desk.answers[desk.submit(write("late", 7))].error
    assert error is not None
    assert error.code == "rank_died"


def test_a_task_belongs_to_the_generation_of_its_admission(desk: Desk) -> None:
    desk.hear(desk.dispatcher.hold(desk.now, "pause"))
    old = desk.submit(write("old", 1))
    desk.hear(desk.dispatcher.bump_generation(desk.now, "g2"))
    new = desk.submit(write("new", 2))
    desk.hear(desk.dispatcher.resume(desk.now))
    desk.finish("old")
    desk.finish("new")
    assert [desk.answers[seq].generation for seq in (old, new)] == ["g1", "g2"]


def test_the_next_alarm_is_the_soonest_deadline_of_what_is_not_done(desk: Desk) -> None:
    assert desk.dispatcher.alarms.next() == float("inf")
    desk.submit(write("late", 1, timeout=50.0))
    desk.submit(write("soon", 2, timeout=5.0))
    assert desk.dispatcher.alarms.next() == 5.0
    desk.finish("soon")
    assert desk.dispatcher.alarms.next() == 50.0


def test_alarms_of_finished_tasks_do_not_pile_up(desk: Desk) -> None:
    for i in range(1000):
        desk.submit(write(f"w{i}", 1, timeout=1e4))
        desk.finish(f"w{i}")
    assert len(desk.dispatcher.alarms._heap) < 200


def test_while_the_daemon_starts_the_answer_is_busy_until_it_is_ready() -> None:
    desk = Desk()
    desk.dispatcher = Dispatcher(LIMITS, admitting=False)
    early = desk.answers[desk.submit(write("w", 1))]
    assert (early.status, early.error and early.error.code) == (Status.BUSY, "starting")
    assert early.retry_after is not None
    desk.hear(desk.dispatcher.resume(desk.now))
    assert desk.dispatcher.gate.refusal is not None, "a resume brings no memory"
    desk.hear(desk.dispatcher.cache_ready(desk.now))
    desk.hear(desk.dispatcher.mappings_changed(desk.now, (), {}))
    desk.submit(write("w", 1))
    assert desk.started == ["w"]


def test_without_a_tier_tasks_for_it_are_rejected() -> None:
    desk = Desk(limits(device_blocks=8, host_blocks=0, block_bytes=100, storage=False))
    codes = [desk.answers[desk.submit(task)].error for task in (write("w", 1), read("r", 1), swap_in("i", [1], [1]))]
    assert [error and error.code for error in codes] == ["no_storage_tier", "no_storage_tier", "no_host_tier"]
