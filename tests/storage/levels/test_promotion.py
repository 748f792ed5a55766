"""Blocks that are used again come up; what is damaged is repaired from below; buffers are bounded."""

from __future__ import annotations

import random
from unittest.mock import AsyncMock

import pytest

from tests.storage.harness import Harness, Open, memory_config
from tests.support.gated_storage import GatedStorage, gated, stack
from tests.support.waits import until
from transferd.config import LevelSection
from transferd.errors import StorageError
from transferd.storage.base import FOUND, STORED, Item
from transferd.storage.levels import promotion
from transferd.storage.levels.promotion import Buffers
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.storage.selection import Selection

NBYTES = 2000


def name(i: int) -> str:
    return f"demo/0123456789abcdef/RL-1/{i:02x}/0"


def content(i: int) -> bytes:
    return random.Random(i).randbytes(NBYTES)


async def two(open_storage: Open, promote: int, capacity: int = 1024**2) -> tuple[Harness, MemoryStorage, GatedStorage]:
    """Memory above a lower level, and only that has the object 1."""
    first, lower = MemoryStorage(memory_config(capacity)), gated(MemoryStorage(memory_config(1024**2)), "lower")
    store = await open_storage(stack(first, lower, lower=LevelSection(promote=promote)))
    assert await store.put((name(1), content(1))) == [STORED]
    await store.levels.flush(10)
    await first.quarantine(name(1))
    return store, first, lower


async def load(store: Harness, i: int = 1) -> int:
    [(outcome, data)] = await store.get((name(i), NBYTES))
    assert data == content(i)
    assert isinstance(store.storage, LevelsStorage)
    await store.storage._promotions.running.settled()
    return outcome.level


@pytest.mark.parametrize(("promote", "levels"), [(0, [1, 1, 1, 1]), (1, [1, 0, 0, 0]), (2, [1, 1, 0, 0])])
async def test_a_block_comes_up_at_the_use_that_the_configuration_names(
    open_storage: Open, promote: int, levels: list[int]
) -> None:
    store, _, _ = await two(open_storage, promote)
    assert [await load(store) for _ in range(4)] == levels
    assert store.storage.statistics()["levels"][0]["promoted"] == (promote > 0)


async def test_a_level_that_hangs_in_what_comes_up_is_left_out(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hung kept its buffers, and all promotions went on going there until none was left."""
    monkeypatch.setattr(promotion, "HANGS_S", 0.01)
    first, middle, last = (gated(MemoryStorage(memory_config(1024**2)), one) for one in ("memory", "middle", "last"))
    store = await open_storage(stack(first, middle, last))
    for i in (1, 2):
        assert await store.put((name(i), content(i))) == [STORED]
        await store.levels.flush(10)
        await first.quarantine(name(i))
        await middle.quarantine(name(i))
    assert isinstance(store.storage, LevelsStorage)
    level = store.levels.all_levels[1]
    middle.gate.clear()
    await store.get((name(1), NBYTES))
    await until(lambda: level.stores.hanging, "it is known to hang")
    await store.get((name(2), NBYTES))
    await until(lambda: first.index.find([name(2)], None) == [True], "it comes to the level above that")
    middle.gate.set()
    await store.storage._promotions.running.settled()
    assert (level.stores.hanging, store.storage._promotions.buffers.used) == (0, [])


async def test_a_look_up_promotes_nothing(open_storage: Open) -> None:
    store, first, _ = await two(open_storage, 1)
    for _ in range(4):
        assert await store.storage.exists([name(1)]) == [True]
    assert first.find([name(1)], None) == [False]


async def test_a_damaged_copy_is_repaired_from_below_at_the_next_use(open_storage: Open) -> None:
    store, first, _ = await two(open_storage, 0)
    assert await store.put((name(2), content(2))) == [STORED]
    await store.levels.flush(10)
    await store.levels.quarantine_at(name(2), 0)
    assert [await load(store, 2) for _ in range(2)] == [1, 0]
    assert first.find([name(2)], None) == [True]


async def test_a_copy_of_a_damaged_copy_goes_with_it(open_storage: Open) -> None:
    store, first, lower = await two(open_storage, 1)
    assert await load(store) == 1
    assert first.find([name(1)], None) == [True]
    await store.levels.quarantine_at(name(1), 1)
    assert first.find([name(1)], None) == [False]
    assert await lower.exists([name(1)]) == [False]


async def test_a_promotion_evicts_no_held_object(open_storage: Open) -> None:
    store, first, lower = await two(open_storage, 1, capacity=3 * NBYTES)
    lower.gate.clear()
    assert await store.put((name(2), content(2))) == [STORED]
    lower.gate.set()
    assert await load(store) == 1
    await store.levels.flush(10)
    assert [outcome for outcome, _ in await store.get((name(2), NBYTES))] == [FOUND]
    assert first.statistics()["bytes"] <= 3 * NBYTES


async def test_a_purge_that_cannot_remove_a_promoted_block_keeps_no_other_from_being_released(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first, _ = await two(open_storage, 0)
    promotions, fences = store.levels._promotions, store.levels._parts.fences
    monkeypatch.setattr(first.keeper, "purge", AsyncMock(side_effect=StorageError("Permission denied")))
    items = [Item(name(i), NBYTES, Use(), i) for i in (2, 3)]
    buffers = [buffer for _ in items if (buffer := promotions.buffers.take(NBYTES)) is not None]
    promotions.begin(store.levels.all_levels[1], items, buffers, fences.number)
    with fences.purge(Selection(names=frozenset([name(2)]))):
        pass
    await promotions.running.settled()
    entry = first.indexes[0].get(name(3))
    assert entry is not None
    assert not entry.kept


def test_buffers_are_bounded_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "BUFFER_BYTES", 3 * 4096)
    buffers = Buffers([])
    assert buffers.take(1) is None, "not open"
    buffers.open()
    assert buffers.take(3 * 4096 + 1) is None
    taken = [buffers.take(nbytes) for nbytes in (4096, 100, 4095)]
    assert [one is not None and one.nbytes for one in taken] == [4096, 100, 4095]
    assert buffers.take(1) is None
    one, two, three = (one for one in taken if one is not None)
    for i, each in enumerate((one, two, three)):
        each[:] = i
    assert (one == 0).all(), "no two lie over each other"
    assert (two == 1).all()
    buffers.give_back([two])
    again = buffers.take(4096)
    assert again is not None
    assert again.ctypes.data == two.ctypes.data
    buffers.give_back([one, again, three])
    whole = buffers.take(3 * 4096)
    assert whole is not None, "all are back"
    buffers.give_back([whole])
    del one, two, three, again, taken, each, whole
    buffers.close()
    assert buffers.take(1) is None
