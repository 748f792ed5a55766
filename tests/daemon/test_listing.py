"""What a task that is under way waits for: told from the dispatcher, the barrier and the recorder as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.dispatch import limits
from transferd.barrier import RankBarrier
from transferd.control import instructions as do
from transferd.control.dispatcher import Dispatcher
from transferd.daemon.listing import Listing
from transferd.observability.recorder import Recorder
from transferd.observability.task_log import TaskLog
from transferd.runtime.clock import Clock
from transferd.tasks import ErrorInfo, RankOutcome, RankResult, ReadStorageTask, Status, TaskResult


def parts(**more: Any) -> SimpleNamespace:
    """What Listing reads of a daemon, at 10 seconds by its clock."""
    recorder = Recorder(capacity=64)
    dispatcher = Dispatcher(limits(lane_depth=2, **more), recorder=recorder)
    clock = SimpleNamespace(monotonic=lambda: 10.0)
    engine = SimpleNamespace(name="default", recorder=recorder, dispatcher=dispatcher, barrier=RankBarrier(2))
    tasks = TaskLog(Clock(monotonic=lambda: 8.0))
    shared = SimpleNamespace(recorder=recorder, tasks=tasks, clock=clock)
    engines = SimpleNamespace(all=[engine], shared=shared, clients=None)
    return SimpleNamespace(recorder=recorder, default=engine, engines=engines, tasks=tasks)


def listing_of(daemon: Any) -> Listing:
    return Listing(daemon.engines)


def read(task_id: str, block: int) -> ReadStorageTask:
    return ReadStorageTask(task_id=task_id, keys=[task_id], gpu_block_ids=[block])


def push(daemon: SimpleNamespace, task: ReadStorageTask, now: float) -> None:
    for instruction in daemon.default.dispatcher.submit(now, b"engine", 1, task):
        if isinstance(instruction, do.Start):
            daemon.default.barrier.open(task.task_id, task.merge, lambda _: None)


def test_a_round_names_the_ranks_that_it_waits_for_and_what_they_do() -> None:
    daemon = parts()
    push(daemon, read("a", 1), 4.0)
    listing = listing_of(daemon)
    daemon.recorder.step("a", "fetch", 0, 1)
    daemon.recorder.step("a", "fetch", 1, 1)
    daemon.recorder.step("a", "copy", 1, 1)
    (row,) = listing.tasks("running", 10)
    assert (row["status"], row["seconds"], row["ended_s"]) == ("running", 6.0, None)
    assert row["ranks"] == [{"rank": 0, "step": "fetch"}, {"rank": 1, "step": "copy"}]
    daemon.default.barrier.arrive("a", RankOutcome(0, error=ErrorInfo("x", "y")))
    (row,) = listing.tasks("running", 10)
    assert (row["waits_for"], row["ranks"]) == ("rank 1 copy", [{"rank": 1, "step": "copy"}])


def test_a_queued_task_says_what_is_before_it() -> None:
    daemon = parts()
    for number, name in enumerate("abcd"):
        push(daemon, read(name, number), float(number))
    push(daemon, read("e", 0), 5.0)
    rows = {row["task_id"]: row["waits_for"] for row in listing_of(daemon).tasks("running", 10)}
    assert rows["c"] == rows["d"] == "a place in its lane"
    assert rows["e"] == "1 tasks before it on its blocks"
    daemon.default.dispatcher.hold(6.0, "pause", b"engine", "me")
    rows = {row["task_id"]: row["waits_for"] for row in listing_of(daemon).tasks("running", 10)}
    assert rows["c"] == "resume"


def test_the_slow_are_found_among_those_under_way_and_those_that_ended() -> None:
    daemon = parts()
    push(daemon, read("under way", 1), 4.0)
    for name, seconds, status in (("slow", 9.0, Status.OK), ("quick", 1.0, Status.FAILED)):
        ranks = [RankResult(rank=n, status=status, copy_s=seconds / (n + 1)) for n in range(2)]
        result = TaskResult(task_id=name, status=status, duration=seconds, ranks=ranks)
        daemon.tasks.ended("default", read(name, 2), result)
    listing = listing_of(daemon)
    rows = listing.tasks("slow", 10)
    assert [(row["task_id"], row["seconds"]) for row in rows] == [("slow", 9.0), ("under way", 6.0), ("quick", 1.0)]
    assert (rows[0]["copy_s"], rows[0]["ended_s"]) == (9.0, 2.0)
    assert [row["task_id"] for row in listing.tasks("slow", 1)] == ["slow"]
    assert [row["task_id"] for row in listing.tasks("recent", 2)] == ["under way", "quick"]
    assert [row["task_id"] for row in listing.tasks("failed", 10)] == ["quick"]
    assert [len(row["stages"]) for row in listing.timeline(10)] == [0, 2, 2]


def test_a_failed_task_stays_listed_after_many_good_ones() -> None:
    history = TaskLog()
    history.ended("default", read("bad", 1), TaskResult(task_id="bad", status=Status.FAILED))
    for number in range(5000):
        history.ended("default", read("good", 1), TaskResult(task_id=f"{number}", status=Status.OK))
    assert [one.task_id for one in history.failed] == ["bad"]
    assert len(history.recent) == 1024
