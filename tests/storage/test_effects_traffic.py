"""Which calls run: background work waits for a quiet moment, but not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.support.simulation.loop import SimLoop, simulate
from transferd.storage.effects import Traffic

PATIENCE_S = 5.0


async def began(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(work)
    await asyncio.sleep(1.0)
    return task


def test_traffic_is_quiet_between_calls_and_after_the_last_of_several() -> None:
    async def story(loop: SimLoop) -> None:
        traffic = Traffic()
        before = loop.time()
        assert await traffic.quiet(0.0)
        with traffic:
            with traffic:
                several = [await began(traffic.quiet(3600.0)) for _ in range(2)]
            await asyncio.sleep(1.0)
            assert not any(one.done() for one in several), "one call still runs"
        assert await asyncio.gather(*several) == [True, True]
        assert loop.time() - before < 10.0

    simulate(story, 1)


def test_patience_ends_and_the_next_wait_is_a_new_one() -> None:
    async def story(loop: SimLoop) -> None:
        traffic = Traffic()
        with traffic:
            before = loop.time()
            assert await traffic.quiet(PATIENCE_S) is False
            assert loop.time() - before == pytest.approx(PATIENCE_S)
            waiting = await began(traffic.quiet(3600.0))
        assert await waiting is True

    simulate(story, 1)


def test_a_waiter_that_is_cancelled_as_it_becomes_quiet_is_cancelled() -> None:
    async def story(loop: SimLoop) -> None:
        traffic = Traffic()
        with traffic:
            waiting = await began(traffic.quiet(3600.0))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    simulate(story, 1)


def test_a_call_that_raises_is_no_traffic() -> None:
    traffic = Traffic()
    with pytest.raises(OSError, match="worn out"), traffic:
        raise OSError("worn out")
    assert asyncio.run(traffic.quiet(0.0))
