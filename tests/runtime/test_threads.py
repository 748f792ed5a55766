"""The contract of runtime/threads.py, over the real threads and the simulated ones.

A refused thread is real where threads are: RLIMIT_NPROC would need another user, so a preloaded library refuses
(tests/support/native).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from tests.support import native
from tests.support.simulation.faults import Gate, Latency, ThreadFaults
from tests.support.simulation.threads import SimThreads
from transferd.errors import Closed, NoThreads, StorageError
from transferd.runtime import threads
from transferd.runtime.aio import every
from transferd.runtime.threads import Direction, SharedItems, ThreadPools, Threads, Work, require_threads

OUT, IN, SETUP = Direction


class Kind:
    """One implementation: how to make it, refuse its threads, and hold a function that has begun."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = name
        self._monkeypatch = monkeypatch
        self._go = threading.Event()
        self._held: list[Gate] = []

    def make(self, size: int = 1) -> Threads:
        """So many threads for each direction, set-up included."""
        if self.name == "real":
            return ThreadPools(size, setup=size)
        return SimThreads(size, faults=ThreadFaults(Latency(0.001, 0.001)))

    def refuse(self, pools: Threads, *fates: bool) -> None:
        """The next threads to be started: refused (True) or not."""
        if isinstance(pools, SimThreads):
            pools.dice.script("start", *("refused" if fate else None for fate in fates))
            return
        start, left = threading.Thread.start, itertools.chain(fates, itertools.repeat(False))

        def refusing(thread: threading.Thread) -> None:
            if next(left):
                raise RuntimeError("can't start new thread")
            start(thread)

        self._monkeypatch.setattr(threading.Thread, "start", refusing)

    async def begun(self, pools: Threads, direction: Direction, ran: list[str]) -> asyncio.Future[str]:
        """A function that a thread has taken and that has not ended, until `go`."""
        if isinstance(pools, SimThreads):
            pools.ends[direction].hold()
            self._held.append(pools.ends[direction])
            running = pools.run(direction, lambda: ran.append("first") or "done")
            while not ran:  # noqa: ASYNC110 - its effect comes after a drawn time
                await asyncio.sleep(0.001)
            return running
        entered, loop = asyncio.Event(), asyncio.get_running_loop()

        def held() -> str:
            ran.append("first")
            loop.call_soon_threadsafe(entered.set)
            assert self._go.wait(30)
            return "done"

        running = pools.run(direction, held)
        await entered.wait()
        return running

    def go(self) -> None:
        self._go.set()
        for end in self._held:
            end.release()


@pytest.fixture(params=["real", "simulated"])
async def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kind]:
    made = Kind(request.param, monkeypatch)
    yield made
    made.go()


