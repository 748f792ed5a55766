"""Runs soon, never more often than asked for, never twice at once, and not at all after a close."""

from __future__ import annotations

import asyncio
import itertools

from tests.support.simulation.loop import SimLoop, simulate
from transferd.runtime.aio import Paced


def test_a_run_begins_at_once_and_the_next_after_the_interval_however_often_it_is_requested() -> None:
    began: list[float] = []

    async def main(loop: SimLoop) -> None:
        async def do() -> None:
            began.append(loop.time())
            await asyncio.sleep(0.25)

        paced = Paced(do, 1.0)
        for _ in range(35):
            paced.soon()
            await asyncio.sleep(0.1)
        assert paced._timer or paced._again is not None, "one more was requested"
        await asyncio.sleep(10)
        assert not paced._timer
        assert paced._again is None
        paced.soon(at_once=True)
        paced.soon(at_once=True)
        await asyncio.sleep(0.1)
        paced.soon(at_once=True)
        await paced.close()
        paced.soon(at_once=True)
        await asyncio.sleep(10)

    simulate(main, 0)
    gaps = [round(later - earlier, 2) for earlier, later in itertools.pairwise(began)]
    assert gaps[:3] == [1.0, 1.0, 1.0]
    assert len(began) == 6, "one at once, and none after the close"
