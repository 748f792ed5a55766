"""A copy from level to level belongs to its object's owner, and does not stay if a fence forbids it."""

from __future__ import annotations

import asyncio

import pytest

from tests.storage.harness import Open, memory_config
from tests.support.gated_storage import gated, stack
from tests.support.waits import until
from transferd.storage.base import Found, Item
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.storage.selection import Selection

NBYTES = 100
NAMES = [f"demo/0123456789abcdef/RL-1/{i:02x}/0" for i in range(2)]


@pytest.mark.parametrize("late", [False, True], ids=["before its store", "while it is stored"])
async def test_a_copy_that_a_purge_forbids_does_not_stay_and_the_others_do(open_storage: Open, late: bool) -> None:
    memory, below = MemoryStorage(memory_config(10 * NBYTES)), MemoryStorage(memory_config(10 * NBYTES))
    first = gated(memory, "first")
    store = await open_storage(stack(first, gated(below, "below")))
    items, slots = [], []
    for depth, name in enumerate(NAMES):
        items.append(Item(name, NBYTES, Use(owner="theirs"), depth))
        slots.append(store.buffer(NBYTES))
    await below.store([Item(name, NBYTES, Use(owner="mine"), 0) for name in NAMES], None, slots)
    parts = store.levels._parts
    born = parts.fences.number
    if late:
        first.gate.clear()
        asyncio.get_running_loop().call_later(0.01, first.gate.set)
    copying = asyncio.ensure_future(parts.copy(items, [parts.levels[1]] * 2, slots, parts.levels[0], born))
    if late:
        await until(lambda: first.waiting, "it is being stored")
    with parts.fences.purge(Selection(names=frozenset(NAMES[:1]))):
        pass
    found = Found.STORED if late else Found.MISSING
    assert [(outcome.found, why) for _, outcome, why in await copying] == [(found, "purged"), (Found.STORED, "")]
    assert first.stores == (NAMES if late else NAMES[1:])
    assert memory.find(NAMES, None) == [False, True]
    entry = memory.indexes[0].get(NAMES[1])
    assert entry is not None
    assert (entry.owner, entry.kept) == ("mine", 0), "not held: it is to be copied nowhere"
