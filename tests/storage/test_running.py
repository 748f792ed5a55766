"""Which objects the calls of now are about, and the wait for those calls alone."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.simulation.loop import SimLoop, simulate
from transferd.storage.running import Running


def test_only_calls_about_the_same_objects_are_waited_for() -> None:
    async def story(loop: SimLoop) -> None:
        calls = Running()
        with calls.of(["a", "b"]):
            assert (calls.has("a"), calls.has("b"), calls.has("c")) == (True, True, False)
            await calls.without(["c", "d"])
            waiting = asyncio.ensure_future(calls.without(["c", "b"]))
            await asyncio.sleep(1.0)
            with calls.of(["c"]):
                assert calls.names == ["a", "b", "c"]
                await asyncio.sleep(1.0)
            await asyncio.sleep(1.0)
            assert not waiting.done()
        await waiting
        assert not calls.has("a")
        assert not calls.ends

    simulate(story, 1)


def test_an_object_that_two_calls_are_about_is_waited_for_until_both_have_ended() -> None:
    async def story(loop: SimLoop) -> None:
        calls = Running()
        second = calls.of(["a"])
        with calls.of(["a"]):
            second.__enter__()
        waiting = asyncio.ensure_future(calls.without(["a"]))
        await asyncio.sleep(1.0)
        assert (calls.has("a"), waiting.done()) == (True, False)
        second.__exit__(None, None, None)
        await waiting

    simulate(story, 1)


async def test_a_call_that_raises_runs_no_more() -> None:
    calls = Running()
    with pytest.raises(OSError, match="worn out"), calls.of(["a"]):
        raise OSError("worn out")
    assert not calls.has("a")
    await calls.without(["a"])
