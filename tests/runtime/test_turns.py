"""Functions of several owners that wait for one thread: the owners take turns."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.support.waits import wait_until
from transferd.runtime.threads import Crew, SharedItems, whose

T = TypeVar("T")


def owned(owner: str, give: Callable[[], asyncio.Future[T]]) -> asyncio.Future[T]:
    before = whose.set(owner)
    try:
        return give()
    finally:
        whose.reset(before)


async def test_an_owner_that_floods_gets_every_other_turn() -> None:
    crew, ran = Crew("turns", 1), []
    gate = threading.Event()
    try:
        held = crew.run(gate.wait)
        flood = [
            owned("flood", lambda number=number: crew.run(lambda: ran.append(f"flood {number}")))  # type: ignore[misc]
            for number in range(50)
        ]
        late = [
            owned(name, lambda name=name, number=number: crew.run(lambda: ran.append(f"{name} {number}")))  # type: ignore[misc]
            for number in range(2)
            for name in ("a", "b")
        ]
        gate.set()
        await asyncio.gather(held, *flood, *late)
    finally:
        gate.set()
        assert crew.close() == []
    assert ran[:7] == ["flood 0", "a 0", "b 0", "flood 1", "a 1", "b 1", "flood 2"]
    assert [one for one in ran if one.startswith("flood")] == [f"flood {number}" for number in range(50)]


async def test_waiting_functions_are_refused_at_a_close() -> None:
    crew, gate, begun = Crew("turns", 1), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert gate.wait(60)

    held = crew.run(hold)
    assert await asyncio.to_thread(begun.wait, 20), "else it is refused as well"
    waiting = [owned(name, lambda: crew.run(lambda: None)) for name in ("a", "b", "a")]

    def release() -> None:
        with contextlib.suppress(AssertionError):  # they were not refused, which is told below
            wait_until(lambda: all(one.done() for one in waiting))
        gate.set()

    threading.Thread(target=release).start()
    assert crew.close(60) == []
    assert all("closed before its turn" in str(one.exception()) for one in waiting)
    await held


class Held:
    """An effect on items that waits at some of them: `begun` is set there, `go` lets it go on."""

    def __init__(self, ran: list[str], *held: str) -> None:
        self.ran, self.held = ran, held
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, item: str) -> str:
        if item in self.held:
            self.begun.set()
            assert self.go.wait(20)
        self.ran.append(item)
        return item.upper()


async def test_a_batch_gives_way_after_each_item() -> None:
    """A quiet owner waits for the item that runs, and for one of each other owner; not for the rest of any batch."""
    crew, ran = Crew("turns", 1), []  # type: ignore[var-annotated]
    effect = Held(ran, "flood 0")
    try:
        items = [f"flood {number}" for number in range(4)]
        flooding, others = SharedItems(effect, items), SharedItems(effect, ["other 0", "other 1"])
        flood = owned("flood", lambda: crew.run(*flooding.shares(1)))
        more = owned("flood", lambda: crew.run(lambda: ran.append("flood later")))
        assert await asyncio.to_thread(effect.begun.wait, 20)
        other = owned("other", lambda: crew.run(*others.shares(1)))
        quiet = owned("quiet", lambda: crew.run(lambda: ran.append("quiet")))
        effect.go.set()
        await asyncio.gather(more, other, quiet)
        await flood
        assert flooding.results == [item.upper() for item in items]
        assert others.results == ["OTHER 0", "OTHER 1"]
    finally:
        effect.go.set()
        assert crew.close() == []
    assert ran[:4] == ["flood 0", "other 0", "quiet", "flood 1"]
    assert ran[-1] == "flood later", "an owner's functions keep their order"


async def test_a_batch_of_the_only_owner_does_not_stop_between_items() -> None:
    crew, ran = Crew("turns", 1), []  # type: ignore[var-annotated]
    try:
        batches = [SharedItems(Held(ran), [f"{batch} {item}" for item in range(3)]) for batch in range(2)]
        both = [crew.run(*batch.shares(1)) for batch in batches]
        await asyncio.gather(*both)
    finally:
        assert crew.close() == []
    assert ran == [f"{batch} {item}" for batch in range(2) for item in range(3)]


async def test_a_batch_that_gave_way_is_finished_at_a_close() -> None:
    """Part of it has had its effect, so it must not be refused; what has not begun must be."""
    crew, ran = Crew("turns", 1), []  # type: ignore[var-annotated]
    flood, other = Held(ran, "flood 0"), Held(ran, "other")
    batch = SharedItems(flood, ["flood 0", "flood 1"])
    first = owned("flood", lambda: crew.run(*batch.shares(1)))
    assert await asyncio.to_thread(flood.begun.wait, 20)
    second = owned("other", lambda: crew.run(lambda: other("other")))
    third = owned("other", lambda: crew.run(lambda: None))
    flood.go.set()
    assert await asyncio.to_thread(other.begun.wait, 20)  # so the batch has given way
    assert not first.cancel(), "a batch that has begun cannot be withdrawn"
    assert len(crew.close(0.0)) == 1
    other.go.set()
    await first
    assert batch.results == ["FLOOD 0", "FLOOD 1"]
    assert await second == "OTHER"
    assert "closed before its turn" in str(third.exception())
    assert crew.close(20) == []


async def test_an_item_that_raises_ends_its_batch() -> None:
    def divide(number: int) -> float:
        return 1 / number

    crew = Crew("turns", 1)
    try:
        with pytest.raises(ZeroDivisionError):
            await crew.run(*SharedItems(divide, [1, 0, 2]).shares(1))
    finally:
        assert crew.close() == []


async def test_a_thread_that_is_held_up_delays_only_its_own_item() -> None:
    crew, ran = Crew("turns", 2), []  # type: ignore[var-annotated]
    effect = Held(ran, "0")
    items = [str(number) for number in range(6)]
    batch = SharedItems(effect, items)
    try:
        held, other = (crew.run(share, share) for share in batch.shares(2))
        assert await asyncio.to_thread(effect.begun.wait, 20)
        await asyncio.wait((held, other), return_when=asyncio.FIRST_COMPLETED)
        assert ran == items[1:]
        assert [told.split(",")[0].split(": ")[1] for told in crew.under_way()] == ["effect 0"]
        effect.go.set()
        await asyncio.gather(held, other)
        assert batch.results == items
    finally:
        effect.go.set()
        assert crew.close() == []


def test_a_batch_has_no_more_shares_than_items() -> None:
    assert len(SharedItems(str, ["a", "b"]).shares(8)) == 2
    assert SharedItems(str, []).shares(8) == []
