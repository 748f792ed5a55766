"""The flight recorder's rings: what is kept, what is not, and that anyone may look at any time."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

from tests.support.dispatch import limits
from transferd.control.dispatcher import Dispatcher
from transferd.observability.recorder import FIELDS, LONGEST_TEXT, NOTES_PER_TASK, STEPS, Recorder
from transferd.runtime.clock import Clock


def ticking() -> Clock:
    now = iter(range(1_000_000))
    return Clock(monotonic=lambda: float(next(now)))


def test_notes_of_a_task_come_back_in_order_and_others_do_not() -> None:
    recorder = Recorder(clock=ticking())
    recorder.step("a", "copy", 0, 3)
    recorder.step("b", "copy", 0, 1)
    recorder.aside("a", "joined", b"c")
    recorder.note("a", "done", "ok", 3)
    assert [note.what for note in recorder.notes("a")] == ["copy", "joined", "done"]
    assert recorder.story("a").splitlines() == [
        "0.000000 a copy rank=0 blocks=3",
        "2.000000 a joined client=b'c'",
        "3.000000 a done status='ok' blocks=3",
    ]
    assert recorder.story("c") == "(no notes kept)"


def test_both_rings_are_bounded_and_keep_the_newest() -> None:
    recorder = Recorder(capacity=16)
    for i in range(200):
        recorder.note(str(i), "slack used up")
        recorder.aside("", "client left", i)
        recorder.step("t", "copy", 0, i)
    half = 16 * NOTES_PER_TASK // 2
    assert [note.detail["blocks"] for note in recorder.notes("t")] == list(range(200 - half, 200))
    assert [note.task_id for note in recorder.notes() if note.what == "slack used up"] == [
        str(i) for i in range(200 - half, 200)
    ]
    assert [note.detail["client"] for note in recorder.notes() if note.what == "client left"] == [198, 199]


def test_a_flood_of_refusals_does_not_push_out_what_tasks_did() -> None:
    recorder = Recorder(capacity=16)
    recorder.note("t", "slack used up")
    for _ in range(10_000):
        recorder.aside("flood", "busy", "queue_full", b"", "why")
    assert recorder.story("t") != "(no notes kept)"


def test_a_task_id_from_outside_is_kept_short_and_found_all_the_same() -> None:
    recorder = Recorder()
    recorder.aside("x" * 100_000, "rejected", "bad_value", b"", "why")
    assert len(recorder.notes()[0].task_id) == LONGEST_TEXT
    assert [note.what for note in recorder.notes("x" * 100_000)] == ["rejected"]


def test_a_failure_is_noted_and_reported_in_one_short_line() -> None:
    recorder, told = Recorder(), list[str]()
    recorder.on_failure = told.append
    recorder.failure("t", "it broke\nand this is its long story" + "x" * 1000)
    assert told == ["it broke"]
    (note,) = recorder.notes("t")
    assert (note.what, note.detail) == ("failure", {"problem": "it broke"})


def test_notes_can_be_read_while_another_thread_adds_more() -> None:
    recorder = Recorder(capacity=512)  # each look waits for the other thread while it goes through them
    end = threading.Event()

    def add() -> None:
        while not end.is_set():
            recorder.note("t", "blocks free", "s")

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(50):
            times = [note.at for note in recorder.notes()]
            assert times == sorted(times)
    finally:
        end.set()
        thread.join()


def test_every_note_in_the_package_is_of_a_known_kind_and_says_what_that_kind_says() -> None:
    found: set[str] = set()
    for path in (Path(__file__).parents[2] / "transferd").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            owner = ast.unparse(call.func.value)
            mine = owner.endswith("recorder") or (owner == "self" and path.name == "recorder.py")
            if path.name == "recorder.py" and owner == "self._recorder":  # handed on as it came
                continue
            of_share = owner in ("share", "self._share")  # which adds the task and the rank
            if call.func.attr == "step" and (mine or of_share):
                assert len(call.args) == (2 if of_share else 4)
                word = call.args[0 if of_share else 1]
                if isinstance(word, ast.Constant) and isinstance(word.value, str):
                    found.add(word.value)
            if call.func.attr == "called" and of_share:  # which steps
                found.update(ast.literal_eval(word.value) for word in call.keywords if word.arg == "step")
            if call.func.attr in ("note", "aside") and mine:
                kind = call.args[1]
                assert not call.keywords
                named = {"status": ["busy", "rejected", "failed"], "what": ["pause", "drain"]}
                kinds = named[kind.id] if isinstance(kind, ast.Name) else [ast.literal_eval(kind)]
                found.update(kinds)
                for what in kinds:
                    assert len(call.args) == 2 + len(FIELDS[what]), f"{path.name}: {ast.unparse(call)}"
    assert found == set(FIELDS) - {"admitted", "from"}  # written by `admitted` itself, and tested below
    assert all(fields[0] == "rank" for fields in STEPS.values())


def test_a_task_says_who_pushed_it() -> None:
    recorder = Recorder(clock=ticking())
    recorder.admitted("t", "write", 3, b"42")
    admitted, pushed = recorder.notes("t")
    assert (admitted.what, admitted.detail) == ("admitted", {"kind": "write", "blocks": 3})
    assert (pushed.what, pushed.detail, pushed.plain()) == ("from", {"client": b"42"}, {"client": "42"})


def test_notes_are_selected_by_task_after_the_ring_has_wrapped() -> None:
    recorder = Recorder(capacity=64)
    for i in range(1000):
        recorder.step(f"task-{i % 7}", "copy", i % 3, i)
    for task in range(7):
        mine = recorder.notes(f"task-{task}")
        assert [note.detail for note in mine] == [
            {"rank": i % 3, "blocks": i} for i in range(1000 - 64 * NOTES_PER_TASK, 1000) if i % 7 == task
        ]


def test_tasks_of_two_engines_are_kept_apart_whatever_they_are_called() -> None:
    daemons = Recorder(capacity=64)
    own, other = daemons.of("default"), daemons.of("b")
    problems: list[str] = []
    daemons.on_failure = problems.append
    for recorder in (own, other):
        for task_id in ("t1", "[b] t1"):
            recorder.step(task_id, "copy", 0, 1)
            recorder.note(task_id, "stopping", recorder.engine)
            recorder.aside(task_id, "busy", "queue_full", b"me", "why")
    for recorder in (own, other):
        for task_id in ("t1", "[b] t1"):
            assert [note.engine for note in recorder.notes(task_id)] == [recorder.engine] * 3
    assert {refusal[1:3] for refusal in daemons.refusals(9)} == {
        (engine, task_id) for engine in ("default", "b") for task_id in ("t1", "[b] t1")
    }
    other.failure("t1", "broken")
    assert problems == ["broken"]
    assert len(daemons.notes()) == 13


def test_an_empty_recorder_is_still_the_one_to_use() -> None:
    """Were it false, as an empty container is, `recorder or Recorder()` would note where nobody reads."""
    recorder = Recorder()
    assert Dispatcher(limits(), recorder=recorder)._recorder is recorder


def test_the_newest_step_of_each_rank_is_found_for_those_who_are_asked_for() -> None:
    recorder = Recorder(capacity=8)
    recorder.admitted("a", "read", 3, b"me")
    recorder.step("a", "fetch", 0, 3)
    recorder.step("b", "put", 0, 1)
    recorder.step("a", "copy", 0, 3)
    recorder.step("a", "fetch", 1, 3)
    assert recorder.last_steps({("default", "a")}) == {("default", "a"): {0: "copy", 1: "fetch"}}
    assert recorder.last_steps(set()) == {}


def test_refusals_are_the_newest_first_and_bounded() -> None:
    recorder = Recorder(capacity=64)
    recorder.aside("x", "rejected", "bad_value", b"me", "why")
    recorder.aside("", "client left", b"me")
    recorder.aside("y", "busy", "queue_full", b"me", "why")
    assert [refusal[1:] for refusal in recorder.refusals(9)] == [
        ("default", "y", "busy", "queue_full", "why"), ("default", "x", "rejected", "bad_value", "why"),
    ]  # fmt: skip
    assert len(recorder.refusals(1)) == 1
