"""The quarantine keeps a few bad objects for inspection, and is bounded whatever one of its files refuses."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import pytest

from tests.storage.harness import Open, file_config
from tests.storage.test_file import GIB, content, file_of, files_below, name
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage import quarantine
from transferd.storage.file import FileStorage
from transferd.storage.quarantine import Quarantine


async def test_the_quarantine_keeps_the_newest_few_files(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    count = quarantine.FILES + 5
    for number in range(count):
        await store.put((name(number), content(number)))
        await store.storage.quarantine(name(number))
    kept = {path.read_bytes() for path in files_below(tmp_path / "quarantine")}
    assert kept == {content(number) for number in range(5, count)}
    assert files_below(tmp_path / "objects") == []
    assert store.storage.statistics()["corrupt"] == count


async def test_the_quarantine_is_bounded_in_bytes(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    for number in range(4):
        await store.put((name(number), b"x"))
        os.truncate(file_of(tmp_path, number), quarantine.BYTES // 3)  # sparse: costs nothing
        await store.storage.quarantine(name(number))
    assert sum(path.stat().st_size for path in files_below(tmp_path / "quarantine")) <= quarantine.BYTES
    assert len(files_below(tmp_path / "quarantine")) == 3


def test_a_file_that_cannot_be_removed_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Quarantine(f"{tmp_path}/q/", SYSTEM_CLOCK, itertools.count(), os.mkdir, lambda path: os.unlink(path))
    taken = []
    for number in range(quarantine.FILES + 3):
        bad = tmp_path / f"{'ab' * 20}@0"
        bad.write_bytes(b"x")
        taken.append(kept.take(str(bad)))
        os.utime(taken[-1], ns=(number, number))

    def refuse_the_oldest(path: str, real: object = os.unlink) -> None:
        if path == taken[0]:
            raise PermissionError(path)
        real(path)  # type: ignore[operator]

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse_the_oldest)
        kept.trim()
    assert sorted(os.listdir(tmp_path / "q")) == sorted(map(os.path.basename, [taken[0], *taken[3:]]))


def test_a_purge_empties_it_also_while_its_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Quarantine(f"{tmp_path}/q/", SYSTEM_CLOCK, itertools.count(), os.mkdir, lambda path: os.unlink(path))
    for _ in range(4):
        bad = tmp_path / f"{'ab' * 20}@0"
        bad.write_bytes(b"x")
        kept.take(str(bad))

    def another_thread_was_faster(path: str, real: object = os.unlink) -> None:
        real(path)  # type: ignore[operator]
        raise FileNotFoundError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", another_thread_was_faster)
        kept.empty(math.inf)
    assert os.listdir(tmp_path / "q") == []
