"""After a restart, a remote level gets what the level above kept, the last used first, and what is loaded later."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.harness import Open, file_config, memory_config
from tests.support.gated_storage import GatedStorage, gated, stack
from tests.support.waits import until
from transferd.config import LevelSection, Size
from transferd.storage.base import STORED, Found
from transferd.storage.file import FileStorage
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.memory import MemoryStorage

NBYTES = 1000
COUNT = 100
NAMES = [f"demo/0123456789abcdef/RL-1/{i:02x}/0" for i in range(COUNT)]


async def restarted(open_storage: Open, path: Path, most: int) -> tuple[LevelsStorage, GatedStorage]:
    """Files that were stored by an earlier daemon, above an empty remote level that does not answer yet."""
    alone = await open_storage(FileStorage(file_config(path, 1000 * NBYTES), unit=1))
    assert await alone.put(*((name, bytes([i]) * NBYTES) for i, name in enumerate(NAMES))) == [STORED] * COUNT
    for name in NAMES:  # so that the last one was used last
        await alone.get((name, NBYTES))
    await alone.storage.close()
    remote = gated(MemoryStorage(memory_config(1000 * NBYTES)), "last", asks=True)
    remote.gate.clear()
    sections = {"last": LevelSection(write_back_bytes=Size(most))}
    store = await open_storage(stack(FileStorage(file_config(path, 1000 * NBYTES), unit=1), remote, **sections))
    assert isinstance(store.storage, LevelsStorage)
    return store.storage, remote


@pytest.mark.parametrize("kept", [10, COUNT])
async def test_the_last_used_objects_are_looked_up_and_copied_at_the_start(
    open_storage: Open, tmp_path: Path, kept: int
) -> None:
    levels, remote = await restarted(open_storage, tmp_path, kept * NBYTES)
    remote.gate.set()
    await until(lambda: len(remote.stores) == kept, "they are copied")
    await levels.flush(10)
    assert set(remote.stores) == set(NAMES[-kept:])
    assert not levels.unsaved
    assert levels.all_levels[1].lost.total() == 0


async def test_other_objects_are_copied_when_loaded_unless_they_are_below(open_storage: Open, tmp_path: Path) -> None:
    levels, remote = await restarted(open_storage, tmp_path, 10 * NBYTES)
    there = remote._behind
    assert isinstance(there, MemoryStorage)
    remote.gate.set()
    await until(lambda: len(remote.stores) == 10, "the newest")
    await levels.flush(10)
    slots = [memoryview(bytearray(NBYTES)) for _ in range(2)]
    from transferd.storage.base import Item

    for _ in range(2):
        outcomes = await levels.load([Item(name, NBYTES) for name in NAMES[:2]], None, slots)
        assert [outcome.found for outcome in outcomes] == [Found.FOUND] * 2
        await levels.flush(10)
        assert remote.stores[10:] == NAMES[:2], "once"
    asked = remote.asked
    assert await there.exists(NAMES[:2]) == [True, True]
    await levels.load([Item(NAMES[0], NBYTES)], None, slots[:1])
    assert remote.asked == asked, "it is known to be there"


async def test_a_level_that_does_not_answer_costs_the_close_nothing(open_storage: Open, tmp_path: Path) -> None:
    levels, remote = await restarted(open_storage, tmp_path, COUNT * NBYTES)
    await until(lambda: remote.waiting, "it is asked")
    assert len(levels.unsaved) <= 64, "a batch at a time"
    closing = asyncio.ensure_future(levels.close())
    await asyncio.sleep(0)
    remote.gate.set()  # the call that runs
    await closing
    assert remote.asked == 1


async def test_a_comparison_that_has_ended_is_not_kept_and_its_failure_is_seen(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = MemoryStorage(memory_config(1000 * NBYTES))
    store = await open_storage(stack(first, gated(MemoryStorage(memory_config(1000 * NBYTES)), "last", asks=True)))
    starting = store.levels._sweep._starting
    await until(lambda: not starting, "the first comparison has ended")
    failures: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(str(context["exception"])))

    def broken() -> Iterator[tuple[str, int]]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(first.index, "hottest_first", broken)
    await store.levels.change("last", leaves=False)
    assert len(starting) == 1
    await until(lambda: not starting, "the next one, too")
    gc.collect()
    assert failures == ["a bug"]
