"""Blocks are brought up before their use: once, bounded, kept until then, and giving way."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.storage.harness import STACKS, Backend, Harness, Open, memory_config
from tests.support.gated_storage import GatedStorage, gated, stack
from tests.support.waits import until
from transferd.blocks.formats import FOOTER_BYTES, seal, stamp_of_name
from transferd.config import LevelSection
from transferd.errors import RequestError, StorageUnavailable
from transferd.runtime import loop_turns
from transferd.storage.base import STORED, Found, Item
from transferd.storage.joined import JoinedStorage
from transferd.storage.keeping import AT_ONCE
from transferd.storage.levels import prefetch as module
from transferd.storage.levels import write_back
from transferd.storage.levels.prefetch import StackBringing
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.levels.write_back import CARRY_BYTES
from transferd.storage.memory import MemoryStorage
from transferd.storage.selection import Selection
from transferd.tasks import Warmed

NBYTES = 2000
ALL = Selection()


def name(i: int, model: str = "demo") -> str:
    return f"{model}/0123456789abcdef/RL-1/{i:040x}/0"


def content(i: int, model: str = "demo") -> bytes:
    """An object with its footer, as stores make them."""
    data = bytearray(random.Random(i).randbytes(NBYTES))
    seal(memoryview(data), NBYTES - FOOTER_BYTES, stamp_of_name(name(i, model)))
    return bytes(data)


async def two(
    open_storage: Open, count: int, capacity: int = 1024**2, *, promote: int = 0
) -> tuple[Harness, GatedStorage]:
    """Memory above a lower level, which alone has objects 0 to count."""
    lower = gated(MemoryStorage(memory_config(1024**2)), "lower")
    store = await open_storage(
        stack(MemoryStorage(memory_config(capacity)), lower, lower=LevelSection(promote=promote))
    )
    for i in range(count):
        assert await store.put((name(i), content(i))) == [STORED]
    await store.levels.flush(10)
    for i in range(count):
        await store.levels.all_levels[0].storage.quarantine(name(i))
    return store, lower


def begin(store: Harness, to: str = "memory") -> StackBringing:
    assert isinstance(store.storage, LevelsStorage)
    return store.storage.prefetcher.to(to, None)


def objects(which: Sequence[int]) -> list[tuple[str, int, int]]:
    return [(name(i), NBYTES, depth) for depth, i in enumerate(which)]


async def waits(storage: GatedStorage, calls: int = 1) -> None:
    """Until so many calls wait at the gate."""
    for _ in range(10_000):
        if storage.waiting >= calls:
            return
        await asyncio.sleep(0)
    pytest.fail("the calls do not come")


def row(store: Harness, key: str, level: int = 0) -> int:
    number: int = store.storage.statistics()["levels"][level][key]
    return number


async def fetch(store: Harness, i: int) -> int:
    """Load an object and compare its bytes. Returns the level that gave it."""
    [(outcome, data)] = await store.get((name(i), NBYTES))
    assert data == content(i)
    return outcome.level


async def test_a_prefetch_brings_lower_objects_and_counts_present_ones(open_storage: Open) -> None:
    store, lower = await two(open_storage, 40)
    assert await store.put((name(99), content(99))) == [STORED]
    one = begin(store)
    await one.bring(objects([*range(40), 99, 77]))
    assert one.there([name(i) for i in (0, 39, 99, 77)]) == [True, True, True, False]
    assert one.error is None
    assert one.brought == {name(i): NBYTES for i in range(40)}
    assert (row(store, "prefetched"), row(store, "promoted")) == (40, 0)
    assert [await fetch(store, i) for i in range(40)] == [0] * 40
    assert sorted(lower.loads) == sorted(name(i) for i in range(40)), "each was read once from below"


async def test_a_prefetch_keeps_objects_until_their_first_use(open_storage: Open) -> None:
    store, _ = await two(open_storage, 4, capacity=16 * NBYTES)
    one = begin(store)
    await one.bring(objects(range(4)))
    assert row(store, "kept_bytes") == 4 * NBYTES
    for i in range(100, 140):
        assert (await store.put((name(i), content(i))))[0].found.value in ("stored", "exists")
    assert one.there([name(i) for i in range(4)]) == [True] * 4
    assert await fetch(store, 0) == 0
    assert row(store, "kept_bytes") == 3 * NBYTES
    for i in range(200, 240):
        await store.put((name(i), content(i)))
    assert one.there([name(i) for i in range(4)]) == [False, True, True, True]
    one.release()
    assert row(store, "kept_bytes") == 0
    for i in range(300, 340):
        await store.put((name(i), content(i)))
    assert one.there([name(i) for i in range(4)]) == [False] * 4


async def test_two_prefetches_keep_an_object_until_both_have_ended(open_storage: Open) -> None:
    store, _ = await two(open_storage, 1)
    one, other = begin(store), begin(store)
    await asyncio.gather(one.bring(objects([0])), other.bring(objects([0])))
    assert (row(store, "prefetched"), row(store, "kept_bytes")) == (1, NBYTES)
    one.release()
    assert row(store, "kept_bytes") == NBYTES
    other.release()
    assert row(store, "kept_bytes") == 0


async def test_what_a_prefetch_kept_is_let_go_in_turns_of_the_loop(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65,536 blocks of eight ranks stopped it for more than a second."""
    store, _ = await two(open_storage, 0)
    count = 1100
    assert await store.put(*((name(i), b"") for i in range(count))) == [STORED] * count
    one, all_ = begin(store), store.levels.prefetcher
    await one.bring([(name(i), 0, i) for i in range(count)])
    assert len(all_.kept) == count
    with monkeypatch.context() as here:
        here.setattr(loop_turns, "now", itertools.count().__next__)  # each piece takes as long as a turn may
        one.release()
        assert len(all_.kept) == count - AT_ONCE
        await until(lambda: not all_.kept, "others have had their turns")
    assert row(store, "kept_bytes") == 0


