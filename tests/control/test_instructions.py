"""Instructions are plain data that never changes; an event returns those that it has led to, once."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tests.support.dispatch import limits
from transferd.control import instructions as do
from transferd.control.dispatcher import Dispatcher
from transferd.errors import InvariantError
from transferd.tasks import Status, SwapOutTask, TaskResult


@pytest.mark.parametrize("kind", get_args(do.Instruction), ids=lambda kind: kind.__name__)
def test_instructions_never_change(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen


def test_an_event_returns_what_it_has_led_to_and_no_later_event_does() -> None:
    dispatcher, task = Dispatcher(limits()), SwapOutTask(task_id="s", gpu_block_ids=[1], cpu_block_ids=[1])
    assert do.Start(task, "", 2.0) in dispatcher.submit(2.0, b"c", 1, task)
    assert dispatcher.hold(3.0, "pause") == []


def test_an_event_that_cannot_be_says_so() -> None:
    with pytest.raises(InvariantError, match="which is not running"):
        Dispatcher(limits()).round_merged(0.0, "nobody", TaskResult(task_id="nobody", status=Status.OK), ())
