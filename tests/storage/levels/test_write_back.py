"""What is stored in the first level comes to the lower ones, in order, bounded, and is lost only with its level."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from tests.storage.harness import Harness, Open, memory_config
from tests.support.blobs import promise, prove, put
from tests.support.gated_storage import GatedStorage, gated, stack
from tests.support.waits import until
from transferd.config import LevelSection, Size
from transferd.errors import StorageError, StorageFull, StorageUnavailable
from transferd.storage.base import FOUND, MISSING, STORED, Blob, Found, Item, Outcome, as_chain
from transferd.storage.levels import stack as stack_module
from transferd.storage.levels import storing, sweep, write_back
from transferd.storage.levels.base import Proof
from transferd.storage.levels.copying import CopyDown
from transferd.storage.levels.write_back import CARRY_BYTES
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.storage.selection import Selection

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
    assert store.levels.stored([name(9)], Use()) == [True], "the next task need not store it"
    await store.levels.flush(10)
    assert await there(lower, 9)


async def test_a_store_that_postpones_its_copy_does_not_wait_for_room(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "TOUCH_S", 3600.0)  # its use is passed on when the test says so, not before
    store, _, lower = await two(open_storage, write_back_bytes=Size(4 * KIB), write_back="postpone")
    sweep = store.levels.write_backs[0].sweep
    await until(lambda: not sweep.running, "the first sweep, of nothing, is over")
    lower.gate.clear()
    assert await store.put(*((name(i), content(i)) for i in range(4))) == [STORED] * 4
    assert await store.put((name(9), content(9))) == [STORED], "a store without a deadline would wait ten seconds"
    assert lost(store) == {"queue_full": 1}
    lower.gate.set()
    await store.levels.flush(10)
    assert await there(lower, 9), "a stop copies what had no room, too, though the next sweep is due in a minute"


async def test_a_level_that_does_not_answer_is_waited_for_and_costs_stores_nothing(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "RETRY_S", 0.01)
    monkeypatch.setattr(stack_module, "TOUCH_S", 3600.0)  # their use would queue them when the level answers again
    store, _, lower = await two(open_storage, write_back_bytes=Size(4 * KIB))
    lower.error = StorageUnavailable("down")
    assert await store.put(*((name(i), content(i)) for i in range(4))) == [STORED] * 4
    await until(lambda: store.levels.write_backs[0].refusal, "the copy has failed")
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


async def test_waiting_copies_are_given_up_in_turns_of_the_loop_and_made_later(open_storage: Open) -> None:
    """60,000 that waited stopped the loop for 0.6 s: for a purge, a drain, or a level that was silent for long."""
    store, _, lower = await two(open_storage)
    lower.gate.clear()
    count = 2500
    assert await store.put(*((name(i), b"") for i in range(count))) == [STORED] * count
    (back,) = store.levels.write_backs
    await until(lambda: lower.waiting, "the first ones are under way")
    left = len(back._queue)
    withdrawing = asyncio.ensure_future(back.withdraw("drained"))
    await asyncio.sleep(0)
    assert 0 < len(back._queue) < left, "others have their turn"
    await withdrawing
    assert not back._queue
    assert lost(store) == {"drained": left}
    lower.gate.set()
    await store.levels.flush(30)
    assert await lower._behind.exists([name(i) for i in range(count)]) == [True] * count


@pytest.mark.parametrize(("kind", "why"), [(StorageFull, "full"), (StorageError, "failed")])
async def test_an_object_that_a_level_never_takes_is_offered_once(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch, kind: type[StorageError], why: str
) -> None:
    monkeypatch.setattr(stack_module, "TOUCH_S", 3600.0)  # the next use offers it again
    store, _, lower = await two(open_storage)
    assert await store.put((name(0), content(0))) == [STORED]
    await until(lambda: not store.levels.unsaved, "copied, and its use is passed on")
    lower.full = kind("too long", refusal="object")
    assert await store.put((name(1), content(1))) == [STORED]
    await until(lambda: not store.levels.unsaved, "given up")
    assert lower.stores == [name(0), name(1)]
    assert lost(store) == {why: 1}
    assert await store.get((name(1), KIB)) == [(FOUND, content(1))]
    assert store.levels.write_backs[0].refusal is None, "the level is well"


REFUSALS = [
    StorageError("slow down"),
    StorageError("expired"),
    StorageFull("no room"),
    StorageError("no access", refusal="denied"),
    StorageUnavailable("nobody"),
]


@pytest.mark.parametrize("whole", [False, True], ids=["each object", "the whole call"])
@pytest.mark.parametrize("error", REFUSALS, ids=str)
async def test_a_refusal_that_passes_costs_no_copy_however_often_it_comes(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch, error: StorageError, whole: bool
) -> None:
    """Three refusals in a row gave up a copy: 64 of 64, in the second in which a bucket's credentials had expired."""
    monkeypatch.setattr(write_back, "RETRY_S", 0.001)
    monkeypatch.setattr(write_back, "LONGEST_RETRY_S", 0.001)
    store, _, lower = await two(open_storage)
    asked = store.levels.write_backs[0]._copy_batch
    rounds = 0

    async def counted(batch: list[CopyDown]) -> None:
        nonlocal rounds
        rounds += 1
        await asked(batch)

    monkeypatch.setattr(store.levels.write_backs[0], "_copy_batch", counted)
    lower.error, lower.full = (error, None) if whole else (None, error)
    assert await store.put(*((name(i), content(i)) for i in range(16))) == [STORED] * 16
    await until(lambda: rounds > 8, "it is asked again")
    assert store.levels.write_backs[0].refusal is error
    lower.error = lower.full = None
    await until(lambda: not store.levels.unsaved, "it is copied when the level takes it")
    assert [await there(lower, i) for i in range(16)] == [True] * 16
    assert not lost(store)
    assert store.levels.write_backs[0].refusal is None


