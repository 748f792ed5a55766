"""Pins end with their time, for each owner by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.support.simulation.loop import simulate
from transferd.storage.lru import Entry, LruIndex, Use
from transferd.storage.pins import Pins
from transferd.storage.queues import EngineOwner

A, B = EngineOwner("a", 1), EngineOwner("b", 1)


def filled(capacity: int = 100) -> tuple[LruIndex, Sequence[Entry]]:
    index, use = LruIndex(capacity), Use(owner=A)
    for depth in range(5):
        index.reserve(f"n{depth}", 10, use, depth)
        index.commit(f"n{depth}")
    return index, list(index.hottest_first())


def test_an_object_is_pinned_until_its_last_pin_ends() -> None:
    async def story(_: object) -> list[int]:
        index, entries = filled()
        pins = Pins(index)
        pins.pin(A, entries[:2], 1.0)
        pins.pin(B, entries[1:3], 10.0)
        pins.pin(A, entries[:1], 5.0)  # again: that is what counts
        seen = [len(pins)]
        for seconds in (2.0, 4.0, 5.0):
            await asyncio.sleep(seconds)
            seen.append(len(pins))
        assert not any(entry.pinned for entry in entries)
        pins.close()
        return [*seen, pins.expired]

    assert simulate(story, 1) == [3, 3, 2, 0, 3]


def test_an_owner_unpins_its_own_pins_and_objects_that_leave_lose_theirs() -> None:
    async def story(_: object) -> None:
        index, entries = filled()
        pins = Pins(index)
        pins.pin(A, entries[:3], 9.0)
        pins.pin(B, entries[:1], 9.0)
        assert (pins.taken(A), pins.taken(B)) == (30, 10)
        assert pins.unpin(B, entries) == 1
        assert entries[0].pinned, "A's"
        assert pins.unpin(A, entries[:1]) == 1
        assert not entries[0].pinned
        index.forget("n1")
        assert (len(pins), pins.taken(A)) == (1, 10)
        assert pins.asked(A, entries[2:4]).new == 10
        assert pins.unpin(A, pins.of(A)) >= 1
        assert (len(pins), sum(account.pinned for account in index.queues())) == (0, 0)
        pins.pin(A, entries[3:], 9.0)
        index.forget(entries[3].name)
        await asyncio.sleep(20.0)
        assert (pins.taken(A), pins._pins, pins.expired) == (0, {}, 1), "nobody has asked how many there are"
        pins.close()

    simulate(story, 1)


def test_pins_that_are_renewed_for_ever_take_no_more_memory() -> None:
    async def story(_: object) -> int:
        index, entries = filled()
        pins = Pins(index)
        pins.pin(B, entries[:1], 100.0)  # ends before all others, and lasts
        for i in range(5000):
            pins.pin(A, entries, 200.0 + i / 1000)
        most = len({request for owners in pins._pins.values() for request in owners.values()})
        waiting = [timer for _, _, timer in asyncio.get_running_loop()._timers if not timer.cancelled()]  # type: ignore[attr-defined]
        assert len(waiting) == most
        assert (len(pins), pins.taken(A), pins.taken(B)) == (5, 50, 10)
        await asyncio.sleep(101.0)
        assert (len(pins), pins.taken(B)) == (5, 0)
        await asyncio.sleep(105.0)
        assert (len(pins), pins.expired) == (0, 5)
        pins.close()
        return most

    assert simulate(story, 1) == 2, "5,001 requests were made, the pins of 2 last"


def test_restored_pins_name_present_objects_and_take_at_most_half_of_the_store() -> None:
    async def story(_: object) -> None:
        pins = Pins(filled(80)[0])
        pins.restore([("gone", A, 5.0), *((f"n{depth}", A, 5.0) for depth in range(5))])
        assert pins.taken(A) == 40
        pins.restore([("n0", B, 9.0)])  # it is pinned already
        assert (len(pins), pins.taken(B)) == (4, 10)
        pins.close()

    simulate(story, 1)


def test_restored_pins_of_about_one_end_share_a_timer_and_none_ends_too_soon() -> None:
    async def story(_: object) -> list[int]:
        pins, seen = Pins(filled()[0]), list[int]()
        pins.restore([(f"n{depth}", A, 5.0 + depth / 10) for depth in range(5)])
        assert len({id(pin) for pinned in pins._pins.values() for pin in pinned.values()}) == 2
        for seconds in (4.99, 0.9, 0.2):
            await asyncio.sleep(seconds)
            seen.append(len(pins))
        return seen

    assert simulate(story, 1) == [5, 4, 0]