async def test_a_prefetch_is_bounded_in_bytes(open_storage: Open) -> None:
    store, _ = await two(open_storage, 12, capacity=16 * NBYTES)
    one = begin(store)
    await one.bring(objects(range(12)))
    assert one.there([name(i) for i in range(12)]) == [True] * 4 + [False] * 8
    assert one.error is not None
    assert (one.error.reason, "25%" in str(one.error)) == ("storage_full", True)
    again = begin(store)
    await again.bring(objects([11]))
    assert again.there([name(11)]) == [False], "all prefetches together"
    one.release()
    last = begin(store)
    await last.bring(objects([11]))
    assert last.there([name(11)]) == [True]


async def test_an_object_that_left_and_was_brought_again_is_kept_again(open_storage: Open) -> None:
    store, _ = await two(open_storage, 1, capacity=16 * NBYTES)
    one, other = begin(store), begin(store)
    await one.bring(objects([0]))
    await store.levels.all_levels[0].storage.quarantine(name(0))
    await other.bring(objects([0]))
    assert row(store, "kept_bytes") == NBYTES
    for i in range(100, 140):
        await store.put((name(i), content(i)))
    assert other.there([name(0)]) == [True]
    other.release()
    assert row(store, "kept_bytes") == NBYTES, "the first prefetch has not ended"
    one.release()
    assert row(store, "kept_bytes") == 0


async def test_an_object_that_comes_to_a_faster_level_is_kept_there(open_storage: Open) -> None:
    store, _ = await two(open_storage, 1, capacity=16 * NBYTES)
    low, high = begin(store, "lower"), begin(store)
    await low.bring(objects([0]))
    assert (row(store, "kept_bytes"), row(store, "kept_bytes", 1)) == (0, NBYTES)
    await high.bring(objects([0]))
    assert (row(store, "kept_bytes"), row(store, "kept_bytes", 1)) == (NBYTES, 0)
    for i in range(100, 140):
        await store.put((name(i), content(i)))
    assert high.there([name(0)]) == [True]


async def test_what_has_left_takes_no_room_of_prefetches(open_storage: Open) -> None:
    store, _ = await two(open_storage, 4, capacity=16 * NBYTES)
    one, other = begin(store), begin(store)
    await one.bring(objects(range(4)))
    await store.levels.keeper.purge(ALL)
    for i in range(10, 14):
        assert await store.put((name(i), content(i))) == [STORED]
    await store.levels.flush(10)
    for i in range(10, 14):
        await store.levels.all_levels[0].storage.quarantine(name(i))
    await other.bring(objects(range(10, 14)))
    assert other.error is None
    assert other.there([name(i) for i in range(10, 14)]) == [True] * 4
    assert row(store, "kept_bytes") == 4 * NBYTES
    one.release()
    assert row(store, "kept_bytes") == 4 * NBYTES


