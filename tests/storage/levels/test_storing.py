"""Stores in a stack whose first level hangs: they go on below, and the slots return when the call has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import Harness, Open, file_config, memory_config
from tests.support.gated_storage import GatedStorage, gated, stack
from tests.support.waits import until
from transferd.config import LevelSection
from transferd.errors import StorageError, StorageFull
from transferd.storage.base import LEFT, STORED, Found, Item, Outcome, Outcomes
from transferd.storage.file import FileStorage
from transferd.storage.levels import level
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage

NBYTES = 1000
NAMES = [f"demo/0123456789abcdef/RL-1/{i:02x}/0" for i in range(9)]


def content(i: int) -> bytes:
    return bytes([i + 1]) * NBYTES


async def hung(open_storage: Open, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Harness, GatedStorage]:
    """Files that do not answer, above memory."""
    monkeypatch.setattr(level, "UNKNOWN_S", 0.05)
    monkeypatch.setattr(level, "FLOOR_S", 0.05)
    first = gated(FileStorage(file_config(path, 100 * NBYTES), unit=1), "first")
    below = MemoryStorage(memory_config(100 * NBYTES))
    store = await open_storage(stack(first, below, memory=LevelSection(promote=1)))
    first.gate.clear()
    return store, first


def well_again(first: GatedStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, and is waited for as long as a slow machine needs."""
    monkeypatch.setattr(level, "UNKNOWN_S", 60.0)
    monkeypatch.setattr(level, "FLOOR_S", 60.0)
    first.gate.set()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_a_store_that_nobody_awaits_touches_no_slot(open_storage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    first, below = MemoryStorage(memory_config(100 * NBYTES)), MemoryStorage(memory_config(100 * NBYTES))
    store = await open_storage(stack(first, gated(below, "below")))
    monkeypatch.setattr(first, "_inline_bytes", 0)  # threads store it
    call = store.storage.store([Item(NAMES[0], NBYTES)], None, [store.buffer(NBYTES)])
    assert isinstance(call, Coroutine)
    call.close()
    assert await store.put((NAMES[1], content(1))) == [STORED]
    assert first.find(NAMES[:2], None) == [False, True]


async def test_a_store_goes_on_below_and_its_slots_return_when_the_call_has_ended(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = await hung(open_storage, tmp_path, monkeypatch)
    use, slots = Use(), [store.buffer(NBYTES) for _ in range(2)]
    for i, slot in enumerate(slots):
        slot[:] = content(i)
    items = [Item(NAMES[i], NBYTES, use, i) for i in range(2)]
    outcomes = await store.storage.store(items, None, slots)
    assert list(outcomes) == [STORED] * 2
    assert isinstance(outcomes, Outcomes)
    assert not outcomes.returned.done()
    top, below = store.levels.statistics()["levels"]
    assert (top["hanging"], top["slow_calls"], top["available"], below["objects"]) == (1, 1, False, 2)
    assert await store.put((NAMES[2], content(2))) == [STORED], "nothing more goes to the level that hangs"
    assert first.waiting == 1
    got = await store.get(*((NAMES[i], NBYTES) for i in range(3)))
    assert [(outcome.found, outcome.level, data) for outcome, data in got] == [
        (Found.FOUND, 1, content(i)) for i in range(3)
    ]
    well_again(first, monkeypatch)
    await outcomes.returned
    top, _ = store.levels.statistics()["levels"]
    assert (top["hanging"], top["available"], top["objects"]) == (0, True, 2)
    assert not store.levels.unsaved, "what it has stored late is below already, so nothing holds it"
    assert await store.put((NAMES[3], content(3))) == [STORED]
    assert first.stores.count(NAMES[3]) == 1


async def test_objects_of_a_hung_store_are_left_and_stored_from_other_slots(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = await hung(open_storage, tmp_path, monkeypatch)
    use = Use()
    items = [Item(NAMES[i], NBYTES, use, i) for i in range(3)]

    def fill(i: int, data: memoryview, _: bool) -> bool:
        data[:] = content(i)
        return True

    outcomes = await store.storage.store(items, fill, [store.buffer(NBYTES) for _ in range(2)])
    assert list(outcomes) == [LEFT] * 3
    assert isinstance(outcomes, Outcomes)
    assert list(await store.storage.store(items, fill, [store.buffer(NBYTES) for _ in range(2)])) == [STORED] * 3
    well_again(first, monkeypatch)
    await outcomes.returned
    got = await store.get(*((NAMES[i], NBYTES) for i in range(3)))
    assert [data for _, data in got] == [content(i) for i in range(3)]


async def test_slots_that_a_failed_store_still_uses_are_filled_with_nothing_else(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = await hung(open_storage, tmp_path, monkeypatch)
    failed, running = Outcome(Found.FAILED, StorageError("hangs")), asyncio.get_running_loop().create_future()

    async def call(items: list[Item], *_: object) -> list[Outcome]:
        return Outcomes.after([failed] * len(items), [running])

    monkeypatch.setattr(first, "store", call)
    items, slots = [Item(NAMES[i], NBYTES, Use(), i) for i in range(2)], [store.buffer(NBYTES) for _ in range(2)]
    outcomes = await store.storage.store(items, lambda *_: pytest.fail("made anew"), slots)
    assert list(outcomes) == [LEFT] * 2
    assert isinstance(outcomes, Outcomes)
    assert not outcomes.returned.done()
    assert list(await store.storage.store(items, None, slots)) == [STORED] * 2, "what is in slots may be read by both"
    running.set_result(None)
    await outcomes.returned


async def test_slots_of_a_hung_store_return_when_the_call_that_it_gives_up_has_ended(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = await hung(open_storage, tmp_path, monkeypatch)
    failed, running = Outcome(Found.FAILED, StorageError("hangs")), asyncio.get_running_loop().create_future()

    async def call(items: list[Item], *_: object) -> list[Outcome]:
        await first.gate.wait()
        return Outcomes.after([failed] * len(items), [running])

    monkeypatch.setattr(first, "store", call)
    slot = store.buffer(NBYTES)
    slot[:] = content(0)
    outcomes = await store.storage.store([Item(NAMES[0], NBYTES, Use(), 0)], None, [slot])
    assert list(outcomes) == [STORED]
    assert isinstance(outcomes, Outcomes)
    first.gate.set()
    await until(lambda: not store.levels.all_levels[0].stuck, "the level's call has ended")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not outcomes.returned.done(), "the library's call still reads the slot"
    running.set_result(None)
    await outcomes.returned


async def test_a_slow_level_without_a_substitute_is_waited_for(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = await hung(open_storage, tmp_path, monkeypatch)
    below: Any = store.levels.all_levels[1]
    monkeypatch.setattr(below.storage, "unusable", lambda: "it is dead")
    asyncio.get_running_loop().call_later(0.2, first.gate.set)
    assert await store.put((NAMES[0], content(0))) == [STORED]
    assert store.levels.statistics()["levels"][0]["slow_calls"] == 0


async def test_a_hung_call_that_fails_at_last_costs_nothing(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = await hung(open_storage, tmp_path, monkeypatch)
    slot = store.buffer(NBYTES)
    slot[:] = content(0)
    outcomes = await store.storage.store([Item(NAMES[0], NBYTES, Use(), 0)], None, [slot])
    assert list(outcomes) == [STORED]
    first.error = StorageError("I/O error")
    first.gate.set()
    assert isinstance(outcomes, Outcomes)
    await outcomes.returned
    first.error = None
    top, below = store.levels.statistics()["levels"]
    assert (top["hanging"], top["objects"], below["objects"]) == (0, 0, 1)
    [(outcome, data)] = await store.get((NAMES[0], NBYTES))
    assert (outcome.found, data) == (Found.FOUND, content(0))
    await store.levels._promotions.running.settled()  # the load brings it up


async def test_what_a_middle_level_stores_beside_a_copy_that_waits_is_not_held_there(open_storage: Open) -> None:
    first, middle = (gated(MemoryStorage(memory_config(100 * NBYTES)), one) for one in ("first", "middle"))
    last = MemoryStorage(memory_config(100 * NBYTES))
    store = await open_storage(stack(first, middle, last))
    middle.full = StorageFull("no room")
    assert await store.put((NAMES[0], content(0))) == [STORED]
    await until(lambda: last.find([NAMES[0]], None) == [True] and middle.stores, "its copy to the middle one waits")
    first.full, middle.full = middle.full, None
    assert await store.put((NAMES[0], content(0))) == [STORED]
    assert middle.stores == NAMES[:1] * 2
    entry = middle.index.indexes[0].get(NAMES[0])
    assert entry is not None
    assert not entry.kept
