"""Threads that need no interpreter: the contract of runtime/threads.py for calls that an extension has prepared.

The calls are real ones of a small extension (tests/support/native/held_call.c): an item tells that it has begun, and
waits until the test lets it end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support import native as under_faults
from tests.support.extension import compiled
from transferd.errors import Closed, MemoryLost, NoThreads
from transferd.runtime import native
from transferd.runtime.native import NativeCall
from transferd.runtime.threads import Crew, Direction, ThreadPools, Work, whose
from transferd.tiers.hostcopy import copied
from transferd.tiers.segment import SharedSegment, fresh_name

SOURCE = Path(under_faults.__file__).with_name("held_call.c")

pytestmark = pytest.mark.skipif(not native.NATIVE, reason="the installation found no compiler")


@pytest.fixture(scope="module")
def held_call(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return compiled(SOURCE, tmp_path_factory.mktemp("held"), f"-I{Path(native.__file__).parent}")


class Holding:
    """A crew, and calls to it whose items wait for `let_go`."""

    def __init__(self, module: ModuleType, crew: Crew) -> None:
        self.crew = crew
        self._module = module
        self.begun, self._begun = os.pipe()
        self._go, self.go = os.pipe()

    def call(self, name: str, items: int = 1, *, leaves: bool = False) -> NativeCall:
        return NativeCall(self._module.held(name, self._begun, self._go, items, leaves))

    def run(self, name: str, items: int = 1, owner: str = "", *, leaves: bool = False) -> Work[Any]:
        before = whose.set(owner)
        try:
            return self.crew.run(self.call(name, items, leaves=leaves), f"held {name}")
        finally:
            whose.reset(before)

    async def next(self) -> str:
        """The name of the next item that begins."""
        return (await asyncio.to_thread(os.read, self.begun, 1)).decode()

    def let_go(self, items: int = 1) -> None:
        os.write(self.go, b"." * items)

    def close(self) -> None:
        for descriptor in (self.begun, self._begun, self._go, self.go):
            os.close(descriptor)


def crew_of(size: int) -> Crew:
    crew = Crew("held", size)
    crew.with_native(0)
    return crew


@pytest.fixture
async def holding(held_call: ModuleType) -> AsyncIterator[Holding]:
    """One thread."""
    made = Holding(held_call, crew_of(1))
    yield made
    made.let_go(1000)
    assert made.crew.close(30.0) == []
    made.close()


async def test_a_call_runs_while_another_thread_keeps_the_interpreter(holding: Holding) -> None:
    work = holding.run("a")
    byte = ctypes.create_string_buffer(1)
    # A function of PyDLL keeps the interpreter's lock: if the thread needed that, this read would never end.
    assert ctypes.PyDLL(None).read(holding.begun, byte, 1) == 1
    assert byte.raw == b"a"
    assert not work.done()
    holding.let_go()
    await work


async def test_owners_take_turns_between_the_items_of_a_call(holding: Holding) -> None:
    flood = [holding.run(name, items=3, owner="flood") for name in "ABC"]
    assert await holding.next() == "A"
    late = [holding.run(name, owner=owner) for name, owner in (("x", "one"), ("y", "two"), ("z", "one"))]
    order = ["A"]
    for _ in range(11):
        holding.let_go()
        order.append(await holding.next())
    holding.let_go()
    await asyncio.gather(*flood, *late)
    assert order == list("AxyAzABBBCCC")


async def test_a_thread_leaves_what_it_has_for_a_call_before_it_turns_to_another(holding: Holding) -> None:
    first = holding.run("a", items=2, owner="one", leaves=True)
    assert await holding.next() == "a"
    other = holding.run("b", owner="two")
    holding.let_go()
    assert [await holding.next() for _ in range(2)] == [".", "b"]
    holding.let_go()
    assert await holding.next() == "a"
    holding.let_go()
    await asyncio.gather(first, other)
    assert await holding.next() == "."
    call = holding.call("c", leaves=True)
    holding.let_go()
    call()
    assert [await holding.next() for _ in range(2)] == ["c", "."], "also in a thread of the caller's"
    assert call.ended == 1


async def test_several_threads_share_the_items_of_one_call(held_call: ModuleType) -> None:
    holding = Holding(held_call, crew_of(3))
    call = holding.call("a", items=7)
    call.threads = 3
    work = holding.crew.run(call)
    with pytest.raises(RuntimeError, match="put before"):
        holding.crew.run(call)
    assert [await holding.next() for _ in range(3)] == ["a"] * 3, "three at a time"
    assert (len(holding.crew.under_way()), call.ended) == (3, 0)
    holding.let_go(7)
    await work
    assert call.ended == call.items == 7
    assert [await holding.next() for _ in range(4)] == ["a"] * 4, "each item once"
    assert holding.crew.close() == []
    holding.close()


async def test_a_call_that_waits_is_withdrawn_and_one_that_has_begun_is_not(holding: Holding) -> None:
    first, second, third = (holding.run(name) for name in "abc")
    assert await holding.next() == "a"
    assert holding.crew.under_way()[0].startswith("held-c0: held a, 0.")
    assert second.cancel()
    assert second.cancelled()
    assert not first.cancel(), "it has begun"
    awaiting = asyncio.ensure_future(asyncio.wait_for(first, None))
    await asyncio.sleep(0)
    awaiting.cancel()
    await asyncio.sleep(0)
    assert not awaiting.done(), "its memory is in use"
    holding.let_go(2)
    with pytest.raises(asyncio.CancelledError):
        await awaiting
    await third
    assert await holding.next() == "c"
    assert not third.cancel(), "it has ended"


async def test_a_call_for_several_threads_is_withdrawn_whole_or_not_at_all(holding: Holding) -> None:
    calls = {name: holding.call(name, items=2) for name in "ab"}
    for call in calls.values():
        call.threads = 2
    first, second = (holding.crew.run(call) for call in calls.values())
    assert await holding.next() == "a"
    assert not first.cancel(), "one of its threads has begun"
    assert second.cancel()
    holding.let_go(2)
    await first
    third = holding.run("c")
    assert [await holding.next() for _ in range(2)] == ["a", "c"]
    holding.let_go()
    await third
    holding.let_go()


async def test_a_call_that_has_given_way_is_not_withdrawn(holding: Holding) -> None:
    first = holding.run("a", items=2, owner="one")
    assert await holding.next() == "a"
    other = holding.run("b", owner="two")
    holding.let_go()
    assert await holding.next() == "b"
    assert not first.cancel(), "one of its items is done"
    holding.let_go(2)
    await asyncio.gather(first, other)
    assert await holding.next() == "a"


async def test_a_call_for_more_threads_than_it_needs_ends_once_and_waits_for_nobody(holding: Holding) -> None:
    call = holding.call("a")
    call.threads = 3
    first, other = holding.crew.run(call), holding.run("b", owner="other")
    assert await holding.next() == "a"
    holding.let_go()
    await first
    assert await holding.next() == "b", "what is left of the first call has no turn"
    closing = asyncio.ensure_future(asyncio.to_thread(holding.crew.close, 0.0))
    assert [one.partition(",")[0] for one in await closing] == ["held-c0: held b"]
    holding.let_go()
    await other


async def test_a_withdrawn_call_lets_its_memory_go_at_once(holding: Holding) -> None:
    running, waiting = holding.run("a"), holding.run("b")
    call = weakref.ref(waiting)
    assert waiting.cancel()
    del waiting
    gc.collect()
    assert call() is None
    holding.let_go()
    await running


async def test_a_close_withdraws_what_waits_and_names_what_hangs(holding: Holding) -> None:
    hanging, waiting = holding.run("a", items=2), holding.run("b")
    assert await holding.next() == "a"
    still = holding.crew.close(0.0)
    assert [one.partition(",")[0] for one in still] == ["held-c0: held a"]
    with pytest.raises(Closed, match="held: closed before its turn came"):
        await waiting
    with pytest.raises(Closed):
        holding.run("c")
    holding.let_go(2)
    await hanging
    assert [await holding.next()] == ["a"], "a call that has begun is done to its end"


async def test_functions_and_native_calls_run_beside_each_other(holding: Holding) -> None:
    work = holding.run("a")
    assert await holding.crew.run(lambda: 7) == 7
    assert not work.done()
    holding.let_go()
    await work


async def test_a_call_without_such_threads_runs_as_a_function(held_call: ModuleType) -> None:
    holding = Holding(held_call, Crew("plain", 1))
    work = holding.run("a")
    assert await holding.next() == "a"
    holding.let_go()
    assert await work is None
    assert holding.crew.close() == []
    holding.close()


@pytest.mark.parametrize("size", [0, 65])
async def test_a_crew_has_a_thread_and_not_too_many(size: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 64 threads, not {size}"):
        native.NativeThreads("held", size, 0)


REFUSED = """
import asyncio, errno, threading
from tests.support.native import Faults
from transferd.errors import NoThreads
from transferd.runtime.native import NativeThreads

