"""Purges and pins of files that hold wherever a disk was meanwhile: real file systems that come and go, kill -9."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import Harness, Memory, Open, file_config
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
from tests.support.hung_files import HANGS, HungFiles
from tests.support.waits import until
from transferd.errors import ConfigError, StorageError
from transferd.storage import effects, journal, ledger, orders
from transferd.storage.base import Found
from transferd.storage.directory import ObjectDirectory
from transferd.storage.disks import Disks
from transferd.storage.file import FileStorage
from transferd.storage.files_keeper import FilesKeeper
from transferd.storage.keeping import PinState
from transferd.storage.orders import MANY_ORDERS, NOBODY
from transferd.storage.paths import path_of
from transferd.storage.quarantine import Quarantine
from transferd.storage.queues import EngineOwner
from transferd.storage.selection import Selection

OWNER = EngineOwner("e", 1)


def one_disk(path: Path) -> FileStorage:
    return FileStorage(file_config(path, EACH))


def keeper(harness: Harness) -> FilesKeeper:
    assert isinstance(harness.storage.keeper, FilesKeeper)
    return harness.storage.keeper


def refuses_to_go(stuck: str, patch: pytest.MonkeyPatch) -> None:
    """From now on this object cannot be removed."""
    remove = ObjectDirectory.remove

    def refused(self: ObjectDirectory, name: str, *, keep: bool = False) -> None:
        if name == stuck:
            raise StorageError("Permission denied", code="storage_denied")
        remove(self, name, keep=keep)

    patch.setattr(ObjectDirectory, "remove", refused)


async def filled(storage: FileStorage | Disks, these: list[str]) -> None:
    """A life of a store: it gets these objects, and closes."""
    await storage.open()
    harness = Harness(storage, Memory(4 * 1024**2))
    assert await put(harness, these) == [Found.STORED] * len(these)
    await storage.close()
    harness.release()


def killed(storage: Disks) -> None:
    """It does nothing more, and its locks are free."""
    for disk in storage._all:
        if disk._recovering is not None:
            disk._recovering.cancel()
    storage.abandon()


@pytest.fixture
def device(mounts: list[Path]) -> Iterator[Path]:
    """The file system of the second mount, at another path too, so that it outlives being unmounted."""
    path = mounts[1].parent / "device"
    path.mkdir()
    mounted_at(mounts[1], path)
    yield path
    gone(path)


# --- a disk that was away -------------------------------------------------------------------------


@needs_root
async def test_the_only_disk_returns_without_what_was_purged_while_it_was_away(
    open_storage: Open, mounts: list[Path], device: Path
) -> None:
    path = mounts[1]
    harness = await open_storage(one_disk(path))
    await put(harness, names(20))
    gone(path)
    purged = await keeper(harness).purge(Selection(frozenset(names(10))))
    assert (purged.complete, purged.not_reached, purged.kept_by) == (False, [str(path)], [])
    assert not list(path.iterdir()), "nothing was written beneath the mount point"
    mounted_at(device, path)
    await until(lambda: not harness.storage.unusable())
    assert await there(harness, names(20)) == set(names(10, 10))
    assert len(on_disk(path)) == 20, "and their bytes are gone"
    assert (await keeper(harness).purge(Selection())).complete


@needs_root
async def test_a_disk_whose_return_fails_has_nothing(
    open_storage: Open, mounts: list[Path], device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found again, then its orders could not be written: its objects seemed to be there until the next try."""
    path = mounts[1]
    storage = one_disk(path)
    harness = await open_storage(storage)
    await put(harness, names(5))
    gone(path)
    await keeper(harness).purge(Selection(frozenset(names(1))))
    tried = threading.Event()

    def refused(_: object) -> None:
        storage.rest_s = 3600.0  # there is no other try
        tried.set()
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(storage.ledger, "write", refused)
    mounted_at(device, path)
    await until(tried.is_set)
    await until(lambda: storage.find(names(5), None) == [False] * 10)
    assert storage.unusable()


