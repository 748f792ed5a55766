"""Storage in memory: what it does beyond the contract. A full store puts new objects into the memory of old ones."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.storage.harness import memory_config
from tests.support.blobs import get
from tests.support.blobs import put as put_blobs
from transferd.storage.base import FOUND, LEFT, MISSING, STORED, Blob, Item
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.tiers.base import INLINE_BYTES

LARGE = INLINE_BYTES + 128


@pytest.fixture(params=[1000, LARGE])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[MemoryStorage]:
    """Room for two objects, copied on the event loop or in threads."""
    storage = MemoryStorage(memory_config(2 * request.param))
    await storage.open()
    yield storage
    await storage.close()
    assert not arrays(storage)


def arrays(store: MemoryStorage) -> dict[str, Any]:
    return {name: memory for part in store._objects for name, memory in part.items()}


def content(text: str, nbytes: int) -> bytes:
    return random.Random(text).randbytes(nbytes)


async def put(store: MemoryStorage, text: str, nbytes: int) -> Any:
    [outcome] = await put_blobs(store, [Blob(text, memoryview(bytearray(content(text, nbytes))))])
    return outcome


async def read(store: MemoryStorage, text: str, nbytes: int) -> tuple[Any, bytes]:
    data = memoryview(bytearray(b"\xaa" * nbytes))
    [outcome] = await get(store, [Blob(text, data)])
    return outcome, bytes(data)


async def test_a_new_object_reuses_the_memory_of_an_evicted_one(store: MemoryStorage) -> None:
    nbytes = store._index.capacity // 2
    for text in ("aa", "bb"):
        assert await put(store, text, nbytes) == STORED
    before = arrays(store)
    assert await put(store, "cc", nbytes) == STORED
    assert arrays(store).keys() == {"bb", "cc"}
    assert arrays(store)["cc"] is before["aa"]
    assert await read(store, "aa", nbytes) == (MISSING, b"\xaa" * nbytes)
    assert await read(store, "bb", nbytes) == (FOUND, content("bb", nbytes))
    assert await read(store, "cc", nbytes) == (FOUND, content("cc", nbytes))


async def test_an_object_of_another_length_gets_memory_of_its_own(store: MemoryStorage) -> None:
    nbytes = store._index.capacity // 2
    for text in ("aa", "bb"):
        await put(store, text, nbytes)
    assert await put(store, "cc", nbytes - 1) == STORED
    assert arrays(store)["cc"].nbytes == nbytes - 1
    assert await read(store, "cc", nbytes - 1) == (FOUND, content("cc", nbytes - 1))
    assert await put(store, "dd", nbytes) == STORED
    assert await read(store, "dd", nbytes) == (FOUND, content("dd", nbytes))
    assert await read(store, "cc", nbytes - 1) == (FOUND, content("cc", nbytes - 1))


@pytest.mark.parametrize("other", [None, 10])
async def test_memory_other_than_what_the_index_says_is_not_used_again(store: MemoryStorage, other: int | None) -> None:
    nbytes = store._index.capacity // 2
    for text in ("aa", "bb"):
        await put(store, text, nbytes)
    if other is None:
        store._remove("aa")
    else:
        store._keep("aa", np.zeros(other, np.uint8))
    assert await put(store, "cc", nbytes) == STORED
    assert await read(store, "cc", nbytes) == (FOUND, content("cc", nbytes))
    assert await read(store, "bb", nbytes) == (FOUND, content("bb", nbytes))


class Held:
    """A drain that waits in its thread, between two halves of the object."""

    wanted = True

    def __init__(self, nbytes: int) -> None:
        self.memory = bytearray(nbytes)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, i: int, data: memoryview, /) -> bool:
        half = data.nbytes // 2
        self.memory[:half] = data[:half]
        self.begun.set()
        self.go_on.wait(30)
        self.memory[half:] = data[half:]
        return True


@pytest.mark.parametrize("store", [LARGE], indirect=True)
async def test_the_memory_of_an_object_that_is_being_read_is_left_alone(store: MemoryStorage) -> None:
    for text in ("aa", "bb"):
        await put(store, text, LARGE)
    displaced, held = arrays(store)["aa"], Held(LARGE)
    reading = asyncio.ensure_future(store.load([Item("aa", LARGE, Use(), 0)], held, ()))
    assert await asyncio.to_thread(held.begun.wait, 30)
    await put(store, "bb", LARGE)  # used again: aa, which the read has used, is older
    assert await put(store, "cc", LARGE) == STORED
    assert arrays(store).keys() == {"bb", "cc"}
    assert arrays(store)["cc"] is not displaced
    held.go_on.set()
    assert await reading == [FOUND]
    assert bytes(held.memory) == content("aa", LARGE)
    assert await read(store, "cc", LARGE) == (FOUND, content("cc", LARGE))


async def test_an_object_is_made_where_it_stays_and_is_drained_from_there(store: MemoryStorage) -> None:
    nbytes = store._index.capacity // 2
    made: list[memoryview] = []

    def fill(i: int, data: memoryview, near: bool) -> bool:
        assert not near, "nobody reads it next"
        made.append(data)
        data[:] = content(f"{i}", nbytes)
        return i == 0

    items = [Item(name, nbytes) for name in ("aa", "bb")]
    assert await store.store(items, fill, ()) == [STORED, LEFT]
    held = Held(nbytes)
    held.go_on.set()
    assert await store.load(items, held, ()) == [FOUND, MISSING]
    assert bytes(held.memory) == content("0", nbytes)
    assert np.shares_memory(np.asarray(made[0]), arrays(store)["aa"])
