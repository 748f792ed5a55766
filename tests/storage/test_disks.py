"""Several disks: what lies where, what a disk costs that fails, and that the others go on. Real file systems."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.storage.harness import Harness, Memory, Open
from tests.storage.real_disks import (
    EACH,
    NBYTES,
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
from tests.support.hung_files import HungDisk
from tests.support.waits import until
from transferd.config import FileStorageSection
from transferd.config.size import Capacities
from transferd.errors import ConfigError, StillRunning
from transferd.runtime import threads
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.runtime.threads import Direction
from transferd.storage import indexed, orders
from transferd.storage.base import Found, Item
from transferd.storage.disks import Disk, Disks
from transferd.storage.effects import TURNS
from transferd.storage.keeping import PinState
from transferd.storage.paths import path_of
from transferd.storage.queues import EngineOwner, Use
from transferd.storage.selection import Selection

T = TypeVar("T")


async def test_objects_are_spread_by_capacity_and_the_ranks_of_a_block_lie_together(
    open_storage: Open, tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in "abc"]
    harness = await open_storage(disks(paths, [4 * EACH, 2 * EACH, 2 * EACH]))
    assert await put(harness, names(200)) == [Found.STORED] * 400
    counts = [len(on_disk(path)) for path in paths]
    assert sum(counts) == 400
    assert 150 < counts[0] < 250, counts
    assert min(counts[1:]) > 60, counts
    for path in paths:
        ranks = Counter(str(file).rpartition("@")[0] for file in on_disk(path))
        assert set(ranks.values()) == {2}
    assert await there(harness, names(200)) == set(names(200))
    assert await put(harness, names(3)) == [Found.EXISTS] * 6
    report = harness.storage.statistics()
    assert (report["objects"], report["capacity"], report["disks_failed"]) == (400, 8 * EACH, 0)
    assert [row["objects"] for row in report["disks"]] == counts


async def test_a_disk_that_is_added_moves_no_file_and_takes_its_part_of_what_comes(
    open_storage: Open, tmp_path: Path
) -> None:
    two, three = [tmp_path / name for name in "ab"], [tmp_path / name for name in "abc"]
    first = disks(two)
    await first.open()
    before = Harness(first, Memory(4 * 1024**2))
    assert await put(before, names(30)) == [Found.STORED] * 60
    await first.close()
    before.release()
    were = {path: on_disk(path) for path in two}
    harness = await open_storage(disks(three))
    assert await there(harness, names(30)) == set(names(30))
    assert await put(harness, names(30)) == [Found.EXISTS] * 60
    assert {path: on_disk(path) for path in two} == were
    await put(harness, names(60, 100))  # so many that its part, which the paths draw, is never so small
    assert len(on_disk(three[2])) > 8


@needs_root
@pytest.mark.parametrize("how", ["read-only", "gone"])
async def test_a_disk_that_fails_costs_its_objects_and_the_others_go_on(
    how: str, open_storage: Open, mounts: list[Path]
) -> None:
    harness = await open_storage(disks(mounts))
    left: list[str] = []
    harness.storage.index.tell_departures(left.append)
    await put(harness, names(30))
    counts = [len(on_disk(path)) for path in mounts]
    if how == "read-only":
        read_only(mounts[1])
    else:
        gone(mounts[1])
    more = names(30, 100)
    assert await put(harness, more) == [Found.STORED] * 60, "what the disk would have got, another one has"
    report = harness.storage.statistics()
    assert (report["disks_failed"], report["lost"] + report["gone"]) == (1, counts[1])
    assert len(left) == counts[1]
    assert report["disks"][1]["failed"]
    assert await there(harness, more) == set(more)
    old = await there(harness, names(30))
    assert old == set(names(30)) - set(left), "exactly the disk's own"
    if how == "gone":
        assert not list(mounts[1].iterdir()), "nothing was written to what is beneath the mount point"
    assert await put(harness, left) == [Found.STORED] * len(left), "and they can be stored again"


@needs_root
@pytest.mark.parametrize("how", ["read-only", "gone", "at the start"])
async def test_a_disk_that_is_well_again_returns_with_what_it_holds(
    how: str, open_storage: Open, mounts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.storage.disks.REST_S", 0.05)
    device = mounts[1].parent / "device"  # the same file system, wherever it is mounted
    device.mkdir()
    mounted_at(mounts[1], device)
    try:
        if how == "at the start":
            earlier = await open_storage(disks(mounts))
            await put(earlier, names(30))
            await earlier.storage.close()
            read_only(mounts[1])
        harness = await open_storage(disks(mounts))
        harness.storage.keeper.claim(EngineOwner("e", 1), "m/f", 0.5)  # type: ignore[union-attr]
        if how != "at the start":
            await put(harness, names(30))
            await harness.storage.exists(names(30))  # a use with a number of its own
            read_only(mounts[1]) if how == "read-only" else gone(mounts[1])
        held = len(on_disk(device))
        assert held > 0
        more = names(30, 100)
        assert await put(harness, more) == [Found.STORED] * 60
        assert harness.storage.statistics()["disks_failed"] == 1
        assert len(await there(harness, names(30))) == 60 - held
        await asyncio.sleep(0.2)
        assert harness.storage.statistics()["disks_failed"] == 1, "it is not well yet"
        if how == "gone":
            assert not list(mounts[1].iterdir()), "nothing was written to what is beneath the mount point"
            mounted_at(device, mounts[1])
        else:
            writable(mounts[1])
        await until(lambda: not harness.storage.statistics()["disks_failed"])
        assert await there(harness, [*names(30), *more]) == {*names(30), *more}
        holdings = harness.storage.keeper.holdings()  # type: ignore[union-attr]
        theirs = {one.owner: one.objects for one in holdings}
        assert theirs[EngineOwner("e", 1)] == (60 if how == "at the start" else held), "the engine of their space"
        assert await put(harness, names(30, 200)) == [Found.STORED] * 60
        assert len(on_disk(device)) > held, "it takes its part of what comes"
    finally:
        gone(device)


async def test_a_disk_that_was_away_at_a_start_without_any_list_of_orders_returns_with_its_objects(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other disk was replaced, so the start found no list, and took the returning disk for another daemon's."""
    monkeypatch.setattr("transferd.storage.disks.REST_S", 0.05)
    paths = [tmp_path / "a", tmp_path / "b"]
    earlier = await open_storage(disks(paths))
    await put(earlier, names(20))
    await earlier.storage.close()
    held = on_disk(paths[1])
    shutil.rmtree(paths[0])
    made = disks(paths)
    with no_answer(made._all[1], monkeypatch):
        harness = await open_storage(made)
        assert made.statistics()["disks_failed"] == 1
        assert await put(harness, names(5, 100)) == [Found.STORED] * 10
    await until(lambda: not made.statistics()["disks_failed"])
    kept = await there(harness, names(20))
    assert len(kept) == len(held) > 0
    assert on_disk(paths[1]) >= held
    await made.close()
    again = await open_storage(disks(paths))
    assert await there(again, [*names(20), *names(5, 100)]) == {*kept, *names(5, 100)}


