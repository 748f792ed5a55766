"""What a store owes to lower levels is asked of them within the task, and copied there if it is missing."""

from __future__ import annotations

import asyncio

import pytest

from tests.storage.harness import Harness, Open, memory_config
from tests.support.blobs import promise, prove, put
from tests.support.gated_storage import GatedStorage, gated, stack
from tests.support.waits import until
from transferd.config import LevelSection
from transferd.errors import StorageError, StorageFull, StorageUnavailable
from transferd.storage.base import STORED, Blob
from transferd.storage.levels import proving, write_back
from transferd.storage.levels.base import Proof
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.storage.queues import EngineOwner
from transferd.storage.selection import Selection

KIB = 1024


def name(i: int) -> str:
    return f"demo/0123456789abcdef/RL-1/{i:02x}/0"


async def two(open_storage: Open, **section: object) -> tuple[Harness, GatedStorage, MemoryStorage]:
    """Memory above a remote level; and what that really has."""
    bucket = MemoryStorage(memory_config(1024 * KIB))
    lower = gated(bucket, "object", asks=True)
    first = MemoryStorage(memory_config(64 * KIB))
    return await open_storage(stack(first, lower, object=LevelSection(**section))), lower, bucket  # type: ignore[arg-type]


def blobs(store: Harness, *which: int) -> list[Blob]:
    use = Use()
    use.shared = True
    return [Blob(name(i), store.buffer(KIB, bytes([i]) * KIB), use, i) for i in which]


def proven(answers: list[Proof | StorageError]) -> list[bool]:
    return [isinstance(one, Proof) for one in answers]


async def test_what_the_task_has_put_is_not_asked_and_what_it_found_is_asked_at_once(open_storage: Open) -> None:
    store, lower, bucket = await two(open_storage)
    assert proven(await promise(store.storage, blobs(store, *range(20)))) == [True] * 20
    assert (lower.asked, len(lower.stores)) == (0, 20)
    late = store.levels._now()
    assert proven(await prove(store.storage, blobs(store, *range(20)), late)) == [True] * 20
    assert (lower.asked, len(lower.stores)) == (1, 20), "one batch, and no copy"
    assert proven(await prove(store.storage, blobs(store, *range(20)), late)) == [True] * 20
    assert lower.asked == 1, "it has said so within the task"
    for i in range(5):
        await bucket.quarantine(name(i))
    assert proven(await prove(store.storage, blobs(store, *range(20)))) == [True] * 20
    assert (lower.asked, lower.stores[20:]) == (2, [name(i) for i in range(5)]), "only what it has lost"
    assert await bucket.exists([name(i) for i in range(20)]) == [True] * 20


async def test_a_level_that_does_not_answer_is_an_error_at_once_and_the_copy_still_waits(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "RETRY_S", 0.01)
    store, lower, bucket = await two(open_storage)
    lower.error = StorageUnavailable("it is dead")
    assert await promise(store.storage, blobs(store, 1)) == [lower.error]
    assert await promise(store.storage, blobs(store, 2)) == [lower.error]
    assert set(store.levels.unsaved) == {name(1), name(2)}
    lower.error = None
    await until(lambda: not store.levels.unsaved, "it is well again")
    assert await bucket.exists([name(1), name(2)]) == [True, True]


async def test_a_level_that_goes_out_while_a_task_waits_ends_the_wait(open_storage: Open) -> None:
    store, lower, _ = await two(open_storage)
    lower.gate.clear()
    waiting = asyncio.ensure_future(promise(store.storage, blobs(store, 1)))
    await until(lambda: lower.waiting, "the copy runs")
    other = asyncio.ensure_future(promise(store.storage, blobs(store, 2)))
    await until(lambda: name(2) in store.levels.unsaved, "it waits behind it")
    lower.error = dead = StorageUnavailable("it is dead")
    lower.gate.set()
    assert [await waiting, await other] == [[dead], [dead]]
    lower.error = None


