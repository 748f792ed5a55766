"""Where a store lives: one rule for one path and for several. Real file systems that are unmounted and replaced."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import Harness, Open, file_config
from tests.storage.real_disks import (
    EACH,
    disks,
    gone,
    mounted_at,
    names,
    needs_root,
    no_answer,
    on_disk,
    put,
    read_only,
    there,
    writable,
)
from tests.support.waits import until
from transferd.config import FileStorageSection, StorageSection
from transferd.config.size import Capacities
from transferd.errors import StorageError, StorageUnavailable
from transferd.storage.base import Found
from transferd.storage.disks import Disks
from transferd.storage.file import FileStorage
from transferd.storage.home import AWAY, Home
from transferd.storage.selection import Selection

pytestmark = needs_root

Make = Callable[[list[Path]], FileStorage | Disks]


def mounted_anew(path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], check=True)


def one(paths: list[Path]) -> FileStorage:
    return FileStorage(file_config(paths[0], EACH))


@pytest.fixture(params=[one, disks], ids=["one path", "several paths"])
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen


def out(harness: Harness) -> bool:
    storage = harness.storage
    return bool(storage.unusable() or storage.statistics().get("disks_failed"))


async def unmounted(harness: Harness, path: Path) -> None:
    """The disk at this path is unmounted, and the store has noticed that."""
    gone(path)
    # On a busy machine the store may notice it before a thread begins to write: then the whole call is refused.
    with contextlib.suppress(StorageUnavailable):
        outcomes = await put(harness, names(10, 500))
        assert isinstance(harness.storage, Disks) or set(outcomes) == {Found.FAILED}, "there is no place for them"
    await until(lambda: out(harness))


async def test_nothing_is_ever_written_beneath_a_mount_point(
    make: Make, open_storage: Open, mounts: list[Path]
) -> None:
    harness = await open_storage(make([mounts[0] / "deep" / "blocks", mounts[1] / "blocks"]))
    await put(harness, names(20))
    await unmounted(harness, mounts[0])
    for number in range(5):
        harness.storage.reconfigure(StorageSection())  # as SIGHUP: it is tried at once
        with contextlib.suppress(StorageError):
            await put(harness, names(5, 600 + number))
        await harness.storage.keeper.purge(Selection(frozenset(names(1, 700))))  # type: ignore[union-attr]
    assert not list(mounts[0].iterdir())


async def test_a_disk_that_was_replaced_by_an_empty_one_returns_without_a_restart(
    make: Make, open_storage: Open, mounts: list[Path]
) -> None:
    path = mounts[0] / "deep" / "blocks"
    harness = await open_storage(make([path, mounts[1] / "blocks"]))
    await put(harness, names(20))
    await unmounted(harness, mounts[0])
    mounted_anew(mounts[0])
    await until(lambda: not out(harness))
    assert await put(harness, names(20)) == [Found.STORED] * 40 or isinstance(harness.storage, Disks)
    assert await there(harness, names(20)) == set(names(20))
    assert on_disk(path), "it takes its part of what comes"


async def test_a_disk_that_is_mounted_again_with_another_device_number_keeps_its_objects(
    make: Make, open_storage: Open, mounts: list[Path], tmp_path: Path
) -> None:
    harness = await open_storage(make([mounts[0] / "blocks", mounts[1] / "blocks"]))
    await put(harness, names(20))
    held = on_disk(mounts[0] / "blocks")
    shutil.copytree(mounts[0] / "blocks", tmp_path / "kept")
    await unmounted(harness, mounts[0])
    mounted_anew(mounts[0])
    shutil.copytree(tmp_path / "kept", mounts[0] / "blocks")
    await until(lambda: not out(harness))
    assert on_disk(mounts[0] / "blocks") >= held
    assert await there(harness, names(20)) == set(names(20))


async def test_a_disk_that_is_not_mounted_at_the_start_is_left_out_until_it_is(
    open_storage: Open, mounts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one path alone nobody knows it: the orders that would say so are on the disk itself."""
    monkeypatch.setattr("transferd.storage.disks.REST_S", 0.05)
    paths = [mounts[0] / "deep" / "blocks", mounts[1] / "blocks"]
    first = await open_storage(disks(paths))
    await put(first, names(20))
    await first.storage.close()
    held, kept = on_disk(paths[0]), tmp_path / "kept"
    kept.mkdir()
    mounted_at(mounts[0], kept)
    gone(mounts[0])
    harness = await open_storage(storage := disks(paths))
    assert "mounted" in storage.statistics()["disks"][0]["failed"]  # the second try may have said it in its words
    assert await put(harness, names(5, 100)) == [Found.STORED] * 10
    assert not list(mounts[0].iterdir()), "nothing is written beneath"
    mounted_at(kept, mounts[0])
    await until(lambda: not storage.statistics()["disks_failed"])
    assert on_disk(paths[0]) >= held
    assert await there(harness, names(20)) == set(names(20))
    gone(kept)


