"""Purges of real stores: what is gone, what stays, and what the medium refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.storage.harness import Open, file_config, memory_config
from transferd.errors import RequestError, StorageError
from transferd.storage.base import FOUND, MISSING, STORED
from transferd.storage.file import FileStorage
from transferd.storage.keeping import check_pins
from transferd.storage.memory import MemoryStorage
from transferd.storage.pins import AskedPins
from transferd.storage.selection import Selection
from transferd.wire.answers import Purged

NAMES = [f"m/f/g/{i:04x}/0" for i in range(1200)]


@pytest.mark.parametrize("backend", ["file", "memory"])
async def test_a_purge_takes_what_fits_in_steps_and_leaves_the_rest(
    backend: str, open_storage: Open, tmp_path: Path
) -> None:
    file = backend == "file"
    storage = FileStorage(file_config(tmp_path, 10**7), unit=1) if file else MemoryStorage(memory_config(10**7))
    harness = await open_storage(storage)
    left: list[str] = []
    storage.tell_departures(left.append)
    assert await harness.put(*((name, b"x" * 100) for name in [*NAMES, "n/f/g/1/0"])) == [STORED] * 1201
    keeper = storage.keeper
    assert await keeper.purge(Selection(model="m"), dry_run=True) == Purged(1200, 120_000)
    assert not left
    purging = asyncio.ensure_future(keeper.purge(Selection(model="m")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < storage.statistics()["purging"] <= 1201, "in steps"
    assert await purging == Purged(1200, 120_000, kept_by=[str(tmp_path)] if file else [])
    assert sorted(left) == NAMES
    harness.reuse_memory()
    outcomes = [outcome for outcome, _ in await harness.get((NAMES[0], 100), ("n/f/g/1/0", 100))]
    assert outcomes == [MISSING, FOUND]
    figures = {"purged": 1200, "purging": 0, "pinned": 0, "pinned_bytes": 0, "pins_expired": 0}
    assert storage.statistics() == storage.statistics() | figures


async def test_an_object_that_cannot_be_removed_is_still_stored_and_reported(
    open_storage: Open, tmp_path: Path
) -> None:
    class Stuck(FileStorage):
        def _remove(self, name: str) -> None:
            if name == NAMES[1]:
                raise StorageError("cannot remove it")
            super()._remove(name)

    storage = Stuck(file_config(tmp_path, 10**7))
    harness = await open_storage(storage)
    await harness.put(*((name, b"x" * 100) for name in NAMES[:3]))
    with pytest.raises(StorageError, match="1 objects could not be removed"):
        await storage.keeper.purge(Selection())
    assert storage.find(NAMES[:3], None) == [False, True, False]
    storage._remove = lambda name: FileStorage._remove(storage, name)  # type: ignore[method-assign]


def test_pins_are_bounded_for_each_owner_and_for_all() -> None:
    check_pins(AskedPins(1, new=10, taken=0, pinned=10, capacity=100), 0.1)
    for asked in (AskedPins(1, 11, 0, 11, 100), AskedPins(1, 5, 6, 11, 100), AskedPins(1, 5, 0, 51, 100)):
        with pytest.raises(RequestError, match=r"engines\.pin_share") as refused:
            check_pins(asked, 0.1)
        assert refused.value.reason == "share_exceeded"