@needs_root
@pytest.mark.parametrize("stop", ["close", "kill"])
@pytest.mark.parametrize(
    "selection", [Selection(), Selection(model="m"), Selection(owner=OWNER), Selection(unused_s=0.0)]
)
async def test_a_disk_that_was_away_at_a_purge_brings_nothing_back_after_a_restart(
    stop: str, selection: Selection, open_storage: Open, mounts: list[Path], device: Path
) -> None:
    await filled(disks(mounts[:2]), names(30))
    first = disks(mounts[:2])
    await first.open()
    first.keeper.claim(OWNER, "m/f", 0.0)  # it takes over what is there
    held = on_disk(mounts[1])
    assert held
    gone(mounts[1])
    purged = await first.keeper.purge(selection)
    assert (purged.not_reached, purged.kept_by) == ([str(mounts[1])], [str(mounts[0])])
    killed(first) if stop == "kill" else await first.close()
    assert on_disk(device) == held
    mounted_at(device, mounts[1])
    again = await open_storage(disks(mounts[:2]))
    assert await there(again, names(30)) == set()
    assert not on_disk(mounts[1])
    await first.close()


@needs_root
async def test_a_disk_that_cannot_take_an_order_is_lost_at_once_and_returns_when_it_has_applied_it(
    open_storage: Open, mounts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.storage.disks.REST_S", 0.05)
    harness = await open_storage(disks(mounts[:2]))
    await put(harness, names(30))
    its = len(on_disk(mounts[1]))
    read_only(mounts[1])  # nobody has noticed
    purged = await keeper(harness).purge(Selection(frozenset(names(10))))
    assert purged.not_reached == [str(mounts[1])]
    assert harness.storage.statistics()["disks_failed"] == 1, "it would serve what was purged after a restart"
    writable(mounts[1])
    await until(lambda: not harness.storage.statistics()["disks_failed"])
    assert await there(harness, names(30)) == set(names(20, 10))
    assert 0 < len(on_disk(mounts[1])) < its


async def test_a_full_disk_applies_an_order_that_it_cannot_record(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await open_storage(one_disk(tmp_path))
    await put(harness, names(5))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(journal, "write_all", full)
        purged = await keeper(harness).purge(Selection())
    assert (purged.objects, purged.complete, purged.kept_by) == (10, True, [])
    assert not harness.storage.unusable(), "it has room again, now that they are gone"
    assert (await keeper(harness).purge(Selection())).kept_by == [str(tmp_path)], "and takes the next one"


async def test_an_order_by_age_that_a_disk_brings_leaves_what_was_used_since(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given while the other disk was away. That one has served since, without knowing it."""
    monkeypatch.setattr("transferd.storage.disks.REST_S", 0.05)
    paths = [tmp_path / "a", tmp_path / "b"]
    await filled(disks(paths), names(20))
    gave = disks(paths[1:])
    await gave.open()
    await gave.keeper.purge(Selection(unused_s=3600.0))
    await gave.close()
    for file in on_disk(paths[0]):
        os.utime(paths[0] / file, (0, 0))
    made = disks(paths)
    with no_answer(made._all[1], monkeypatch):
        harness = await open_storage(made)
        await put(harness, names(10, 100))
    await until(lambda: not made.statistics()["disks_failed"])
    await until(lambda: not any(made._book.left_for(disk.ledger.listed) for disk in made._all))
    assert await there(harness, names(10, 100)) == set(names(10, 100))
    assert len(on_disk(paths[0])) == 20, "and what was not used for so long has gone"


# --- stores that have missed orders -----------------------------------------------------------------


async def forgotten(storage: FileStorage | Disks) -> None:
    """Give so many orders, and have them applied, that no list has them any more."""
    for number in range(MANY_ORDERS):
        assert (await storage.keeper.purge(Selection(frozenset({f"m/f/g/{number}/9"})))).complete


async def test_a_store_that_missed_orders_that_nobody_lists_any_more_is_emptied(
    open_storage: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    await filled(disks(paths), names(20))
    shutil.copytree(paths[1], tmp_path / "image")
    later = disks(paths)
    await later.open()
    assert (await later.keeper.purge(Selection(frozenset(names(20))))).objects == 40
    await forgotten(later)
    await later.close()
    shutil.rmtree(paths[1])
    (tmp_path / "image").rename(paths[1])
    harness = await open_storage(disks(paths))
    assert await there(harness, names(20)) == set()
    assert not on_disk(paths[1])
    assert "it was away while orders were given that no disk lists any more" in capsys.readouterr().out
    assert await put(harness, names(5)) == [Found.STORED] * 10


@pytest.mark.parametrize("dies_at", [0, 1])
async def test_a_kill_between_two_disks_at_the_end_of_an_epoch_empties_none(
    dies_at: int, open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    await filled(disks(paths), names(20))
    storage = disks(paths)
    await storage.open()
    written = list[str]()

    class Killed(Exception):
        pass

    def write(self: Any, *args: Any) -> None:
        if len(written) == dies_at:
            raise Killed
        written.append(self._path)
        real(self, *args)

    real = ledger.Ledger.write
    with monkeypatch.context() as patched:
        patched.setattr(ledger.Ledger, "write", write)
        patched.setattr(orders, "MANY_ORDERS", 1)
        with pytest.raises(Killed):
            await storage.keeper.purge(Selection(frozenset(names(1))))
    assert len(written) == dies_at
    killed(storage)
    again = await open_storage(disks(paths))
    assert await there(again, names(20)) == set(names(19, 1))
    await storage.close()


async def test_disks_of_different_stores_are_refused_at_the_start(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for number, path in enumerate(paths):
        await filled(one_disk(path), names(5, 10 * number))
    with pytest.raises(ConfigError, match="hold objects of different stores"):
        await disks(paths).open()
    shutil.rmtree(paths[1] / "objects")  # as the message says
    (both := disks(paths))
    await both.open()
    assert both.find(names(5), None) == [True] * 10
    await both.close()


async def test_a_store_whose_orders_are_damaged_is_emptied(open_storage: Open, tmp_path: Path) -> None:
    storage = one_disk(tmp_path)
    await storage.open()
    harness = Harness(storage, Memory(4 * 1024**2))
    await put(harness, names(5))
    await storage.keeper.purge(Selection(frozenset(names(1))))
    await storage.close()
    harness.release()
    file = tmp_path / "orders"
    data = bytearray(file.read_bytes())
    data[60] ^= 1
    file.write_bytes(data)
    again = await open_storage(one_disk(tmp_path))
    assert await there(again, names(5)) == set()
    assert await put(again, names(5)) == [Found.STORED] * 10


def orders_refuse(error: int, path: Path, patch: pytest.MonkeyPatch) -> None:
    """The list of orders of this store cannot be opened."""
    real = os.open

    def refused(path_: Any, *args: Any, **named: Any) -> int:
        if path_ == str(path / "orders"):
            raise OSError(error, os.strerror(error), path_)
        return real(path_, *args, **named)

    patch.setattr(os, "open", refused)


async def test_a_store_whose_orders_cannot_be_opened_keeps_its_objects_and_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo transferd serve` once, and the list was root's."""
    await filled(one_disk(tmp_path), names(5))
    held = on_disk(tmp_path)
    with monkeypatch.context() as patch:
        orders_refuse(errno.EACCES, tmp_path, patch)
        with pytest.raises(ConfigError, match=r"cannot be used at .*/orders: Permission denied: let the daemon"):
            await one_disk(tmp_path).open()
        with pytest.raises(ConfigError, match=r"cannot be used at .*/orders: Permission denied"):
            await disks([tmp_path, tmp_path.with_name("other")]).open()
    assert on_disk(tmp_path) == held
    again = one_disk(tmp_path)
    await again.open()  # its lock was released
    assert again.find(names(5), None) == [True] * 10
    await again.close()


async def test_a_disk_whose_orders_cannot_be_read_is_left_out_until_they_can(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.storage.disks.REST_S", 0.05)
    paths = [tmp_path / "a", tmp_path / "b"]
    await filled(disks(paths), names(20))
    with monkeypatch.context() as patch:
        orders_refuse(errno.EIO, paths[1], patch)
        harness = await open_storage(storage := disks(paths))
        assert storage.statistics()["disks_failed"] == 1
    await until(lambda: not storage.statistics()["disks_failed"])
    assert await there(harness, names(20)) == set(names(20))


async def test_a_store_of_an_earlier_release_keeps_its_objects(open_storage: Open, tmp_path: Path) -> None:
    storage = one_disk(tmp_path)
    await storage.open()
    harness = Harness(storage, Memory(4 * 1024**2))
    await put(harness, names(5))
    await storage.close()
    harness.release()
    (tmp_path / "orders").unlink()  # 0.3.0 has none
    again = await open_storage(one_disk(tmp_path))
    assert await there(again, names(5)) == set(names(5))
    assert (tmp_path / "orders").exists()


# --- what a purge reaches ---------------------------------------------------------------------------


async def test_a_purge_reaches_the_quarantine(open_storage: Open, tmp_path: Path) -> None:
    harness = await open_storage(one_disk(tmp_path))
    await put(harness, names(4))
    await harness.storage.quarantine(names(1)[0])
    aside = tmp_path / "quarantine"
    assert len(list(aside.iterdir())) == 1
    await keeper(harness).purge(Selection(unused_s=1000.0))
    assert len(list(aside.iterdir())) == 1, "it was set aside just now"
    await keeper(harness).purge(Selection(model="m"))
    assert not list(aside.iterdir())


def hides(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """This directory cannot be listed."""
    real = os.scandir

    def refused(path: Any) -> Any:
        if Path(path) == directory:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    patch.setattr(os, "scandir", refused)


async def test_a_purge_says_that_it_could_not_look_everywhere(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not looked at came back with the next start after somebody had mended it."""
    await filled(one_disk(tmp_path), names(5))
    with monkeypatch.context() as patch:
        hides((tmp_path / "objects" / path_of(names(1)[0])).parent, patch)
        harness = await open_storage(one_disk(tmp_path))
    await put(harness, new := ["m/f/g/ff00/0"])
    with pytest.raises(StorageError, match="1 directories or files cannot be read"):
        await keeper(harness).purge(Selection())
    assert await there(harness, new) == set()
    assert len(on_disk(tmp_path)) == 10, "and nobody has said that they are gone"
    await put(harness, new)
    await harness.storage.close()
    again = await open_storage(one_disk(tmp_path))
    assert await there(again, new) == set(new), "what was stored after the purge stays"
    assert (await keeper(again).purge(Selection())).complete
    assert not on_disk(tmp_path)


async def test_a_disk_that_returns_during_a_purge_of_one_engine_takes_nothing_of_others(
    open_storage: Open, tmp_path: Path
) -> None:
    """It brought the order to the other disks, where only the engine's space was known by then, not whose is what."""
    harness = await open_storage(disks([tmp_path / "a", tmp_path / "b"]))
    await put(harness, names(10))  # nobody's
    purge = asyncio.ensure_future(keeper(harness).purge(Selection(owner=OWNER)))
    await asyncio.sleep(0)  # it has begun
    await keeper(harness).catch_up()
    assert (await purge).objects == 0
    assert await there(harness, names(10)) == set(names(10))


async def test_what_a_start_could_not_look_at_goes_at_the_next_start(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was away when the order was given, or the daemon was killed."""
    paths = [tmp_path / "a", tmp_path / "b"]
    await filled(disks(paths), names(20))
    (gave := disks(paths[:1]))
    await gave.open()
    await gave.keeper.purge(Selection())
    await gave.close()
    held = on_disk(paths[1])
    with monkeypatch.context() as patch:
        hides((paths[1] / min(held)).parent, patch)
        first = await open_storage(storage := disks(paths))
    assert on_disk(paths[1]) == held, "all of it lies in one directory"
    await put(first, names(3, 100))
    await storage._keeper.catch_up()
    assert await there(first, names(3, 100)) == set(names(3, 100)), "a disk that returns costs nothing here"
    await storage.close()
    again = await open_storage(disks(paths))
    assert await there(again, names(20)) == set()
    assert not on_disk(paths[1])


async def test_a_purge_that_left_an_object_takes_nothing_at_a_restart_that_was_stored_since(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = one_disk(tmp_path)
    await storage.open()
    harness = Harness(storage, Memory(4 * 1024**2))
    await put(harness, names(5))
    with monkeypatch.context() as patch:
        refuses_to_go(names(1)[0], patch)
        with pytest.raises(StorageError, match="1 objects could not be removed"):
            await storage.keeper.purge(Selection(model="m"))
    await put(harness, names(5))
    await storage.close()
    harness.release()
    again = await open_storage(one_disk(tmp_path))
    assert await there(again, names(5)) == set(names(5))


async def test_an_object_that_a_start_cannot_remove_costs_no_other_at_the_next_start(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file of root, and each start would have emptied the store by the same order again."""
    storage = one_disk(tmp_path)
    await storage.open()
    harness = Harness(storage, Memory(4 * 1024**2))
    await put(harness, names(5))
    refuses_to_go(names(1)[0], monkeypatch)
    killed_at = asyncio.Event()

    async def ends_here(*_: object) -> None:
        killed_at.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(storage._files_keeper, "_removed", ends_here)
    purging = asyncio.ensure_future(storage.keeper.purge(Selection(model="m")))
    await killed_at.wait()
    purging.cancel()
    storage.abandon()
    harness.release()
    again = one_disk(tmp_path)
    await again.open()
    harness = Harness(again, Memory(4 * 1024**2))
    assert await there(harness, names(5)) == set(), "it was purged, and is not served"
    await put(harness, names(5)[2:])
    await again.close()
    harness.release()
    storage = one_disk(tmp_path)
    last = await open_storage(storage)
    assert await there(last, names(5)) == set(names(5)[2:])
    assert len(storage._book.purges) == 2, "the list does not grow with each start"


async def test_the_second_of_two_overlapping_purges_waits_for_what_the_first_removes(
    open_storage: Open, tmp_path: Path
) -> None:
    harness = await open_storage(one_disk(tmp_path))
    await put(harness, names(5))
    assert isinstance(harness.storage, FileStorage)
    reading = harness.storage._traffic.reads.of(names(5))
    with reading:  # a load of these runs
        first = asyncio.ensure_future(keeper(harness).purge(Selection(model="m")))
        second = asyncio.ensure_future(keeper(harness).purge(Selection()))
        await until(lambda: harness.storage.index.find(names(5), None) == [False] * 10)
        done, _ = await asyncio.wait([first, second], timeout=0.2)
        assert not done, "their bytes are there, and a kill would bring them back"
    assert (await first).objects + (await second).objects == 10
    assert not on_disk(tmp_path)


def lives(path: Path, work: Callable[[Disks], Any], at: int) -> bool:
    """In a process of its own: open two disks, work, and die as by kill -9 before the system call of this number.

    Returns whether it died.
    """
    child = os.fork()
    if not child:
        left = [at]

        def counted(real: Any) -> Any:
            def call(*args: Any, **named: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **named)

            return call

        async def life() -> None:
            storage = disks([path / "a", path / "b"])
            await storage.open()
            for name in ("unlink", "rename", "write", "fdatasync", "fsync", "ftruncate"):
                setattr(os, name, counted(getattr(os, name)))
            await work(storage)
            os._exit(0)

        asyncio.set_event_loop(None)
        asyncio.run(life())
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


async def test_a_purge_that_was_killed_at_any_system_call_is_done_or_was_never_answered(tmp_path: Path) -> None:
    """And what is not meant stays. The purge is recorded before its first object goes, or none has gone."""
    await filled(disks([tmp_path / "life" / "a", tmp_path / "life" / "b"]), names(4))
    shutil.copytree(tmp_path / "life", tmp_path / "image")
    meant, kept = names(2), names(2, 2)

    async def purge(storage: Disks) -> None:
        assert (await storage.keeper.purge(Selection(frozenset(meant)))).complete

    at = 0
    answers = list[bool]()
    while not answers or not answers[-1]:
        shutil.rmtree(tmp_path / "life")
        shutil.copytree(tmp_path / "image", tmp_path / "life")
        answers.append(not lives(tmp_path / "life", purge, at))
        again = disks([tmp_path / "life" / "a", tmp_path / "life" / "b"])
        await again.open()
        assert again.find(kept, None) == [True] * 4, at
        recorded = any(b'"fits"' in (tmp_path / "life" / d / "orders").read_bytes() for d in "ab")
        if recorded or answers[-1]:
            assert again.find(meant, None) == [False] * 4, at
            assert len(on_disk(tmp_path / "life" / "a")) + len(on_disk(tmp_path / "life" / "b")) == 4
        await again.close()
        at += 1
    assert at > 8, "it was killed at each of its calls"


# --- pins -------------------------------------------------------------------------------------------


@needs_root
async def test_pins_hold_on_a_disk_that_was_away_when_they_were_given_or_ended(
    open_storage: Open, mounts: list[Path], device: Path
) -> None:
    first = disks(mounts[:2])
    await first.open()
    harness = Harness(first, Memory(4 * 1024**2))
    await put(harness, names(20))
    held = await first.keeper.pin(OWNER, names(20), 600.0, 0.5)
    assert held == [PinState.DURABLE] * 40
    gone(mounts[1])
    await first.keeper.unpin(OWNER, names(10))
    killed(first)
    mounted_at(device, mounts[1])
    again = await open_storage(disks(mounts[:2]))
    assert again.storage.statistics()["pinned"] == 20, "what was ended while the disk was away has ended there too"
    assert await again.storage.keeper.unpin(OWNER, None) == 20  # type: ignore[union-attr]
    await first.close()
    harness.release()


@pytest.mark.parametrize("gives_up", [False, True])
async def test_the_pieces_of_a_long_pin_are_written_together_by_one_thread_at_a_time(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives_up: bool
) -> None:
    monkeypatch.setattr("transferd.storage.keeping.AT_ONCE", 2)
    harness = await open_storage(one_disk(tmp_path))
    await put(harness, names(20))
    running, most, written, real = 0, 0, 0, ledger.Ledger.write

    def write(self: ledger.Ledger, listed: orders.Listed) -> None:
        nonlocal running, most, written
        running, written = running + 1, written + 1
        most = max(most, running)
        time.sleep(0.05)
        real(self, listed)
        running -= 1

    monkeypatch.setattr(ledger.Ledger, "write", write)
    pinning = asyncio.ensure_future(keeper(harness).pin(OWNER, names(20), 600.0, 0.5))
    if gives_up:
        await until(lambda: running == 1)
        pinning.cancel()
        await asyncio.wait([pinning])  # the thread goes on: nobody else may write until it has ended
    else:
        assert await pinning == [PinState.DURABLE] * 40
        assert written == 2, "the first piece's, and all others'"
    assert (await keeper(harness).pin(OWNER, names(20), 600.0, 0.5)) == [PinState.DURABLE] * 40
    assert most == 1
    await harness.storage.close()
    again = await open_storage(one_disk(tmp_path))
    assert again.storage.statistics()["pinned"] == 40
    assert await keeper(again).unpin(OWNER, None) == 40


async def test_a_pin_is_of_the_object_and_holds_when_it_comes(open_storage: Open, tmp_path: Path) -> None:
    harness = await open_storage(one_disk(tmp_path))
    await put(harness, names(1))
    held = await keeper(harness).pin_all(OWNER, names(2), 600.0, coming=names(2))
    assert held == [PinState.DURABLE] * 2 + [PinState.NOT] * 2
    await put(harness, names(1, 1))
    assert harness.storage.statistics()["pinned"] == 4, "as soon as it is stored"
    await keeper(harness).purge(Selection(frozenset(names(1, 1))))
    await put(harness, names(1, 1))
    assert harness.storage.statistics()["pinned"] == 2, "a purge ends it"
    await harness.storage.close()
    again = await open_storage(one_disk(tmp_path))
    assert again.storage.statistics()["pinned"] == 2


async def test_a_pin_of_what_was_removed_from_outside_or_with_its_disk_says_so(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index finds that out only when the pin looks at the disk."""
    storage = one_disk(tmp_path)
    harness = await open_storage(storage)
    await put(harness, names(2))
    (tmp_path / "objects" / path_of(names(1)[0])).unlink()
    held = await keeper(harness).pin_all(OWNER, names(2), 600.0)
    assert held == [PinState.NOT] + [PinState.DURABLE] * 3

    async def fails(_: object) -> list[bool]:
        storage.fail("it does not answer", 3600.0)
        raise StorageError("I/O error")

    monkeypatch.setattr(storage, "look", fails)
    assert await keeper(harness).pin_all(OWNER, names(2), 600.0) == [PinState.NOT] * 4


async def test_a_list_of_orders_stays_small(open_storage: Open, tmp_path: Path) -> None:
    harness = await open_storage(one_disk(tmp_path))
    await put(harness, names(2))
    for _ in range(3):
        await keeper(harness).pin(OWNER, names(2), 600.0, 0.5)
    for _ in range(MANY_ORDERS + 1):
        await keeper(harness).purge(Selection(model="another"))
    data = (tmp_path / "orders").read_bytes()
    assert (data.count(b'"until"'), data.count(b'"fits"')) == (1, 1)
    await harness.storage.close()
    again = await open_storage(one_disk(tmp_path))
    assert again.storage.statistics()["pinned"] == 4


async def test_a_quarantine_that_cannot_be_emptied_at_a_start_is_emptied_at_a_later_one(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = one_disk(tmp_path)
    await put(await open_storage(first), names(3))
    await first.quarantine(names(1)[0])
    first._book.purge(Selection(), NOBODY, None)
    assert await first.record(), "it has the order, and the daemon is killed"
    await first.close()

    def bad_sectors(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as ill:
        ill.setattr(Quarantine, "empty", bad_sectors)
        second = one_disk(tmp_path)
        await open_storage(second)
        assert not on_disk(tmp_path)
        assert second.statistics()["disks"][0]["stuck"] == 1
        await second.close()
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    third = one_disk(tmp_path)
    await open_storage(third)
    assert not list((tmp_path / "quarantine").iterdir())
    assert len(third.ledger.listed.applied) == 1


async def test_a_store_that_has_missed_orders_is_emptied_until_all_of_it_can_be_read(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had a list of this epoch after the first start. So what could not be read then was served after the second."""
    await filled(one_disk(tmp_path), names(5))
    (tmp_path / "orders").write_bytes(b"damaged")
    first = one_disk(tmp_path)
    with monkeypatch.context() as patch:
        hides((tmp_path / "objects" / path_of(names(1)[0])).parent, patch)
        await open_storage(first)
    assert len(on_disk(tmp_path)) == 10, "all have one directory"
    assert await first.keeper.pin(OWNER, names(1), 60.0, 0.5) == [PinState.NOT] * 2
    await first.record()
    await first.close()
    second = one_disk(tmp_path)
    harness = await open_storage(second)
    assert await there(harness, names(5)) == set()
    assert not on_disk(tmp_path)
    await put(harness, names(5))
    await second.close()
    assert await there(await open_storage(one_disk(tmp_path)), names(5)) == set(names(5)), "it has missed nothing"


async def test_one_thread_at_a_time_writes_a_list(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that returned wrote its list beside a write that had hung: each renamed the file of the other one."""
    storage = one_disk(tmp_path)
    await open_storage(storage)
    running, most, goes_on = 0, 0, threading.Event()
    real = ledger.Ledger.write

    def write(self: ledger.Ledger, listed: orders.Listed) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        goes_on.wait(10.0)
        real(self, listed)
        running -= 1

    monkeypatch.setattr(ledger.Ledger, "write", write)
    recording = asyncio.ensure_future(storage.record())
    await until(lambda: running == 1)
    storage.fail("it has failed")
    await asyncio.sleep(0.3)
    goes_on.set()
    assert await recording
    await until(lambda: not storage.lost)
    assert most == 1


async def test_pins_end_with_a_store_that_returns_on_a_file_system_of_other_units(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes were taken off in the new units, so the owner had pinned less than nothing from then on."""
    storage = one_disk(tmp_path)
    harness = await open_storage(storage)
    await put(harness, names(3))
    await storage.keeper.hold("a lease", names(3), 600.0, 0.5)
    monkeypatch.setattr("transferd.storage.directory.allocated_at_once", lambda _: 8192)
    storage.fail("it has failed")
    await until(lambda: not storage.lost)
    pins = storage.index_keeper.pins
    assert (len(pins), pins.taken("a lease")) == (0, 0)
    await storage.keeper.hold("a lease", names(1), 600.0, 0.5)
    assert pins.taken("a lease") == 2 * 8192


async def test_a_load_that_hangs_keeps_no_purge_for_ever_and_no_other_one_from_its_end(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes orders, so it is not lost: no purge was answered, and no copy of what they named committed."""
    monkeypatch.setattr(effects, "PATIENCE_S", 0.05)
    harness = await open_storage(HungFiles(file_config(tmp_path / "a", EACH)))
    read, other = names(1)
    await put(harness, [read, other])
    (hangs := tmp_path / f"a{HANGS}").touch()
    reading = asyncio.ensure_future(there(harness, [read]))
    await until(lambda: harness.storage._traffic.reads.has(read))  # type: ignore[attr-defined]
    with pytest.raises(StorageError, match="a load of these objects hangs"):
        await keeper(harness).purge(Selection(frozenset([read])))
    assert (await keeper(harness).purge(Selection(frozenset([other])))).objects == 1
    assert len(on_disk(tmp_path / "a")) == 1
    hangs.unlink()
    assert await reading == {read}, "its bytes were there until it had ended"
    await until(lambda: not on_disk(tmp_path / "a"))
    assert (await keeper(harness).purge(Selection(model="m"))).not_reached == []