@needs_root
async def test_disks_that_were_all_unmounted_at_the_start_return_with_their_objects(
    open_storage: Open, mounts: list[Path]
) -> None:
    """The daemon has made stores beneath, of a family of their own."""
    paths, devices = mounts[:2], [mounts[2] / "a", mounts[2] / "b"]
    earlier = await open_storage(disks(devices))
    await put(earlier, names(20))
    await earlier.storage.close()
    for path in paths:
        gone(path)
    harness = await open_storage(disks(paths))
    await put(harness, names(5, 100))
    try:
        for device, path in zip(devices, paths, strict=True):
            mounted_at(device, path)
        await put(harness, names(20, 200))  # which finds that both were replaced
        await until(lambda: not harness.storage.statistics()["disks_failed"])
        assert await there(harness, names(20)) == set(names(20))
        await harness.storage.close()
        again = await open_storage(disks(paths))
        assert await there(again, names(20)) == set(names(20))
    finally:
        for path in paths:
            gone(path)


@needs_root
async def test_a_disk_that_cannot_be_written_at_the_start_is_left_out(open_storage: Open, mounts: list[Path]) -> None:
    read_only(mounts[0])
    harness = await open_storage(disks(mounts))
    assert await put(harness, names(10)) == [Found.STORED] * 20
    assert harness.storage.statistics()["disks_failed"] == 1
    for path in mounts[1:]:
        read_only(path)
    failed = await put(harness, names(3, 50))
    assert set(failed) == {Found.FAILED}, "every disk has failed"
    with pytest.raises(ConfigError, match="Read-only file system"):
        await disks(mounts[:1]).open()