@pytest.mark.parametrize(
    ("error", "why"), list(zip(REFUSALS, ["failed", "failed", "full", "failed", "down"], strict=True)), ids=str
)
async def test_a_refusal_that_does_not_pass_costs_the_copies_after_a_time(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch, error: StorageError, why: str
) -> None:
    monkeypatch.setattr(write_back, "RETRY_S", 0.01)
    store, _, lower = await two(open_storage, write_back_max_age=0.05)
    lower.full = error
    assert await store.put((name(1), content(1)), (name(2), content(2))) == [STORED] * 2
    await until(lambda: not store.levels.unsaved, "given up")
    assert lost(store) == {why: 2}


def test_the_pauses_of_a_level_that_refuses_grow_and_it_is_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_back, "JITTER", 0.0)
    at = 0.0
    pace = write_back.Pauses(lambda: at)
    pauses, most = [], []
    for _ in range(9):
        pace.refused(0)
        pauses.append(pace.left_s)
        most.append(pace.most)
        at += pace.left_s
        assert not pace.left_s
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert most == [32, 16, 8, 4, 2, 1, 1, 1, 1]
    pace.refused(3)
    assert pace.left_s == 1, "it takes some: it is not closed"
    pace.took(1)
    assert (pace.left_s, pace.most) == (0, 2)
    pace.took(100)
    assert pace.most == write_back.BATCH
    pace.refused(0)
    assert pace.left_s == 1, "what was before is over"


def test_the_pauses_of_two_nodes_differ() -> None:
    paces = [write_back.Pauses(lambda: 0.0) for _ in range(20)]
    for pace in paces:
        pace.refused(0)
    assert len({pace.left_s for pace in paces}) > 10
    assert all(0.75 <= pace.left_s <= 1.25 for pace in paces)


async def test_one_object_that_is_refused_again_and_again_holds_up_no_other(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "RETRY_S", 0.001)
    monkeypatch.setattr(write_back, "LONGEST_RETRY_S", 0.001)
    store, _, lower = await two(open_storage)
    behind = lower.store

    async def picky(items: Sequence[Item], fill: None, slots: Sequence[memoryview]) -> list[Outcome]:
        outcomes = await behind(items, fill, slots)
        refused = Outcome(Found.FAILED, StorageError("odd"))
        return [refused if item.name == name(0) else one for item, one in zip(items, outcomes, strict=True)]

    monkeypatch.setattr(lower, "store", picky)
    for first in range(0, 24, 8):
        assert await store.put(*((name(i), content(i)) for i in range(first, first + 8))) == [STORED] * 8
        await until(lambda: list(store.levels.unsaved) == [name(0)], "all others are copied")
    assert not lost(store)


@pytest.mark.parametrize("error", REFUSALS, ids=str)
async def test_a_task_that_waits_for_its_copy_is_told_and_the_copy_goes_on(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch, error: StorageError
) -> None:
    """Its slots of staging were held until the task's deadline."""
    monkeypatch.setattr(write_back, "RETRY_S", 0.05)
    store, _, lower = await two(open_storage, write="through")
    lower.full = error
    first, second = (Blob(name(i), store.buffer(KIB, content(i)), Use()) for i in (1, 2))
    back, told = store.levels.write_backs[0], list[int]()
    answer = back._answer

    def answered(one: CopyDown, why: StorageError | None) -> None:
        told.append(len(lower.stores))
        answer(one, why)

    monkeypatch.setattr(back, "_answer", answered)
    assert await promise(store.storage, [first]) == [error]
    tried = told[0]  # the next try may come before the task goes on
    assert tried == (3 if error.refusal == "passing" else 1)
    monkeypatch.setattr(write_back, "RETRY_S", 3600.0)
    await until(lambda: len(lower.stores) > tried, "it is tried again, and then after long")
    if error.refusal != "passing":
        assert await promise(store.storage, [second]) == [error], "the next one is told without a try"


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


