"""A load takes each block from the first level that has it, and goes on below what is damaged, too slow or dead."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from tests.storage.harness import Harness, Open, memory_config
from tests.support.blobs import get
from tests.support.gated_storage import GatedStorage, gated, stack
from tests.support.waits import until
from transferd.config import LevelSection
from transferd.errors import StorageError, StorageUnavailable
from transferd.storage.base import FOUND, LEFT, MISSING, STORED, Blob, Found, Item, Outcome, Outcomes
from transferd.storage.levels import level
from transferd.storage.levels.loading import Taking
from transferd.storage.levels.promotion import Buffers
from transferd.storage.memory import MemoryStorage

NBYTES = 3000


def name(i: int) -> str:
    return f"demo/0123456789abcdef/RL-1/{i:02x}/0"


def content(i: int) -> bytes:
    return random.Random(i).randbytes(NBYTES)


class Taken:
    """A drain that keeps what it gets."""

    def __init__(self, *refused: int) -> None:
        self.objects: dict[int, bytes] = {}
        self.refused = refused

    @property
    def wanted(self) -> bool:
        return True

    def __call__(self, i: int, data: memoryview, /) -> bool:
        if i in self.refused:
            return False
        self.objects[i] = bytes(data)
        return True


async def three(open_storage: Open, *, asks: bool = False) -> tuple[Harness, list[GatedStorage]]:
    """Three levels of memory that the test holds up; every object is in the lower two, and none in the first one."""
    each = [gated(MemoryStorage(memory_config(1024**2)), text) for text in ("top", "middle", "bottom")]
    for one in each:
        one.slots_at_once = 2
    each[2].asks = asks
    store = await open_storage(stack(*each, middle=LevelSection(promote=0), bottom=LevelSection(promote=0)))
    assert await store.put(*((name(i), content(i)) for i in range(8))) == [STORED] * 8
    await store.levels.flush(10)
    for i in range(8):
        await each[0]._behind.quarantine(name(i))
    return store, each


async def test_the_outcome_says_which_level_it_was(open_storage: Open) -> None:
    store, each = await three(open_storage)
    await each[1]._behind.quarantine(name(3))
    got = await store.get(*((name(i), NBYTES) for i in range(9)))
    assert [outcome.found for outcome, _ in got] == [Found.FOUND] * 8 + [Found.MISSING]
    assert [outcome.level for outcome, _ in got][:8] == [1, 1, 1, 2, 1, 1, 1, 1]
    assert [data for _, data in got[:8]] == [content(i) for i in range(8)]


@pytest.mark.parametrize("asks", [False, True], ids=["known", "remote"])
async def test_a_dead_level_costs_nothing_but_its_own_objects(open_storage: Open, asks: bool) -> None:
    store, each = await three(open_storage, asks=asks)
    each[1].error = StorageUnavailable("dead")
    got = await store.get(*((name(i), NBYTES) for i in range(8)))
    assert [(outcome.level, data) for outcome, data in got] == [(2, content(i)) for i in range(8)]
    each[2].error = StorageUnavailable("dead, too")
    got = await store.get((name(0), NBYTES))
    assert [outcome.found for outcome, _ in got] in ([Found.MISSING], [Found.FAILED])


async def test_a_look_up_does_not_wait_for_a_level_that_hangs(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.storage.levels.stack.LOOK_UP_S", 0.05)
    store, each = await three(open_storage, asks=True)
    await each[1]._behind.quarantine(name(3))
    each[2].gate.clear()
    try:
        assert await store.storage.exists([name(0), name(3), name(9)]) == [True, False, False]
    finally:
        each[2].gate.set()
    assert await store.storage.exists([name(0), name(3), name(9)]) == [True, True, False]


async def test_a_remote_level_is_not_asked_again_at_once_for_what_it_does_not_have(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level, "ABSENT_S", 3600.0)
    store, each = await three(open_storage, asks=True)
    before = each[2].asked
    for _ in range(5):
        assert await store.storage.exists([name(99)]) == [False]
    assert each[2].asked == before + 1
    assert await store.put((name(99), content(99))) == [STORED]
    await store.levels.flush(10)
    await each[0]._behind.quarantine(name(99))
    await each[1]._behind.quarantine(name(99))
    assert await store.storage.exists([name(99)]) == [True], "a store of our own ends that"


@pytest.mark.parametrize("in_place", [False, True], ids=["slots", "in place"])
async def test_a_level_that_is_too_slow_leaves_its_blocks_to_the_next_and_keeps_its_slots_until_it_ends(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    monkeypatch.setattr(level, "FLOOR_S", 0.05)
    monkeypatch.setattr(level, "TIMES", 0)
    store, each = await three(open_storage)
    for _ in range(level.FEWEST_SAMPLES):
        await store.get((name(0), NBYTES))
    each[1].gate.clear()
    items, slots = [Item(name(i), NBYTES) for i in range(3)], [store.buffer(NBYTES) for _ in range(3)]
    drain = Taken() if in_place else None
    outcomes = await store.storage.load(items, drain, slots)
    assert list(outcomes) == [LEFT] * 3
    assert isinstance(outcomes, Outcomes)
    returned = outcomes.returned
    assert returned is not None
    assert not returned.done()
    again = [Blob(name(i), store.buffer(NBYTES)) for i in range(3)]
    second = await get(store.storage, again)
    assert [(one.found, one.level) for one in second] == [(Found.FOUND, 2)] * 3
    assert [bytes(blob.data) for blob in again] == [content(i) for i in range(3)]
    each[1].gate.set()
    await returned
    assert drain is None or drain.objects == {}, "it was withdrawn"
    assert in_place or [bytes(slot) for slot in slots] == [content(i) for i in range(3)]
    assert store.levels.all_levels[1].loads.slow_calls == 1
    assert not store.levels.all_levels[1].stuck


async def test_a_level_that_gives_up_a_call_that_still_runs_leaves_its_blocks_to_the_next(open_storage: Open) -> None:
    store, each = await three(open_storage)
    good, running = each[1].load, asyncio.get_running_loop().create_future()
    unavailable = Outcome(Found.FAILED, StorageUnavailable("a node does not answer"))

    async def load(items: list[Item], drain: Taken | None, slots: list[memoryview]) -> list[Outcome]:
        await good(items, drain, slots)
        return Outcomes.after([unavailable] * len(items), [running])

    each[1].load = load  # type: ignore[assignment, method-assign]
    slot = store.buffer(NBYTES)
    outcomes = await store.storage.load([Item(name(0), NBYTES)], None, [slot])
    assert list(outcomes) == [LEFT], "the slot is in use: the caller comes again with another one"
    assert isinstance(outcomes, Outcomes)
    assert not outcomes.returned.done()
    await each[2]._behind.quarantine(name(0))
    nowhere = await store.storage.load([Item(name(0), NBYTES)], None, [store.buffer(NBYTES)])
    running.set_result(None)
    assert [outcome.error for outcome in nowhere] == [unavailable.error]
    await outcomes.returned


async def test_slots_of_a_level_left_as_too_slow_return_when_the_call_that_it_gives_up_has_ended(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level, "FLOOR_S", 0.05)
    monkeypatch.setattr(level, "TIMES", 0)
    store, each = await three(open_storage)
    for _ in range(level.FEWEST_SAMPLES):
        await store.get((name(0), NBYTES))
    good, running = each[1].load, asyncio.get_running_loop().create_future()
    unavailable = Outcome(Found.FAILED, StorageUnavailable("a node does not answer"))

    async def load(items: list[Item], drain: Taken | None, slots: list[memoryview]) -> list[Outcome]:
        await good(items, drain, slots)
        return Outcomes.after([unavailable] * len(items), [running])

    each[1].load = load  # type: ignore[assignment, method-assign]
    each[1].gate.clear()
    outcomes = await store.storage.load([Item(name(0), NBYTES)], None, [store.buffer(NBYTES)])
    assert list(outcomes) == [LEFT]
    assert isinstance(outcomes, Outcomes)
    each[1].gate.set()
    await until(lambda: not store.levels.all_levels[1].stuck, "the level's call has ended")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not outcomes.returned.done(), "the library's call still writes to the slot"
    running.set_result(None)
    await outcomes.returned


async def test_a_later_round_gets_no_slots_that_a_call_of_an_earlier_one_still_uses(open_storage: Open) -> None:
    store, each = await three(open_storage)
    running = asyncio.get_running_loop().create_future()
    unavailable = Outcome(Found.FAILED, StorageUnavailable("a node does not answer"))

    async def load(*_: object) -> list[Outcome]:
        return Outcomes.after([MISSING, unavailable], [running])

    each[1].load = load  # type: ignore[assignment, method-assign]
    items, slots = [Item(name(i), NBYTES) for i in range(2)], [store.buffer(NBYTES) for _ in range(2)]
    outcomes = await store.storage.load(items, Taken(), slots)
    assert not each[2].loads, "the slots are in use"
    assert list(outcomes) == [LEFT] * 2
    assert isinstance(outcomes, Outcomes)
    running.set_result(None)
    await outcomes.returned


async def test_a_slow_level_without_a_substitute_is_waited_for(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level, "FLOOR_S", 0.01)
    monkeypatch.setattr(level, "TIMES", 0)
    store, each = await three(open_storage)
    for i in range(level.FEWEST_SAMPLES):
        await each[1]._behind.quarantine(name(i % 8))
    for _ in range(level.FEWEST_SAMPLES):
        await store.get((name(0), NBYTES))
    each[2].gate.clear()
    asyncio.get_running_loop().call_later(0.1, each[2].gate.set)
    assert [outcome.found for outcome, _ in await store.get((name(0), NBYTES))] == [Found.FOUND]


async def test_an_object_that_one_level_cannot_read_comes_from_the_next(open_storage: Open) -> None:
    store, each = await three(open_storage)
    good = each[1].load

    async def load(items: list[Item], drain: Taken | None, slots: list[memoryview]) -> list[Outcome]:
        outcomes = await good(items, drain, slots)
        return [Outcome(Found.FAILED, StorageError("I/O error")), *outcomes[1:]]

    each[1].load = load  # type: ignore[assignment, method-assign]
    got = await store.get((name(0), NBYTES), (name(1), NBYTES))
    assert [(outcome.level, data) for outcome, data in got] == [(2, content(0)), (1, content(1))]


async def test_without_slots_what_has_left_the_memory_is_left(open_storage: Open) -> None:
    store, _ = await three(open_storage)
    assert store.levels.slots_for([name(0)]) == 2
    assert await store.storage.load([Item(name(0), NBYTES)], Taken(), []) == [LEFT]


async def test_a_missing_block_is_missing_in_all_levels(open_storage: Open) -> None:
    store, _ = await three(open_storage, asks=True)
    drain = Taken()
    items = [Item(name(i), NBYTES) for i in (1, 77, 2)]
    slots = [store.buffer(NBYTES) for _ in range(2)]
    outcomes = await store.storage.load(items, drain, slots)
    assert [one.found for one in outcomes] == [Found.FOUND, Found.MISSING, Found.FOUND]
    assert outcomes[1] is MISSING
    assert drain.objects == {0: content(1), 2: content(2)}


async def test_a_drain_that_is_withdrawn_waits_for_the_thread_that_is_in_it() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Taken):
        def __call__(self, i: int, data: memoryview, /) -> bool:
            entered.set()
            assert go_on.wait(10)
            return super().__call__(i, data)

    drain, buffers = Slow(), Buffers([])
    buffers.open()
    taking = Taking(drain, [4, 5], {0}, buffers)
    thread = asyncio.ensure_future(asyncio.to_thread(taking, 0, memoryview(b"abc")))
    await until(entered.is_set, "a thread takes the first item")
    withdrawing = asyncio.ensure_future(taking.withdraw())
    await asyncio.sleep(0)
    assert not withdrawing.done()
    assert not taking.wanted
    go_on.set()
    assert await withdrawing == [1]
    assert await thread is True
    assert drain.objects == {4: b"abc"}
    assert taking(1, memoryview(b"late")) is False
    assert drain.objects == {4: b"abc"}, "nothing is touched after the withdrawal"
    assert bytes(taking.copies[0].data) == b"abc"


async def test_a_hit_of_the_first_level_is_answered_at_once(open_storage: Open) -> None:
    first = MemoryStorage(memory_config(1024**2))
    store = await open_storage(stack(first, gated(MemoryStorage(memory_config(1024**2)), "lower")))
    assert await store.put((name(1), content(1))) == [STORED]
    answer = get(store.storage, [Blob(name(1), store.buffer(NBYTES))])
    assert isinstance(answer, asyncio.Future)
    assert answer.result() == [FOUND]
    assert store.levels.slots_for([name(1)]) == 0


async def test_a_drain_that_raises_keeps_no_withdrawal_waiting() -> None:
    class Broken(Taken):
        def __call__(self, i: int, data: memoryview, /) -> bool:
            raise MemoryError(f"item {i}")

    taking = Taking(Broken(), [4, 5], set(), Buffers([]))
    with pytest.raises(MemoryError, match="item 5"):
        taking(1, memoryview(b"abc"))
    assert await asyncio.wait_for(taking.withdraw(), 10.0) == [0]