async def test_another_engines_purge_and_one_by_age_cost_a_hand_over_nothing(open_storage: Open) -> None:
    store, lower, bucket = await two(open_storage)
    keeper = store.storage.keeper
    assert keeper is not None
    for which, selection in enumerate((Selection(owner=EngineOwner("other", 1)), Selection(unused_s=3600.0))):
        lower.gate.clear()
        [blob] = blobs(store, which)
        assert blob.use is not None
        blob.use.owner = EngineOwner("me", 1)
        waiting = asyncio.ensure_future(promise(store.storage, [blob]))
        await until(lambda: lower.waiting, "the copy runs")
        purging = asyncio.ensure_future(keeper.purge(selection))
        for _ in range(5):
            await asyncio.sleep(0)
        lower.gate.set()
        assert proven(await waiting) == [True]
        assert (await purging).objects == 0
    assert await bucket.exists([name(0), name(1)]) == [True, True]


async def test_a_refusal_and_an_object_that_has_left_are_errors_of_their_objects(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "RETRY_S", 0.01)
    store, lower, bucket = await two(open_storage)
    lower.full = StorageFull("no room")
    assert await promise(store.storage, blobs(store, 1)) == [lower.full]
    lower.full = None
    await until(lambda: not store.levels.unsaved, "it is tried again")
    assert await put(store.storage, blobs(store, 2, 3)) == [STORED] * 2
    await store.levels.flush(10)
    for i in (2, 3):
        await bucket.quarantine(name(i))
    await store.levels.quarantine_at(name(2), 0)
    left, good = await prove(store.storage, blobs(store, 2, 3))
    assert isinstance(left, StorageError)
    assert "has left the levels above object" in str(left)
    assert isinstance(good, Proof)


async def test_a_task_that_gives_up_leaves_the_copy_to_others(open_storage: Open) -> None:
    store, lower, bucket = await two(open_storage)
    lower.gate.clear()
    gives_up = asyncio.ensure_future(promise(store.storage, blobs(store, 1)))
    await until(lambda: lower.waiting, "the copy runs")
    stays = asyncio.ensure_future(prove(store.storage, blobs(store, 1)))
    await asyncio.sleep(0)
    gives_up.cancel()
    lower.gate.set()
    assert proven(await stays) == [True]
    assert await bucket.exists([name(1)]) == [True]


async def test_an_answer_from_before_the_task_does_not_count(open_storage: Open) -> None:
    """A check that was asked earlier says that the object is there; it is gone when the task begins."""
    store, lower, bucket = await two(open_storage)
    assert await put(store.storage, blobs(store, 1)) == [STORED]
    await store.levels.flush(10)
    store.levels.all_levels[1].unsettle(name(1))
    lower.gate.clear()
    assert store.levels.stored([name(1)], Use()) == [True]
    await until(lambda: lower.waiting, "it is asked again")
    task = asyncio.ensure_future(prove(store.storage, blobs(store, 1), store.levels._now()))
    await asyncio.sleep(0)
    lower.gate.set()
    assert proven(await task) == [True]
    assert lower.asked == 2
    assert await bucket.exists([name(1)]) == [True]


async def test_a_level_that_hangs_is_an_error_and_not_the_deadline(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy goes on; the task's blocks, and other tasks that want them, need not wait for it."""
    monkeypatch.setattr(proving, "HANGS_S", 0.05)
    store, lower, bucket = await two(open_storage)
    lower.gate.clear()
    [error] = await promise(store.storage, blobs(store, 1))
    assert isinstance(error, StorageUnavailable)
    assert "object has not answered a copy" in str(error)
    store.levels.all_levels[1].stored(name(2))
    assert await put(store.storage, blobs(store, 2)) == [STORED]
    [error] = await prove(store.storage, blobs(store, 2))
    assert isinstance(error, StorageUnavailable)
    lower.gate.set()
    await store.levels.flush(10)
    assert await bucket.exists([name(1)]) == [True]
