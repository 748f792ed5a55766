"""`resumed`: a coroutine that was begun without an asyncio task goes on in one, and notices nothing."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from transferd.runtime.aio import in_turns, resumed
from transferd.runtime.compat import timeout

Work = Callable[[], Coroutine[Any, Any, str]]


def begin(work: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
    """Run the first step here, and the rest in a task."""
    waits_for = work.send(None)
    return asyncio.get_running_loop().create_task(resumed(work, waits_for))


async def turns() -> str:
    """Waits for nothing but a turn of the loop."""
    for _ in range(3):
        await asyncio.sleep(0)
    return "ended"


async def futures() -> str:
    """Waits for futures that are done, later done, and done with an error."""
    loop = asyncio.get_running_loop()
    later, wrong = loop.create_future(), loop.create_future()
    loop.call_soon(later.set_result, "en")
    loop.call_soon(wrong.set_exception, KeyError("wrong"))
    text: str = await later
    with pytest.raises(KeyError, match="wrong"):
        await wrong
    return text + await asyncio.create_task(part())


async def part() -> str:
    await asyncio.sleep(0)
    return "ded"


async def timed() -> str:
    """Asks for its asyncio task after its first step."""
    await asyncio.sleep(0)
    assert asyncio.current_task() is not None
    async with timeout(30):
        await asyncio.sleep(0)
    return "ended"


@pytest.mark.parametrize("work", [turns, futures, timed])
async def test_the_rest_runs_in_a_task(work: Work) -> None:
    assert await begin(work()) == "ended"


async def test_an_error_of_the_rest_is_that_of_the_task() -> None:
    async def fails() -> str:
        await asyncio.sleep(0)
        raise ZeroDivisionError("by hand")

    with pytest.raises(ZeroDivisionError, match="by hand"):
        await begin(fails())


@pytest.mark.parametrize("turns_before", [1, 2, 3])
async def test_a_cancellation_reaches_the_coroutine_where_it_waits(turns_before: int) -> None:
    seen: list[str] = []

    async def waits() -> str:
        for turn in range(3):
            try:
                await asyncio.get_running_loop().create_future() if turn else await asyncio.sleep(0)
            except asyncio.CancelledError:
                seen.append(f"cancelled in turn {turn}")
                raise
        return "never"

    task = begin(waits())
    for _ in range(turns_before):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [f"cancelled in turn {min(turns_before - 1, 1)}"]


async def test_a_coroutine_that_survives_its_cancellation_goes_on() -> None:
    async def survives() -> str:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "ended"

    task = begin(survives())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "ended"


async def test_closing_the_rest_closes_the_coroutine() -> None:
    seen: list[str] = []

    async def tidies() -> str:
        try:
            await asyncio.sleep(0)
        finally:
            seen.append("tidied")
        return "never"

    work = tidies()
    rest = resumed(work, work.send(None))
    rest.send(None)
    rest.close()
    assert seen == ["tidied"]


async def test_a_context_variable_of_the_first_step_holds_in_the_rest() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="")
    loop, context, ended = asyncio.get_running_loop(), contextvars.copy_context(), asyncio.Event()

    async def names() -> str:
        name.set("ours")
        await asyncio.sleep(0)
        assert name.get() == "ours"
        ended.set()
        return "ended"

    def first() -> None:
        work = names()
        tasks.append(loop.create_task(resumed(work, work.send(None))))

    tasks: list[asyncio.Task[str]] = []
    loop.call_soon(first, context=context)
    await ended.wait()
    assert await tasks[0] == "ended"
    assert name.get() == ""


async def test_a_long_list_leaves_others_their_turns() -> None:
    turns: list[int] = []

    async def beside() -> None:
        while True:
            turns.append(len(seen))
            await asyncio.sleep(0)

    seen: list[int] = []
    other = asyncio.ensure_future(beside())
    async for number in in_turns(iter(range(10)), each=4):
        seen.append(number)  # noqa: PERF401 - the other one looks at it
    other.cancel()
    assert seen == list(range(10))
    assert turns == [4, 8]