async def test_a_quarantine_of_all_copies_ends_after_those_that_run(open_storage: Open) -> None:
    """A look-up between the end of the copy and its removal found what the quarantine had taken."""
    store, _, lower = await two(open_storage)
    lower.gate.clear()
    assert await store.put((name(1), content(1))) == [STORED]
    await until(lambda: lower.waiting, "the copy runs")
    quarantined = asyncio.ensure_future(store.storage.quarantine(name(1)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not quarantined.done()
    lower.gate.set()
    await quarantined
    assert not await there(lower, 1)


async def test_a_sweep_that_ends_early_is_followed_by_others(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had not come to waited until something else was lacking."""
    real, runs = sweep.Sweep._sweep, list[object]()

    async def counted(self: sweep.Sweep, back: write_back.WriteBack) -> None:
        runs.append(back)
        await real(self, back)

    monkeypatch.setattr(sweep, "EVERY_S", 0.01)
    monkeypatch.setattr(sweep.Sweep, "_sweep", counted)
    store, _, lower = await two(open_storage)
    below = store.levels.all_levels[1]
    below.leaving = True
    assert await store.put(*((name(i), content(i)) for i in range(3))) == [STORED] * 3
    await until(lambda: len(runs) > 5, "it goes on while the level takes nothing")
    below.leaving = False
    await until(lambda: len(lower.stores) == 3, "they are copied")


async def test_a_copy_that_anothers_purge_has_forbidden_is_made_later(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a level knows owners, so a purge by owner forbids all copies. The level below went on lacking this one."""
    monkeypatch.setattr(sweep, "EVERY_S", 0.01)
    store, _, lower = await two(open_storage)
    lower.gate.clear()
    assert await store.put((name(1), content(1))) == [STORED]
    await until(lambda: lower.waiting, "the copy runs")
    purging = asyncio.ensure_future(store.levels.keeper.purge(Selection(owner="another")))
    await asyncio.sleep(0)
    lower.gate.set()
    await purging
    await until(lambda: lower.stores == [name(1)] * 2, "it is copied again")
    await store.levels.flush(10)
    assert await there(lower, 1)
    assert await store.get((name(1), KIB)) == [(FOUND, content(1))]


async def test_what_is_stored_while_a_level_is_out_is_copied_when_it_is_back(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed above alone until its next use."""
    monkeypatch.setattr(sweep, "EVERY_S", 0.01)
    store, _, lower = await two(open_storage)
    await store.levels.change("lower", leaves=True)
    assert await store.put((name(1), content(1))) == [STORED]
    store.levels._touch_now()  # the store was a use, which is passed on a moment later
    assert not lower.stores
    await store.levels.change("lower", leaves=False)
    await until(lambda: lower.stores == [name(1)], "it is copied")


async def test_a_damaged_copy_below_is_made_again_from_the_one_above(open_storage: Open) -> None:
    store, _, lower = await two(open_storage)
    assert await store.put((name(1), content(1))) == [STORED]
    await store.levels.flush(10)
    await store.levels.quarantine_at(name(1), 1)
    assert await store.get((name(1), KIB)) == [(FOUND, content(1))]
    await store.levels.flush(10)
    assert lower.stores == [name(1)] * 2
    assert await there(lower, 1)


async def test_the_end_of_an_older_copy_does_not_let_go_what_has_just_been_stored_anew(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The level had it, and its store was not answered yet: so it could be evicted before it was copied."""
    memory = MemoryStorage(memory_config(64 * KIB))
    first, lower = gated(memory, "first"), gated(MemoryStorage(memory_config(1024 * KIB)), "lower")
    store = await open_storage(stack(first, lower))
    lower.gate.clear()
    assert await store.put((name(1), content(1))) == [STORED]
    await until(lambda: lower.waiting, "the copy runs")
    await store.levels.quarantine_at(name(1), 0)
    behind = first.store

    async def slow(items: Sequence[Item], fill: None, slots: Sequence[memoryview]) -> list[Outcome]:
        outcomes = await behind(items, fill, slots)
        lower.gate.set()
        await until(lambda: not store.levels.unsaved, "the older copy has ended")
        lower.gate.clear()
        return outcomes

    monkeypatch.setattr(first, "store", slow)
    assert await store.put((name(1), content(1))) == [STORED]
    entry = memory.indexes[0].get(name(1))
    assert entry is not None
    assert entry.kept, "its copy waits"
    lower.gate.set()
    await store.levels.flush(10)
    assert await there(lower, 1)
    assert not entry.kept


async def test_a_close_gives_up_what_a_dead_level_has_not_taken_and_says_so(open_storage: Open) -> None:
    store, _, lower = await two(open_storage)
    lower.error = StorageUnavailable("down")
    assert await store.put((name(1), content(1))) == [STORED]
    await until(lambda: store.levels.write_backs[0].refusal, "the copy has failed")
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


async def test_a_source_that_hangs_stops_no_copy_from_another_one(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "HANGS_S", 0.01)
    disk = gated(MemoryStorage(memory_config(1024 * KIB)), "disk")
    pool = gated(MemoryStorage(memory_config(1024 * KIB)), "object", asks=True)
    store = await open_storage(stack(MemoryStorage(memory_config(64 * KIB)), disk, pool))
    use = Use()
    use.shared = True
    old, new = (Blob(name(i), store.buffer(KIB, content(i)), use) for i in range(2))
    assert await store.put((name(0), content(0))) == [STORED]
    await store.levels.flush(10)
    first, _, last = store.levels.all_levels
    await first.storage.quarantine(name(0))
    await pool._behind.quarantine(name(0))
    last.forget_hints()
    disk.gate.clear()
    old_answer = asyncio.ensure_future(prove(store.storage, [old]))  # only the disk has it
    [answer] = await promise(store.storage, [new])
    assert isinstance(answer, Proof)
    assert await there(pool, 1)
    [error] = await old_answer
    assert "has not answered a read" in str(error)
    disk.gate.set()
    await store.levels.flush(10)
    assert [type(one) for one in await prove(store.storage, [old])] == [Proof], "it is copied when the disk answers"


async def test_a_level_to_which_copies_hang_costs_stores_and_other_levels_nothing(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its queue was full, each store waited for it for half of its time, and nothing said that it hangs."""
    monkeypatch.setattr(write_back, "HANGS_S", 0.01)
    monkeypatch.setattr(write_back, "RETRY_S", 0.001)
    monkeypatch.setattr(storing, "WAIT_S", 1e6)
    disk = gated(MemoryStorage(memory_config(1024 * KIB)), "disk")
    pool = gated(MemoryStorage(memory_config(1024 * KIB)), "object", asks=True)
    few = LevelSection(write_back_bytes=Size(4 * KIB))
    store = await open_storage(stack(MemoryStorage(memory_config(64 * KIB)), disk, pool, disk=few))
    back = store.levels.write_backs[0]
    disk.gate.clear()
    assert await store.put(*((name(i), content(i)) for i in range(4))) == [STORED] * 4
    await until(lambda: back.refusal is not None, "it is known to hang")
    use = Use()
    use.shared = True
    [answer] = await promise(store.storage, [Blob(name(9), store.buffer(KIB, content(9)), use)])
    assert isinstance(answer, Proof), "it has waited for nothing"
    tried = back.answered
    await until(lambda: back.answered > tried + 2, "it is tried again and again, and not called")
    row = store.storage.statistics()["levels"][1]
    assert (row["hanging"], row["available"], disk.waiting) == (1, False, 1), "nothing else is stored there"
    assert back.carry.nbytes + back.carry.hanging_bytes == CARRY_BYTES
    keeper = store.storage.keeper
    assert keeper is not None
    await keeper.purge(Selection(names=frozenset([name(0)])))
    disk.gate.set()
    await until(lambda: not store.levels.unsaved, "it answers, and takes what has waited")
    await store.levels.flush(10)
    assert [await there(disk, i) for i in (0, 1, 2, 3, 9)] == [False, True, True, True, True]
    assert back.carry.hanging_bytes == 0


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


@pytest.mark.parametrize(("nbytes", "largest"), [(KIB, 3), (4096, 3), (4097, 1), (20_000, 1)])
async def test_one_copy_has_as_many_objects_as_its_memory_takes_and_at_least_one(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch, nbytes: int, largest: int
) -> None:
    monkeypatch.setattr(write_back, "CARRY_BYTES", 3 * 4096)
    store, _, lower = await two(open_storage, 1024 * KIB)
    behind, calls = lower.store, list[int]()

    async def counted(items: Sequence[Item], fill: None, slots: Sequence[memoryview]) -> list[Outcome]:
        calls.append(len(items))
        return await behind(items, fill, slots)

    monkeypatch.setattr(lower, "store", counted)
    assert await store.put(*((name(i), content(i, nbytes)) for i in range(8))) == [STORED] * 8
    await store.levels.flush(10)
    assert (max(calls), sum(calls)) == (largest, 8)
    assert lower.stores == [name(i) for i in range(8)], "root first"


def test_the_memory_of_a_copy_takes_objects_of_any_length() -> None:
    carry = write_back.Carry([])
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
    store.levels.touch([Item(name(0), KIB, as_chain([Item(name(0), KIB)])[0].use, 0)])
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
