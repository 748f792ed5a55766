"""What the flight recorder tells of a task: every turn that it took, and of whom it was asked."""

from __future__ import annotations

import pytest

from tests.control.test_dispatcher import CLIENT, LIMITS, Desk, read, write
from transferd.control.dispatcher import Dispatcher
from transferd.observability.recorder import LONGEST_TEXT, Recorder
from transferd.tasks import ErrorInfo


class CountingClock:
    """Each look is a second after the last, so that no two notes are of one moment."""

    def __init__(self) -> None:
        self.looks = 0.0

    def monotonic(self) -> float:
        self.looks += 1.0
        return self.looks


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(clock=CountingClock())  # type: ignore[arg-type]


@pytest.fixture
def desk(recorder: Recorder) -> Desk:
    desk = Desk()
    desk.dispatcher = Dispatcher(LIMITS, boot_id="boot", generation="g1", recorder=recorder)
    return desk


def recorded(recorder: Recorder, task_id: str = "") -> list[str]:
    """The notes of a task, or of the daemon, as `transferd explain` has them, without their times."""
    return [
        " ".join([note.what, *(f"{name}={value}" for name, value in note.detail.items())])
        for note in recorder.notes(task_id)
    ]


def test_a_task_without_conflicts_is_admitted_started_and_done(desk: Desk, recorder: Recorder) -> None:
    desk.submit(write("w", 1, 2))
    desk.finish("w")
    assert recorded(recorder, "w") == [
        "admitted kind=write blocks=2",
        "from client=b'engine'",
        "started",
        "done status=ok blocks=2",
    ]


def test_a_task_that_waits_says_for_how_many_and_for_whom_last(desk: Desk, recorder: Recorder) -> None:
    desk.submit(read("a", 1))
    desk.submit(read("b", 2))
    desk.submit(write("w", 1, 2))
    desk.finish("a")
    desk.finish("b")
    assert recorded(recorder, "w")[2:] == ["waits tasks=2", "blocks free after=b", "started"]


def test_a_task_cancelled_while_queued_has_no_note_that_its_blocks_are_free(desk: Desk, recorder: Recorder) -> None:
    desk.submit(read("a", 1))
    desk.submit(write("w", 1))
    desk.hear(desk.dispatcher.cancel(desk.now, "w"))
    desk.finish("a")
    assert recorded(recorder, "w")[2:] == [
        "waits tasks=1",
        "done status=cancelled blocks=0",
        "cause code=cancelled problem=cancelled while queued",
    ]


def test_the_story_of_a_straggling_task_has_its_stop_and_the_late_ranks(desk: Desk, recorder: Recorder) -> None:
    desk.submit(read("r", 1, timeout=2.0))
    desk.pass_time(2.0)
    desk.pass_time(1.0)
    desk.finish("r", missing=(0, 1))
    desk.hear(desk.dispatcher.rank_left(desk.now, "r", 0))
    desk.hear(desk.dispatcher.rank_left(desk.now, "r", 1))
    assert recorded(recorder, "r")[3:] == [
        "stopping reason=expired",
        "slack used up",
        "done status=expired blocks=0",
        "cause code=expired problem=rank 0: late",
        "straggling ranks=[0, 1]",
        "straggler left rank=1",
    ]


def test_a_task_that_nobody_waits_for_names_the_client_that_went_last(desk: Desk, recorder: Recorder) -> None:
    desk.submit(write("w", 1))
    desk.submit(write("w", 1), client=b"other")
    desk.hear(desk.dispatcher.client_gone(desk.now, CLIENT))
    desk.hear(desk.dispatcher.client_gone(desk.now, b"other"))
    assert recorded(recorder, "w")[3:] == [
        "joined client=b'other'",
        "no client waits client=b'other'",
        "stopping reason=cancelled",
    ]


def test_a_repeated_push_is_recorded(desk: Desk, recorder: Recorder) -> None:
    desk.submit(write("w", 1))
    desk.finish("w")
    desk.submit(write("w", 1), client=b"other")
    assert recorded(recorder, "w")[4:] == ["repeated client=b'other'"]


def test_a_refusal_is_recorded_with_its_code(desk: Desk, recorder: Recorder) -> None:
    desk.submit(write("bad", 99))
    assert recorded(recorder, "bad") == [
        "rejected code=id_out_of_range client=b'engine' problem=gpu_block_ids: block 99 is out of range (0 … 7)"
    ]
    for i in range(5):
        desk.submit(write(f"w{i}", i))
    desk.submit(write("again", 6))
    why = "the queue is full: 3 tasks are waiting"
    assert recorded(recorder, "again") == [f"busy code=queue_full client=b'engine' problem={why}"]


def test_control_requests_are_recorded(desk: Desk, recorder: Recorder) -> None:
    desk.hear(desk.dispatcher.hold(desk.now, "pause", b"a1", "a"))
    desk.hear(desk.dispatcher.hold(desk.now, "drain", b"b1", "b"))
    desk.hear(desk.dispatcher.client_gone(desk.now, b"b1"))
    desk.hear(desk.dispatcher.resume(desk.now, "a"))
    desk.hear(desk.dispatcher.bump_generation(desk.now, "g2"))
    desk.hear(desk.dispatcher.withdraw_cache(desk.now, ErrorInfo("cleared", "the cache was cleared"), False))
    desk.hear(desk.dispatcher.cache_ready(desk.now))
    desk.hear(desk.dispatcher.rank_failed(desk.now, 1, "context lost"))
    desk.hear(desk.dispatcher.shut_down(desk.now))
    assert recorded(recorder) == [
        "pause holder=a",
        "drain holder=b",
        "hold ended hold=drain holder=b",
        "resume holder=a",
        "generation old=g1 new=g2",
        "cache withdrawn problem=the cache was cleared",
        "cache ready",
        "rank died rank=1 cause=context lost",
        "shutdown",
    ]


def test_texts_from_outside_are_cut_in_the_story_and_whole_in_the_answer(desk: Desk, recorder: Recorder) -> None:
    long = "x" * (LONGEST_TEXT + 1)
    desk.submit(write("w", 1))
    queued = desk.submit(read("r", 1))
    desk.hear(desk.dispatcher.withdraw_cache(desk.now, ErrorInfo("gone", long), False))
    desk.hear(desk.dispatcher.rank_failed(desk.now, 1, long))
    assert recorded(recorder) == [
        f"cache withdrawn problem={long[:-1]}",
        f"rank died rank=1 cause={long[:-1]}",
    ]
    error = desk.answers[queued].error
    assert error == ErrorInfo("rank_died", f"rank 1 died: {long}")
    assert recorded(recorder, "r")[-1] == f"cause code=rank_died problem={error.message[:LONGEST_TEXT]}"
