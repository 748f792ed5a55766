"""Lanes: how many tasks run at once in each, in which order, and when one more is too much."""

from __future__ import annotations

import pytest

from tests.support.dispatch import limits, record_of
from transferd.control.order import RETRY_AFTER_S, HazardTable, Lanes, State, TaskState
from transferd.tasks import ErrorInfo, Lane, ReadStorageTask, Task, WriteStorageTask

LIMITS = limits(max_queued_tasks=4, max_queued_bytes=1000, max_inflight_bytes=2000, lane_depth=2).server


def read(task_id: str) -> ReadStorageTask:
    return ReadStorageTask(task_id=task_id, keys=["k"], gpu_block_ids=[1])


def write(task_id: str) -> WriteStorageTask:
    return WriteStorageTask(task_id=task_id, keys=["k"], gpu_block_ids=[1])


def admit(lanes: Lanes, task: Task, nbytes: int = 0, *, ready: bool = True) -> TaskState:
    record = record_of(task, nbytes=nbytes)
    lanes.enter(record)
    if ready:
        lanes.ready(record)
    return record


def move(lanes: Lanes, record: TaskState, state: State, now: float = 0.0) -> None:
    old, record.state = record.state, state
    lanes.moved(record, old, now)


def start(lanes: Lanes) -> list[str]:
    """Move to running whatever may run, and say what that was."""
    started = []
    while (record := lanes.next_startable()) is not None:
        started.append(record.task_id)
        move(lanes, record, State.RUNNING)
    return started


def answer(lanes: Lanes, record: TaskState, now: float = 0.0) -> None:
    move(lanes, record, State.DONE, now)


def run(lanes: Lanes, task: Task, seconds: float) -> None:
    """Have a task run for so long from its admission on, beside those that are there."""
    record = admit(lanes, task, ready=False)
    move(lanes, record, State.RUNNING)
    answer(lanes, record, seconds)


def refusal(
    lanes: Lanes, task: Task, nbytes: int = 0, arguments: int = 0, held: int = 0, *, flush: bool = False
) -> ErrorInfo | None:
    lanes.hazards.nbytes = held
    return lanes.too_much(record_of(task, nbytes=nbytes, arguments=arguments, flush=flush))


def hint(lanes: Lanes, task: Task, nbytes: int) -> float:
    assert lanes.too_much(record_of(task, nbytes=nbytes)) is not None
    return lanes.hint(task.lane)


# --- places ---------------------------------------------------------------------------------------


def test_as_many_tasks_run_in_a_lane_as_it_has_places_in_the_order_in_which_they_became_ready() -> None:
    lanes = Lanes(LIMITS, HazardTable())
    records = {name: admit(lanes, read(name), ready=False) for name in "abc"}
    for name in "cab":
        lanes.ready(records[name])
    assert start(lanes) == ["c", "a"]
    assert lanes.running == 2
    answer(lanes, records["c"])
    assert start(lanes) == ["b"]
    assert start(lanes) == []


def test_one_lane_does_not_take_the_places_of_another() -> None:
    lanes = Lanes(LIMITS, HazardTable())
    for name in ("w1", "w2", "w3"):
        admit(lanes, write(name))
    admit(lanes, read("r"))
    assert sorted(start(lanes)) == ["r", "w1", "w2"]


def test_a_task_that_is_not_ready_does_not_run() -> None:
    lanes = Lanes(LIMITS, HazardTable())
    admit(lanes, read("blocked"), ready=False)
    assert start(lanes) == []


def test_a_task_that_was_taken_back_while_it_waited_for_a_place_does_not_run_and_leaves_its_place_free() -> None:
    lanes = Lanes(LIMITS, HazardTable())
    gone = admit(lanes, read("gone"))
    admit(lanes, read("next"))
    answer(lanes, gone)
    assert start(lanes) == ["next"]


def test_a_cancelling_task_keeps_its_place_until_it_is_done() -> None:
    lanes = Lanes(limits(lane_depth=1).server, HazardTable())
    record = admit(lanes, read("a"))
    admit(lanes, read("b"))
    start(lanes)
    move(lanes, record, State.CANCELLING)
    assert start(lanes) == []
    assert lanes.running == 1
    answer(lanes, record)
    assert start(lanes) == ["b"]


