"""Purges, pins and shares reach every level, and what is on its way between them."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import Open, file_config, memory_config, mooncake_config, pool_storage
from tests.storage.real_disks import disks
from tests.support.gated_storage import gated, stack
from tests.support.simulation.pool import SIM_MASTER, SimPool
from tests.support.waits import until
from transferd.config import LevelSection
from transferd.errors import RequestError, StorageFull
from transferd.runtime.compat import wait_for
from transferd.storage import keeping
from transferd.storage.base import STORED, Found, Item
from transferd.storage.file import FileStorage
from transferd.storage.keeping import PinState
from transferd.storage.levels import level, parts, write_back
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.storage.paths import path_of
from transferd.storage.queues import EngineOwner, space_of
from transferd.storage.selection import Selection
from transferd.wire.answers import Purged


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


async def test_a_shared_level_keeps_what_is_purged_and_this_node_uses_it_no_more(open_storage: Open) -> None:
    first, pool = MemoryStorage(memory_config(2**20)), gated(MemoryStorage(memory_config(2**20)), "object", asks=True)
    store = await open_storage(stack(first, pool))
    names = [name(1, "old"), name(2, "old"), name(3, "new")]
    assert await store.put(*((one, b"a" * 100) for one in names)) == [STORED] * 3
    await store.levels.flush(10)
    keeper = store.storage.keeper
    assert keeper is not None
    assert (await keeper.purge(Selection(generation="old"), dry_run=True)).objects == 2
    purged = await keeper.purge(Selection(generation="old"))
    assert (purged.objects, purged.shared, purged.complete) == (2, ["object"], False)
    assert [await one.exists(names) for one in (first, pool)] == [[False, False, True], [True] * 3]
    assert await store.storage.exists(names) == [False, False, True]
    assert await store.levels.where(names) == {"memory": [False, False, True], "object": [False, False, True]}
    got = await store.get(*((one, 100) for one in names))
    assert [outcome.found for outcome, _ in got] == [Found.MISSING, Found.MISSING, Found.FOUND]
    assert [store.levels.having(one) for one in names] == [0, 0, 3]
    assert await store.put((names[0], b"a" * 100)) == [STORED]  # again, and to the pool as well
    await store.levels.flush(10)
    await keeper.purge(Selection(names=frozenset([names[2]])))
    assert await store.levels.where(names) == {"memory": [True, False, False], "object": [True, False, False]}


async def test_what_is_stored_again_after_a_purge_replaces_what_a_pool_has_kept(open_storage: Open) -> None:
    """A pool keeps an object that it has, and answers a further store of it with yes."""
    sim, first = SimPool(), gated(MemoryStorage(memory_config(2**20)))
    pool = pool_storage(mooncake_config(SIM_MASTER), set_up=sim.set_up)
    store = await open_storage(stack(first, pool))
    keeper = store.storage.keeper
    assert keeper is not None
    names = [name(1), name(2)]
    assert await store.put(*((one, b"bad") for one in names)) == [STORED] * 2
    await store.levels.flush(10)
    await keeper.purge(Selection())
    assert [sim.objects[one] for one in names] == [b"bad"] * 2
    assert await store.put((names[0], b"new")) == [STORED]
    await store.levels.flush(10)
    first.full = StorageFull("no room")  # so the pool gets the next one itself
    assert await store.put((names[1], b"new")) == [STORED]
    assert [sim.objects[one] for one in names] == [b"new"] * 2
    assert await store.levels.where(names) == {"memory": [True, False], "mooncake": [True] * 2}
    assert pool.statistics()["corrupt"] == 0


async def test_a_purge_beside_a_shared_one_that_still_lists_hides_what_is_left(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing has passed the object by when another node stores it, and a purge hides that one."""
    pool = gated(MemoryStorage(memory_config(2**20)), "object", asks=True)
    store = await open_storage(stack(MemoryStorage(memory_config(2**20)), pool))
    keeper = store.storage.keeper
    assert keeper is not None
    await pool._behind.store([Item(name(1), 100)], None, [memoryview(bytes(100))])

    async def lists(_: Selection, *, dry_run: bool) -> Purged:
        await keeper.purge(Selection())
        return Purged()

    monkeypatch.setattr(pool, "purge_shared", lists)
    await keeper.purge(Selection())
    await store.levels.purge_shared(Selection(), dry_run=False)
    assert await store.levels.where([name(1)]) == {"memory": [False], "object": [False]}


