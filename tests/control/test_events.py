"""Events and instructions are plain data that never changes, and the dispatcher hears every one of them."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tests.support.dispatch import limits
from transferd.control import events as ev
from transferd.control.dispatcher import Dispatcher

KINDS = [kind for kind in vars(ev).values() if isinstance(kind, type) and kind.__module__ == ev.__name__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_events_and_instructions_never_change(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen


def test_every_kind_is_an_event_or_an_instruction() -> None:
    assert {*get_args(ev.Event), *get_args(ev.Instruction)} == set(KINDS)


def test_the_dispatcher_handles_every_event() -> None:
    assert set(Dispatcher(limits())._handlers) == set(get_args(ev.Event))


def test_a_control_event_without_a_name_has_an_empty_holder() -> None:
    assert ev.PauseRequested(1.0) == ev.PauseRequested(1.0, b"", "")
    assert ev.ResumeRequested(1.0) == ev.ResumeRequested(1.0, "")
    assert ev.DrainRequested(1.0) == ev.DrainRequested(1.0, b"", "")