# --- load -----------------------------------------------------------------------------------------


def test_the_load_of_a_lane_is_what_is_queued_and_running_and_its_bytes() -> None:
    lanes = Lanes(LIMITS, HazardTable())
    records = [admit(lanes, read(f"r{i}"), nbytes=100 + i) for i in range(3)]
    start(lanes)
    assert lanes.queued == 1
    assert lanes.waiting == dict.fromkeys(Lane, 0) | {Lane.READ: 1}
    assert (lanes.loads[Lane.READ].running, lanes.loads[Lane.READ].nbytes) == (2, 303)
    for record in records:
        answer(lanes, record)
    assert lanes.waiting == dict.fromkeys(Lane, 0)
    assert (lanes.loads[Lane.READ].running, lanes.loads[Lane.READ].nbytes) == (0, 0)
    assert (lanes.queued, lanes.running) == (0, 0)


def test_a_load_has_no_other_fields() -> None:
    with pytest.raises(AttributeError):
        Lanes(LIMITS, HazardTable()).loads[Lane.READ].waiting = 1  # type: ignore[attr-defined]


# --- too much -------------------------------------------------------------------------------------


def test_a_task_is_refused_once_as_many_are_queued_in_all_lanes_as_may_be() -> None:
    lanes = Lanes(LIMITS, HazardTable())
    for i in range(3):
        admit(lanes, write(f"w{i}"), ready=False)
    assert refusal(lanes, read("r")) is None
    admit(lanes, read("r"), ready=False)
    assert refusal(lanes, read("s")) == ErrorInfo("queue_full", "the queue is full: 4 tasks are waiting")


def test_running_tasks_do_not_count_as_queued() -> None:
    lanes = Lanes(limits(max_queued_tasks=1, lane_depth=2).server, HazardTable())
    admit(lanes, read("a"))
    start(lanes)
    assert refusal(lanes, read("b")) is None


@pytest.mark.parametrize(("bound", "allowed"), [(4, 2), (5, 3)])
def test_flushes_take_half_of_the_queue_at_most_rounded_up(bound: int, allowed: int) -> None:
    lanes = Lanes(limits(only_flush=True, max_queued_tasks=bound, lane_depth=1).server, HazardTable())
    admit(lanes, write("running"))
    start(lanes)
    for i in range(allowed):
        assert refusal(lanes, write("w"), flush=True) is None
        admit(lanes, write(f"w{i}"))
    told = f"flushes fill half of the queue: {allowed} are waiting"
    assert refusal(lanes, write("w"), flush=True) == ErrorInfo("queue_full", told)
    assert refusal(lanes, read("r")) is None, "the other half is for the rest"


def test_writes_that_move_blocks_may_take_the_whole_queue() -> None:
    lanes = Lanes(LIMITS, HazardTable())
    for i in range(3):
        admit(lanes, write(f"w{i}"), ready=False)
    assert refusal(lanes, write("w")) is None


def test_arguments_are_bounded_but_one_task_alone_may_be_larger() -> None:
    lanes = Lanes(LIMITS, HazardTable())
    assert refusal(lanes, read("a"), arguments=5000, held=0) is None
    assert refusal(lanes, read("a"), arguments=399, held=600) is None
    assert refusal(lanes, read("a"), arguments=400, held=600) is None
    told = "admitted tasks hold 600 bytes of keys, ids and token_ids, and this one would add 401"
    assert refusal(lanes, read("a"), arguments=401, held=600) == ErrorInfo("queue_full", told)
    assert refusal(lanes, read("a"), arguments=1000, held=1) is not None


def test_bytes_under_way_are_bounded_for_each_lane_but_one_task_alone_may_be_larger() -> None:
    lanes = Lanes(LIMITS, HazardTable())
    assert refusal(lanes, read("a"), nbytes=9999) is None
    record = admit(lanes, read("a"), nbytes=1500)
    assert refusal(lanes, read("b"), nbytes=500) is None
    told = ErrorInfo("bytes_in_flight", "1500 bytes are in flight in this lane")
    assert refusal(lanes, read("b"), nbytes=501) == told
    assert refusal(lanes, write("w"), nbytes=9999) is None
    start(lanes)
    assert refusal(lanes, read("b"), nbytes=501) == told, "a running task counts"
    answer(lanes, record)
    assert refusal(lanes, read("b"), nbytes=9999) is None


