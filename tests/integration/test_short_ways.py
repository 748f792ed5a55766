"""A task's way through the daemon stays short: scripts/walk_task.py counts it, docs/adr/0036 says what it costs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from scripts.walk_task import Walk, walk_levels, walk_read, walk_swap_in, walk_swap_out, walk_write
from transferd.storage.lru import LruIndex, Use

MOST_FILES_OF_A_WRITE, MOST_CALLS_OF_A_WRITE = 33, 220  # to storage in memory
MOST_FILES_OF_A_SWAP, MOST_CALLS_OF_A_SWAP = 25, 118
MOST_FILES_OF_A_READ, MOST_CALLS_OF_A_READ = 44, 320  # from storage in files
MOST_FILES_OF_LEVELS, MOST_CALLS_OF_LEVELS = 55, 468  # a write to memory above files, and its copy
MOST_CALLS_OF_A_BLOCK = 31  # of the index, for one that is written to a full store

MANY = 40  # tasks, of which the shortest counts: a busy loop looks at its own turns

Walks = Callable[[Path, int], Coroutine[Any, Any, Walk]]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    # The count is of one loop's callbacks in order, so one kind of loop is enough.
    return asyncio.run(walk_write(tmp_path_factory.mktemp("walk"), MANY))


def test_a_write_crosses_few_files_in_few_calls(walk: Walk) -> None:
    assert len(walk.files) <= MOST_FILES_OF_A_WRITE, walk.files
    assert len(walk.calls) <= MOST_CALLS_OF_A_WRITE, walk.calls


@pytest.mark.parametrize("swap", [walk_swap_out, walk_swap_in])
def test_a_swap_crosses_few_files_in_few_calls(swap: Walks, tmp_path: Path) -> None:
    walk = asyncio.run(swap(tmp_path, MANY))
    assert len(walk.files) <= MOST_FILES_OF_A_SWAP, walk.files
    assert len(walk.calls) <= MOST_CALLS_OF_A_SWAP, walk.calls


def test_a_write_to_levels_crosses_few_files_and_asks_little(tmp_path: Path) -> None:
    walk = asyncio.run(walk_levels(tmp_path, MANY))
    assert len(walk.files) <= MOST_FILES_OF_LEVELS, walk.files
    assert len(walk.calls) <= MOST_CALLS_OF_LEVELS, walk.calls


def test_a_read_of_a_file_crosses_few_files_in_few_calls(tmp_path: Path) -> None:
    walk = asyncio.run(walk_read(tmp_path, MANY))
    assert len(walk.files) <= MOST_FILES_OF_A_READ, walk.files
    assert len(walk.calls) <= MOST_CALLS_OF_A_READ, walk.calls


@pytest.mark.parametrize("engines", [1, 8])
def test_a_block_takes_few_steps_of_the_index_however_many_engines_there_are(engines: int) -> None:
    index, walk, blocks = LruIndex(100), Walk(), [f"{number}" for number in range(110)]
    for number, block in enumerate(blocks):
        use = Use(owner=("engine", number % engines))
        sys.setprofile(walk if number == 109 else None)
        assert isinstance(index.reserve(block, 1, use), list)
        index.commit(block)
        sys.setprofile(None)
    assert len(index) == 100
    assert len(walk.calls) <= MOST_CALLS_OF_A_BLOCK, walk.calls


@pytest.mark.parametrize(
    "function",
    [
        "check_task",
        "content_hash",
        "WriteStorageTask.footprint",
        "ObjectNamer.ids",  # once a task
        "ObjectNamer.names",  # once a rank
        "RankWorker.start",
    ],
)
def test_what_can_be_worked_out_once_is(walk: Walk, function: str) -> None:
    assert [name for _, name in walk.calls].count(function) == 1


def test_a_small_write_takes_no_asyncio_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A free staging slot, an index in memory and a copy of few bytes are answered at once."""
    made: list[str] = []
    real: Callable[..., asyncio.Task[object]] = asyncio.BaseEventLoop.create_task

    def create_task(self: asyncio.BaseEventLoop, work: object, **more: object) -> asyncio.Task[object]:
        made.append(getattr(work, "__qualname__", str(work)))
        return real(self, work, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_task", create_task)
    asyncio.run(walk_write(tmp_path, tasks=3))
    assert made, "the daemon and its client have tasks of their own"
    workers = ("RankWorker._run", "resumed", "Writer.", "StorageSink.", "IndexedStorage._", "Staging.")
    ours = [name for name in made if name.startswith(workers)]
    assert ours == [], "somebody was given a task to wait in for what was there already"
