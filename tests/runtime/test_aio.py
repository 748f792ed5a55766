"""Work that ends before its caller goes on, and coroutines that begin without an asyncio task."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from transferd.errors import InvariantError
from transferd.runtime.aio import (
    Background,
    Rest,
    answered,
    at_once,
    begun,
    every,
    in_turns,
    is_awaited,
    resolve,
    run_until_stopped,
    uncancelled,
)
from transferd.runtime.compat import timeout

Work = Callable[[], Coroutine[Any, Any, str]]


def begin(work: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
    """Run the first step here, and the rest in a task."""
    waits_for = work.send(None)
    return asyncio.ensure_future(Rest(work, waits_for))


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


async def test_a_future_is_resolved_once_and_not_after_its_waiter_was_cancelled() -> None:
    first, cancelled = (asyncio.get_running_loop().create_future() for _ in range(2))
    cancelled.cancel()
    for future in (first, first, cancelled):
        resolve(future, "value")
    assert first.result() == "value"
    assert cancelled.cancelled()


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
    rest = Rest(work, work.send(None)).__await__()
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
        tasks.append(begin(names()))

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


# --- every ----------------------------------------------------------------------------------------


async def passes(count: int) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_every_gives_the_results_in_order_and_raises_the_first_error_when_all_have_ended() -> None:
    ended: list[str] = []
    gate = asyncio.Event()

    async def work(name: str, error: Exception | None = None) -> str:
        if error is None:
            await gate.wait()
        ended.append(name)
        if error is not None:
            raise error
        return name

    task = asyncio.ensure_future(
        every(work(name, error) for name, error in [("a", None), ("b", KeyError()), ("c", None)])
    )
    await passes(5)
    assert ended == ["b"]
    assert not task.done()
    gate.set()
    with pytest.raises(KeyError):
        await task
    assert sorted(ended) == ["a", "b", "c"]
    assert await every(work(name) for name in "xyz") == ["x", "y", "z"]
    assert await every([]) == []


async def test_a_cancelled_every_ends_when_the_last_of_them_has_ended() -> None:
    gate = asyncio.Event()

    task = asyncio.ensure_future(every([asyncio.Event().wait(), uncancelled(gate.wait())]))
    await passes(3)
    task.cancel()
    await passes(5)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_works_that_had_begun_end_before_the_error_of_the_one_that_could_not_begin() -> None:
    gate, ended = asyncio.Event(), list[str]()

    async def work() -> None:
        await gate.wait()
        ended.append("work")

    def works() -> Iterator[Coroutine[Any, Any, None]]:
        yield work()
        raise KeyError("no thread")

    task = asyncio.ensure_future(every(works()))
    await passes(3)
    assert not task.done()
    gate.set()
    with pytest.raises(KeyError, match="no thread"):
        await task
    assert ended == ["work"]


# --- at once, or never cancelled ------------------------------------------------------------------


async def test_a_coroutine_that_waits_is_not_done_at_once() -> None:
    async def adds(one: int, other: int) -> int:
        return one + other

    assert at_once(adds(1, 2)) == 3
    with pytest.raises(InvariantError, match="waited, but must not"):
        at_once(asyncio.sleep(0))


async def test_an_answer_is_there_before_anybody_waits() -> None:
    assert answered(7).result() == 7


@pytest.mark.parametrize("ends", ["with a result", "with an error", "cancelled by itself"])
async def test_work_that_is_not_cancelled_ends_first_and_its_caller_is_cancelled_once(ends: str) -> None:
    gate, seen = asyncio.Event(), list[str]()

    async def work() -> str:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        seen.append("ended")
        if ends == "with an error":
            raise KeyError
        if ends == "cancelled by itself":
            raise asyncio.CancelledError
        return "result"

    task = asyncio.ensure_future(uncancelled(work()))
    for _ in range(3):
        await passes(2)
        task.cancel()
    await passes(5)
    assert (seen, task.done()) == ([], False)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["ended"]


async def test_without_a_cancellation_the_result_and_the_error_are_the_works() -> None:
    async def fails() -> None:
        raise KeyError("its own")

    assert await uncancelled(asyncio.sleep(0, "result")) == "result"
    with pytest.raises(KeyError, match="its own"):
        await uncancelled(fails())


def test_a_loop_that_is_stopped_in_its_thread_cancels_what_is_left_and_is_closed() -> None:
    loop, ended = asyncio.new_event_loop(), list[str]()

    async def waits(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
            if name == "bad":
                raise KeyError(name)

    thread = threading.Thread(target=run_until_stopped, args=(loop,))
    thread.start()
    begun = [asyncio.run_coroutine_threadsafe(waits(name), loop) for name in ("good", "bad")]
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    assert not thread.is_alive()
    assert (sorted(ended), loop.is_closed()) == (["bad", "good"], True)
    assert all(one.done() for one in begun)


async def test_what_is_begun_is_done_unless_it_waits_and_goes_on_only_if_it_is_awaited() -> None:
    steps = []

    async def work(waits: bool, error: Exception | None = None) -> str:
        steps.append("begun")
        if waits:
            await asyncio.sleep(0)
        if error is not None:
            raise error
        steps.append("ended")
        return "result"

    done = begun(work(False))
    assert isinstance(done, asyncio.Future)
    assert done.result() == "result"
    failed = begun(work(False, KeyError("wrong")))
    assert isinstance(failed, asyncio.Future)
    with pytest.raises(KeyError, match="wrong"):
        await failed
    steps.clear()
    rest = begun(work(True))
    assert not isinstance(rest, asyncio.Future)
    await asyncio.sleep(0)
    assert steps == ["begun"]
    assert await rest == "result"
    assert steps == ["begun", "ended"]


async def test_what_is_begun_and_dropped_ends_without_a_warning_and_so_does_what_it_was_about_to_call() -> None:
    steps = []

    async def call() -> None:
        steps.append("called")

    async def work() -> None:
        coming = call()
        try:
            await is_awaited(coming)
            await coming
        finally:
            steps.append("ended")

    rest = begun(work())
    del rest
    gc.collect()
    await asyncio.sleep(0)
    assert steps == ["ended"]
    await begun(work())
    assert steps == ["ended", "called", "ended"]


@pytest.mark.parametrize("awaited", [True, False])
async def test_a_bug_in_the_background_is_reported_where_nobody_awaits_it(awaited: bool) -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise KeyError("wrong")

    loop, reported = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: reported.append(context.get("exception")))
    background = Background(awaited=awaited)
    background.begin(work())
    await background.settled()
    gc.collect()
    loop.set_exception_handler(None)
    assert [str(one) for one in reported] == ([] if awaited else ["'wrong'"])
