"""The heartbeat by itself: each transition, and when Hello is due."""

from __future__ import annotations

import pytest

from transferd.client import heartbeat as hb
from transferd.client.heartbeat import Heartbeat, Presence

CLOSED, SEEKING, PRESENT, DOUBTED, LOST = Presence


def in_state(presence: Presence) -> Heartbeat:
    """A heartbeat that got there by itself; its one unanswered Hello, if any, was said at 0."""
    heart = Heartbeat()
    if presence is CLOSED:
        return heart
    heart.opened()
    heart.said_hello(1, 0.0)
    if presence is PRESENT:
        heart.heard()
        heart.welcomed(1)
    if presence in (DOUBTED, LOST):
        heart.look(hb.SILENCE_S)
    if presence is LOST:
        heart.look(hb.SILENCE_S + hb.DOUBT_S)
    assert heart.presence is presence
    return heart


def give(heart: Heartbeat, event: str) -> None:
    if event == "silence":
        heart.said_hello(7, 0.0)
        heart.look(hb.SILENCE_S)
    else:
        {"open": heart.opened, "message": heart.heard, "welcome": lambda: heart.welcomed(9), "close": heart.closed}[
            event
        ]()


@pytest.mark.parametrize(
    ("before", "event", "after"),
    [
        (CLOSED, "open", SEEKING),
        (SEEKING, "message", SEEKING),
        (SEEKING, "welcome", PRESENT),
        (SEEKING, "silence", DOUBTED),
        (SEEKING, "close", CLOSED),
        (PRESENT, "message", PRESENT),
        (PRESENT, "welcome", PRESENT),
        (PRESENT, "silence", DOUBTED),
        (PRESENT, "close", CLOSED),
        (DOUBTED, "message", PRESENT),
        (DOUBTED, "welcome", PRESENT),
        (DOUBTED, "silence", LOST),
        (DOUBTED, "close", CLOSED),
        (LOST, "message", LOST),
        (LOST, "welcome", PRESENT),
        (LOST, "silence", LOST),
        (LOST, "close", CLOSED),
    ],
)
def test_an_event_leads_from_one_state_to_the_next(before: Presence, event: str, after: Presence) -> None:
    heart = in_state(before)
    give(heart, event)
    assert heart.presence is after
    assert (heart.open, heart.lost) == (after is not CLOSED, after is LOST)


def test_silence_is_counted_from_the_oldest_hello_since_anything_was_heard() -> None:
    heart = in_state(PRESENT)
    heart.said_hello(2, 10.0)
    heart.said_hello(3, 11.0)
    assert heart.look(10.0 + hb.SILENCE_S - 0.01) is None
    assert heart.look(10.0 + hb.SILENCE_S - hb.TIMER_RESOLUTION_S) is DOUBTED
    heart.heard()
    assert heart.presence is PRESENT
    assert heart.look(1000.0) is None, "nothing is asked, so nothing is missing"
    heart.said_hello(4, 1000.0)
    assert heart.look(1000.0) is None


def test_a_look_tells_a_change_once() -> None:
    heart = in_state(SEEKING)
    assert [heart.look(at) for at in (1.0, 3.5, 3.6, 8.6)] == [None, DOUBTED, LOST, None]


def test_only_a_newer_welcome_counts() -> None:
    heart = in_state(SEEKING)
    heart.said_hello(5, 0.0)
    assert heart.hello_under_way
    assert heart.welcomed(1)
    assert heart.hello_under_way, "that was the answer to another"
    assert heart.welcomed(5)
    assert not heart.hello_under_way
    assert not heart.welcomed(5)
    assert not heart.welcomed(4)
    lost = in_state(LOST)
    lost.said_hello(2, 9.0)
    assert lost.welcomed(2)
    assert not lost.lost


def test_hello_is_frequent_until_somebody_is_ready_then_slow_and_rare_to_a_lost_daemon() -> None:
    heart = in_state(SEEKING)
    delays = [heart.next_hello(0.0, ready=False) for _ in range(8)]
    assert delays == [0.004, 0.008, 0.016, 0.032, 0.064, 0.1, 0.1, 0.1]
    heart = in_state(PRESENT)
    assert heart.next_hello(0.0, ready=True) == hb.HEARTBEAT_S
    heart.said_hello(2, 0.0)
    assert heart.next_hello(3.0, ready=True) == pytest.approx(0.5), "to look as soon as silence is doubt"
    assert heart.next_hello(9.0, ready=True) == 0.0
    assert heart.next_hello(0.0, ready=False) == 0.004, "the daemon was ready meanwhile"
    assert in_state(LOST).next_hello(99.0, ready=True) == hb.LOST_HELLO_S


def test_opened_again_it_remembers_nothing() -> None:
    heart = in_state(LOST)
    heart.next_hello(0.0, ready=False)
    heart.closed()
    heart.opened()
    assert heart.look(1000.0) is None
    assert not heart.hello_under_way
    assert heart.next_hello(0.0, ready=False) == 2 * hb.FIRST_HELLO_S
    heart.said_hello(1, 0.0)
    assert heart.welcomed(1), "numbers of an earlier conversation do not count"
