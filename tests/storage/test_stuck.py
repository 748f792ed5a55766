"""One file that refuses costs itself: the innocent are stored, the next victim goes, and the store says which it is."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from tests.storage.harness import Open
from tests.storage.test_indexed import TEN, ScriptedStorage
from tests.support import native
from tests.support.blobs import put as put_blobs
from tests.support.waits import until
from transferd.errors import StorageError, StorageUnavailable
from transferd.storage.base import STORED, Blob, Found
from transferd.storage.queues import Use
from transferd.storage.selection import Selection
from transferd.storage.stuck import FAILING

DENIED = "storage_denied"
MET = {"file, open", "file, rename", "file, pread", "file, stat", "directory, open", "directory, rename",
       "directory, rmdir", "directory, opendir", "directory, stat", "quarantine, rename", "quarantine, opendir",
       "quarantine, stat"}  # fmt: skip
# The extension writes over files and keeps those that leave; its twin makes and removes them.
MET_BY = {"native": {"file, pwrite"}, "Python": {"file, unlink", "directory, unlink"}}


@pytest.mark.timeout(960)
@pytest.mark.parametrize("way", ["native", "Python"])
def test_whatever_one_member_refuses_all_others_go_on(tmp_path: Path, way: str) -> None:
    """member_faults.py runs the cells: member × operation × errno × what the store does. `make faults` runs more."""
    program = "from tests.storage.member_faults import main; main()"
    report = json.loads(native.run(program, str(tmp_path), way, "2", timeout=900).splitlines()[-1])
    assert report["broken"] == []
    assert {cell for cell, hits in report["hits"].items() if hits} == MET | MET_BY[way]
    assert report["cells"] > 100


async def filled(open_storage: Open, count: int) -> ScriptedStorage:
    """A full store of so many objects, the first of which is the next to go."""
    storage = ScriptedStorage(count * len(TEN))
    store = await open_storage(storage)
    for number in range(count):
        await store.put((f"{number}/0", TEN))
    return storage


async def put(storage: ScriptedStorage, name: str) -> Found:
    [outcome] = await put_blobs(storage, [Blob(name, memoryview(bytearray(TEN)))])
    return outcome.found


async def test_a_victim_that_cannot_be_removed_stays_and_the_next_one_goes(open_storage: Open) -> None:
    storage = await filled(open_storage, 3)
    storage.failures["remove 0/0"] = StorageError("denied", code=DENIED)
    assert await put(storage, "new/0") is STORED.found
    assert sorted(storage.objects) == ["0/0", "2/0", "new/0"]
    assert storage.find(["0/0", "1/0"], None) == [True, False], "it is served"
    assert storage._stuck.statistics() == {"stuck": 1, "stuck_bytes": 10, "stuck_why": "denied"}
    assert storage.statistics()["evictions"] == 1
    assert storage.statistics()["errors"] == 0
    assert await put(storage, "newer/0") is STORED.found
    assert storage.effects.count("remove 0/0") == 1, "it is passed by"


async def test_a_purge_may_take_what_a_running_write_could_not_remove(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write removes another object meanwhile, in a thread."""
    storage, held = await filled(open_storage, 3), threading.Event()
    storage.failures["remove 0/0"] = StorageError("denied", code=DENIED)
    remove = storage._remove

    def slow(name: str) -> None:
        if name == "1/0":
            held.wait()
        remove(name)

    monkeypatch.setattr(storage, "_remove", slow)
    writing = asyncio.ensure_future(put(storage, "new/0"))
    try:
        await until(lambda: storage._stuck.refused, "the first one has refused")
        purging = asyncio.ensure_future(storage.keeper.purge(Selection()))
        await until(lambda: storage.find(["2/0"], None) == [False], "the purge runs")
    finally:
        held.set()
    assert await writing is STORED.found
    await purging
    assert not storage._effects.busy
    assert await put(storage, "0/0") is STORED.found, "nobody waits for a removal that is over"


