"""The file of announcements: torn, of another generation, mostly out of date, or on a disk that cannot be written."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from structlog.testing import capture_logs

from tests.support.waits import until
from transferd.config import from_tree
from transferd.daemon.kv_events import remembered as module
from transferd.daemon.kv_events.announcements import Block
from transferd.daemon.kv_events.remembered import Record, Remembered

Open = Callable[[], Remembered]


class Live:
    """What is announced."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def stored(self) -> list[Record]:
        return list(self.records)

    def statistics(self) -> dict[str, int]:
        return {"STORAGE": len(self.records)}


def record(i: int) -> Record:
    return f"{i:040x}", Block(2**64 - 1 - i, 2**64 - i if i else None, i != 3, None if i == 5 else bytes([i]) * 8)


@pytest.fixture
def live() -> Live:
    return Live()


@pytest.fixture
def open_(tmp_path: Path, live: Live) -> Open:
    return lambda: Remembered(tmp_path / "announced-x", live)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may take seconds for the last write, which these tests read."""
    monkeypatch.setattr(module, "CLOSE_S", 60.0)


async def test_each_life_reads_what_those_before_it_have_noted(open_: Open) -> None:
    for life in range(3):
        file = open_()
        assert await file.read("g") == [record(i) for i in range(life)]
        file.note([record(life)])
        await file.close()


@pytest.mark.parametrize("harm", ["cut", "flip", "other version"])
async def test_a_damaged_end_is_cut_off_and_what_follows_is_read_again(open_: Open, tmp_path: Path, harm: str) -> None:
    path = tmp_path / "announced-x"
    sizes = []
    for i in range(2):
        file = open_()
        await file.read("g")
        file.note([record(i)])
        await file.close()
        sizes.append(path.stat().st_size)
    whole = path.read_bytes()
    end = sizes[harm == "other version"]
    damaged = {
        "cut": whole[:-1],
        "flip": whole[:-1] + bytes([whole[-1] ^ 1]),
        "other version": whole + module._HEAD.pack(1, xxhash.xxh3_64_intdigest(b"\x07")) + b"\x07",
    }[harm]
    path.write_bytes(damaged)
    file = open_()
    left = [record(0)] if harm != "other version" else [record(0), record(1)]
    assert await file.read("g") == left
    assert path.read_bytes() == whole[:end]
    file.note([record(9)])
    await file.close()
    assert await open_().read("g") == [*left, record(9)]


async def test_another_generation_is_read_by_nobody_and_the_file_begins_anew(open_: Open, tmp_path: Path) -> None:
    file = open_()
    await file.read("old")
    file.note([record(1)])
    await file.close()
    file = open_()
    assert await file.read("new") == []
    file.note([record(2)])
    file.forget("newer")
    file.note([record(3)])
    await file.close()
    size = (tmp_path / "announced-x").stat().st_size
    assert await open_().read("newer") == [record(3)]
    assert (tmp_path / "announced-x").stat().st_size == size


async def test_a_file_of_blocks_that_are_mostly_gone_is_written_anew(
    open_: Open, live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW", 4)
    monkeypatch.setattr(module, "EVERY_S", 0.0)
    live.records = [record(7), record(8)]
    file = open_()
    await file.read("g")
    for i in range(8):
        file.note([record(i)])
        await until(lambda: not file._pending)
    file.note([record(8)])
    await file.close()
    assert await open_().read("g") == [record(7), record(8)]


async def test_records_of_other_generations_count_when_a_file_is_written_anew(
    open_: Open, live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW", 4)
    sizes = []
    for life in range(10):
        file = open_()
        assert await file.read(f"g{life}") == []
        file.announced_again()
        live.records = [record(8 + life)]
        file.note(live.records)
        await file.close()
        sizes.append((tmp_path / "announced-x").stat().st_size)
    assert max(sizes) <= sizes[0] * (module.FEW + 2)
    assert await open_().read("g9") == live.records


async def test_a_file_is_not_written_anew_before_what_it_has_is_announced_again(
    open_: Open, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW", 4)
    old = [record(i) for i in range(8)]
    live.records = [*old]
    for _ in range(2):
        file = open_()
        await file.read("g")
        file.note(live.records)
        await file.close()
        live.records = [record(8)]  # of the next life, which has announced none of the others yet
    assert await open_().read("g") == [*old, record(8)]


async def test_a_disk_that_is_slow_at_the_end_does_not_hold_up_the_loop(
    open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, go_on, write = asyncio.get_running_loop(), threading.Event(), Remembered._write

    def slow(*args: Any) -> None:
        loop.call_soon_threadsafe(go_on.set)
        assert go_on.wait(20), "the loop stood still"
        write(*args)

    monkeypatch.setattr(Remembered, "_write", slow)
    file = open_()
    await file.read("g")
    file.note([record(1)])
    await file.close()
    assert await open_().read("g") == [record(1)]


async def test_a_disk_that_hangs_at_the_end_is_left(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    go_on = threading.Event()
    monkeypatch.setattr(Remembered, "_write", lambda *_: go_on.wait())
    file = open_()
    file.note([record(1)])
    await file.close()
    go_on.set()


async def test_a_file_that_cannot_be_written_is_logged_once_and_harms_nothing(open_: Open, tmp_path: Path) -> None:
    os.mkdir(tmp_path / "announced-x")
    file = open_()
    with capture_logs() as logs:
        assert await file.read("g") == []
        file.note([record(1)])
        file.forget("h")
        await file.close()
    assert [line["log_level"] for line in logs] == ["warning"]
    assert "cannot note which blocks were announced" in logs[0]["event"]


async def test_nothing_is_written_beneath_the_mount_point_of_a_disk_that_is_away(tmp_path: Path, live: Live) -> None:
    """There the path of the store is an empty directory; where the store is, the file lies beside its objects."""
    path = module.place_of(from_tree({"storage": {"backend": "file", "file": {"path": str(tmp_path)}}}), "e", "m/f")
    assert path is not None
    for there in (False, True):
        if there:
            (tmp_path / "objects").mkdir()
        file = Remembered(path, live)  # type: ignore[arg-type]
        assert await file.read("g") == []
        file.note([record(1)])
        await file.close()
        assert [one.name for one in tmp_path.iterdir() if one.name != "objects"] == [path.name] * there