async def test_a_disk_that_another_daemon_uses_ends_the_start(open_storage: Open, tmp_path: Path) -> None:
    await open_storage(disks([tmp_path / "b"]))
    both = disks([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ConfigError, match="in use by another daemon"):
        await both.open()
    await (again := disks([tmp_path / "a"])).open()  # its lock was released
    await again.close()


@needs_root
@pytest.mark.parametrize("purges", [1, 100])
async def test_objects_purged_while_a_disk_was_out_do_not_return_with_it(
    purges: int, open_storage: Open, mounts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.storage.disks.REST_S", 0.05)
    harness = await open_storage(disks(mounts))
    keeper = harness.storage.keeper
    assert keeper is not None
    await put(harness, names(30))
    held = on_disk(mounts[1])
    read_only(mounts[1])
    await put(harness, names(30, 100))
    assert harness.storage.statistics()["disks_failed"] == 1
    for number in range(purges):
        await keeper.purge(Selection(frozenset(names(10, 10 * number))))
    await keeper.purge(Selection(frozenset(names(30))), dry_run=True)
    writable(mounts[1])
    await until(lambda: not harness.storage.statistics()["disks_failed"])
    assert await there(harness, names(30)) == (set(names(20, 10)) if purges == 1 else set())
    purged = {Path("objects") / path_of(name) for number in range(purges) for name in names(10, 10 * number)}
    assert on_disk(mounts[1]) == held - purged


async def test_shares_pins_and_purges_are_of_all_disks_together(open_storage: Open, tmp_path: Path) -> None:
    harness = await open_storage(disks([tmp_path / name for name in "abc"]))
    keeper = harness.storage.keeper
    assert keeper is not None
    keeper.claim(EngineOwner("a", 1), "m/f", 0.5)
    await put(harness, names(10))
    held = await keeper.pin(EngineOwner("a", 1), [*names(2), "m/f/g/absent/0"], 60.0, 0.1)
    assert held == [PinState.DURABLE] * 4 + [PinState.NOT]
    with pytest.raises(Exception, match=r"engines\.pin_share"):
        await keeper.pin(EngineOwner("a", 1), names(10), 60.0, 0.01)
    assert harness.storage.statistics()["pinned"] == 4
    assert await keeper.unpin(EngineOwner("a", 1), names(1)) == 2
    assert [one.share for one in keeper.holdings() if one.owner == EngineOwner("a", 1)] == [3 * EACH // 2]
    assert (await keeper.purge(Selection(model="m"), dry_run=True)).objects == 20
    assert (await keeper.purge(Selection(model="m"))).bytes == 20 * NBYTES
    assert await there(harness, names(10)) == set()


async def test_a_disk_that_hangs_keeps_no_other_from_being_closed(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = disks([tmp_path / name for name in "abc"])
    await open_storage(store)
    first, *others = store._all
    close = first.close

    async def hangs() -> None:
        await close()
        raise StillRunning("a call hangs")

    with monkeypatch.context() as ill:
        ill.setattr(first, "close", hangs)
        with pytest.raises(StillRunning, match="a call hangs"):
            await store.close()
    assert [disk._closed for disk in others] == [True, True]


class HungInAll(HungDisk):
    """A disk whose threads do not begin anything new while there is a file PATH.hangs."""

    def _in_thread(self, function: Callable[[], T], what: str) -> Awaitable[T]:
        def hang() -> T:
            self._hang()
            return function()

        return super()._in_thread(hang, what)


def hung_disks(tmp_path: Path, kind: type[HungDisk] = HungInAll) -> Disks:
    section = FileStorageSection(path=[str(tmp_path / name) for name in "ab"], capacity=Capacities.parse(EACH))
    return Disks([kind(one, scrub_rate=0, clock=SYSTEM_CLOCK) for one in section.disks])


def hang(store: Disks, tmp_path: Path) -> Callable[[], None]:
    """Have the second disk hang, which soon counts as such, until the result is called."""
    ill, hangs = store._all[1], tmp_path / "b.hangs"
    ill.answers_s = 0.05  # of this disk alone, and while it hangs: others may be late, on a busy machine
    hangs.touch()

    def answer() -> None:
        ill.answers_s = Disk.answers_s
        hangs.unlink()

    return answer


@pytest.mark.parametrize(("stores", "most"), [(False, 99), (True, 99), (True, 0)], ids=["idle", "stores", "and orders"])
async def test_neither_a_purge_nor_a_pin_waits_for_a_disk_that_hangs(
    stores: bool, most: int, open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither was ever answered, and in a stack no copy was committed meanwhile, so no hand-over was ok."""
    monkeypatch.setattr(indexed, "PATIENCE_S", 0.05)
    monkeypatch.setattr(orders, "MOST_ORDERS", most)  # with more a new epoch begins, and the disk has missed some
    store = hung_disks(tmp_path)
    harness = await open_storage(store)
    await put(harness, names(40))
    ill = store._all[1]
    before = len(ill._index)
    answer = hang(store, tmp_path)
    storing = asyncio.ensure_future(put(harness, names(20, 40))) if stores else None
    if stores:
        await until(
            lambda: len(store._all[0]._index) > 80 - before and store._stores.names, "the other disk has its part"
        )
    purged = await store.keeper.purge(Selection(model="m"))
    assert (purged.not_reached, purged.kept_by) == ([str(tmp_path / "b")], [str(tmp_path / "a")])
    assert re.search("it has not (taken its list of orders|answered)", ill.lost), "the stores may be the first to see"
    assert await there(harness, names(60)) == set()
    assert await put(harness, names(5, 100)) == [Found.STORED] * 10, "the others take all"
    assert await store.keeper.pin(EngineOwner("e", 1), names(5, 100), 60.0, 0.5) == [PinState.DURABLE] * 10
    answer()
    if storing is not None:
        await storing
    await until(lambda: not ill.lost, "it has applied the order")
    assert await there(harness, names(60)) == set(), "nor does what was being stored come back"
    assert await there(harness, names(5, 100)) == set(names(5, 100))
    assert not on_disk(tmp_path / "b")


async def test_a_disk_that_hangs_in_loads_and_stores_alone_is_left_out_until_it_answers(
    open_storage: Open, tmp_path: Path
) -> None:
    """It was not, until an order met it: calls took their slots for good, and soon no engine had any."""
    store = hung_disks(tmp_path, HungDisk)
    harness = await open_storage(store)
    await put(harness, names(40))
    good, ill = store._all
    theirs, its = [[one for one in names(40) if disk.has(one)] for disk in (good, ill)]
    answer = hang(store, tmp_path)
    loading = [asyncio.ensure_future(there(harness, its)) for _ in range(2 * ill._shares + 1)]
    storing = asyncio.ensure_future(put(harness, names(20, 40)))
    await until(lambda: "it has not answered" in ill.lost, "nothing was ordered")
    while len(loading) > ill._shares:  # at most one for each thread that hangs
        done, more = await asyncio.wait(loading, return_when=asyncio.FIRST_COMPLETED)
        assert {frozenset(one.result()) for one in done} == {frozenset()}
        loading = list(more)
    assert await there(harness, names(40)) == set(theirs) != set()
    assert await put(harness, names(5, 100)) == [Found.STORED] * 10, "the others take all"
    answer()
    assert set(await storing) == {Found.STORED}
    await asyncio.gather(*loading)
    await until(lambda: not ill.lost, "it answers")
    assert await there(harness, [*names(60), *names(5, 100)]) == {*names(60), *names(5, 100)}


async def test_stores_that_look_at_a_disk_that_hangs_go_on_without_it(open_storage: Open, tmp_path: Path) -> None:
    """They look at one with little room before they store, and kept their slots until it answered."""
    store = hung_disks(tmp_path)
    harness = await open_storage(store)
    ill = store._all[1]
    ill._bounds = ill._capacity - 1, math.inf, "reserve"
    answer = hang(store, tmp_path)
    storing = [asyncio.ensure_future(put(harness, [one])) for one in names(20)]
    await until(lambda: "it has not answered" in ill.lost, "nothing was ordered")
    _, waiting = await asyncio.wait(storing, timeout=20.0)
    answer()
    assert not waiting, "no thread has any of their slots"
    assert {found for one in storing for found in one.result()} == {Found.STORED}
    await until(lambda: not ill.lost, "it answers")


async def test_a_disk_that_hangs_while_files_are_looked_at_is_left_out(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes of what is stored make no other call: each waited until its deadline, for as long as the disk hung."""
    store = hung_disks(tmp_path)
    harness = await open_storage(store)
    await put(harness, names(40))
    ill, over = store._all[1], threading.Event()
    missing, ill.answers_s = ill._directory.missing, 0.05

    def hangs(*file: Any) -> str:
        over.wait(60.0)
        return missing(*file)

    monkeypatch.setattr(ill._directory, "missing", hangs)
    its = {one for one in names(40) if ill.has(one)}
    looking = asyncio.ensure_future(store.look(names(40)))
    await asyncio.wait([looking], timeout=20.0)
    answered = looking.done()
    ill.answers_s = Disk.answers_s
    over.set()
    assert await looking == [one not in its for one in names(40)]
    assert answered, "others have it, or it is stored again"
    await until(lambda: not ill.lost, "it answers")


@pytest.mark.parametrize(("answers", "parts"), [(True, TURNS), (False, 1)], ids=["others", "the daemon was stopped"])
async def test_a_disk_does_not_hang_that_answers_anything_or_whose_daemon_was_stopped(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool, parts: int
) -> None:
    """A load takes longer than a disk may be silent, but others come in each part of that time, or one part is a stop.

    A paused container goes on, and the loop's timers are over before any thread has told what it has done.
    """
    store = hung_disks(tmp_path, HungDisk)
    harness = await open_storage(store)
    await put(harness, names(40))
    ill, over, inside = store._all[1], threading.Event(), list[bool]()
    slow, other = [one for one in names(40) if ill.has(one)][:2]
    read, wait, waits = ill._directory.read, asyncio.wait, list[object]()

    def hold(name: str, *more: Any) -> Any:
        return (name != slow or over.wait(60.0)) and read(name, *more)

    async def waited(futures: Any, *, timeout: float | None = None, **more: Any) -> Any:
        """In place of the first waits for the slow load: the time of each is over at once."""
        if timeout is None or inside or threading.current_thread() is not threading.main_thread():
            return await wait(futures, timeout=timeout, **more)
        if len(waits) == parts:
            over.set()
            return await wait(futures, timeout=timeout, **more)
        waits.append(futures)
        inside.append(True)
        if answers:
            assert await there(harness, [other]) == {other}
        inside.clear()
        return set(), set(futures)

    monkeypatch.setattr(ill, "_native_load", lambda *_: None)
    monkeypatch.setattr(ill._directory, "read", hold)
    with monkeypatch.context() as here:
        here.setattr("transferd.storage.disks.asyncio.wait", waited)
        assert await there(harness, [slow]) == {slow}
    assert (len(waits), ill.lost) == (parts, "")


async def test_a_disk_that_hangs_at_a_start_returns_when_it_answers(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start waited for it, and so nothing was served."""
    monkeypatch.setattr("transferd.storage.disks.REST_S", 0.01)
    harness = await open_storage(hung_disks(tmp_path))
    await put(harness, names(40))
    await harness.storage.close()
    store = hung_disks(tmp_path)
    good, ill = store._all
    answer, good.answers_s = hang(store, tmp_path), 3.0
    again = await open_storage(store)
    assert ill.lost == "it does not answer"
    assert await there(again, names(40)) == {one for one in names(40) if good.has(one)} != set()
    answer()
    await until(lambda: not ill.lost, "it answers")
    assert await there(again, names(40)) == set(names(40))


async def test_a_list_that_hung_says_nothing_of_orders_that_were_given_since(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written when the disk was lost already, with the new epoch: what had been purged meanwhile came back."""
    store = hung_disks(tmp_path)
    harness = await open_storage(store)
    await put(harness, names(40))
    answer = hang(store, tmp_path)
    await store.keeper.pin(EngineOwner("e", 1), names(40), 60.0, 0.5)
    assert store._all[1].lost
    monkeypatch.setattr(orders, "MOST_ORDERS", 0)
    purged = await store.keeper.purge(Selection(model="m"))
    assert purged.not_reached == [str(tmp_path / "b")]
    assert on_disk(tmp_path / "b")
    answer()
    await until(lambda: not store._all[1].lost, "it answers")
    assert await there(harness, names(40)) == set()


async def test_disks_that_hang_are_waited_for_together_and_the_loop_goes_on(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop took a second for each of them, whatever its time."""
    monkeypatch.setattr(threads, "CLOSE_S", 60.0)
    store = disks([tmp_path / name for name in "abc"])
    await open_storage(store)
    over = threading.Event()
    hung = [disk._threads.run(Direction.OUT, over.wait, "hangs") for disk in store._all]
    await until(lambda: all(disk._threads.under_way() for disk in store._all))
    closing = asyncio.ensure_future(store.close())
    await until(lambda: all(disk._directory.home.lock.problem() for disk in store._all))  # only threads are left
    over.set()
    await closing
    assert [work.result() for work in hung] == [True] * 3


async def test_a_disk_that_two_calls_try_at_once_is_well(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial that ended last found its file removed by the other one, and took the disk out."""
    store = disks([tmp_path / name for name in "ab"])
    await open_storage(store)
    both = threading.Barrier(2)
    real = os.pread

    def together(*arguments: int) -> bytes:
        both.wait(10.0)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", together)
        assert all(await asyncio.gather(store._all[0].works(), store._all[0].works()))
    assert store.statistics()["disks_failed"] == 0


async def test_a_disk_returns_while_tasks_continue_the_chains_that_it_has(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its objects are added in steps of the loop, and between two of them a task may name a block of an earlier one."""
    monkeypatch.setattr("transferd.storage.file.SLICE", 1)
    harness = await open_storage(disks([tmp_path / "a", tmp_path / "b"]))
    for name in names(20):
        await put(harness, [name])
    disk = harness.storage._all[0]  # type: ignore[attr-defined]
    held = len(on_disk(tmp_path / "a"))
    returns = asyncio.ensure_future(disk.open_anew())
    stores = []
    for number in itertools.count(1000):
        use = Use(start=1, stop=2)
        use.parent, use.last = f"{number % 20:04x}", f"{number:04x}"
        item = Item(f"m/f/g/{number:04x}/0", NBYTES, use, 1)
        stores.append(asyncio.ensure_future(harness.storage.store([item], None, [memoryview(bytes(NBYTES))])))
        await asyncio.sleep(0)
        if returns.done():
            break
    await asyncio.gather(*stores)
    assert not disk.lost
    assert len(disk.indexes[0]) >= held
