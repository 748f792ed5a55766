"""A pool that takes only whole slots, as a level among others."""

from __future__ import annotations

import asyncio
import gc
import random
import warnings
from collections.abc import Coroutine

from tests.storage.harness import Open
from tests.support.simulation.storage import SimStorage
from tests.support.simulation.threads import SimThreads
from transferd.errors import StorageUnavailable
from transferd.storage.base import FOUND, LEFT, MISSING, STORED, Found, Item, Outcome, Outcomes
from transferd.storage.levels.whole_slots import WholeSlots

NBYTES = 500


class Taken:
    wanted = True

    def __init__(self) -> None:
        self.objects: dict[int, bytes] = {}

    def __call__(self, i: int, data: memoryview, /) -> bool:
        self.objects[i] = bytes(data)
        return i != 4


async def test_objects_are_made_and_taken_a_few_slots_at_a_time(open_storage: Open) -> None:
    behind = SimStorage()
    behind.slots_at_once = None
    store = await open_storage(WholeSlots(behind, SimThreads()))  # type: ignore[abstract]
    contents = [random.Random(i).randbytes(NBYTES) for i in range(7)]
    items = [Item(f"a/b/c/{i}/0", NBYTES) for i in range(7)]
    slots = [store.buffer(NBYTES + 12) for _ in range(3)]

    def fill(i: int, data: memoryview, _near: bool) -> bool:
        data[:] = contents[i]
        return i != 5

    assert await store.storage.store(items, fill, slots) == [STORED] * 5 + [LEFT, STORED]
    drain = Taken()
    assert await store.storage.load(items, drain, slots) == [FOUND] * 4 + [LEFT, MISSING, FOUND]
    assert drain.objects == {i: contents[i] for i in (0, 1, 2, 3, 4, 6)}
    drain.wanted = False
    drain.objects.clear()
    assert await store.storage.load(items, drain, slots) == [LEFT] * 7
    assert drain.objects == {}


async def test_a_call_that_is_dropped_before_it_begins_leaves_no_coroutine(open_storage: Open) -> None:
    """As a store of levels drops one that nobody awaits (`is_awaited`)."""
    behind = SimStorage()
    behind.slots_at_once = None
    store = await open_storage(WholeSlots(behind, SimThreads()))  # type: ignore[abstract]
    items, slots = [Item("a/b/c/0/0", NBYTES)], [store.buffer(NBYTES)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for call in (store.storage.store(items, lambda *_: True, slots), store.storage.load(items, Taken(), slots)):
            if isinstance(call, Coroutine):
                call.close()
        del call
        gc.collect()
    assert not seen


async def test_slots_that_a_call_still_uses_take_no_further_objects(open_storage: Open) -> None:
    behind = SimStorage()
    behind.slots_at_once = None
    store = await open_storage(WholeSlots(behind, SimThreads()))  # type: ignore[abstract]
    failed = Outcome(Found.FAILED, StorageUnavailable("a node does not answer"))

    async def call(items: list[Item], *_: object) -> list[Outcome]:
        return Outcomes.after([failed] * len(items), [running])

    behind.load = behind.store = call  # type: ignore[method-assign, assignment]

    def made(_: int, data: memoryview, _near: bool) -> bool:
        data[:] = bytes(NBYTES)
        return True

    items = [Item(f"a/b/c/{i}/0", NBYTES) for i in range(5)]
    slots = [store.buffer(NBYTES) for _ in range(2)]
    for load in (True, False):
        running = asyncio.get_running_loop().create_future()
        calling = store.storage.load(items, Taken(), slots) if load else store.storage.store(items, made, slots)
        outcomes = await calling
        assert list(outcomes) == [failed] * 2 + [LEFT] * 3
        assert isinstance(outcomes, Outcomes)
        assert not outcomes.returned.done()
        running.set_result(None)
        await outcomes.returned
