"""Native calls: lanes that never wait for each other, waits that end, threads that are let go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from transferd.errors import StorageUnavailable
from transferd.storage.mooncake.native_calls import CallKind, NativeCalls


class Held:
    """A blocking call that ends when it is told to."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __call__(self) -> str:
        assert self.release.wait(30)
        return "done"


@pytest.fixture
def held() -> Iterator[Held]:
    call = Held()
    yield call
    call.release.set()


async def started(calls: NativeCalls, kind: CallKind, held: Held, count: int) -> list[asyncio.Task[str]]:
    tasks = [asyncio.ensure_future(calls.call(kind, held)) for _ in range(count)]
    await asyncio.sleep(0)
    assert len(calls) == count
    return tasks


async def test_a_call_returns_what_the_function_returns_and_raises_what_it_raises() -> None:
    calls = NativeCalls(1.0)
    assert await calls.call(CallKind.LOAD, lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        await calls.call(CallKind.LOAD, lambda: 1 // 0)
    assert len(calls) == 0
    calls.close(0.0)


@pytest.mark.parametrize("full", list(CallKind))
async def test_a_full_lane_keeps_no_other_waiting(full: CallKind, held: Held) -> None:
    calls = NativeCalls(0.01)
    tasks = await started(calls, full, held, full.threads)
    for kind in CallKind:
        if kind is not full:
            assert await calls.call(kind, lambda: "at once") == "at once"
    with pytest.raises(StorageUnavailable, match=f"{full.threads} {full.name.lower()} calls are running"):
        await calls.call(full, lambda: pytest.fail("no thread was free"))
    held.release.set()
    assert await asyncio.gather(*tasks) == ["done"] * full.threads
    assert await calls.call(full, lambda: "again") == "again"
    calls.close(0.0)


async def test_a_call_that_waits_takes_the_first_thread_that_comes_free(held: Held) -> None:
    calls = NativeCalls(30.0)
    (task,) = await started(calls, CallKind.PROBE, held, 1)
    began: list[int] = []
    waiting = asyncio.ensure_future(calls.call(CallKind.PROBE, lambda: "next", lambda: began.append(len(calls))))
    await asyncio.sleep(0)
    assert not began, "it has no thread yet"
    held.release.set()
    assert (await task, await waiting) == ("done", "next")
    assert began
    calls.close(0.0)


async def test_an_error_of_begun_is_raised_and_the_function_is_not_called() -> None:
    calls = NativeCalls(1.0)

    def refuse() -> None:
        raise StorageUnavailable("the breaker has opened meanwhile")

    for _ in range(2 * CallKind.PROBE.threads):  # or a kind would run dry
        with pytest.raises(StorageUnavailable, match="meanwhile"):
            await calls.call(CallKind.PROBE, lambda: pytest.fail("called all the same"), refuse)
    assert len(calls) == 0
    calls.close(0.0)


async def test_idle_waits_for_calls_within_its_limit(held: Held) -> None:
    calls = NativeCalls(1.0)
    assert await calls.idle(0.0)
    (task,) = await started(calls, CallKind.STORE, held, 1)
    assert not await calls.idle(0.01)
    waiting = asyncio.ensure_future(calls.idle(30.0))
    held.release.set()
    assert await waiting
    assert await task == "done"
    calls.close(0.0)