async def test_a_purge_takes_what_another_could_not_remove_and_has_put_back(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at the index while the other has dropped the object from it, and has not removed it yet."""
    storage, held = await filled(open_storage, 3), threading.Event()
    storage.failures["remove 0/0"] = StorageError("read-only", code="storage_read_only")  # once
    remove = storage._remove

    def slow(name: str) -> None:
        held.wait()
        remove(name)

    monkeypatch.setattr(storage._stuck, "_remove", slow)
    one = asyncio.ensure_future(storage.keeper.purge(Selection()))
    try:
        await until(lambda: not storage._index.names(), "the first purge has dropped all")
        other = asyncio.ensure_future(storage.keeper.purge(Selection()))
        await asyncio.sleep(0)  # the second has looked, too
        await asyncio.sleep(0)
    finally:
        held.set()
    with pytest.raises(StorageError, match="1 objects could not be removed"):
        await one
    assert (await other).objects == 1
    assert not storage.objects


async def test_a_quarter_of_all_files_refuse_and_all_tasks_are_stored(open_storage: Open) -> None:
    storage = await filled(open_storage, 40)
    storage.failures |= {f"remove {number}/0": StorageError("denied", code=DENIED) for number in range(10)}
    for number in range(60):
        assert await put(storage, f"new{number}/0") is STORED.found
    assert storage._index.used <= storage._index.capacity
    assert {f"{number}/0" for number in range(10)} < set(storage.objects)


async def test_an_error_of_the_whole_store_sets_nothing_aside(open_storage: Open) -> None:
    storage = await filled(open_storage, 3)
    storage.failures["remove 0/0"] = StorageError("read-only", code="storage_read_only")
    assert await put(storage, "new/0") is Found.FAILED
    storage.failures["remove 0/0"] = StorageUnavailable("lost")
    assert await put(storage, "new/0") is Found.FAILED
    assert storage._stuck.statistics()["stuck"] == 0
    assert sorted(storage.objects) == ["0/0", "1/0", "2/0"]
    assert await put(storage, "new/0") is STORED.found
    assert sorted(storage.objects) == ["1/0", "2/0", "new/0"], "it was the next to go again"


async def test_a_failing_disk_is_told_to_its_owner_after_a_few(open_storage: Open) -> None:
    storage = await filled(open_storage, 20)
    storage.failures |= {f"remove {number}/0": StorageError("bad", code="storage_io") for number in range(20)}
    assert await put(storage, "new/0") is Found.FAILED
    assert storage._stuck.statistics()["stuck"] == FAILING


async def test_what_can_be_removed_again_goes_at_the_next_try(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = await filled(open_storage, 3)
    storage.failures["remove 0/0"] = StorageError("denied", code=DENIED)
    await put(storage, "new/0")
    storage._stuck.try_again()
    await storage._effects.end()
    assert "0/0" in storage.objects, "too early"
    monkeypatch.setattr("transferd.storage.stuck.RETRY_S", -1.0)
    storage.failures["remove 0/0"] = StorageError("denied", code=DENIED)
    storage._stuck.try_again()
    await storage._effects.end()
    assert storage._stuck.statistics()["stuck"] == 1
    assert storage.find(["0/0"], None) == [True]
    storage._stuck.try_again()
    await storage._effects.end()
    assert storage._stuck.statistics()["stuck"] == 0
    assert "0/0" not in storage.objects


@pytest.mark.parametrize("how", ["looks first", "stores"])
async def test_what_a_task_stores_again_meanwhile_stays(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A task that is told `ok` for an object that was to be removed counts on it."""
    storage = await filled(open_storage, 3)
    storage.failures["remove 0/0"] = StorageError("denied", code=DENIED)
    [entry] = [entry for entry in [storage._index.get("0/0")] if entry is not None]
    assert await storage.drop([entry]) == 1
    if how == "stores":
        assert await put(storage, "0/0") is Found.EXISTS
    else:
        assert storage.stored(["0/0"], Use()) == [True]
    monkeypatch.setattr("transferd.storage.stuck.RETRY_S", -1.0)
    storage._stuck.try_again()
    await storage._effects.end()
    assert storage.find(["0/0"], None) == [True]
    assert "0/0" in storage.objects
    assert storage._stuck.statistics()["stuck"] == 0
    assert await put(storage, "new/0") is STORED.found
    assert "1/0" not in storage.objects, "it is evicted as any other, when it is the oldest"


async def test_nothing_comes_back_to_the_index_of_a_lost_store(open_storage: Open) -> None:
    """A removal that began before the loss fails after it, when the index has been emptied."""
    storage = await filled(open_storage, 2)
    storage.failures |= {f"remove {number}/0": StorageUnavailable("lost") for number in range(2)}
    entries = [entry for name in ("0/0", "1/0") if (entry := storage._index.get(name)) is not None]
    storage._effects.unusable = lambda: "its lock was removed"
    assert await storage.drop(entries) == 2
    assert storage.find(["0/0", "1/0"], None) == [False, False]


async def test_a_purge_says_what_it_could_not_remove(open_storage: Open) -> None:
    storage = await filled(open_storage, 3)
    storage.failures["remove 1/0"] = StorageError("denied", code=DENIED)
    entries = [entry for name in ("0/0", "1/0", "2/0") if (entry := storage._index.get(name)) is not None]
    assert await storage.drop(entries) == 1
    assert sorted(storage.objects) == ["1/0"]
    assert storage._stuck.statistics()["stuck"] == 1


async def test_a_bad_object_that_can_be_neither_kept_nor_removed_is_counted_and_not_served(open_storage: Open) -> None:
    storage = await filled(open_storage, 2)
    storage.failures["aside 0/0"] = StorageError("denied", code=DENIED)
    await storage.quarantine("0/0")
    assert storage.find(["0/0"], None) == [False]
    assert storage._stuck.statistics()["stuck"] == 1
    assert await put(storage, "0/0") is STORED.found


async def test_a_bad_object_on_a_disk_that_is_read_only_goes_when_it_can(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed until a restart, and every scrub found it again."""
    monkeypatch.setattr("transferd.storage.stuck.RETRY_S", -1.0)
    storage = await filled(open_storage, 2)
    read_only = StorageError("read-only", code="storage_read_only")
    storage.failures |= {"aside 0/0": read_only, "remove 0/0": read_only}
    await storage.quarantine("0/0")
    storage._stuck.try_again()
    await storage._effects.end()
    assert storage.find(["0/0"], None) == [False]
    assert sorted(storage.objects) == ["0/0", "1/0"]
    storage._stuck.try_again()
    await storage._effects.end()
    assert sorted(storage.objects) == ["1/0"]
    assert storage._stuck.statistics()["stuck"] == 0


async def test_a_purge_removes_bad_objects_that_could_not_be_put_aside_or_says_so(open_storage: Open) -> None:
    """A restart would have found them, and their medium may be well again."""
    storage = await filled(open_storage, 2)
    failing = StorageError("bad", code="storage_io")
    storage.failures |= {"aside 0/0": failing, "remove 0/0": failing}
    await storage.quarantine("0/0")
    with pytest.raises(StorageError, match="1 objects could not be removed"):
        await storage.keeper.purge(Selection())
    assert sorted(storage.objects) == ["0/0"]
    await storage.keeper.purge(Selection())
    assert sorted(storage.objects) == []
    assert storage._stuck.statistics()["stuck"] == 0


async def test_a_purge_that_does_not_mean_it_leaves_an_object_that_was_stored_in_place_of_a_bad_one(
    open_storage: Open,
) -> None:
    storage = await filled(open_storage, 2)
    failing = StorageError("bad", code="storage_io")
    storage.failures |= {"aside 0/0": failing, "remove 0/0": failing}
    await storage.quarantine("0/0")
    assert await put(storage, "0/0") is STORED.found
    storage.failures.clear()
    await storage.keeper.purge(Selection(unused_s=3600.0))
    assert storage.find(["0/0"], None) == [True]
    assert "0/0" in storage.objects
