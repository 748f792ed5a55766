"""The contract of runtime/clock.py, over the system's clock and the simulated one, while the wall clock is stepped.

The system's own cannot be stepped for one process, so a preloaded library does it (tests/support/native).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support import native
from tests.support.native.page import FaultPage
from tests.support.simulation.clock import SimClock
from tests.support.simulation.loop import SimLoop, simulate
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import timeout

DAY_S = 24 * 3600
STEPS = (DAY_S, -DAY_S, 400 * DAY_S, 0)  # off from the right time
TIMER_S = 0.01


async def keeps_its_contract(clock: Clock, step: Callable[[int], None]) -> None:
    """step: set the wall clock so many seconds off."""
    loop, right = asyncio.get_running_loop(), clock.wall() - clock.monotonic()
    last = clock.monotonic()
    for seconds in STEPS:
        timer = asyncio.ensure_future(asyncio.sleep(TIMER_S))
        due = clock.monotonic() + TIMER_S
        await asyncio.sleep(0)  # the timer runs when the clock is stepped
        step(seconds)
        off = clock.wall() - clock.monotonic() - right
        assert abs(off - seconds) < DAY_S / 4, f"the wall clock is {off} s off, set was {seconds}"
        async with timeout(60):  # of the loop's, which the step must not touch either
            await timer
        now = clock.monotonic()
        assert now >= last, "monotonic time went back"
        assert now >= due - 0.005, "a timer came early"
        assert now < last + DAY_S / 4, "monotonic time went with the wall clock"
        before, at, after = clock.monotonic(), loop.time(), clock.monotonic()
        assert before - 0.005 <= at <= after + 0.005, "the loop's timers have a clock of their own"
        last = now
    assert len({clock.fresh_id() for _ in range(1000)}) == 1000


def test_the_simulated_clock() -> None:
    async def main(loop: SimLoop) -> None:
        clock = SimClock(loop)
        await keeps_its_contract(clock, lambda seconds: clock.jump_wall(seconds - clock.wall_offset))

    for seed in range(5):
        simulate(main, seed)


def test_the_systems_clock(tmp_path: Path) -> None:
    page = tmp_path / "page"
    FaultPage(page)
    for loop in ("asyncio", "uvloop"):
        program = "from tests.runtime.test_clock import main; main()"
        native.run(program, loop, str(page), TRANSFERD_FAULT_PAGE=str(page))


def main() -> None:
    """In a process under the library."""
    import uvloop

    library = FaultPage.mapped(Path(sys.argv[2]))
    run = asyncio.run if sys.argv[1] == "asyncio" else uvloop.run
    run(keeps_its_contract(SYSTEM_CLOCK, library.step_wall))
    assert library.wall_reads > 0