async def test_an_owners_purge_hides_its_space_in_a_shared_level_and_many_purges_hide_all(open_storage: Open) -> None:
    first, pool = MemoryStorage(memory_config(2**20)), gated(MemoryStorage(memory_config(2**20)), "object", asks=True)
    store = await open_storage(stack(first, pool))
    me, other = EngineOwner("me", 1), EngineOwner("other", 1)
    keeper = store.storage.keeper
    assert keeper is not None
    keeper.claim(me, "demo/0123456789abcdef", 0.0)
    keeper.claim(other, "demo/fedcba9876543210", 0.0)
    names = [name(1), name(1).replace("0123456789abcdef", "fedcba9876543210")]
    assert await store.put(*((one, b"a" * 100) for one in names)) == [STORED] * 2
    await store.levels.flush(10)
    await keeper.purge(Selection(owner=me))
    await keeper.purge(Selection(unused_s=1e9))
    assert (await store.levels.where(names))["object"] == [False, True]
    for i in range(level.MOST_PURGES):
        await keeper.purge(Selection(generation=f"old-{i}"))
    assert (await store.levels.where(names))["object"] == [False, False]


async def test_a_purge_of_an_owner_without_a_space_hides_only_names_without_one(open_storage: Open) -> None:
    """Under FastDeploy's schema."""
    first, pool = MemoryStorage(memory_config(2**20)), gated(MemoryStorage(memory_config(2**20)), "object", asks=True)
    store = await open_storage(stack(first, pool))
    me, other = EngineOwner("me", 1), EngineOwner("other", 1)
    keeper = store.storage.keeper
    assert keeper is not None
    keeper.claim(me, "", 0.0)
    keeper.claim(other, "demo/0123456789abcdef", 0.0)
    names = ["plain", name(1)]
    assert await store.put(*((one, b"a" * 100) for one in names)) == [STORED] * 2
    await store.levels.flush(10)
    await keeper.purge(Selection(owner=me))
    assert (await store.levels.where(names))["object"] == [False, True]
    await keeper.purge(Selection(owner=EngineOwner("nobody knows whose", 1)))
    assert (await store.levels.where(names))["object"] == [False, False], "its space may be any"


async def test_a_pin_is_in_the_lowest_level_that_has_the_object_and_holds_end_apart_from_it(open_storage: Open) -> None:
    first, lower = MemoryStorage(memory_config(2000)), gated(MemoryStorage(memory_config(2**20)), "lower")
    store = await open_storage(stack(first, lower))
    keeper = store.storage.keeper
    assert keeper is not None
    lower.gate.clear()
    assert await store.put((name(1), b"a" * 100)) == [STORED]
    assert await keeper.pin("me", [name(1), name(2)], 60.0, 0.5) == [PinState.PINNED, PinState.NOT]
    assert (first.statistics()["pinned"], lower.statistics()["pinned"]) == (1, 0)
    lower.gate.set()
    await store.levels.flush(10)
    for i in range(10, 40):
        assert await store.put((name(i), b"b" * 100)) == [STORED]
        await store.levels.flush(10)
    assert first.find([name(1)], None) == [True], "pinned, although it is below now"
    assert await keeper.pin("me", [name(1)], 60.0, 0.5) == [PinState.PINNED]
    assert lower.statistics()["pinned"] == 1
    assert await keeper.unpin("me", None) == 2
    assert store.storage.statistics()["pinned"] == 0


