"""The steps of a stop in virtual time: none is skipped, none takes longer than the budget, and what hangs is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.support.simulation.clock import SimClock
from tests.support.simulation.loop import SimLoop, simulate
from transferd.daemon.shutdown import LEAST_S, LOOK_S, Shutdown
from transferd.errors import StillRunning


class Stop:
    """A shutdown with a budget that a test may shorten, as a second signal does."""

    def __init__(self, loop: SimLoop, budget_s: float) -> None:
        clock = SimClock(loop)
        self.ends_at = clock.monotonic() + budget_s
        self.now = clock.monotonic
        self.shutdown = Shutdown(lambda: max(0.0, self.ends_at - clock.monotonic()), clock)


def run(program: Callable[[Stop], Coroutine[Any, Any, None]], budget_s: float = 10.0) -> None:
    async def main(loop: SimLoop) -> None:
        await program(Stop(loop, budget_s))

    simulate(main, 0)


async def nothing(seconds: float = 0.0) -> None:
    await asyncio.sleep(seconds)


async def raises(error: Exception) -> None:
    raise error


def test_steps_end_with_their_errors_and_the_next_ones_still_happen() -> None:
    async def program(stop: Stop) -> None:
        bug, hang = RuntimeError("a bug"), StillRunning("a copy of rank 1")
        assert await stop.shutdown.step("one", raises(bug))
        assert not await stop.shutdown.step("two", raises(hang))
        assert await stop.shutdown.step("three", nothing(1.0))
        assert stop.shutdown.errors == [bug]
        assert stop.shutdown.hanging == ["two: a copy of rank 1"]

    run(program)


def test_a_step_that_hangs_takes_what_is_left_and_each_later_one_at_least_a_second() -> None:
    async def program(stop: Stop) -> None:
        began, never = stop.now(), asyncio.Event()
        assert not await stop.shutdown.step("storage", never.wait())  # type: ignore[arg-type]
        assert 10.0 <= stop.now() - began <= 10.0 + LOOK_S
        again = stop.now()
        assert not await stop.shutdown.step("tiers", never.wait())  # type: ignore[arg-type]
        assert LEAST_S <= stop.now() - again <= LEAST_S + LOOK_S
        assert await stop.shutdown.step("quick", nothing(LEAST_S / 2))
        assert stop.shutdown.hanging == ["storage", "tiers"]
        never.set()
        await asyncio.sleep(0)

    run(program)


def test_a_second_signal_shortens_the_wait_that_is_under_way() -> None:
    async def program(stop: Stop) -> None:
        began = stop.now()
        asyncio.get_running_loop().call_later(1.0, setattr, stop, "ends_at", began + 2.0)
        assert not await stop.shutdown.within(8.0, nothing(9.0))
        assert 2.0 <= stop.now() - began <= 2.0 + LOOK_S

    run(program)


def test_waiting_ends_when_it_may_and_is_cancelled_when_it_may_not() -> None:
    cancelled: list[bool] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def program(stop: Stop) -> None:
        began = stop.now()
        assert await stop.shutdown.within(5.0, nothing(1.0))
        assert stop.now() - began < 1.0 + LOOK_S
        assert not await stop.shutdown.within(2.0, waits())
        await asyncio.sleep(0.001)
        assert cancelled == [True]
        assert stop.shutdown.hanging == [], "what was waited for is no step"

    run(program)


def test_a_late_error_of_an_abandoned_step_is_retrieved() -> None:
    """The simulated loop fails a test in which an error is never retrieved."""

    async def program(stop: Stop) -> None:
        gate = asyncio.Event()

        async def fails() -> None:
            await gate.wait()
            raise OSError("the disk has gone")

        assert not await stop.shutdown.step("storage", fails())
        gate.set()
        await asyncio.sleep(1.0)
        assert not stop.shutdown._left_behind

    run(program, budget_s=0.0)
