"""Alarms: deadlines ring in order, and those of tasks that are over neither ring nor pile up."""

from __future__ import annotations

import math

from transferd.control.order import Alarms

MANY = 1000


def alarms(*over: str) -> tuple[Alarms[str], set[str]]:
    gone = set(over)
    return Alarms(gone.__contains__), gone


def test_alarms_ring_soonest_first_however_they_were_set() -> None:
    clock, _ = alarms()
    for when, subject in [(3.0, "third"), (1.0, "first"), (2.0, "second")]:
        clock.set(when, subject)
    assert clock.due(2.5, MANY) == ["first", "second"]
    assert clock.due(9.0, MANY) == ["third"]
    assert clock.due(9.0, MANY) == []


def test_an_alarm_is_due_in_the_moment_it_was_set_for_and_not_before() -> None:
    clock, _ = alarms()
    clock.set(2.0, "a")
    assert clock.due(1.999, MANY) == []
    assert clock.due(2.0, MANY) == ["a"]


def test_alarms_of_one_moment_ring_in_the_order_in_which_they_were_set() -> None:
    clock, _ = alarms()
    for subject in "cabd":  # subjects are never compared: a task has no order
        clock.set(1.0, subject)
    assert clock.due(1.0, MANY) == ["c", "a", "b", "d"]


def test_at_most_so_many_ring_and_the_others_next_time() -> None:
    clock, gone = alarms()
    for when, subject in enumerate("abcd"):
        clock.set(float(when), subject)
    gone.add("b")
    assert clock.due(9.0, 2) == ["a", "c"]
    assert clock.next() == 3.0
    assert clock.due(9.0, 2) == ["d"]


def test_an_alarm_of_an_ended_subject_does_not_ring() -> None:
    clock, gone = alarms()
    clock.set(1.0, "over")
    clock.set(2.0, "live")
    gone.add("over")
    assert clock.due(5.0, MANY) == ["live"]


def test_the_next_alarm_is_the_soonest_of_those_that_will_ring() -> None:
    clock, gone = alarms()
    assert clock.next() == math.inf
    clock.set(3.0, "late")
    clock.set(1.0, "over")
    clock.set(2.0, "over, too")
    assert clock.next() == 1.0
    gone.update(["over", "over, too"])
    assert clock.next() == 3.0
    gone.add("late")
    assert clock.next() == math.inf


def test_alarms_that_will_not_ring_are_dropped_once_more_than_64_are_set() -> None:
    clock, _ = alarms("over")
    for _ in range(64):
        clock.set(9.0, "over")
    assert len(clock._heap) == 64
    clock.set(1.0, "live")
    assert len(clock._heap) == 1
    assert clock.due(1.0, MANY) == ["live"]


def test_dropping_dead_alarms_keeps_the_order_of_the_others() -> None:
    clock, _ = alarms("over")
    live = [f"{i:03}" for i in range(40)]
    clock.set(0.0, "over")  # the soonest of all, so that those behind it must be put in order anew
    for i in reversed(range(40)):
        clock.set(float(i), live[i])
    for _ in range(24):
        clock.set(0.5, "over")
    assert len(clock._heap) == 40
    assert clock.due(math.inf, MANY) == live


def test_the_more_are_live_the_more_may_be_set_before_the_next_look() -> None:
    looks: list[str] = []

    def over(subject: str) -> bool:
        looks.append(subject)
        return False

    clock: Alarms[str] = Alarms(over)
    for i in range(65):
        clock.set(float(i), "live")
    assert len(looks) == 65, "the 65th looked at each"
    for i in range(64 + 2 * 65 - 65):
        clock.set(float(i), "live")
    assert len(looks) == 65
    clock.set(0.0, "live")
    assert len(looks) == 65 + 195