async def test_a_pin_right_after_the_write_survives_a_kill(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy to the file level has not even begun. A copy of the directory is what kill -9 leaves at that moment."""
    monkeypatch.setattr("transferd.storage.levels.proving.HANGS_S", 60.0)  # the test holds the copy up
    monkeypatch.setattr("transferd.storage.levels.keeping.COPIES_S", 60.0)

    async def pinned_after_a_kill(moment: str) -> int:
        shutil.copytree(tmp_path / "blocks", tmp_path / moment)
        left = FileStorage(file_config(tmp_path / moment, 2**20))
        await left.open()
        pinned: int = left.statistics()["pinned"]
        await left.close()
        return pinned

    me = EngineOwner("me", 1)
    lower = gated(FileStorage(file_config(tmp_path / "blocks", 2**20)), "file")
    store = await open_storage(stack(MemoryStorage(memory_config(2**20)), lower))
    keeper = store.storage.keeper
    assert keeper is not None
    lower.gate.clear()
    names = [name(i) for i in range(5)]
    assert await store.put(*((one, b"a" * 100) for one in names)) == [STORED] * 5
    await until(lambda: lower.waiting, "the copy has begun")
    pinning = asyncio.ensure_future(keeper.pin(me, [*names, name(9)], 600.0, 0.5))
    await until(lambda: (tmp_path / "blocks" / "orders").read_bytes().count(b'"until"'))
    assert await pinned_after_a_kill("before the copy") == 0
    lower.gate.set()
    assert await pinning == [PinState.DURABLE] * 5 + [PinState.NOT]
    assert store.storage.statistics()["pinned"] == 5, "below, and no more in memory"
    assert await pinned_after_a_kill("after the copy") == 5


async def test_a_pin_of_what_was_removed_below_from_outside_holds_the_copy_above(
    open_storage: Open, tmp_path: Path
) -> None:
    files = gated(FileStorage(file_config(tmp_path, 2**20)), "file")
    memory = MemoryStorage(memory_config(2**20))
    store = await open_storage(stack(memory, files))
    keeper = store.storage.keeper
    assert keeper is not None
    assert await store.put((name(1), b"a" * 100)) == [STORED]
    await store.levels.flush(10)
    (tmp_path / "objects" / path_of(name(1))).unlink()
    files.full = StorageFull("no room")  # so it is not copied there again
    assert await keeper.pin(EngineOwner("me", 1), [name(1)], 600.0, 0.5) == [PinState.PINNED]
    assert memory.statistics()["pinned"] == 1


async def test_a_refused_pin_pins_nothing_in_any_level(open_storage: Open, tmp_path: Path) -> None:
    me, files = EngineOwner("me", 1), FileStorage(file_config(tmp_path, 64 * 4096))
    lower = gated(files, "file")
    store = await open_storage(stack(MemoryStorage(memory_config(64 * 4096)), lower))
    keeper = store.storage.keeper
    assert keeper is not None
    assert await store.put(*((name(i), b"a" * 4096) for i in range(16))) == [STORED] * 16
    await store.levels.flush(10)
    lower.gate.clear()
    assert await store.put(*((name(i), b"a" * 4096) for i in range(16, 24))) == [STORED] * 8
    with pytest.raises(RequestError, match=r"engines\.pin_share"):
        await keeper.pin(me, [name(i) for i in range(24)], 600.0, 0.25)
    assert store.storage.statistics()["pinned"] == 0
    lower.gate.set()
    await store.levels.flush(10)
    assert store.storage.statistics()["pinned"] == 0
    held = await keeper.pin(me, [name(i) for i in range(24)], 600.0, 0.5)
    assert held == [PinState.DURABLE] * 24


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


async def test_each_level_says_whose_objects_it_has_and_for_whom_they_were_evicted(open_storage: Open) -> None:
    first, lower = MemoryStorage(memory_config(300)), MemoryStorage(memory_config(500))
    lower.backend = "lower"
    store = await open_storage(stack(first, lower))
    keeper = store.storage.keeper
    assert keeper is not None
    for number, owner in enumerate("aaabbab"):
        item = Item(name(number), 100, Use(owner=owner))
        assert await store.storage.store([item], None, [store.buffer(100, bytes(100))]) == [STORED]
        await store.levels.flush(10)

    def held(level: str) -> dict[Hashable, tuple[int, dict[Hashable, int]]]:
        of_level = keeper.of_level(level)
        assert of_level is not None
        return {one.owner: (one.objects, dict(one.evicted)) for one in of_level.holdings() if one.objects}

    assert held(first.backend) == {"a": (1, {"b": 2, "a": 1}), "b": (2, {"b": 1})}
    assert held("lower") == {"a": (2, {"a": 1, "b": 1}), "b": (3, {})}
    assert keeper.of_level("none of these") is None
    both = {one.owner: dict(one.evicted) for one in keeper.holdings()}
    assert both == {"a": {"a": 2, "b": 3}, "b": {"b": 1}}, "the store's are the sums of its levels"


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 34])
async def test_loads_that_run_beside_a_purge_bring_nothing_back(open_storage: Open, tmp_path: Path, steps: int) -> None:
    """Blocks that only files have, at the use that copies them up: the purge begins some steps of the loop later."""
    files = FileStorage(file_config(tmp_path, 2**20), unit=1)
    store = await open_storage(stack(MemoryStorage(memory_config(2**20)), files))
    keeper = store.storage.keeper
    assert keeper is not None
    names = [name(i) for i in range(24)]
    assert await store.put(*((one, b"a" * 100) for one in names)) == [STORED] * 24
    await store.levels.flush(10)
    for one in names:
        await store.levels.all_levels[0].storage.quarantine(one)
    await store.get(*((one, 100) for one in names))
    loads = [asyncio.ensure_future(store.get((one, 100))) for one in names]
    for _ in range(steps):
        await asyncio.sleep(0)
    assert (await keeper.purge(Selection())).objects >= 24, "some may be in both levels by now"
    assert await store.storage.exists(names) == [False] * 24
    await asyncio.gather(*loads)
    await store.levels._promotions.running.settled()
    await store.levels.flush(10)
    assert await store.storage.exists(names) == [False] * 24
    assert not [one for one in (tmp_path / "objects").rglob("*") if one.is_file()]
    assert await store.put((names[0], b"b" * 100)) == [STORED], "what is stored after it stays"
    assert await store.storage.exists(names[:1]) == [True]


@pytest.mark.parametrize("what", ["load", "prefetch", "copy", "store", "late store"])
async def test_what_has_read_before_a_purge_commits_nothing_after_it(
    open_storage: Open, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level, "UNKNOWN_S", 0.05)
    monkeypatch.setattr(level, "FLOOR_S", 0.05)
    first, lower = (gated(MemoryStorage(memory_config(2**20)), one) for one in ("first", "lower"))
    store = await open_storage(stack(first, lower, lower=LevelSection(promote=1)))
    keeper, levels = store.storage.keeper, store.levels
    assert keeper is not None
    if above := what in ("load", "prefetch"):
        assert await store.put((name(1), b"a" * 100)) == [STORED]
        await levels.flush(10)
        await first.quarantine(name(1))
    held = {"load": first, "prefetch": first, "copy": lower, "store": first, "late store": lower}[what]
    held.gate.clear()
    running: asyncio.Future[Any]
    if what == "load":
        running = asyncio.ensure_future(store.get((name(1), 100)))
    elif what == "prefetch":
        running = levels.prefetcher.to("first", None).bring([(name(1), 100, 0)])
    else:
        if what == "late store":  # the first level cannot take it
            monkeypatch.setattr(first, "full", StorageFull("no room"))
        running = asyncio.ensure_future(store.put((name(1), b"a" * 100)))
    await until(lambda: held.waiting, "it has read, and is about to commit")
    purging = asyncio.ensure_future(keeper.purge(Selection()))
    for _ in range(5):
        await asyncio.sleep(0)
    held.gate.set()
    await purging
    await running
    if above:
        await levels._promotions.running.settled()
    await levels.flush(10)
    await levels._parts.withdrawn()
    assert [await one._behind.exists([name(1)]) for one in (first, lower)] == [[False]] * 2


@pytest.mark.parametrize("what", ["load", "prefetch", "copy"])
async def test_what_reads_while_a_long_purge_runs_commits_nothing(
    open_storage: Open, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One level is done with the purge while another still has objects."""
    monkeypatch.setattr(keeping, "AT_ONCE", 1)
    monkeypatch.setattr(write_back, "BATCH", 2)
    me = EngineOwner("me", 1)
    first, lower = (gated(MemoryStorage(memory_config(2**20)), one) for one in ("first", "lower"))
    store = await open_storage(stack(first, lower, lower=LevelSection(promote=1)))
    keeper, levels = store.storage.keeper, store.levels
    assert keeper is not None
    names, slots = [name(i) for i in range(40)], [memoryview(bytearray(b"a" * 100)) for _ in range(40)]
    if what == "copy":
        lower.gate.clear()
    assert await levels.store([Item(one, 100, Use(owner=me)) for one in names], None, slots) == [STORED] * 40
    if what != "copy":
        await levels.flush(10)
        for one in names:
            await first.quarantine(one)
    purging = asyncio.ensure_future(keeper.purge(Selection(owner=me)))
    for _ in range(8):
        await asyncio.sleep(0)
    assert not purging.done()
    running: asyncio.Future[Any] = asyncio.ensure_future(asyncio.sleep(0))
    if what == "load":
        running = asyncio.ensure_future(levels.load([Item(names[-1], 100, Use(owner=me))], None, slots[-1:]))
    elif what == "prefetch":
        running = levels.prefetcher.to("first", me).bring([(one, 100, 0) for one in names[-8:]])
    lower.gate.set()
    await purging
    await running
    await levels._promotions.running.settled()
    await levels.flush(10)
    await levels._parts.withdrawn()
    assert [await one._behind.exists(names) for one in (first, lower)] == [[False] * 40] * 2


async def test_neither_a_purge_nor_a_drain_waits_for_ever_for_a_call_that_hangs(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "SETTLE_S", 0.05)
    first, lower = (gated(MemoryStorage(memory_config(2**20)), one) for one in ("first", "lower"))
    store = await open_storage(stack(first, lower, lower=LevelSection(promote=1)))
    keeper, levels = store.storage.keeper, store.levels
    assert keeper is not None
    assert await store.put((name(1), b"a" * 100), (name(2), b"b" * 100)) == [STORED] * 2
    await levels.flush(10)
    await first.quarantine(name(1))
    first.gate.clear()
    await store.get((name(1), 100))
    await until(lambda: first.waiting, "it is about to be copied up, for ever")
    try:
        purged = await wait_for(keeper.purge(Selection(names=frozenset([name(1)]))), 60)
        drained = await wait_for(levels.change("first", leaves=True), 60)
    finally:
        first.gate.set()
    assert (purged.objects, drained.objects) == (1, 0)
    await levels._promotions.running.settled()
    await levels._parts.withdrawn()
    assert await first._behind.exists([name(1), name(2)]) == [False, True]


async def test_a_copy_that_is_made_again_has_the_owner_of_what_is_above(open_storage: Open, tmp_path: Path) -> None:
    me, files = EngineOwner("me", 1), FileStorage(file_config(tmp_path, 2**20))
    store = await open_storage(stack(MemoryStorage(memory_config(2**20)), files))
    keeper = store.storage.keeper
    assert keeper is not None
    slot = memoryview(bytearray(b"a" * 100))
    assert await store.storage.store([Item(name(1), 100, Use(owner=me))], None, [slot]) == [STORED]
    await store.levels.flush(10)
    (path := tmp_path / "objects" / path_of(name(1))).unlink()
    await files.look([name(1)])
    await until(lambda: path.is_file() and files.find([name(1)], None) == [True], "it is copied again")
    await store.levels.flush(10)
    assert (await keeper.purge(Selection(owner=me))).objects == 2
    assert files.find([name(1)], None) == [False]


async def test_a_purge_knows_the_uses_that_have_yet_to_reach_lower_levels(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What files have from an earlier life is its first user's."""
    monkeypatch.setattr("transferd.storage.levels.stack.TOUCH_S", 3600.0)
    me = EngineOwner("me", 1)
    slot = memoryview(bytearray(b"a" * 100))
    earlier = await open_storage(FileStorage(file_config(tmp_path, 2**20)))
    assert await earlier.storage.store([Item(name(1), 100, Use(owner=me))], None, [slot]) == [STORED]
    await earlier.storage.close()
    files = FileStorage(file_config(tmp_path, 2**20))
    store = await open_storage(stack(MemoryStorage(memory_config(2**20)), files))
    assert files.find([name(1)], None) == [True]
    keeper = store.storage.keeper
    assert keeper is not None
    for engine in (EngineOwner("other", 1), me):
        keeper.claim(engine, space_of(name(1)), 0.0)
    assert await store.storage.store([Item(name(2), 100, Use(owner=me))], None, [slot]) == [STORED]
    await until(lambda: not store.levels._touches, "the first use is passed on at once; the next one waits")
    assert await store.storage.store([Item(name(1), 100, Use(owner=me))], None, [slot]) == [STORED]
    assert (await keeper.purge(Selection(owner=me))).objects >= 3
    assert await store.storage.exists([name(1)]) == [False]


@pytest.mark.parametrize("how", ["load", "prefetch"])
async def test_a_copy_that_another_engine_brings_up_stays_its_owners(
    open_storage: Open, tmp_path: Path, how: str
) -> None:
    me, other, files = EngineOwner("me", 1), EngineOwner("other", 1), FileStorage(file_config(tmp_path, 2**20))
    memory = MemoryStorage(memory_config(2**20))
    store = await open_storage(stack(memory, files))
    levels, keeper = store.levels, store.levels.keeper
    slot = memoryview(bytearray(b"a" * 100))
    assert await levels.store([Item(name(1), 100, Use(owner=me))], None, [slot]) == [STORED]
    await levels.flush(10)
    await memory.keeper.purge(Selection())
    if how == "load":
        for _ in range(files.promotes_at):
            [outcome] = await levels.load([Item(name(1), 100, Use(owner=other))], None, [slot])
            assert outcome.found is Found.FOUND
    else:
        await levels.prefetcher.to("memory", other).bring([(name(1), 100, 0)])
    await levels._promotions.running.settled()
    assert memory.find([name(1)], None) == [True]
    assert (await keeper.purge(Selection(owner=other))).objects == 0
    assert (await keeper.purge(Selection(owner=me))).objects == 2
    assert await levels.exists([name(1)]) == [False]


@pytest.mark.parametrize("seed", range(20))
def test_what_purges_hide_is_what_fits_one_since_the_object_was_stored(seed: int) -> None:
    """Against the rule said plainly: each purge is kept, and asked."""
    chance, hidden, said = random.Random(seed), level.Hidden(), list[tuple[int, Selection]]()
    names = [f"{m}/{f}/{g}/{k}/0" for m in ("m", "n%2F") for f in ("f", "h") for g in ("", "a") for k in "xy"] + [
        "plain"
    ]
    stored: dict[str, int] = {}  # since which purge an object there is new

    def drawn() -> Selection:
        some = None if chance.random() < 0.7 else frozenset(chance.sample(names, 3))
        of = chance.choice([None, "m", "n/"]), chance.choice([None, "", "a"])
        return Selection(some, None, *of, space=chance.choice([None, "m/f", "n%2F/h"]))

    for number in range(1, 40):
        hidden.purge(selection := drawn())
        said.append((number, selection))
        for name in chance.sample(names, 6):
            hidden.stored(name)
            stored[name] = number
        if chance.random() < 0.3:  # it began at an earlier purge, perhaps
            hidden.removed(gone := drawn(), began := chance.choice([number, number - 1]))
            stored |= {name: max(began, stored.get(name, 0)) for name in filter(gone.fits, names)}
        assert {name: name in hidden for name in names} == {
            name: any(at > stored.get(name, 0) and one.fits(name) for at, one in said) for name in names
        }


@pytest.mark.parametrize("named", [True, False])
def test_what_is_stored_again_and_used_is_not_hidden_again(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest were: a prompt that all requests begin with was missing again."""
    hidden = level.Hidden()
    monkeypatch.setattr(hidden._anew, "_most", 8)
    names = [name(i) for i in range(20)]
    hidden.purge(Selection(frozenset(names)) if named else Selection())
    assert all(one in hidden for one in names)
    for one in names:
        hidden.stored(one)
        assert names[0] not in hidden
    assert [one for one in names if one in hidden] == ([] if named else names[1:13])
    hidden.purge(Selection(frozenset(names[:1])))
    assert names[0] in hidden


async def test_what_was_purged_from_a_disk_stays_counted_when_the_disk_fails(
    open_storage: Open, tmp_path: Path
) -> None:
    store = disks([tmp_path / "a", tmp_path / "b"])
    harness = await open_storage(stack(MemoryStorage(memory_config(2**20)), gated(store, "file")))
    assert await harness.put(*((name(i), b"a" * 100) for i in range(20))) == [STORED] * 20
    await harness.levels.flush(10)
    assert harness.storage.keeper is not None
    assert (await harness.storage.keeper.purge(Selection())).objects == 40
    store._all[0].fail("it has gone", 60.0)
    assert harness.storage.statistics()["purged"] == 40
