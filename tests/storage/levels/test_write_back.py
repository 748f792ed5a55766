"""What is stored in the first level comes to the lower ones, in order, bounded, and is lost only with its level."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.storage.harness import Harness, Open, memory_config
from tests.support.blobs import promise, prove, put
from tests.support.gated_storage import GatedStorage, gated, stack
from tests.support.waits import until
from transferd.config import LevelSection, Size
from transferd.errors import StorageError, StorageFull, StorageUnavailable
from transferd.storage.base import FOUND, MISSING, STORED, Blob, Found, Item
from transferd.storage.levels import write_back
from transferd.storage.levels.base import Proof
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage

KIB = 1024


def name(i: int) -> str:
    return f"demo/0123456789abcdef/RL-1/{i:02x}/0"


def content(i: int, nbytes: int = KIB) -> bytes:
    return random.Random(i).randbytes(nbytes)


async def two(
    open_storage: Open, capacity: int = 64 * KIB, *, asks: bool = False, **section: object
) -> tuple[Harness, MemoryStorage, GatedStorage]:
    """Memory above a level that the test holds up."""
    first = MemoryStorage(memory_config(capacity))
    lower = gated(MemoryStorage(memory_config(1024 * KIB)), "lower", asks=asks)
    store = await open_storage(stack(first, lower, lower=LevelSection(**section)))  # type: ignore[arg-type]
    return store, first, lower


async def there(lower: GatedStorage, i: int) -> bool:
    return await lower._behind.exists([name(i)]) == [True]


def lost(store: Harness) -> dict[str, int]:
    return {why: n for why, n in store.storage.statistics()["levels"][1]["lost_for"].items() if n}


async def test_a_store_is_answered_before_the_lower_level_has_it_and_then_it_has_it(open_storage: Open) -> None:
    store, _, lower = await two(open_storage)
    lower.gate.clear()
    assert await store.put(*((name(i), content(i)) for i in range(8))) == [STORED] * 8
    assert store.storage.statistics()["levels"][1]["pending_bytes"] == 8 * KIB
    lower.gate.set()
    await store.levels.flush(10)
    assert [await there(lower, i) for i in range(8)] == [True] * 8
    assert lower.stores == [name(i) for i in range(8)], "root first"
    assert store.storage.statistics()["levels"][1]["pending_bytes"] == 0
    assert not store.levels.unsaved


@pytest.mark.parametrize("full", [False, True], ids=["much room", "nearly all of it is taken"])
async def test_copies_wait_for_a_pause_between_loads_while_there_is_much_room(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    monkeypatch.setattr(write_back, "LEISURE_S", 3600.0)
    monkeypatch.setattr(write_back, "GIVE_WAY_S", 0.0)
    store, _, lower = await two(open_storage, write_back_bytes=Size(8 * KIB))
    with store.levels._parts.traffic:  # as if a load ran that does not end
        assert await store.put(*((name(i), content(i)) for i in range(8 if full else 3))) == [STORED] * (
            8 if full else 3
        )
        if full:
            await until(lambda: len(lower.stores) >= 4, "it copies until there is room again")
        else:
            for _ in range(50):  # more turns of the loop than a copy takes
                await asyncio.sleep(0)
            assert not lower.stores
    await until(lambda: not store.levels.unsaved, "in the pause, it copies the rest")
    assert lower.stores == [name(i) for i in range(8 if full else 3)]


@pytest.mark.parametrize("asks", [False, True], ids=["known", "remote"])
async def test_a_burst_larger_than_the_first_level_loses_nothing(open_storage: Open, asks: bool) -> None:
    """A prototype without the hold answered 64 and could load 12."""
    store, _, lower = await two(open_storage, 16 * KIB, asks=asks)
    loop = asyncio.get_running_loop()
    lower.gate.clear()
    loop.call_later(0.05, lower.gate.set)

    async def task(number: int) -> list[bool]:
        use = Use()
        blobs = [Blob(name(8 * number + i), store.buffer(KIB, content(8 * number + i)), use, i) for i in range(8)]
        return [outcome is STORED for outcome in await put(store.storage, blobs)]

    answers = await asyncio.gather(*(task(number) for number in range(16)))
    assert all(all(one) for one in answers)
    got = await store.get(*((name(i), KIB) for i in range(128)))
    assert got == [(outcome, content(i)) for i, (outcome, _) in enumerate(got)]
    assert {outcome.found for outcome, _ in got} == {Found.FOUND}
    assert not lost(store)


async def test_a_store_waits_for_room_until_half_of_its_time_and_the_copy_is_queued_again_later(
    open_storage: Open,
) -> None:
    store, _, lower = await two(open_storage, write_back_bytes=Size(4 * KIB))
    lower.gate.clear()
    assert await store.put(*((name(i), content(i)) for i in range(4))) == [STORED] * 4
    use = Use()
    use.until = asyncio.get_running_loop().time() + 0.2  # the system's clock is the loop's
    use.until = store.levels._now() + 0.2
    assert await put(store.storage, [Blob(name(9), store.buffer(KIB, content(9)), use)]) == [STORED]
    assert lost(store) == {"queue_full": 1}
    lower.gate.set()
    await store.levels.flush(10)
    assert not await there(lower, 9)
    assert store.levels.stored([name(9)], Use()) == [True], "the next task need not store it"
    await store.levels.flush(10)
    assert await there(lower, 9)


async def test_a_level_that_does_not_answer_is_waited_for_and_costs_stores_nothing(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "RETRY_S", 0.01)
    store, _, lower = await two(open_storage, write_back_bytes=Size(4 * KIB))
    lower.error = StorageUnavailable("down")
    assert await store.put(*((name(i), content(i)) for i in range(4))) == [STORED] * 4
    await until(lambda: store.levels.write_backs[0]._down, "the copy has failed")
    assert await store.put(*((name(i), content(i)) for i in range(4, 12))) == [STORED] * 8
    assert lost(store) == {"queue_full": 8}, "what waits already stays, and is what was promised first"
    lower.error = None
    await until(lambda: not store.levels.unsaved, "it is copied when the level answers again")
    assert [await there(lower, i) for i in range(12)] == [True] * 4 + [False] * 8
    assert await store.get(*((name(i), KIB) for i in range(12))) == [(FOUND, content(i)) for i in range(12)]


async def test_copies_that_wait_for_a_dead_level_are_given_up_after_a_time(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "RETRY_S", 0.01)
    store, first, lower = await two(open_storage, 8 * KIB, write_back_max_age=0.05)
    lower.error = StorageUnavailable("down")
    assert await store.put(*((name(i), content(i)) for i in range(4))) == [STORED] * 4
    await until(lambda: not store.levels.unsaved, "given up")
    assert lost(store) == {"down": 4}
    assert await store.put(*((name(i), content(i)) for i in range(10, 18))) == [STORED] * 8
    assert first.find([name(i) for i in range(4)], None) == [False] * 4, "they can be evicted now"


@pytest.mark.parametrize(("error", "why"), [(StorageFull("no room"), "full"), (StorageError("refused"), "failed")])
async def test_a_level_that_refuses_an_object_is_asked_three_times(
    open_storage: Open, error: StorageError, why: str
) -> None:
    store, _, lower = await two(open_storage)
    lower.full = error
    assert await store.put((name(1), content(1))) == [STORED]
    await until(lambda: not store.levels.unsaved, "given up")
    assert lower.stores == [name(1)] * 3
    assert lost(store) == {why: 1}
    assert await store.get((name(1), KIB)) == [(FOUND, content(1))]


async def test_an_object_that_is_quarantined_while_it_is_copied_does_not_return(open_storage: Open) -> None:
    store, _, lower = await two(open_storage)
    lower.gate.clear()
    assert await store.put((name(1), content(1)), (name(2), content(2))) == [STORED] * 2
    await until(lambda: lower.waiting, "the copy runs")
    await store.levels.quarantine_at(name(1), 0)
    lower.gate.set()
    await store.levels.flush(10)
    assert [await there(lower, i) for i in (1, 2)] == [False, True]
    assert [outcome for outcome, _ in await store.get((name(1), KIB))] == [MISSING]
    assert lost(store) == {"quarantined": 1}
    assert not store.levels.all_levels[1].bad


async def test_a_damaged_copy_below_is_made_again_from_the_one_above(open_storage: Open) -> None:
    store, _, lower = await two(open_storage)
    assert await store.put((name(1), content(1))) == [STORED]
    await store.levels.flush(10)
    await store.levels.quarantine_at(name(1), 1)
    assert await store.get((name(1), KIB)) == [(FOUND, content(1))]
    await store.levels.flush(10)
    assert lower.stores == [name(1)] * 2
    assert await there(lower, 1)


async def test_a_close_gives_up_what_a_dead_level_has_not_taken_and_says_so(open_storage: Open) -> None:
    store, _, lower = await two(open_storage)
    lower.error = StorageUnavailable("down")
    assert await store.put((name(1), content(1))) == [STORED]
    await until(lambda: store.levels.write_backs[0]._down, "the copy has failed")
    await store.levels.flush(10)
    await store.storage.close()
    assert lost(store) == {"close": 1}


async def test_a_level_that_is_written_through_has_the_object_before_the_answer(open_storage: Open) -> None:
    store, _, lower = await two(open_storage, write="through")
    lower.gate.clear()
    blobs = [Blob(name(i), store.buffer(KIB, content(i)), Use()) for i in range(3)]
    storing = asyncio.ensure_future(promise(store.storage, blobs[1:2]))
    await until(lambda: lower.waiting, "the copy runs")
    assert not storing.done()
    lower.gate.set()
    assert [type(one) for one in await storing] == [Proof]
    assert await there(lower, 1)
    lower.full = StorageFull("no room")
    assert await promise(store.storage, blobs[2:]) == [lower.full], "the answer speaks of that level, too"


async def test_a_use_that_must_be_shared_waits_for_the_first_level_that_others_see(open_storage: Open) -> None:
    first = MemoryStorage(memory_config(64 * KIB))
    pool = gated(MemoryStorage(memory_config(1024 * KIB)), "object", asks=True)
    store = await open_storage(stack(first, pool))
    use = Use()
    use.shared = True
    assert store.levels.owes(use)
    assert not store.levels.owes(Use()), "others need not wait"
    blob = Blob(name(1), store.buffer(KIB, content(1)), use)
    pool.gate.clear()
    storing = asyncio.ensure_future(promise(store.storage, [blob]))
    await until(lambda: pool.waiting, "the copy runs")
    assert store.levels.stored([name(1)], use) == [True], "it is above, so its slots are back"
    again = asyncio.ensure_future(prove(store.storage, [blob]))
    await asyncio.sleep(0.02)
    assert not storing.done()
    assert not again.done(), "others do not see it yet"
    pool.gate.set()
    assert [type(one) for one in await storing + await again] == [Proof] * 2
    assert await there(pool, 1)


async def test_a_chain_longer_than_the_first_level_keeps_its_root_there_and_its_tail_goes_below(
    open_storage: Open,
) -> None:
    store, first, lower = await two(open_storage, 8 * KIB)
    use = Use()
    blobs = [Blob(name(i), store.buffer(KIB, content(i)), use, i) for i in range(20)]
    assert await put(store.storage, blobs) == [STORED] * 20
    await store.levels.flush(10)
    assert first.find([name(i) for i in range(20)], None) == [True] * 8 + [False] * 12
    assert [await there(lower, i) for i in range(20)] == [True] * 20
    got = await store.get(*((name(i), KIB) for i in range(20)))
    assert [data for _, data in got] == [content(i) for i in range(20)]


def test_the_memory_of_a_copy_takes_objects_of_any_length() -> None:
    carry = write_back.Carry([])
    assert carry.fitting([write_back.CARRY_BYTES * 2, 1]) == 1
    assert carry.fitting([4096] * 3) == 3
    small, large = carry.slots([10, 5000])
    assert (small.nbytes, large.nbytes) == (10, 5000)
    [huge] = carry.slots([write_back.CARRY_BYTES + 1])
    assert huge.nbytes == write_back.CARRY_BYTES + 1
    small.release()
    large.release()
    huge.release()
    carry.close()
    assert carry.nbytes == 0


async def test_a_touch_of_a_held_object_counts_when_it_is_released(open_storage: Open) -> None:
    store, first, lower = await two(open_storage, 4 * KIB)
    lower.gate.clear()
    for i in range(2):
        assert await store.put((name(i), content(i))) == [STORED]
    await store.get((name(0), KIB))  # while both are held
    lower.gate.set()
    await store.levels.flush(10)
    store.levels.touch([Item(name(0), KIB, store.levels._in_order([Item(name(0), KIB)])[0].use, 0)])
    for i in (10, 11, 12):
        assert await store.put((name(i), content(i))) == [STORED]
        await store.levels.flush(10)
    assert first.find([name(0), name(1)], None) == [True, False]


async def test_an_object_stored_anew_with_another_length_stays(open_storage: Open) -> None:
    """While a copy of the damaged one is under way, a read of its length for the other level would remove it."""
    between, last = (gated(MemoryStorage(memory_config(64 * KIB)), which) for which in ("between", "last"))
    store = await open_storage(stack(MemoryStorage(memory_config(64 * KIB)), between, last))
    between.gate.clear()
    assert await store.put((name(0), content(0))) == [STORED]
    await until(lambda: last.index.find([name(0)], None) == [True], "it is copied to the last one")
    assert [outcome for outcome, _ in await store.get((name(0), 900))] == [MISSING]
    assert await store.put((name(0), content(1, 900))) == [STORED]
    await until(lambda: not store.levels.write_backs[1].pending_bytes, "it is copied to the last one again")
    assert await store.get((name(0), 900)) == [(FOUND, content(1, 900))]
    between.gate.set()
    await store.levels.flush(10)
    assert await store.get((name(0), 900)) == [(FOUND, content(1, 900))]
    assert not store.levels.unsaved
    assert not any(back.pending_bytes for back in store.levels.write_backs)
