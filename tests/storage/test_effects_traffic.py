"""Which calls run: background work waits for a quiet moment, but not for ever; what is read is not written over."""

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
        assert traffic._waiting == []

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
        assert traffic._waiting == []

    simulate(story, 1)


def test_a_waiter_that_is_cancelled_as_it_becomes_quiet_is_cancelled() -> None:
    async def story(loop: SimLoop) -> None:
        traffic = Traffic()
        with traffic:
            waiting = await began(traffic.quiet(3600.0))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert traffic._waiting == []

    simulate(story, 1)


def test_only_reads_of_the_same_objects_are_waited_for() -> None:
    async def story(loop: SimLoop) -> None:
        traffic = Traffic()
        with traffic.reading(["a", "b"]):
            assert (traffic.reads("a"), traffic.reads("b"), traffic.reads("c")) == (True, True, False)
            await traffic.unread(["c", "d"])
            waiting = await began(traffic.unread(["c", "b"]))
            with traffic.reading(["c"]):
                await asyncio.sleep(1.0)
            await asyncio.sleep(1.0)
            assert not waiting.done()
        await waiting
        assert not traffic.reads("a")
        assert (traffic._read_ended, traffic._read) == ([], [])

    simulate(story, 1)


def test_an_object_that_two_calls_read_is_read_until_both_have_ended() -> None:
    async def story(loop: SimLoop) -> None:
        traffic = Traffic()
        second = traffic.reading(["a"])
        with traffic.reading(["a"]):
            second.__enter__()
        waiting = await began(traffic.unread(["a"]))
        assert (traffic.reads("a"), waiting.done()) == (True, False)
        second.__exit__(None, None, None)
        await waiting

    simulate(story, 1)


def test_a_call_that_raises_reads_no_more() -> None:
    traffic = Traffic()
    with pytest.raises(OSError, match="worn out"), traffic, traffic.reading(["a"]):
        raise OSError("worn out")
    assert not traffic.reads("a")
    assert asyncio.run(traffic.quiet(0.0)), "nor does it count as traffic"
