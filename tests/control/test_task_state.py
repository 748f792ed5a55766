"""The law of a task's states, and how an admitted task begins."""

from __future__ import annotations

import math

import pytest

from tests.support.dispatch import record_of
from transferd.control.order import AT_WORK, TRANSITIONS, State
from transferd.tasks import ReadStorageTask

READ = ReadStorageTask(task_id="r", keys=["a"], gpu_block_ids=[1])


def test_every_state_says_which_states_may_follow() -> None:
    assert set(TRANSITIONS) == set(State)


def test_a_queued_task_starts_or_is_answered_without_having_run() -> None:
    assert TRANSITIONS[State.QUEUED] == {State.RUNNING, State.DONE}


def test_a_running_task_becomes_cancelling_or_done() -> None:
    assert TRANSITIONS[State.RUNNING] == {State.CANCELLING, State.DONE}


def test_a_cancelling_task_can_only_become_done() -> None:
    assert TRANSITIONS[State.CANCELLING] == {State.DONE}


def test_a_task_that_is_done_stays_done() -> None:
    assert TRANSITIONS[State.DONE] == frozenset()


def test_cancelling_tasks_are_still_at_work() -> None:
    assert {State.RUNNING, State.CANCELLING} == AT_WORK


def test_an_admitted_task_is_queued_without_a_stop() -> None:
    record = record_of(READ)
    assert (record.state, record.stop, record.claim, record.straggling) == (State.QUEUED, None, None, set())
    assert record.forsaken_at == math.inf


def test_two_records_of_equal_tasks_are_two_tasks_with_stragglers_of_their_own() -> None:
    one, two = record_of(READ), record_of(READ)
    assert one != two
    one.straggling |= {1}
    assert two.straggling == set()


def test_a_field_that_no_task_has_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        record_of(READ).stopped = True  # type: ignore[attr-defined]