# --- when to ask again ----------------------------------------------------------------------------


def loaded(waiting: int, *, seconds: float | None) -> Lanes:
    """Two reads at work, others that wait, and a read that took so many seconds before."""
    lanes = Lanes(limits(max_queued_tasks=99, max_inflight_bytes=1, lane_depth=2).server, HazardTable())
    if seconds is not None:
        run(lanes, read("before"), seconds)
    for i in range(2 + waiting):
        admit(lanes, read(f"r{i}"))
    start(lanes)
    return lanes


def test_a_lane_says_when_a_quarter_of_what_waits_will_be_worked_off() -> None:
    assert hint(loaded(8, seconds=0.6), read("r"), 2) == pytest.approx(0.6 * 8 / 2 / 4)
    assert hint(loaded(3, seconds=0.6), read("r"), 2) == pytest.approx(0.6 * 3 / 2 / 4)


def test_a_lane_in_which_nothing_waits_is_asked_again_as_if_one_task_did() -> None:
    assert hint(loaded(0, seconds=0.8), read("r"), 2) == pytest.approx(0.8 / 2 / 4)
    assert hint(loaded(1, seconds=0.8), read("r"), 2) == pytest.approx(0.8 / 2 / 4)


def test_a_hint_is_never_shorter_or_longer_than_its_bounds() -> None:
    assert RETRY_AFTER_S == (0.005, 5.0)
    assert hint(loaded(8, seconds=None), read("r"), 2) == 0.005
    assert hint(loaded(8, seconds=1e-6), read("r"), 2) == 0.005
    assert hint(loaded(8, seconds=1e6), read("r"), 2) == 5.0


def test_a_task_moves_the_average_by_a_tenth_and_the_first_one_sets_it() -> None:
    lanes = loaded(8, seconds=0.5)
    run(lanes, read("r"), 1.5)
    assert hint(lanes, read("r"), 2) == pytest.approx(0.9 * 0.5 + 0.1 * 1.5)


def test_each_lane_has_an_average_of_its_own() -> None:
    lanes = loaded(8, seconds=0.5)
    run(lanes, write("w"), 100.0)
    assert hint(lanes, read("r"), 2) == pytest.approx(0.5)


def test_every_refusal_says_when_to_ask_again() -> None:
    lanes = Lanes(
        limits(only_flush=True, max_queued_tasks=4, max_queued_bytes=10, max_inflight_bytes=1, lane_depth=1).server,
        HazardTable(),
    )
    for lane_task in (read("x"), write("x")):
        run(lanes, lane_task, 0.4)
    for i in range(2):
        admit(lanes, write(f"w{i}"), ready=False)
    assert lanes.too_much(record_of(write("w"), flush=True)) is not None
    assert lanes.hint(Lane.WRITE) == pytest.approx(0.2)
    lanes.hazards.nbytes = 1
    assert lanes.too_much(record_of(read("r"), arguments=10)) is not None
    assert lanes.hint(Lane.READ) == pytest.approx(0.1)
    for i in range(2):
        admit(lanes, read(f"r{i}"), ready=False)
    assert lanes.too_much(record_of(read("r"))) is not None
    assert lanes.hint(Lane.READ) == pytest.approx(0.2)


def test_a_ready_task_is_counted_until_it_is_started_or_passed_over() -> None:
    lanes = Lanes(LIMITS, HazardTable())
    running = [admit(lanes, read(task_id)) for task_id in "ab"]
    waiting, cancelled = admit(lanes, read("c")), admit(lanes, read("d"))
    assert lanes.ready_tasks == 4
    assert start(lanes) == ["a", "b"]
    assert lanes.ready_tasks == 2
    move(lanes, cancelled, State.DONE)
    for record in running:
        answer(lanes, record)
    assert start(lanes) == [waiting.task_id]
    assert lanes.ready_tasks == 0
