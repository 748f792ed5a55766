"""Directories go when they are empty, many at a time and never one that is in use."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import file_config
from tests.support.blobs import put
from transferd.storage.base import STORED, Blob
from transferd.storage.file import FileStorage
from transferd.storage.pruning import AT_ONCE, Pruning

NBYTES = 100


def made(root: Path, count: int) -> list[Path]:
    directories = [root / "space" / f"{i:03x}" for i in range(count)]
    for directory in directories:
        directory.mkdir(parents=True)
    return directories


def leave(pruning: Pruning, *directories: Path) -> None:
    for directory in directories:
        pruning.left(f"{directory}/object")


def test_directories_wait_until_there_are_many_and_the_empty_ones_go(tmp_path: Path) -> None:
    pruning = Pruning(f"{tmp_path}/")
    directories = made(tmp_path, AT_ONCE)
    (directories[1] / "object").touch()
    leave(pruning, *directories[:-1])
    assert all(directory.is_dir() for directory in directories)
    leave(pruning, directories[-1])
    assert list((tmp_path / "space").iterdir()) == [directories[1]]
    (directories[1] / "object").unlink()
    leave(pruning, directories[1])
    assert directories[1].is_dir(), "it waits for the next many"


def test_the_end_takes_all_that_wait_with_their_parents_and_leaves_the_root(tmp_path: Path) -> None:
    pruning = Pruning(f"{tmp_path}/")
    directories = made(tmp_path, 3)
    leave(pruning, *directories, tmp_path / "never there")
    pruning.finish()
    assert list(tmp_path.iterdir()) == []
    pruning.finish()


async def test_a_small_store_that_is_written_over_keeps_its_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 objects in up to 256 directories: nearly every one is alone in its own."""
    storage = FileStorage(file_config(tmp_path, 64 * NBYTES), unit=1)
    await storage.open()
    made: list[Any] = []
    mkdir = os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda *arguments: (made.append(arguments), mkdir(*arguments)))
    for start in range(0, 2000, 50):
        digests = [hashlib.sha1(str(i).encode()).hexdigest() for i in range(start, start + 50)]
        blobs = [Blob(f"demo/{digest}/0", memoryview(bytes(NBYTES))) for digest in digests]
        assert await put(storage, blobs) == [STORED] * 50
    await storage.close()
    assert len(made) < 300, "a directory for each of 256 and two above them, for some of which threads compete"
    directories = list((tmp_path / "objects" / "demo").iterdir())
    assert all(any(directory.iterdir()) for directory in directories)