async def test_results_and_errors_come_back_from_either_direction(kind: Kind) -> None:
    pools = kind.make()
    assert [await pools.run(direction, lambda: 7) for direction in Direction] == [7, 7, 7]
    with pytest.raises(ZeroDivisionError):
        await pools.run(IN, lambda: 1 // 0)
    assert pools.close() == []


async def test_a_refused_function_never_runs(kind: Kind) -> None:
    """CPython's pool queues it first: it would run with the next one, in memory that is somebody else's by then."""
    pools, ran = kind.make(), list[str]()
    kind.refuse(pools, True)
    with pytest.raises(NoThreads, match="cannot start the thread transferd-out-0"):
        pools.run(OUT, lambda: ran.append("refused"))
    await pools.run(OUT, lambda: ran.append("later"))
    await pools.run(OUT, lambda: ran.append("last"))
    pools.close()
    assert ran == ["later", "last"]


async def test_opening_starts_all_threads_or_none_and_running_starts_no_more(kind: Kind) -> None:
    pools, ran = kind.make(size=3), list[str]()
    for granted in (2, 5, 5):  # in turn, the last thread of each direction is refused
        kind.refuse(pools, *[False] * granted, True)
        with pytest.raises(NoThreads):
            pools.open()
    assert pools.under_way() == []
    pools.open()
    kind.refuse(pools, *[True] * 20)
    await every(pools.run(d, functools.partial(ran.append, "ran")) for d in Direction for _ in range(8))
    assert ran == ["ran"] * 24
    pools.close()


async def test_set_up_that_hangs_keeps_no_copy_from_running_and_is_named_at_the_close(kind: Kind) -> None:
    pools, ran = kind.make(), list[str]()
    hanging = await kind.begun(pools, SETUP, ran)
    waiting = pools.run(SETUP, lambda: ran.append("second"))
    assert [await pools.run(direction, lambda: 7) for direction in (OUT, IN)] == [7, 7]
    assert (hanging.done(), waiting.done()) == (False, False)
    still = pools.close(within=0.0)
    assert [told.partition(":")[0] for told in still] == ["transferd-setup-0"] * (kind.name == "real")
    with pytest.raises(Closed):
        await waiting
    kind.go()
    assert await hanging == "done"
    assert ran == ["first"]


async def test_where_no_threads_are_for_set_up_those_of_loads_do_it() -> None:
    pools = ThreadPools(1)
    names = [await pools.run(direction, lambda: threading.current_thread().name) for direction in Direction]
    assert names == ["transferd-out-0", "transferd-in-0", "transferd-in-0"]
    assert pools.close() == []


async def test_a_function_that_waits_can_be_withdrawn_and_one_that_has_begun_ends_before_its_caller_hears(
    kind: Kind,
) -> None:
    pools, ran = kind.make(), list[str]()
    running = await kind.begun(pools, OUT, ran)
    waiting = pools.run(OUT, lambda: ran.append("withdrawn"))
    assert (running.cancel(), waiting.cancel()) == (False, True)
    kind.go()
    assert await running == "done"
    assert waiting.cancelled()
    await pools.run(OUT, lambda: None)
    assert ran == ["first"]
    pools.close()


async def test_what_is_withdrawn_holds_no_buffer_although_its_thread_hangs(kind: Kind) -> None:
    pools, buffer = kind.make(), bytearray(8)
    running = await kind.begun(pools, OUT, [])
    waiting = pools.run(OUT, functools.partial(bytes, memoryview(buffer)))
    assert waiting.cancel()
    buffer.clear()  # BufferError while anybody has a view of it
    kind.go()
    assert await running == "done"
    pools.close()


async def test_a_cancelled_caller_is_cancelled_when_the_function_has_ended(kind: Kind) -> None:
    pools, ran = kind.make(), list[str]()
    running = await kind.begun(pools, OUT, ran)

    async def call() -> None:
        await running

    caller = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    caller.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not caller.done()
    kind.go()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert running.done()
    pools.close()


async def test_a_close_withdraws_what_waits_and_names_what_does_not_end(kind: Kind) -> None:
    pools, ran, began = kind.make(), list[str](), time.monotonic()
    running = await kind.begun(pools, OUT, ran)
    waiting = pools.run(OUT, lambda: ran.append("waited"))
    still = pools.close(within=0.0)
    if kind.name == "real":  # a simulation has no threads that a stop could leave behind
        [told] = still
        named = re.fullmatch(r"transferd-out-0: Kind\.begun\.<locals>\.held, (\d+\.\d) s at \w+\.py:\d+ \w+", told)
        assert named is not None, told
        assert float(named[1]) <= time.monotonic() - began + 0.05, "rounded to a tenth"
    with pytest.raises(Closed):
        await waiting
    with pytest.raises(Closed):
        pools.run(OUT, lambda: ran.append("too late"))
    kind.go()
    assert await running == "done"
    assert pools.close() == []
    assert ran == ["first"]


async def test_nothing_is_held_of_a_function_and_its_memory_once_its_end_is_known(kind: Kind) -> None:
    class Memory:
        """Something that a weak reference can follow."""

    memory, pools = Memory(), kind.make()
    followed = weakref.ref(memory)
    running = pools.run(IN, functools.partial(lambda _: 7, memory))
    del memory
    assert await running == 7
    assert followed() is None
    pools.close()


@pytest.mark.parametrize("ends", ["refused", "withdrawn"])
async def test_nothing_is_held_of_a_function_that_waits_and_will_never_run(kind: Kind, ends: str) -> None:
    """It may wait long behind one that hangs, and a stop could not free the memory of a load of a lost disk."""
    shared, pools, ran = SharedItems(len, [bytearray(8)]), kind.make(), list[str]()
    followed = weakref.ref(shared)
    running = await kind.begun(pools, OUT, ran)
    (share,) = shared.shares(1)
    waiting = pools.run(OUT, share, share)  # which names itself
    del shared, share
    if ends == "refused":
        cast("Work[None]", waiting).refuse(StorageError("the store is lost"))
    else:
        waiting.cancel()
    assert followed() is None
    kind.go()
    assert await running == "done"
    pools.close()


async def test_works_that_have_begun_end_before_a_refusal_is_raised() -> None:
    """The stripes of a read: one is refused, and the buffers go back to the caller."""
    ended: list[str] = []

    async def stripe() -> None:
        await asyncio.sleep(0)
        ended.append("stripe")

    def works() -> object:
        yield stripe()
        yield stripe()
        raise NoThreads("cannot start a thread")

    with pytest.raises(NoThreads):
        await every(works())  # type: ignore[arg-type]
    assert ended == ["stripe", "stripe"]


def test_threads_that_cannot_be_had_are_noticed_before_a_library_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    require_threads(3)
    start: Callable[[str, Callable[[], object]], threading.Thread] = threads.start_thread
    left = iter([False, False, True])

    def refusing(name: str, target: Callable[[], object]) -> threading.Thread:
        if next(left):
            raise NoThreads("no more")
        return start(name, target)

    monkeypatch.setattr(threads, "start_thread", refusing)
    with pytest.raises(NoThreads, match="at least 3 threads are needed, 2 can be started"):
        require_threads(3)
    assert not [thread for thread in threading.enumerate() if "probe" in thread.name]


REAL_REFUSAL = """
import asyncio, errno
from tests.support.native import Faults
from transferd.errors import NoThreads
from transferd.runtime.threads import Direction, ThreadPools

async def main():
    faults, ran, pools = Faults(), [], ThreadPools(2)
    for skip in range(4):
        with faults.armed("pthread_create", errno.EAGAIN, skip=skip % 2):
            try:
                pools.run(Direction.IN, lambda: ran.append("refused"))
            except NoThreads:
                assert faults.hits == 1
            else:
                raise SystemExit("a thread was started that the system refuses")
    await pools.run(Direction.IN, lambda: ran.append("later"))
    with faults.armed("pthread_create", errno.EAGAIN, count=-1):
        for _ in range(20):
            await pools.run(Direction.IN, lambda: ran.append("later"))
    pools.close()
    assert ran == ["later"] * 21, ran

asyncio.run(main())
"""


def test_the_system_refuses_threads_and_nothing_refused_ever_runs() -> None:
    native.run(REAL_REFUSAL)
