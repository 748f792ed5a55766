"""The life of a task as it is told: lives, ranks, times since admission, bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from transferd.errors import RequestError
from transferd.observability.recorder import Note
from transferd.observability.story import MAX_NOTES, as_text, task_story

ADMITTED = {"kind": "read", "blocks": 2, "client": b"17"}


def story_of(*notes: tuple[float, str, Mapping[str, object]], task_id: str = "t") -> dict[str, Any]:
    kept = [Note(at, task_id, what, dict(detail)) for at, what, detail in notes]
    return task_story(task_id, kept, "default", wall=1_000_100.0, monotonic=100.0)


def test_a_story_counts_from_admission_and_groups_events_by_rank() -> None:
    story = story_of(
        (50.0, "admitted", ADMITTED),
        (50.5, "started", {}),
        (50.75, "copy", {"rank": 1, "blocks": 2}),
        (51.0, "copy", {"rank": 0, "blocks": 2}),
        (52.0, "done", {"status": "ok", "blocks": 2}),
    )
    (life,) = story["lives"]
    assert (life["kind"], life["blocks"], life["status"], life["seconds"]) == ("read", 2, "ok", 2.0)
    assert (life["began"], life["complete"]) == (1_000_050.0, True)
    assert [(event["t"], event["what"]) for event in life["events"]] == [(0, "admitted"), (0.5, "started"), (2, "done")]
    assert life["events"][0]["client"] == "17"
    assert life["ranks"] == [
        {"rank": 0, "events": [{"t": 1.0, "what": "copy", "blocks": 2}]},
        {"rank": 1, "events": [{"t": 0.75, "what": "copy", "blocks": 2}]},
    ]


def test_a_task_id_that_lived_twice_has_two_lives_and_a_busy_belongs_to_the_next() -> None:
    story = story_of(
        (1.0, "busy", {"code": "queue_full"}),
        (2.0, "admitted", ADMITTED),
        (3.0, "done", {"status": "failed"}),
        (3.5, "straggler left", {"rank": 0}),
        (4.0, "busy", {"code": "queue_full"}),
        (5.0, "admitted", ADMITTED),
    )
    first, second = story["lives"]
    assert [event["t"] for event in first["events"]] == [-1.0, 0.0, 1.0]
    assert first["ranks"][0]["events"][0]["what"] == "straggler left"
    assert [event["t"] for event in second["events"]] == [-1.0, 0.0]
    assert (second["status"], second["seconds"]) == (None, None)


def test_a_refusal_after_the_answer_belongs_to_the_last_life() -> None:
    story = story_of(
        (2.0, "admitted", ADMITTED), (3.0, "done", {"status": "ok"}), (4.0, "rejected", {"code": "draining"})
    )
    (life,) = story["lives"]
    assert [event["what"] for event in life["events"]] == ["admitted", "done", "rejected"]


def test_a_life_whose_beginning_is_forgotten_starts_with_what_is_left() -> None:
    (life,) = story_of((7.0, "copy", {"rank": 0}), (8.0, "done", {"status": "ok"}))["lives"]
    assert (life["complete"], life["kind"], life["seconds"]) == (False, None, 1.0)
    assert "first note kept" in as_text(story_of((7.0, "copy", {"rank": 0})))


def test_an_unknown_task_is_one_line() -> None:
    with pytest.raises(RequestError, match=r"unknown task 'a\\nb'") as refused:
        task_story("a\nb", [], "default", wall=0.0, monotonic=0.0)
    assert refused.value.reason == "unknown_task"
    assert "\n" not in str(refused.value)


def test_an_answer_is_bounded_and_says_what_it_leaves_out() -> None:
    story = story_of((0.0, "admitted", ADMITTED), *((float(i), "copy", {"rank": 0}) for i in range(1, 5000)))
    (life,) = story["lives"]
    told = len(life["events"]) + len(life["ranks"][0]["events"])
    assert (told, story["omitted"]) == (MAX_NOTES, 4000)
    assert life["ranks"][0]["events"][-1]["t"] == 4999.0
    assert "4000 notes in the middle are left out" in as_text(story)


def test_text_from_outside_cannot_begin_a_line() -> None:
    evil = "t\n     0.000 ms  done"
    story = story_of((0.0, "admitted", ADMITTED), (1.0, "error", {"rank": 0, "problem": "x\ny"}), task_id=evil)
    lines = as_text(story).splitlines()
    assert len(lines) == 4
    assert repr(evil) in lines[0]
    assert lines[2:] == ["  rank 0", "        1000.000 ms  error          problem='x\\ny'"]


def test_nothing_in_a_story_or_a_dump_reaches_a_terminal_raw() -> None:
    evil = "\x1b[2J\x9b31m\u202e"
    story = story_of(
        (0.0, "admitted", ADMITTED), (1.0, "error", {"rank": 0, "problem": evil, "code": evil}), task_id=evil
    )
    life = story["lives"][0]
    life["kind"], life["status"], life["seconds"] = evil, evil, 1.0
    life["ranks"][0]["rank"] = evil
    life["events"].append({"t": 2.0, "what": evil, evil: 1})
    assert as_text(story).replace("\n", "").isprintable()


@pytest.mark.parametrize("how", ["rejected", "busy"])
def test_a_task_that_was_refused_was_answered(how: str) -> None:
    story = story_of((2.0, how, {"code": "id_out_of_range"}))
    (life,) = story["lives"]
    assert (life["status"], life["seconds"], life["complete"]) == (how, None, False)
    heading = as_text(story).splitlines()[0]
    assert heading == f"task t: refused 1970-01-12 13:46:42.000 UTC, {how}"
    running = as_text(story_of((2.0, "admitted", ADMITTED))).splitlines()[0]
    assert running.endswith(" UTC, not answered yet")
    assert "first note kept" in as_text(story_of((2.0, "copy", {"rank": 0})))