async def main():
    faults = Faults()
    for skip in range(3):
        with faults.armed("pthread_create", errno.EAGAIN, skip=skip):
            try:
                NativeThreads("held", 3, 0)
            except NoThreads as error:
                assert "cannot start the threads held" in str(error), error
                assert faults.hits == 1
            else:
                raise SystemExit("a thread was started that the system refuses")
    made = NativeThreads("held", 3, 0)
    assert made.dismiss() == []
    made.join(10.0)
    print("all or none")

asyncio.run(main())
"""


def test_all_threads_start_or_none() -> None:
    assert under_faults.run(REFUSED) == "all or none\n"


async def test_a_copy_arrives_and_one_whose_memory_vanished_is_an_error() -> None:
    threads = ThreadPools(1, native=0)
    source, target = np.random.default_rng(7).integers(0, 256, 3_000_000, np.uint8), np.zeros(3_000_000, np.uint8)
    runs = np.array([[0, 1_000_000, 2_000_000], [2_000_000, 0, 1_000_000]], np.int64)
    await copied(threads, Direction.OUT, source.ctypes.data, target.ctypes.data, runs, "a copy")
    assert np.array_equal(target, np.roll(source, 1_000_000))

    segment = SharedSegment(fresh_name("native"), 3_000_000, create=True)
    os.ftruncate(segment.descriptor, 4096)
    with pytest.raises(MemoryLost, match="vanished"):
        await copied(threads, Direction.IN, source.ctypes.data, segment.address, runs, "a copy")
    await copied(threads, Direction.IN, target.ctypes.data, source.ctypes.data, runs[:1], "the threads are well")
    assert np.array_equal(source[1_000_000:], target[:2_000_000])
    segment.close()
    assert threads.close() == []


async def test_a_refusal_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(vars(native)["_crew"], "start", refuse)
    with pytest.raises(NoThreads, match=r"cannot start the threads held: .*TasksMax"):
        crew_of(1).open()


async def test_threads_stand_back_by_their_nice_value_and_no_other_thread_does(held_call: ModuleType) -> None:
    crew = Crew("held", 2)
    crew.with_native(3)
    before = niceness()
    holding = Holding(held_call, crew)
    works = [holding.run(name) for name in "ab"]
    assert {await holding.next(), await holding.next()} == {"a", "b"}
    after = niceness()
    mine = before[os.getpid()]
    assert [nice - mine for thread, nice in after.items() if thread not in before and nice != mine] == [3, 3]
    assert [thread for thread, nice in after.items() if before.get(thread, nice) != nice] == []
    holding.let_go(2)
    await asyncio.gather(*works)
    assert crew.close() == []
    holding.close()


def niceness() -> dict[int, int]:
    """The nice value of each thread of this process."""
    found: dict[int, int] = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # it has ended
            stat = Path(f"/proc/self/task/{thread}/stat").read_text()
            found[int(thread)] = int(stat.rpartition(") ")[2].split()[16])
    return found
