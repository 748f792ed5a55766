"""Files of objects that were purged become empty spares, and then other objects' files (spares.py)."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import file_config
from tests.support.blobs import get, put
from transferd.runtime.threads import ThreadPools
from transferd.storage import file_io, spares
from transferd.storage.base import FOUND, STORED, Blob
from transferd.storage.file import FileStorage
from transferd.storage.quarantine import FILES

pytestmark = pytest.mark.skipif(not file_io.NATIVE, reason="the installation had no compiler: nothing is kept")

NBYTES = 5000


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FileStorage]:
    storage = FileStorage(file_config(tmp_path, 1024**3), threads=ThreadPools(1))
    await storage.open()
    yield storage
    await storage.close()
    assert there(tmp_path) == [], "none is left at the end"


def blob(number: int, nbytes: int = NBYTES) -> Blob:
    data = random.Random(number).randbytes(nbytes)
    return Blob(f"demo/0123456789abcdef/RL-1/{number:040x}/0", memoryview(bytearray(data)))


def there(root: Path) -> list[Path]:
    return sorted((root / "spares").iterdir())


def inodes(root: Path) -> set[int]:
    return {path.stat().st_ino for path in (root / "objects").rglob("*@0")}


async def purge(store: FileStorage) -> None:
    entries = [entry for name in store._index.names() if (entry := store._index.get(name))]
    assert await store.drop(entries) == 0


async def stored(store: FileStorage, *numbers: int, nbytes: int = NBYTES) -> None:
    assert await put(store, [blob(number, nbytes) for number in numbers]) == [STORED] * len(numbers)
    for number in numbers:
        wanted = Blob(blob(number).name, memoryview(bytearray(nbytes)))
        assert await get(store, [wanted]) == [FOUND]
        assert wanted.data == blob(number, nbytes).data


async def test_new_objects_lie_in_the_files_of_those_that_were_purged(store: FileStorage, tmp_path: Path) -> None:
    await stored(store, *range(6))
    before = inodes(tmp_path)
    await purge(store)
    kept = there(tmp_path)
    assert {path.stat().st_ino for path in kept} == before
    assert [(path.stat().st_size, path.stat().st_blocks) for path in kept] == [(0, 0)] * 6, "what was purged is gone"
    assert inodes(tmp_path) == set()
    await stored(store, *range(10, 14), nbytes=3 * NBYTES)
    assert inodes(tmp_path) < before
    await stored(store, *range(20, 25))
    assert inodes(tmp_path) > before
    assert there(tmp_path) == []


async def test_a_backups_file_stays_what_it_is(store: FileStorage, tmp_path: Path) -> None:
    await stored(store, 1)
    [path] = (tmp_path / "objects").rglob("*@0")
    (tmp_path / "backup").hardlink_to(path)
    await purge(store)
    assert (tmp_path / "backup").read_bytes() == blob(1).data
    assert (there(tmp_path), inodes(tmp_path)) == ([], set())


async def test_an_object_that_is_read_is_not_emptied(store: FileStorage, tmp_path: Path) -> None:
    await stored(store, 1)
    [path] = (tmp_path / "objects").rglob("*@0")
    with path.open("rb") as reading, store._traffic.reads.of([blob(1).name]):
        store._remove(blob(1).name)
        assert reading.read() == blob(1).data
    assert there(tmp_path) == []


async def test_spares_are_bounded_and_go_when_files_become_few(
    store: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "MOST", 3)
    await stored(store, *range(5))
    await purge(store)
    assert len(there(tmp_path)) == 3
    state = store._directory.state
    monkeypatch.setattr("transferd.storage.directory.FEW_INODES", 1)  # fewer than all are free
    state()
    assert there(tmp_path) == []
    await stored(store, *range(10, 15))


async def test_objects_that_others_have_emptied_cost_no_file(store: FileStorage, tmp_path: Path) -> None:
    """As the benchmark beside peers does to make room: the store sets them aside, and keeps the newest few."""
    await stored(store, *range(40))
    before = inodes(tmp_path)
    for path in (tmp_path / "objects").rglob("*@0"):
        os.truncate(path, 0)
    assert await store._presence.look(store._index.names()) == [False] * 40
    await store._effects.end()
    kept = [*there(tmp_path), *(tmp_path / "quarantine").iterdir()]
    assert {path.stat().st_ino for path in kept} == before
    assert len(there(tmp_path)) == 40 - FILES


async def test_spares_that_somebody_has_removed_or_replaced_do_no_harm(store: FileStorage, tmp_path: Path) -> None:
    await stored(store, *range(4))
    await purge(store)
    gone, directory, link, _ = there(tmp_path)
    for path in (gone, directory, link):
        path.unlink()
    directory.mkdir()
    (tmp_path / "kept").write_bytes(b"somebody's")
    link.symlink_to(tmp_path / "kept")
    await stored(store, *range(10, 18))
    assert (tmp_path / "kept").read_bytes() == b"somebody's"
    directory.rmdir()


async def test_a_spare_that_is_gone_is_not_taken_again(tmp_path: Path) -> None:
    """With `fsync`, the first object of each new directory ends its run, and its spare is removed."""
    store = FileStorage(file_config(tmp_path, 1024**3, fsync=True), threads=ThreadPools(1))
    await store.open()
    await stored(store, *range(6))
    await purge(store)
    store._directory._pruning.finish()
    await stored(store, *range(10, 16))
    await purge(store)
    free = store._directory._spares._free
    assert sorted(free) == [str(path) for path in there(tmp_path)]
    link, directory = there(tmp_path)[:2]
    for path in (link, directory):
        path.unlink()
    link.symlink_to(directory)
    directory.mkdir()
    store._directory._spares.give_back([store._directory._spares.take() or "" for _ in range(len(free))])
    assert sorted(free) == [str(path) for path in there(tmp_path)[2:]]
    directory.rmdir()
    await store.close()


async def test_the_next_start_removes_what_a_killed_daemon_has_left(tmp_path: Path) -> None:
    (tmp_path / "spares").mkdir()
    for left in ("0", "17", "of somebody"):
        (tmp_path / "spares" / left).write_bytes(b"x")
    storage: Any = FileStorage(file_config(tmp_path, 1024**3))
    await storage.open()
    assert [path.name for path in there(tmp_path)] == ["of somebody"]
    await storage.close()
