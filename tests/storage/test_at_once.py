"""What a store in memory answers at once, and what it must not begin before somebody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.storage.harness import memory_config
from tests.support.blobs import get, put
from transferd.errors import Closed
from transferd.storage.base import EXISTS, FOUND, STORED, Blob
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.tiers.base import INLINE_BYTES


@pytest.fixture
async def storage() -> AsyncIterator[MemoryStorage]:
    opened = MemoryStorage(memory_config(2 * 1024**2))
    await opened.open()
    yield opened
    await opened.close()


def blob(name: str, content: bytes) -> Blob:
    return Blob(name, memoryview(bytearray(content)))


async def test_a_look_up_and_a_small_put_are_done_at_once(storage: MemoryStorage) -> None:
    sent = blob("a", b"before")
    putting = put(storage, [sent, blob("b", b"b")])
    assert isinstance(putting, asyncio.Future)
    assert putting.result() == [STORED, STORED]
    sent.data[:] = b"after!"  # the buffer is the caller's again
    assert storage.find(["a", "c"], Use()) == [True, False]
    again = put(storage, [blob("a", b"before")])
    assert isinstance(again, asyncio.Future)
    assert again.result() == [EXISTS]
    got = blob("a", bytes(6))
    assert await get(storage, [got]) == [FOUND]
    assert bytes(got.data) == b"before"


async def test_a_large_put_begins_when_it_is_awaited(storage: MemoryStorage) -> None:
    """Else a caller that is cancelled before would leave a thread at work on its buffer."""
    putting = put(storage, [blob("a", bytes(INLINE_BYTES + 1))])
    assert not isinstance(putting, asyncio.Future)
    await asyncio.sleep(0)
    assert storage.find(["a"], None) == [False]
    assert await putting == [STORED]


async def test_a_small_put_waits_for_what_is_under_way_on_its_name(storage: MemoryStorage) -> None:
    first = asyncio.ensure_future(put(storage, [blob("a", bytes(INLINE_BYTES + 1))]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # its thread has the name
    second = put(storage, [blob("a", b"short"), blob("b", b"b")])
    assert not isinstance(second, asyncio.Future)
    assert await second == [STORED, STORED]  # of another length, so the first was no object of this name
    assert await first == [STORED]
    got = blob("a", bytes(5))
    assert await get(storage, [got]) == [FOUND]
    assert bytes(got.data) == b"short"


async def test_a_put_to_a_closed_store_raises_closed_when_awaited() -> None:
    storage = MemoryStorage(memory_config(1024))
    await storage.close()
    putting = put(storage, [blob("a", b"a")])
    with pytest.raises(Closed):
        await putting
