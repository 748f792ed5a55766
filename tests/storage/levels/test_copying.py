"""A copy from level to level belongs to its object's owner, and does not stay if a fence forbids it."""

from __future__ import annotations

from tests.storage.harness import Open, memory_config
from tests.support.gated_storage import gated, stack
from transferd.storage.base import Found, Item
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.storage.selection import Selection

NBYTES = 100
NAMES = [f"demo/0123456789abcdef/RL-1/{i:02x}/0" for i in range(2)]


async def test_a_copy_that_a_purge_forbids_is_removed_again_and_the_others_stay(open_storage: Open) -> None:
    first, below = MemoryStorage(memory_config(10 * NBYTES)), MemoryStorage(memory_config(10 * NBYTES))
    store = await open_storage(stack(first, gated(below, "below")))
    items, slots = [], []
    for depth, name in enumerate(NAMES):
        items.append(Item(name, NBYTES, Use(owner="theirs"), depth))
        slots.append(store.buffer(NBYTES))
    await below.store([Item(name, NBYTES, Use(owner="mine"), 0) for name in NAMES], None, slots)
    parts = store.levels._parts
    born = parts.fences.number
    with parts.fences.purge(Selection(names=frozenset(NAMES[:1]))):
        pass
    copies = await parts.copy(items, [parts.levels[1]] * 2, slots, parts.levels[0], born)
    assert [(outcome.found, why) for _, outcome, why in copies] == [(Found.STORED, "purged"), (Found.STORED, "")]
    assert first.find(NAMES, None) == [False, True]
    entry = first.indexes[0].get(NAMES[1])
    assert entry is not None
    assert (entry.owner, bool(entry.kept)) == ("mine", True), "held until whoever made the copy releases it"
