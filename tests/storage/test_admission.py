"""Second use: which blocks are worth storing, the same on every rank, with bounded memory."""

from __future__ import annotations

from transferd.storage.admission import SecondUse
from transferd.storage.lru import Use


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_task_is_refused_and_the_second_admitted_on_every_rank() -> None:
    second_use = SecondUse(100.0, Time())
    first, second = Use(), Use()
    for _rank in range(3):
        assert second_use.admits(["a", "b"], first) == [False, False]
    for _rank in range(3):
        assert second_use.admits(["a", "b", "c"], second) == [True, True, False]
    assert second_use.admits(["c"], Use()) == [True]
    assert second_use.statistics() == {"not_admitted": 9, "remembered": 3}


def test_a_first_task_counts_within_the_window_and_not_for_ever() -> None:
    for later, admitted in ((49.0, True), (400.0, False)):
        time = Time()
        second_use = SecondUse(100.0, time)
        second_use.admits(["a"], Use())
        time.now = later
        assert second_use.admits(["a"], Use()) == [admitted], later


def test_a_window_that_turns_between_two_ranks_does_not_part_them() -> None:
    time = Time()
    second_use = SecondUse(100.0, time)
    second_use.admits(["a"], Use())
    time.now = 60.0
    second_use.admits(["z"], Use())  # turns
    use = Use()
    time.now = 109.0
    assert second_use.admits(["a"], use) == [True]
    time.now = 111.0  # turns again: what was only in the older set is forgotten
    assert second_use.admits(["a"], use) == [True]


def test_memory_is_bounded_and_the_oldest_are_forgotten_first() -> None:
    second_use = SecondUse(1e9, Time(), most=100)
    for i in range(1000):
        second_use.admits([i], Use())
        assert second_use.statistics()["remembered"] <= 200
    assert second_use.admits([999, 0], Use()) == [True, False]
    assert not second_use._firsts, "nothing is kept for uses that have ended"