async def test_a_reload_of_the_configuration_tries_a_disk_that_rests(
    open_storage: Open, mounts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.storage.disks.REST_S", 3600.0)
    storage = disks(mounts[:2])
    harness = await open_storage(storage)
    await put(harness, names(20))
    read_only(mounts[0])
    await put(harness, names(20, 100))
    assert storage.statistics()["disks_failed"] == 1
    writable(mounts[0])
    paths = [str(path) for path in mounts[:2]]
    storage.reconfigure(StorageSection(file=FileStorageSection(path=paths, capacity=Capacities(EACH))))
    await until(lambda: not storage.statistics()["disks_failed"])
    assert await there(harness, names(20)) == set(names(20))


def test_a_home_knows_what_is_beneath_it(mounts: list[Path]) -> None:
    root = mounts[0] / "blocks"
    home = Home(root)
    assert home.away() == "there is no store", "it was never opened"
    home.make()
    home.opened()
    assert (root.stat().st_mode & 0o777, home.away()) == (0o700, "")
    shutil.rmtree(root)
    assert home.away() == "", "it is made anew on its device"
    gone(mounts[0])
    assert home.away() == AWAY
    with pytest.raises(OSError, match="not mounted"):
        home.make()
    (root / "objects").mkdir(parents=True)  # somebody has stored beneath, as earlier releases did
    assert home.away() == AWAY
    with pytest.raises(OSError, match="not mounted"):
        home.opened()  # it went after `make`
    assert home.away() == AWAY
    mounted_anew(mounts[0])
    assert home.away() == ""


async def test_a_disk_that_did_not_answer_at_the_start_and_is_unmounted_then_is_not_made_anew(
    open_storage: Open, mounts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.storage.disks.REST_S", 0.05)
    earlier = await open_storage(disks(mounts))
    await put(earlier, names(10))
    await earlier.storage.close()
    made = disks(mounts)
    disk = made._all[1]
    with no_answer(disk, monkeypatch):
        harness = await open_storage(made)
        assert harness.storage.statistics()["disks_failed"] == 1
        gone(mounts[1])
    monkeypatch.setattr(disk._directory.home, "away", lambda: "")  # it goes just after it was looked for
    await until(lambda: "Input/output error" not in disk.lost)  # it was tried again
    assert "nothing is mounted at" in disk.lost
    assert not list(mounts[1].iterdir()), "nothing was written beneath the mount point"


async def test_a_disk_whose_file_system_does_not_answer_at_the_start_is_left_out(
    open_storage: Open, mounts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead mount of a network or of FUSE: every call of it fails, also the look at what is mounted."""
    for _ in range(2):  # the first disk hears of the second one's mount point with the second start
        earlier = await open_storage(disks(mounts[:2]))
        await earlier.storage.close()

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **named: Any) -> Any:
            if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(mounts[1]):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return real(path, *args, **named)

        return call

    with monkeypatch.context() as ill:
        for name in ("stat", "lstat", "open", "mkdir", "scandir"):
            ill.setattr(os, name, failing(getattr(os, name)))
        harness = await open_storage(disks(mounts[:2]))
    assert harness.storage.statistics()["disks_failed"] == 1
    assert await put(harness, names(5)) == [Found.STORED] * 10
