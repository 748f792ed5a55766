"""Levels that are taken out and put back: what only they have goes elsewhere, and nothing goes to them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from tests.storage.harness import Harness, Open, file_config, memory_config, mooncake_config, pool_storage
from tests.support.blobs import promise
from tests.support.gated_storage import GatedStorage, gated, stack
from tests.support.simulation.pool import SIM_MASTER, SimPool
from tests.support.waits import until
from transferd.errors import ConfigError, RequestError, StorageFull, StorageUnavailable
from transferd.storage.base import STORED, Blob, Found
from transferd.storage.file import FileStorage
from transferd.storage.levels.base import Proof
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.storage.mooncake import copies
from transferd.storage.mooncake.master_pages import PoolObject
from transferd.storage.paths import path_of
from transferd.tasks import LevelChange

NBYTES = 1000
NAMES = [f"demo/0123456789abcdef/RL-1/{i:02x}/0" for i in range(9)]


def content(i: int) -> bytes:
    return bytes([i + 1]) * NBYTES


async def three(open_storage: Open, path: Path) -> tuple[Harness, LevelsStorage, GatedStorage]:
    """Memory above files above a remote level."""
    remote = gated(MemoryStorage(memory_config(100 * NBYTES)), "object", asks=True)
    files = FileStorage(file_config(path, 100 * NBYTES), unit=1)
    store = await open_storage(stack(MemoryStorage(memory_config(100 * NBYTES)), files, remote))
    assert isinstance(store.storage, LevelsStorage)
    return store, store.storage, remote


async def put(store: Harness, *which: int) -> None:
    assert await store.put(*((NAMES[i], content(i)) for i in which)) == [STORED] * len(which)


async def test_a_drained_levels_only_copies_go_below_and_it_keeps_its_objects(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.storage.levels.stack.LOOK_UP_S", 0.05)
    store, levels, remote = await three(open_storage, tmp_path)
    remote.gate.clear()
    await put(store, *range(4))
    draining = asyncio.ensure_future(levels.change("memory", leaves=True))
    await until(lambda: levels.all_levels[0].state == "draining", "it has begun")
    await put(store, 4)
    assert [await levels.where([NAMES[4]])] == [{"memory": [False], "file": [True], "object": [False]}]
    remote.gate.set()
    assert await draining == LevelChange("memory", "drained")
    assert levels.all_levels[0].draining_bytes == 0
    got = await store.get(*((NAMES[i], NBYTES) for i in range(5)))
    assert [(outcome.level, data) for outcome, data in got] == [(1, content(i)) for i in range(5)]
    assert await levels.change("memory", leaves=False) == LevelChange("memory", "used")
    [(outcome, data)] = await store.get((NAMES[0], NBYTES))
    assert (outcome.level, data) == (0, content(0))


async def test_a_drain_waits_until_a_level_that_is_put_back_has_found_its_objects(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that nothing is only there: nothing had been found yet, and who drains removes the medium next."""
    files = FileStorage(file_config(tmp_path, 100 * NBYTES), unit=1)
    store = await open_storage(stack(MemoryStorage(memory_config(NBYTES // 2)), files))
    levels, returns, gate = store.storage, files._returns, asyncio.Event()
    assert isinstance(levels, LevelsStorage)

    async def held() -> bool:
        await gate.wait()
        return await returns()

    monkeypatch.setattr(files, "_returns", held)
    await put(store, 0)
    alone = LevelChange("file", "drained", 1, NBYTES)
    assert await levels.change("file", leaves=True) == alone
    using = asyncio.ensure_future(levels.change("file", leaves=False))
    await until(lambda: files.lost and not files.count, "it reads its medium anew")
    draining = asyncio.ensure_future(levels.change("file", leaves=True))
    await asyncio.wait([draining], timeout=0.1)
    gate.set()
    assert await draining == alone
    await using


async def test_what_only_a_level_has_is_counted_in_turns_of_the_loop(open_storage: Open) -> None:
    """No other level could be asked, so a million objects were looked at in one step: that took seconds."""
    store = await open_storage(stack(MemoryStorage(memory_config(10**6)), gated(MemoryStorage(memory_config(10**6)))))
    levels, count, turns = store.storage, 640, 0
    assert isinstance(levels, LevelsStorage)
    await levels.change(levels.names[1], leaves=True)
    assert await store.put(*((f"m/f/g/{i}/0", b"") for i in range(count))) == [STORED] * count
    counting = asyncio.ensure_future(levels.only_here())
    while not counting.done():
        turns += 1
        await asyncio.sleep(0)
    assert counting.result() == (count, 0)
    assert turns > count / 64


async def test_what_vanished_below_while_a_level_was_out_is_copied_there_again(
    open_storage: Open, tmp_path: Path
) -> None:
    files = FileStorage(file_config(tmp_path, 100 * NBYTES), unit=1)
    store = await open_storage(stack(MemoryStorage(memory_config(100 * NBYTES)), files))
    levels = store.storage
    assert isinstance(levels, LevelsStorage)
    await put(store, 0, 1)
    await levels.flush(10)
    await levels.change("memory", leaves=True)
    (tmp_path / "objects" / path_of(NAMES[0])).unlink()
    assert [outcome.found for outcome, _ in await store.get((NAMES[0], NBYTES))] == [Found.MISSING]
    await levels.change("memory", leaves=False)
    await until(lambda: files.index.find([NAMES[0]], None) == [True], "memory alone had it")
    assert (tmp_path / "objects" / path_of(NAMES[0])).read_bytes() == content(0)


async def test_a_level_is_put_back_while_it_drains(open_storage: Open, tmp_path: Path) -> None:
    store, levels, remote = await three(open_storage, tmp_path)
    remote.gate.clear()
    await put(store, 0)
    draining = asyncio.ensure_future(levels.change("file", leaves=True))
    await until(lambda: levels.all_levels[1].state == "draining", "it has begun")
    await levels.change("file", leaves=False)
    remote.gate.set()
    assert (await draining).state == "used"
    await put(store, 1)
    await levels.flush(10)
    assert (await levels.where([NAMES[1]]))["file"] == [True]


async def test_a_level_is_taken_out_again_while_an_ended_drain_still_copies(open_storage: Open, tmp_path: Path) -> None:
    """The second drain copies everything itself, whatever the first one had come to."""
    store, levels, remote = await three(open_storage, tmp_path)
    remote.gate.clear()
    await put(store, *range(4))
    first = asyncio.ensure_future(levels.change("file", leaves=True))
    await until(lambda: levels.all_levels[1].state == "draining", "it has begun")
    assert (await levels.change("file", leaves=False)).state == "used"
    second = asyncio.ensure_future(levels.change("file", leaves=True))
    await until(lambda: levels.all_levels[1].state == "draining", "it has begun again")
    assert not second.done()
    remote.gate.set()
    assert (await second).state == "drained"
    assert (await first).state in ("used", "draining", "drained")
    assert (await levels.where(NAMES[:4]))["object"] == [True] * 4
    assert (await levels.change("file", leaves=False)).state == "used"


async def test_a_drain_that_fails_says_so_and_takes_nothing_out(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, levels, _ = await three(open_storage, tmp_path)
    await put(store, 0)
    with monkeypatch.context() as broken:
        broken.setattr(levels.all_levels[1].storage, "hottest_first", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await levels.change("file", leaves=True)
    assert (levels.all_levels[1].state, levels.all_levels[1].draining_bytes) == ("used", 0)
    assert (await levels.change("file", leaves=True)).state == "drained"


async def test_a_drain_waits_for_stores_that_began_before_it(open_storage: Open, tmp_path: Path) -> None:
    """What they store in the level after its last look would be in no count."""
    first = gated(MemoryStorage(memory_config(100 * NBYTES)), "memory")
    files = FileStorage(file_config(tmp_path, 100 * NBYTES), unit=1)
    store = await open_storage(stack(first, files))
    assert isinstance(store.storage, LevelsStorage)
    first.gate.clear()
    storing = asyncio.ensure_future(store.put((NAMES[0], content(0))))
    await until(lambda: first.waiting, "it runs")
    draining = asyncio.ensure_future(store.storage.change("memory", leaves=True))
    await until(lambda: store.levels.all_levels[0].state == "draining", "it has begun")
    for _ in range(50):
        await asyncio.sleep(0)
    assert not draining.done()
    first.gate.set()
    assert await storing == [STORED]
    assert await draining == LevelChange("memory", "drained")
    assert (await store.levels.where(NAMES[:1]))["file"] == [True]


async def test_the_last_level_stays_and_an_unknown_one_is_refused(open_storage: Open, tmp_path: Path) -> None:
    _, levels, _ = await three(open_storage, tmp_path)
    for name in ("memory", "file"):
        await levels.change(name, leaves=True)
    with pytest.raises(RequestError, match="only level that is in use") as refused:
        await levels.change("object", leaves=True)
    assert refused.value.reason == "bad_value"
    with pytest.raises(RequestError) as refused:
        await levels.change("attic", leaves=False)
    assert refused.value.reason == "unknown_level"


async def test_a_hand_over_fails_while_the_level_that_others_see_is_out(open_storage: Open, tmp_path: Path) -> None:
    store, levels, remote = await three(open_storage, tmp_path)
    await levels.change("object", leaves=True)
    use = Use()
    use.shared = True
    blob = Blob(NAMES[0], store.buffer(NBYTES, content(0)), use)
    [error] = await promise(levels, [blob])
    assert isinstance(error, StorageUnavailable)
    assert not remote.waiting
    await put(store, 1)
    await levels.change("object", leaves=False)
    [proof] = await promise(levels, [blob])
    assert isinstance(proof, Proof)
    assert (await levels.where([NAMES[0]]))["object"] == [True]


async def test_a_drain_counts_only_what_another_level_says_it_has(open_storage: Open, tmp_path: Path) -> None:
    """Files that were removed, and a bucket that has lost them: what memory still has is not alone after the drain."""
    store, levels, remote = await three(open_storage, tmp_path)
    await put(store, *range(4))
    await levels.flush(10)
    for one in (tmp_path / "objects").rglob("*"):
        if one.is_file():
            one.unlink()
    for i in range(4):
        await remote._behind.quarantine(NAMES[i])
    remote.full = StorageFull("no room")
    assert await levels.change("memory", leaves=True) == LevelChange("memory", "drained")
    assert len([one for one in (tmp_path / "objects").rglob("*") if one.is_file()]) == 4, "copied again"
    assert await levels.change("memory", leaves=False) == LevelChange("memory", "used")
    remote.error = StorageUnavailable("it does not answer")
    assert await levels.change("file", leaves=True) == LevelChange("file", "drained"), "memory has them"
    assert await levels.change("memory", leaves=True) == LevelChange("memory", "drained", 4, 4 * NBYTES)
    assert await levels.change("memory", leaves=True) == LevelChange("memory", "drained", 4, 4 * NBYTES), "again"


async def test_a_pool_below_is_what_a_node_leaves(open_storage: Open, tmp_path: Path) -> None:
    remote = gated(MemoryStorage(memory_config(100 * NBYTES)), "object", asks=True)
    pool = pool_storage(mooncake_config(SIM_MASTER), set_up=SimPool().set_up)  # a master without pages
    pool.leave = recorded = AsyncMock()  # type: ignore[method-assign]
    store = await open_storage(stack(MemoryStorage(memory_config(100 * NBYTES)), pool))
    made = store.storage.pool
    assert made is pool
    with pytest.raises(ConfigError, match="master_pages"):
        await made.make_copies(leaves=True)
    await made.leave(10)
    recorded.assert_awaited_once_with(10)
    other = await open_storage(stack(FileStorage(file_config(tmp_path, 100 * NBYTES), unit=1), remote))
    assert other.storage.pool is None


async def test_what_only_memory_has_is_what_no_level_that_outlives_the_process_says_it_has(
    open_storage: Open, tmp_path: Path
) -> None:
    store, levels, remote = await three(open_storage, tmp_path)
    files = levels.all_levels[1]
    await put(store, 0, 1, 2)
    await until(lambda: not any(back.pending_bytes for back in levels.write_backs), "the copies are made")
    assert await levels.only_here() == (0, 0)
    files.leaving = True  # so the bucket alone counts, and it is asked
    asked = remote.asked
    assert await levels.only_here() == (0, 0)
    assert remote.asked > asked
    remote.error = StorageUnavailable("no bucket answers")
    assert await levels.only_here() == (3, 3 * NBYTES)
    assert levels.all_levels[0].state == "used", "and nothing is taken out"
    files.leaving = False
    assert await levels.only_here() == (0, 0)


async def test_a_copy_in_another_level_of_memory_does_not_outlive_the_process(open_storage: Open) -> None:
    below = gated(MemoryStorage(memory_config(100 * NBYTES)), "below")
    store = await open_storage(stack(MemoryStorage(memory_config(100 * NBYTES)), below))
    assert isinstance(store.storage, LevelsStorage)
    await put(store, 0, 1)
    await until(lambda: below.stores == NAMES[:2], "the copies are made")
    assert await store.storage.only_here() == (2, 2 * NBYTES)


@pytest.mark.parametrize(("files", "lost"), [(False, 1), (True, 0)])
async def test_what_only_this_node_has_of_a_pool_does_not_outlive_the_process(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: bool, lost: int
) -> None:
    pool = pool_storage(mooncake_config(SIM_MASTER, master_pages="10.0.0.9:1"), set_up=SimPool().set_up)
    between = [FileStorage(file_config(tmp_path, 100 * NBYTES), unit=1)] if files else []
    store = await open_storage(stack(MemoryStorage(memory_config(100 * NBYTES)), *between, pool))
    await put(store, 0, 1, 2)
    await store.levels.flush(10)
    monkeypatch.setattr(pool._client, "own", frozenset({"me:1"}))
    held = [PoolObject(NAMES[i], NBYTES, nodes) for i, nodes in enumerate((("me:1",), ("me:1", "b:1"), ("b:1",)))]
    monkeypatch.setattr(copies, "read_all", lambda *_: iter([held]))
    assert await store.storage.only_here() == (lost, lost * NBYTES)
    assert await pool.only_here() == (1, NBYTES)
