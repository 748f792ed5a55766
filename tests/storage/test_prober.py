"""A probe at intervals, in virtual time: one at a time, whatever it answers, until the close."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from tests.support.simulation.loop import SimLoop, simulate
from transferd.errors import StorageUnavailable
from transferd.runtime.aio import uncancelled
from transferd.storage.prober import Prober

EVERY_S = 10.0
TAKES_S = 4.0


@pytest.mark.parametrize(
    ("error", "told"),
    [(None, 0), (StorageUnavailable("gone"), 0), (ValueError("a bug"), 5)],
    ids=["answered", "refused", "bug"],
)
def test_a_probe_follows_each_answer_after_the_interval(error: Exception | None, told: int) -> None:
    """The store has acted on its own error; anything else is a bug, which is told and ends nothing."""

    async def story(loop: SimLoop) -> None:
        asked: list[float] = []

        async def ask() -> None:
            asked.append(loop.time())
            await asyncio.sleep(TAKES_S)
            if error is not None:
                raise error

        prober = Prober(ask, EVERY_S)
        began = loop.time()
        await asyncio.sleep(2 * EVERY_S)
        assert asked == [], "not before its start"
        prober.start()
        with structlog.testing.capture_logs() as logs:
            await asyncio.sleep(5 * (EVERY_S + TAKES_S) + 1.0)
        apart = [round(b - a, 3) for a, b in zip([began + 2 * EVERY_S, *asked], asked, strict=False)]
        assert apart == [EVERY_S, *[EVERY_S + TAKES_S] * 4]
        assert len(logs) == told
        prober.close()
        prober.close()
        await asyncio.sleep(10 * EVERY_S)
        assert len(asked) == 5

    simulate(story, 1)


def test_a_probe_that_runs_at_the_close_ends_by_itself_and_is_the_last() -> None:
    async def story(loop: SimLoop) -> None:
        ended: list[float] = []

        async def call() -> None:
            await asyncio.sleep(TAKES_S)
            ended.append(loop.time())

        async def ask() -> None:
            await uncancelled(call())

        prober = Prober(ask, EVERY_S)
        prober.start()
        await asyncio.sleep(EVERY_S + 1.0)
        prober.close()
        await asyncio.sleep(10 * EVERY_S)
        assert len(ended) == 1

    simulate(story, 1)
