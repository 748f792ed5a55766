"""Functions of several owners that wait for one thread: the owners take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from transferd.runtime.threads import Crew, whose


def owned(owner: str, give: Callable[[], asyncio.Future[None]]) -> asyncio.Future[None]:
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


async def test_what_waits_is_refused_at_a_close_whoever_gave_it() -> None:
    crew, gate = Crew("turns", 1), threading.Event()
    held = crew.run(gate.wait)
    waiting = [owned(name, lambda: crew.run(lambda: None)) for name in ("a", "b", "a")]
    threading.Timer(0.05, gate.set).start()
    assert crew.close(5.0) == []
    assert all("closed before its turn" in str(one.exception()) for one in waiting)
    await held
