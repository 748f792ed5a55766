"""Work that goes on while its caller waits for something else, or no longer waits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from transferd.errors import InvariantError
from transferd.runtime.aio import Background, answered


@pytest.fixture
async def unhandled() -> AsyncIterator[list[dict[str, Any]]]:
    """What the loop was told that nobody has taken."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    yield told
    asyncio.get_running_loop().set_exception_handler(None)


async def test_what_is_answered_needs_no_task_and_all_else_is_kept_until_it_ends() -> None:
    background, gate = Background(), asyncio.Event()

    async def waits() -> str:
        await gate.wait()
        return "late"

    there = answered("there")
    assert background.begin(there) is there
    assert len(background) == 0
    begun: asyncio.Future[Any] = background.begin(waits())
    assert len(background) == 1
    gate.set()
    await background.settled()
    assert begun.result() == "late"


async def test_an_error_that_nobody_waits_for_any_more_is_not_reported_as_lost(unhandled: list[dict[str, Any]]) -> None:
    background = Background()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise InvariantError("the task has its answer already")

    work = background.begin(fails())
    await background.settled()
    assert len(background) == 0
    assert work.done()
    del work
    gc.collect()
    await asyncio.sleep(0)
    assert unhandled == []


async def test_what_is_begun_while_others_settle_is_waited_for_too() -> None:
    """A chunk that ends may begin the quarantine of an object, which reads the same memory's names."""
    background, ended = Background(), list[str]()

    async def second() -> None:
        await asyncio.sleep(0.01)
        ended.append("second")

    async def first() -> None:
        await asyncio.sleep(0)
        background.begin(second())
        ended.append("first")

    background.begin(first())
    await background.settled()
    assert ended == ["first", "second"]


async def test_a_waiter_that_is_cancelled_cancels_no_work() -> None:
    background, gate = Background(), asyncio.Event()
    work = background.begin(gate.wait())
    waiting = asyncio.ensure_future(background.settled())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (len(background), work.done()) == (1, False)
    gate.set()
    await background.settled()
    assert work.result() is True


async def test_those_that_run_now_are_waited_for_and_no_later_ones() -> None:
    background, first, later = Background(), asyncio.Event(), asyncio.Event()
    background.begin(first.wait())
    ended = asyncio.ensure_future(background.ended())
    await asyncio.sleep(0)
    background.begin(later.wait())
    first.set()
    await ended
    assert len(background) == 1
    later.set()
    await background.settled()
    await background.ended()
