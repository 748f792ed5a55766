"""The contract's own parts: what a backend gets for nothing, and a storage that stands in front of another one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.blobs import get, put
from tests.support.simulation.storage import SimStorage
from transferd.errors import StorageUnavailable
from transferd.storage import base
from transferd.storage.base import (
    EXISTS,
    FOUND,
    MISSING,
    STORED,
    Blob,
    Found,
    FrontStorage,
    Item,
    Outcome,
    Outcomes,
    SlotStorage,
    Storage,
    blobs_of,
)
from transferd.storage.lru import Use

MOST_METHODS = 16
OF_CLASSES = {
    "from_config",
    "directories",
    "memory_of",
    "try_out",
    "lists",
    "scrubs",
    "packages",
}  # asked before one is made


def methods(contract: type) -> set[str]:
    """The public methods that a contract declares itself."""
    routines = {name for name, part in vars(contract).items() if inspect.isroutine(part)}
    return {name for name in routines - OF_CLASSES if not name.startswith("_")}


def test_the_contract_of_every_backend_is_small() -> None:
    assert len(methods(Storage)) <= MOST_METHODS, sorted(methods(Storage))
    flags = [name for name, value in vars(Storage).items() if isinstance(value, bool) and name not in OF_CLASSES]
    assert flags == ["asks_first", "shared"]


class Front(FrontStorage):
    """Defines nothing of its own."""


def test_a_front_passes_every_method_and_part_on_to_what_is_behind_it() -> None:
    """Also those that the contract gets later: a default in front would hide what the storage behind knows."""
    asked: list[Any] = []

    class Behind(SimStorage):
        chunk_bytes, slots_at_once, asks_first, tries = 77, 3, False, 2
        shared, promotes_at = True, 5

        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            return super().__getattribute__(name)

    public = {name for name in vars(Storage) if not name.startswith("_")} - OF_CLASSES
    flags = {
        name for name in public if not callable(vars(Storage)[name]) and not isinstance(vars(Storage)[name], property)
    }
    behind = Behind()
    front = Front(behind)  # type: ignore[abstract] # it has every method
    assert (front.backend, front.chunk_bytes, front.slots_at_once, front.asks_first, front.tries) == (
        *("simulated", 77, 3, False),
        2,
    )
    assert flags == {"slots_at_once", "asks_first", "chunk_bytes", "tries", "shared", "promotes_at"}, (
        "another one must be taken over, too"
    )
    assert (front.shared, front.promotes_at) == (True, 5)
    for name in base.PARTS:
        asked.clear()
        assert getattr(front, name) is getattr(behind, name)
        assert asked.count(name) == 2, name
    for name in set(base.METHODS) - {"join"}:
        assert getattr(Front, name) is not getattr(Storage, name, None), name
        assert not getattr(getattr(Front, name), "__isabstractmethod__", False), name
    assert front.join(lambda storage: storage) is front, "what wraps calls wraps the front"


async def test_a_front_hands_over_arguments_answers_and_errors() -> None:
    behind = SimStorage()
    front = Front(behind)  # type: ignore[abstract]
    await front.open()
    assert await front.exists(["a"]) == [False]
    behind.dice.script("exists", "unavailable")
    with pytest.raises(StorageUnavailable):
        await front.exists(["a"])
    assert front.statistics() == behind.statistics()
    await front.close()


class Slots(SlotStorage):
    """A dict. `called`: with which blobs."""

    backend = "slots"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.called: list[Sequence[Blob]] = []

    async def open(self) -> None: ...

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return [name in self.objects for name in names]

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        self.called.append(blobs)
        new = [blob.name not in self.objects for blob in blobs]
        self.objects |= {blob.name: bytes(blob.data) for blob in blobs}
        return [STORED if one else EXISTS for one in new]

    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        for blob in blobs:
            if blob.name in self.objects:
                blob.data[:] = self.objects[blob.name]
        return [FOUND if blob.name in self.objects else MISSING for blob in blobs]

    async def quarantine(self, name: str) -> None:
        del self.objects[name]

    async def close(self) -> None: ...

    def statistics(self) -> dict[str, Any]:
        return {}


async def test_a_backend_of_whole_slots_needs_only_put_and_get() -> None:
    storage, use = Slots(), Use()
    made = bytearray(b"abcd")
    items = [Item("a", 2, use, 5), Item("b", 2, use, 6)]
    assert await storage.store(items, None, [memoryview(made)[:2], memoryview(made)[2:]]) == [STORED, STORED]
    assert [(blob.use, blob.depth) for blob in storage.called[0]] == [(use, 5), (use, 6)]
    assert await put(storage, [Blob("a", memoryview(b"ab"))]) == [EXISTS]
    room = memoryview(bytearray(4))
    assert await get(storage, [Blob("b", room[:2]), Blob("c", room[2:])]) == [FOUND, MISSING]
    assert bytes(room) == b"cd\0\0"


def test_optional_methods_of_a_backend_promise_nothing_by_default() -> None:
    storage, left = Slots(), list[str]()
    index = storage.index
    assert (index.find(["a"], None), index.stored(["a"], None), index.look(["a"])) == (None, None, None)
    assert (index.hold("a"), list(index.hottest_first()), index.ranges) == (None, [], False)
    assert index.tell_departures(left.append) is False
    assert (storage.keeper, storage.levels, storage.pool, storage.unusable(), storage.abandon()) == (
        None,
        None,
        None,
        "",
        [],
    )
    assert storage.slots_at_once is None
    assert storage.asks_first


def test_each_item_keeps_its_own_slot_and_a_slot_too_few_is_a_bug() -> None:
    slots = [memoryview(bytearray(1)), memoryview(bytearray(2))]
    made = blobs_of([Item("a", 1), Item("b", 2)], slots)
    assert [(blob.name, blob.data.nbytes) for blob in made] == [("a", 1), ("b", 2)]
    with pytest.raises(ValueError, match="shorter"):
        blobs_of([Item("a", 1), Item("b", 2)], slots[:1])


@pytest.mark.parametrize(("use", "counted"), [(None, True), (Use(), True), (Use(counts=False), False)])
def test_a_load_counts_unless_its_use_says_otherwise(use: Use | None, counted: bool) -> None:
    assert Item("a", 1, use).counted is counted


async def test_outcomes_whose_slots_return_later_are_outcomes_all_the_same() -> None:
    returned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    outcomes = Outcomes([FOUND, MISSING], returned)
    assert outcomes == [FOUND, MISSING]
    assert outcomes.returned is returned
    assert Outcome(Found.FOUND) != FOUND, "an outcome is compared by identity: of level 0 each is one object"
