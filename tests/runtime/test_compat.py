"""What runs on Python 3.10 as on every later one: timers that tell a caller's cancellation from their own."""

from __future__ import annotations

import asyncio
import sys

import pytest

from transferd.runtime import compat
from transferd.runtime.compat import StrEnum, cancelled_from_outside, timeout, timeout_at, tomllib, wait_for

NEVER = 1e6


def test_from_3_11_on_everything_is_the_standard_librarys_own() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has none of it")
    for name in ("timeout", "timeout_at", "wait_for", "Runner", "TaskGroup"):
        assert getattr(compat, name) is getattr(asyncio, name)
    assert all(hasattr(compat, name) for name in compat.__all__)


async def test_a_timer_that_ends_raises_the_builtin_error_and_one_that_does_not_is_silent() -> None:
    for late in (timeout(0), timeout(-1), timeout_at(asyncio.get_running_loop().time())):
        with pytest.raises(TimeoutError):
            async with late:
                await asyncio.sleep(NEVER)
    async with timeout(NEVER), timeout(None):
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await wait_for(asyncio.sleep(NEVER), 0)
    assert await wait_for(asyncio.sleep(0, "value"), NEVER) == "value"


async def test_a_callers_cancellation_is_no_timeout_even_in_the_turn_in_which_the_timer_ends() -> None:
    async def limited() -> None:
        async with timeout(0.01):
            await asyncio.sleep(NEVER)

    task = asyncio.ensure_future(limited())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def both_at_once() -> None:
        async with timeout_at(asyncio.get_running_loop().time() + 0.01) as _:
            asyncio.get_running_loop().call_later(0.01, current.cancel)
            await asyncio.sleep(NEVER)

    current: asyncio.Task[None] = asyncio.ensure_future(both_at_once())
    with pytest.raises(asyncio.CancelledError):
        await current


async def test_a_task_knows_whether_somebody_cancelled_it_or_what_it_awaited() -> None:
    told: list[bool] = []

    async def waits(future: asyncio.Future[None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await future
        except asyncio.CancelledError:
            told.append(cancelled_from_outside(task))
            if told[-1]:
                compat.uncancel(task)
        told.append(cancelled_from_outside(task))

    for from_outside in (True, False):
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(waits(future))
        await asyncio.sleep(0)
        (task if from_outside else future).cancel()
        await task
    assert told == [True, False, False, False]


def test_a_string_enum_is_its_text_and_toml_is_read() -> None:
    class Kind(StrEnum):
        ONE = "one"

    assert f"{Kind.ONE} {Kind.ONE!s}" == "one one"
    assert tomllib.loads("a = 1") == {"a": 1}