async def test_a_prefetch_evicts_no_held_object_of_a_full_level(open_storage: Open) -> None:
    store, lower = await two(open_storage, 4, capacity=8 * NBYTES)
    first = store.levels.all_levels[0].storage
    for i in range(10, 18):
        assert await store.put((name(i), content(i))) == [STORED]
        assert first.index.hold(name(i)) == NBYTES
    await store.levels.flush(10)
    for i in range(10, 18):
        first.index.hold(name(i))
    one = begin(store)
    await one.bring(objects(range(4)))
    assert one.brought == {}
    assert one.error is not None
    assert one.error.reason == "storage_full"
    assert first.index.find([name(i) for i in range(10, 18)], None) == [True] * 8
    assert lower.waiting == 0


async def test_a_load_joins_the_read_of_a_prefetch(open_storage: Open) -> None:
    lower = gated(MemoryStorage(memory_config(1024**2)), "lower")
    storage = stack(MemoryStorage(memory_config(1024**2)), lower, lower=LevelSection(promote=0))
    store = await open_storage(storage)
    assert await store.put((name(0), content(0))) == [STORED]
    await storage.flush(10)
    await storage.all_levels[0].storage.quarantine(name(0))
    storage.all_levels[1].storage = JoinedStorage(lower, storage._threads)  # type: ignore[abstract]
    lower.gate.clear()
    one = begin(store)
    bringing = one.bring(objects([0]))
    await waits(lower)
    loading = asyncio.ensure_future(fetch(store, 0))
    for _ in range(20):
        await asyncio.sleep(0)
    assert lower.waiting == 1, "one call for both"
    lower.gate.set()
    assert await loading == 1
    await bringing
    assert lower.loads == [name(0)]
    assert one.there([name(0)]) == [True]


