"""Look-ups in a stack: by level, and not by a level that does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.harness import Open, file_config, memory_config
from tests.support.blobs import put
from tests.support.gated_storage import gated, stack
from transferd.errors import StorageUnavailable
from transferd.storage.base import STORED, Blob, Found
from transferd.storage.file import FileStorage
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.memory import MemoryStorage

NBYTES = 100
NAMES = [f"demo/0123456789abcdef/RL-1/{i:02x}/0" for i in range(3)]


async def test_where_names_each_level_and_waits_for_none(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.storage.levels.stack.LOOK_UP_S", 0.05)
    top = MemoryStorage(memory_config(100 * NBYTES))
    middle = FileStorage(file_config(tmp_path, 100 * NBYTES), unit=1)
    last = gated(MemoryStorage(memory_config(100 * NBYTES)), "last", asks=True)
    store = await open_storage(stack(top, middle, last))
    levels = store.storage
    assert isinstance(levels, LevelsStorage)
    changed: list[str] = []
    levels.tell(changed.append)
    assert levels.names == ["memory", "file", "last"]
    levels.tell_departures(lambda _: None)
    assert await store.put(*((name, bytes(NBYTES)) for name in NAMES[:2])) == [STORED] * 2
    await levels.flush(10)
    assert [changed.count(name) for name in NAMES] == [3, 3, 0]
    assert [levels.having(name) for name in NAMES] == [0b111, 0b111, 0]
    await top.quarantine(NAMES[0])
    assert changed[-1] == NAMES[0]
    assert levels.having(NAMES[0]) == 0b110
    everywhere = {"memory": [False, True, False], "file": [True, True, False], "last": [True, True, False]}
    assert await levels.where(NAMES) == everywhere
    last.gate.clear()
    try:
        assert await levels.where(NAMES) == everywhere | {"last": [False] * 3}, "it does not answer in time"
    finally:
        last.gate.set()
    last.error = StorageUnavailable("dead")
    assert await levels.where(NAMES) == everywhere | {"last": [False] * 3}
    last.error = None
    before = len(changed)
    await last._behind.quarantine(NAMES[1])
    assert (await levels.where(NAMES))["last"] == [True, False, False]
    assert NAMES[1] in changed[before:], "that it has gone is known once it was asked"
    assert levels.having(NAMES[1]) == 0b011


async def test_a_read_believes_no_not_there_of_a_moment_ago(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node has stored it since: decode's scheduler looks, then prefill hands over, then decode reads."""
    monkeypatch.setattr("transferd.storage.levels.level.ABSENT_S", 3600.0)
    bucket = MemoryStorage(memory_config(100 * NBYTES))
    store = await open_storage(stack(MemoryStorage(memory_config(100 * NBYTES)), gated(bucket, "object", asks=True)))
    assert await store.storage.exists(NAMES[:1]) == [False]
    await put(bucket, [Blob(NAMES[0], store.buffer(NBYTES, b"a" * NBYTES))])
    assert await store.storage.exists(NAMES[:1]) == [False], "a scheduler may ask again and again"
    [(outcome, data)] = await store.get((NAMES[0], NBYTES))
    assert (outcome.found, data) == (Found.FOUND, b"a" * NBYTES)
    await bucket.quarantine(NAMES[0])
    await store.levels.all_levels[0].storage.quarantine(NAMES[0])
    assert await store.storage.exists(NAMES[:1]) == [False]
    await put(bucket, [Blob(NAMES[0], store.buffer(NBYTES, b"a" * NBYTES))])
    assert await store.levels.exists_now(NAMES[:1]) == [True]
