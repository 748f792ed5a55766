"""Purges, pins and shares reach every level, and what is on its way between them."""

from __future__ import annotations

import asyncio

import pytest

from tests.storage.harness import Open, memory_config
from tests.support.gated_storage import gated, stack
from tests.support.waits import until
from transferd.errors import RequestError
from transferd.storage.base import STORED
from transferd.storage.memory import MemoryStorage
from transferd.storage.selection import Selection


def name(i: int, generation: str = "g") -> str:
    return f"demo/0123456789abcdef/{generation}/{i:02x}/0"


async def test_a_purge_reaches_what_is_being_copied(open_storage: Open) -> None:
    first, lower = MemoryStorage(memory_config(2**20)), gated(MemoryStorage(memory_config(2**20)), "lower")
    store = await open_storage(stack(first, lower))
    keeper = store.storage.keeper
    assert keeper is not None
    assert await store.put((name(0, "old"), b"a" * 100)) == [STORED]
    await store.levels.flush(10)
    lower.gate.clear()
    objects = [(name(i, "old"), b"a" * 100) for i in range(1, 4)] + [(name(9, "new"), b"b" * 100)]
    assert await store.put(*objects) == [STORED] * 4
    await until(lambda: lower.waiting, "the copy runs")
    purging = asyncio.ensure_future(keeper.purge(Selection(generation="old")))
    await asyncio.sleep(0)
    lower.gate.set()
    purged = await purging
    await store.levels.flush(10)
    assert purged.objects >= 5
    names = [name(i, "old") for i in range(4)] + [name(9, "new")]
    assert [await one.exists(names) for one in (first, lower)] == [[False] * 4 + [True]] * 2


async def test_a_purge_is_refused_where_a_level_cannot_do_it(open_storage: Open) -> None:
    first, pool = MemoryStorage(memory_config(2**20)), gated(MemoryStorage(memory_config(2**20)), "object", asks=True)
    store = await open_storage(stack(first, pool))
    assert await store.put((name(1), b"a" * 100)) == [STORED]
    keeper = store.storage.keeper
    assert keeper is not None
    with pytest.raises(RequestError, match="the level object cannot remove objects on request"):
        await keeper.purge(Selection())
    assert (await keeper.purge(Selection(), dry_run=True)).objects == 1
    assert await store.storage.exists([name(1)]) == [True]


async def test_a_pin_is_in_the_lowest_level_that_has_the_object_and_holds_end_apart_from_it(open_storage: Open) -> None:
    first, lower = MemoryStorage(memory_config(2000)), gated(MemoryStorage(memory_config(2**20)), "lower")
    store = await open_storage(stack(first, lower))
    keeper = store.storage.keeper
    assert keeper is not None
    lower.gate.clear()
    assert await store.put((name(1), b"a" * 100)) == [STORED]
    assert keeper.pin("me", [name(1), name(2)], 60.0, 0.5) == [True, False]
    assert (first.statistics()["pinned"], lower.statistics()["pinned"]) == (1, 0)
    lower.gate.set()
    await store.levels.flush(10)
    for i in range(10, 40):
        assert await store.put((name(i), b"b" * 100)) == [STORED]
        await store.levels.flush(10)
    assert first.find([name(1)], None) == [True], "pinned, although it is below now"
    assert keeper.pin("me", [name(1)], 60.0, 0.5) == [True]
    assert lower.statistics()["pinned"] == 1
    assert keeper.unpin("me", None) == 2
    assert keeper.statistics()["pinned"] == 0


async def test_each_level_keeps_the_share_of_an_engine(open_storage: Open) -> None:
    first, lower = MemoryStorage(memory_config(1000)), MemoryStorage(memory_config(4000))
    lower.backend = "lower"
    store = await open_storage(stack(first, lower))
    keeper = store.storage.keeper
    assert keeper is not None
    keeper.claim("me", "demo/0123456789abcdef", 0.25)
    assert await store.put((name(1), b"a" * 100)) == [STORED]
    await store.levels.flush(10)
    [mine] = [one for one in keeper.holdings() if one.owner == "me"]
    assert mine.share == 250 + 1000
    keeper.leave("me")
