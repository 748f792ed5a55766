"""A block of several objects behaves as one: the worst of its objects' answers is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from unittest.mock import ANY

import pytest

from tests.storage.harness import Harness, Memory, Open, memory_config
from tests.support.blobs import promise, prove
from tests.support.gated_storage import gated, stack
from tests.support.simulation.faults import StorageFaults
from tests.support.simulation.storage import SimStorage
from transferd.blocks.formats import ObjectPart
from transferd.config import StorageSection
from transferd.errors import StorageFull, StorageUnavailable
from transferd.storage.base import LEFT, Blob, Found, FrontStorage, Item, Outcome, Outcomes, Storage
from transferd.storage.divided import divided
from transferd.storage.levels.base import Proof
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage

PARTS = (ObjectPart("_key", 0, 100), ObjectPart("_value", 100, 160), ObjectPart("_scale", 160, 161))
BLOCK = bytes(range(161))


@pytest.fixture
def blocks(behind: SimStorage) -> Harness:
    storage, memory = divided(behind, PARTS), Memory(1024**2)
    storage.register(memory)
    return Harness(storage, memory)


def test_a_block_that_is_one_object_needs_no_division() -> None:
    storage = SimStorage()
    assert divided(storage, [ObjectPart("", 0, 100)]) is storage


async def test_each_part_is_an_object_of_its_own(behind: SimStorage, blocks: Harness) -> None:
    (outcome,) = await blocks.put(("b", BLOCK))
    assert outcome.found is Found.STORED
    assert behind.objects == {"b_key": BLOCK[:100], "b_value": BLOCK[100:160], "b_scale": BLOCK[160:]}
    ((outcome, data),) = await blocks.get(("b", 161))
    assert (outcome.found, data) == (Found.FOUND, BLOCK)
    assert [o.found for o in await blocks.put(("b", BLOCK), ("c", BLOCK))] == [Found.EXISTS, Found.STORED]


@pytest.mark.parametrize("part", ["_key", "_value", "_scale"])
async def test_a_block_that_lacks_an_object_is_missing_until_a_put_completes_it(
    behind: SimStorage, blocks: Harness, part: str
) -> None:
    await blocks.put(("a", BLOCK), ("b", BLOCK), ("c", BLOCK))
    del behind.objects[f"b{part}"]
    assert await blocks.storage.exists(["a", "b", "c", "d"]) == [True, False, True, False]
    got = await blocks.get(("a", 161), ("b", 161), ("c", 161))
    assert [outcome.found for outcome, _ in got] == [Found.FOUND, Found.MISSING, Found.FOUND]
    assert [o.found for o in await blocks.put(("b", BLOCK))] == [Found.STORED]
    assert await blocks.storage.exists(["b"]) == [True]


@pytest.mark.parametrize("place", range(3))
async def test_one_object_that_fails_fails_its_block_alone(behind: SimStorage, blocks: Harness, place: int) -> None:
    faults = [None] * 3 + [None] * place + ["error"]
    behind.dice.script("object put", *faults)
    assert [o.found for o in await blocks.put(("a", BLOCK), ("b", BLOCK))] == [Found.STORED, Found.FAILED]
    await blocks.put(("b", BLOCK))
    behind.dice.script("object get", *faults)
    got = await blocks.get(("a", 161), ("b", 161))
    assert [outcome.found for outcome, _ in got] == [Found.FOUND, Found.FAILED]
    assert got[1][0].error is not None


async def test_a_failure_weighs_more_than_a_gap(behind: SimStorage, blocks: Harness) -> None:
    await blocks.put(("a", BLOCK))
    behind.dice.script("object get", "missing", "error", None)
    ((outcome, _),) = await blocks.get(("a", 161))
    assert outcome.found is Found.FAILED


async def test_a_call_that_fails_as_a_whole_raises(behind: SimStorage, blocks: Harness) -> None:
    behind.faults = StorageFaults(unavailable=1.0)
    with pytest.raises(StorageUnavailable):
        await blocks.storage.exists(["a"])


async def test_quarantine_takes_every_object_and_close_leaves_what_is_behind_open(
    behind: SimStorage, blocks: Harness
) -> None:
    await blocks.put(("a", BLOCK))
    await blocks.storage.quarantine("a")
    assert set(behind.quarantined) == {"a_key", "a_value", "a_scale"}
    await blocks.storage.open()
    await blocks.storage.close()
    assert await blocks.storage.exists(["a"]) == [False]
    assert blocks.storage.statistics() == behind.statistics()
    assert blocks.storage.backend == behind.backend
    blocks.storage.unregister(blocks.memory)


async def test_a_backends_capacity_can_be_changed_through_it() -> None:
    behind = MemoryStorage(memory_config(1000))
    storage: Storage = divided(behind, PARTS)
    storage.reconfigure(StorageSection(memory=memory_config(10)))
    harness = Harness(storage, Memory(4096))
    storage.register(harness.memory)
    (outcome,) = await harness.put(("a", BLOCK))
    assert outcome.found is Found.FAILED
    await behind.close()


async def test_a_block_departs_with_each_of_its_objects() -> None:
    behind = MemoryStorage(memory_config(400))
    storage = divided(behind, PARTS)
    gone: list[str] = []
    assert storage.index.tell_departures(gone.append)
    harness = Harness(storage, Memory(4096))
    storage.register(harness.memory)
    await harness.put(("a", BLOCK))
    await harness.put(("b", BLOCK))
    assert storage.index.find(["a", "b", "c"], None) == [True, True, False]
    await harness.put(("c", BLOCK))
    assert set(gone) == {"a"}
    assert storage.index.find(["a", "b", "c"], None) == [False, True, True]
    await behind.quarantine("unrelated")
    await behind.close()


async def test_a_task_need_not_store_a_block_whose_objects_are_there() -> None:
    """`stored` was once asked with the name of the block, which names no object."""
    behind = MemoryStorage(memory_config(1000))
    storage = divided(behind, PARTS)
    harness = Harness(storage, Memory(4096))
    storage.register(harness.memory)
    await harness.put(("a", BLOCK))
    assert storage.index.stored(["a", "b"], None) == [True, False]
    await behind.close()


@pytest.mark.parametrize("call", ["load", "store"])
async def test_slots_that_return_later_than_the_answer_stay_lent(behind: SimStorage, call: str) -> None:
    """A level of storage is too slow, and still at work in them."""
    returned = asyncio.get_running_loop().create_future()

    class Late(FrontStorage):
        async def load(self, items: Sequence[Item], *_: object) -> list[Outcome]:
            return Outcomes([LEFT] * len(items), returned)

        async def store(self, items: Sequence[Item], *_: object) -> list[Outcome]:
            return Outcomes([LEFT] * len(items), returned)

    late: Storage = Late(behind)  # type: ignore[abstract]
    storage, slot = divided(late, PARTS), memoryview(bytearray(161))
    outcomes = await getattr(storage, call)([Item("b", 161)], None, [slot])
    assert list(outcomes) == [LEFT]
    assert outcomes.returned is returned


async def test_a_block_is_proven_only_with_all_of_its_objects(open_storage: Open) -> None:
    bucket = MemoryStorage(memory_config(2**20))
    lower = gated(bucket, "object", asks=True)
    store = await open_storage(stack(MemoryStorage(memory_config(2**20)), lower))
    blocks, use = divided(store.storage, PARTS), Use()
    use.shared = True
    both = [Blob(name, store.buffer(161, BLOCK), use, depth) for depth, name in enumerate(("a", "b"))]
    assert [isinstance(one, Proof) for one in await promise(blocks, both)] == [True, True]
    assert len(lower.stores) == 6
    await bucket.quarantine("b_scale")
    assert blocks.levels is not None
    assert await blocks.levels.exists_now(["a", "b"]) == [True, True], "memory has it all"
    lower.full = full = StorageFull("no room")
    assert await prove(blocks, both) == [ANY, full], "one object of a block is enough"
    lower.full = None