async def test_a_load_that_comes_first_brings_the_block_up_itself(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH", 1)
    store, lower = await two(open_storage, 2)
    lower.gate.clear()
    one = begin(store)
    bringing = one.bring(objects([0, 1]))
    await waits(lower)
    loading = asyncio.ensure_future(fetch(store, 1))
    await waits(lower, 2)
    lower.gate.set()
    assert await loading == 1
    await bringing
    assert sorted(lower.loads) == [name(0), name(1)], "each was read once"
    assert one.there([name(0), name(1)]) == [True, True]
    assert await fetch(store, 1) == 0
    assert isinstance(store.storage, LevelsStorage)
    assert not store.storage._promotions.awaited


async def test_a_stop_ends_it_after_the_running_batch(open_storage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 2)
    store, lower = await two(open_storage, 6)
    lower.gate.clear()
    one = begin(store)
    bringing = one.bring(objects(range(6)))
    await waits(lower)
    one.stop()
    lower.gate.set()
    await bringing
    assert row(store, "kept_bytes") == 0, "a stopped one keeps nothing"
    assert lower.loads == [name(0), name(1)]
    one.release()


async def test_a_damaged_copy_does_not_come_up(open_storage: Open) -> None:
    lower = MemoryStorage(memory_config(1024**2))
    middle = gated(MemoryStorage(memory_config(1024**2)), "middle")
    store = await open_storage(stack(MemoryStorage(memory_config(1024**2)), middle, lower))
    bad = bytearray(content(0))
    bad[7] ^= 1
    assert await store.put((name(0), bytes(bad)), (name(1), content(1))) == [STORED, STORED]
    await store.levels.flush(10)
    first, _, last = store.levels.all_levels
    for i in (0, 1):
        await first.storage.quarantine(name(i))
    middle.gate.clear()  # else it is copied down again
    await last.storage.quarantine(name(0))
    good = [(name(0), content(0))]
    [outcome] = await lower.store([store_item(name(0))], None, [store.buffer(NBYTES, good[0][1])])
    assert outcome is STORED
    middle.gate.set()
    await store.levels.flush(10)
    one = begin(store)
    await one.bring(objects([0, 1]))
    assert one.there([name(0), name(1)]) == [True, True], "the next level has a good copy"
    assert row(store, "corrupt", 1) == 1
    assert [await fetch(store, i) for i in (0, 1)] == [0, 0]


def store_item(of: str) -> Item:
    return Item(of, NBYTES)


async def test_a_purge_reaches_what_is_being_brought(open_storage: Open) -> None:
    store, lower = await two(open_storage, 1)
    lower.gate.clear()
    one = begin(store)
    bringing = one.bring(objects([0]))
    await waits(lower)
    keeper = store.storage.keeper
    assert keeper is not None
    purging = asyncio.ensure_future(keeper.purge(ALL))
    for _ in range(10):
        await asyncio.sleep(0)
    lower.gate.set()
    await asyncio.gather(bringing, purging)
    assert one.there([name(0)]) == [False]
    assert await store.storage.exists([name(0)]) == [False]


async def test_a_dead_level_below_is_an_error(open_storage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store, lower = await two(open_storage, 2)
    lower.error = StorageUnavailable("it does not answer")
    one = begin(store)
    await one.bring(objects([0, 1]))
    assert one.there([name(0), name(1)]) == [False, False]
    assert one.error is not None
    assert one.error.reason == "storage_unavailable"
    lower.error = None
    monkeypatch.setattr(lower, "unusable", lambda: "its server is gone")
    out = begin(store)
    await out.bring(objects([0, 1]))
    assert "its server is gone" in str(out.error)
    monkeypatch.undo()
    again = begin(store)
    await again.bring(objects([0, 1]))
    assert again.there([name(0), name(1)]) == [True, True]


async def test_a_read_that_hangs_stops_no_other_prefetch(open_storage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    middle, last = gated(MemoryStorage(memory_config(1024**2)), "middle"), MemoryStorage(memory_config(1024**2))
    store = await open_storage(stack(MemoryStorage(memory_config(1024**2)), middle, last))
    for i in range(4):
        assert await store.put((name(i), content(i))) == [STORED]
    await store.levels.flush(10)
    first, second, third = store.levels.all_levels
    for i in range(4):
        await first.storage.quarantine(name(i))
        await (third if i < 3 else second).storage.quarantine(name(i))  # 0, 1 and 2 are in the middle alone, 3 below
    assert isinstance(store.storage, LevelsStorage)
    carry = store.storage.prefetcher.carry
    middle.gate.clear()
    for i in (0, 1):
        with monkeypatch.context() as patched:
            patched.setattr(write_back, "HANGS_S", 0.01)
            hangs = begin(store)
            await hangs.bring(objects([i]))
        assert isinstance(hangs.error, StorageUnavailable)
        assert "has not answered a read" in str(hangs.error)
        if i == 0:
            other = begin(store)
            await other.bring(objects([3]))
            assert other.there([name(3)]) == [True], "another level answers"
    await (full := begin(store)).bring(objects([2]))
    assert "2 earlier reads have not ended" in str(full.error)
    assert middle.waiting == 2, "it has not asked"
    assert (carry.nbytes, carry.hanging_bytes) == (0, 2 * CARRY_BYTES)
    middle.gate.set()
    await store.storage._parts.late.settled()
    await asyncio.sleep(0)
    assert carry.hanging_bytes == 0, "what hung has given its memory back"
    again = begin(store)
    await again.bring(objects([0, 1, 2]))
    assert again.error is None
    assert [await fetch(store, i) for i in range(4)] == [0] * 4


async def test_a_level_that_hangs_in_what_it_is_brought_stops_no_other_prefetch(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    middle = gated(MemoryStorage(memory_config(1024**2)), "middle")
    store = await open_storage(
        stack(MemoryStorage(memory_config(1024**2)), middle, MemoryStorage(memory_config(1024**2)))
    )
    for i in range(3):
        assert await store.put((name(i), content(i))) == [STORED]
    await store.levels.flush(10)
    for level in store.levels.all_levels[:2]:
        for i in range(3):
            await level.storage.quarantine(name(i))
    middle.gate.clear()
    hangs = begin(store, "middle")
    with monkeypatch.context() as patched:
        patched.setattr(write_back, "HANGS_S", 0.01)
        await hangs.bring(objects([0]))
    assert "has not answered a store" in str(hangs.error)
    await (again := begin(store, "middle")).bring(objects([1]))
    assert "stores to it do not end" in str(again.error), "it is not asked again"
    await (other := begin(store)).bring(objects([1]))
    assert other.there([name(1)]) == [True], "another level takes it"
    assert middle.waiting == 1
    middle.gate.set()
    await until(lambda: not store.levels.all_levels[1].stores.hanging, "it answers")
    await (last := begin(store, "middle")).bring(objects([2]))
    assert last.error is None
    assert await middle._behind.exists([name(0), name(2)]) == [True, True]


async def test_levels_that_it_cannot_bring_to(open_storage: Open) -> None:
    lower = gated(MemoryStorage(memory_config(1024**2)), "pool", asks=True)
    store = await open_storage(stack(MemoryStorage(memory_config(1024**2)), lower))
    with pytest.raises(RequestError, match="it has memory, pool") as refused:
        begin(store, "disk")
    assert refused.value.reason == "unknown_level"
    with pytest.raises(RequestError) as refused:
        begin(store, "pool")
    assert refused.value.reason == "backend_cannot"
    assert isinstance(store.storage, LevelsStorage)
    with pytest.raises(RequestError) as refused:
        await store.storage.prefetcher.warm(ALL, 10**9, "memory", None)
    assert refused.value.reason == "backend_cannot"


async def test_a_warm_up_brings_the_newest_into_free_room_and_keeps_nothing(open_storage: Open) -> None:
    store, _ = await two(open_storage, 12, capacity=8 * NBYTES)
    assert await store.put((name(50), content(50))) == [STORED]
    await store.levels.flush(10)
    for i in (3, 4, 5):  # the newest are 5, 4, 3, then 50
        assert await fetch(store, i) == 1
    assert isinstance(store.storage, LevelsStorage)
    await store.storage._promotions.running.settled()
    store.storage._touch_now()
    warm, evicted = store.storage.prefetcher.warm, row(store, "evictions")
    assert await warm(ALL, 2 * NBYTES + 1, "memory", None) == Warmed("memory", 2, 2 * NBYTES)
    first = store.levels.all_levels[0].storage
    assert first.index.find([name(i) for i in (5, 4, 3, 50)], None) == [True, True, False, True]
    assert await warm(ALL, 10**9, "memory", None) == Warmed("memory", 5, 5 * NBYTES)
    assert first.index.find([name(50)], None) == [True], "nothing was evicted for it"
    assert (row(store, "kept_bytes"), row(store, "evictions"), row(store, "prefetched")) == (0, evicted, 7)
    assert store.storage.statistics()["warming_bytes"] == 0
    assert await warm(Selection(model="other"), 10**9, "memory", None) == Warmed("memory")


async def test_a_close_ends_prefetches(open_storage: Open) -> None:
    store, lower = await two(open_storage, 2)
    lower.gate.clear()
    one = begin(store)
    bringing = one.bring(objects([0, 1]))
    await waits(lower)
    closing = asyncio.ensure_future(store.storage.close())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()
    lower.gate.set()
    await asyncio.gather(closing, bringing)


@pytest.mark.parametrize("backend", STACKS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("seed", range(2))
async def test_any_order_of_calls_over_stacks_delivers_the_right_bytes(
    open_storage: Open, tmp_path: Path, backend: Backend, seed: int
) -> None:
    """Stores, loads, losses of the first level, prefetches, releases and purges at the same time."""
    chance = random.Random(seed)
    store = await open_storage(backend.make(tmp_path, 200 * NBYTES))
    running: list[StackBringing] = []
    for i in range(30):
        await store.put((name(i), content(i)))
    await store.levels.flush(10)

    async def step() -> None:
        which = [chance.randrange(30) for _ in range(chance.randint(1, 12))]
        match chance.randrange(5):
            case 0:
                running.append(one := begin(store))
                await one.bring(objects(list(dict.fromkeys(which))))
            case 1 if running:
                one = running.pop(chance.randrange(len(running)))
                one.stop()
                one.release()
            case 2:
                await store.levels.all_levels[0].storage.quarantine(name(which[0]))
            case 3:
                await store.put((name(which[0]), content(which[0])))
            case _:
                for i, (outcome, data) in zip(which, await store.get(*((name(i), NBYTES) for i in which)), strict=True):
                    assert outcome.found is not Found.FOUND or data == content(i)

    for _ in range(40):
        await asyncio.gather(*(step() for _ in range(3)))
    for one in running:
        one.release()
    last = begin(store)
    await last.bring(objects(range(30)))
    await store.levels.flush(10)
    there = last.there([name(i) for i in range(30)])
    for i, (outcome, data) in enumerate(await store.get(*((name(i), NBYTES) for i in range(30)))):
        assert (outcome.found is Found.FOUND) >= there[i]
        assert outcome.found is not Found.FOUND or data == content(i)
    assert last.error is None or last.error.reason == "storage_full"
    assert sum(there) >= 10
    assert row(store, "kept_bytes") == 0
