"""The gate: whether tasks are admitted, whether admitted ones are started, and who may undo what stands against it."""

from __future__ import annotations

import pytest

from transferd.control.gate import DRAINING, STARTING, Gate, Hold
from transferd.tasks import ErrorInfo, Status

DIED = ErrorInfo("rank_died", "rank 1 died")
CLEARED = ErrorInfo("cleared", "the cache was cleared")


@pytest.fixture
def gate() -> Gate:
    return Gate(memory=True)


def test_a_gate_with_memory_admits_and_starts(gate: Gate) -> None:
    assert gate.refusal is None
    assert gate.starts
    assert gate.alive
    assert not gate.draining
    assert not gate.paused
    assert gate.held == []


def test_without_memory_at_the_start_the_answer_is_busy_until_there_is_some() -> None:
    gate = Gate(memory=False)
    assert gate.refusal == (Status.BUSY, STARTING)
    assert gate.starts
    gate.memory_there()
    assert gate.refusal is None


def test_memory_that_was_taken_away_rejects_until_there_is_some_again(gate: Gate) -> None:
    gate.memory_gone(CLEARED)
    assert gate.refusal == (Status.REJECTED, CLEARED)
    assert gate.alive
    gate.memory_there()
    assert gate.refusal is None


def test_a_pause_admits_and_does_not_start(gate: Gate) -> None:
    gate.hold("pause", "a", b"a1", 1.0)
    assert gate.paused
    assert not gate.starts
    assert gate.refusal is None
    assert not gate.draining
    gate.resume("a")
    assert gate.starts
    assert not gate.paused


def test_a_drain_starts_and_does_not_admit(gate: Gate) -> None:
    gate.hold("drain", "a", b"a1", 1.0)
    assert gate.draining
    assert gate.starts
    assert gate.refusal == (Status.REJECTED, DRAINING)
    assert not gate.paused
    gate.resume("a")
    assert gate.refusal is None


def test_a_shutdown_counts_at_once(gate: Gate) -> None:
    gate.shut()
    assert gate.refusal == (Status.REJECTED, DRAINING)
    assert gate.draining
    assert not gate.starts


def test_a_gate_is_open_again_once_those_who_shut_it_have_gone(gate: Gate) -> None:
    gate.hold("pause", "a", b"a1", 1.0)
    gate.hold("drain", "a", b"a1", 2.0)
    gate.client_gone(b"a1")
    assert gate.refusal is None
    assert gate.starts
    assert (gate.paused, gate.draining) == (False, False)


def test_a_shutdown_neither_admits_nor_starts_and_nothing_undoes_it(gate: Gate) -> None:
    gate.shut()
    gate.resume("operator")
    gate.memory_there()
    assert gate.refusal == (Status.REJECTED, DRAINING)
    assert gate.draining
    assert not gate.starts
    assert not gate.alive


def test_a_dead_rank_fails_every_task_and_nothing_undoes_it(gate: Gate) -> None:
    gate.rank_died(DIED)
    gate.resume("operator")
    gate.memory_there()
    assert gate.refusal == (Status.FAILED, DIED)
    assert not gate.starts
    assert not gate.alive
    assert not gate.draining


def test_the_strongest_reason_to_refuse_comes_first(gate: Gate) -> None:
    gate.memory_gone(CLEARED)
    gate.hold("drain", "a", b"a1", 1.0)
    assert gate.refusal == (Status.REJECTED, DRAINING)
    gate.rank_died(DIED)
    assert gate.refusal == (Status.FAILED, DIED)


def test_holds_are_listed_by_age_and_not_by_insertion(gate: Gate) -> None:
    gate.hold("pause", "a", b"a1", 3.0)
    gate.hold("drain", "b", b"b1", 1.0)
    gate.hold("drain", "a", b"a1", 2.0)
    assert gate.held == [
        Hold("drain", "b", b"b1", 1.0),
        Hold("drain", "a", b"a1", 2.0),
        Hold("pause", "a", b"a1", 3.0),
    ]


def test_a_holder_that_asks_again_keeps_its_time_and_ends_with_its_new_connection(gate: Gate) -> None:
    gate.hold("pause", "a", b"a1", 1.0)
    gate.hold("pause", "a", b"a2", 5.0)
    assert gate.held == [Hold("pause", "a", b"a2", 1.0)]
    assert gate.client_gone(b"a1") == []
    assert gate.paused


def test_a_resume_lets_go_of_all_that_its_holder_holds_and_of_nothing_else(gate: Gate) -> None:
    gate.hold("pause", "a", b"a1", 1.0)
    gate.hold("drain", "a", b"a1", 2.0)
    gate.hold("pause", "b", b"b1", 3.0)
    gate.resume("a")
    assert gate.held == [Hold("pause", "b", b"b1", 3.0)]


def test_a_resume_by_a_holder_without_holds_ends_all_holds(gate: Gate) -> None:
    gate.hold("pause", "a", b"a1", 1.0)
    gate.hold("drain", "b", b"b1", 2.0)
    gate.resume("operator")
    assert gate.held == []


def test_a_clients_holds_end_with_its_connection_and_are_returned(gate: Gate) -> None:
    gate.hold("pause", "a", b"a1", 1.0)
    gate.hold("drain", "a", b"a1", 2.0)
    gate.hold("pause", "b", b"b1", 3.0)
    assert gate.client_gone(b"a1") == [Hold("pause", "a", b"a1", 1.0), Hold("drain", "a", b"a1", 2.0)]
    assert gate.held == [Hold("pause", "b", b"b1", 3.0)]
    assert gate.client_gone(b"a1") == []


def test_a_task_that_waited_behind_a_pause_can_say_whose(gate: Gate) -> None:
    assert gate.behind == ""
    gate.hold("drain", "d", b"d1", 1.0)
    assert gate.behind == ""
    gate.hold("pause", "trainer (1f)", b"a1", 2.0, "secret")
    gate.hold("pause", "later", b"b1", 3.0)
    assert gate.behind == ", behind the pause of trainer (1f)"
