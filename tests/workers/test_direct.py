"""Loads past the page cache: real files by way of a slot of staging each, and who touches a block, or a slot, when."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import file_config, skip_without_direct_io
from tests.support.descriptors import open_below
from tests.workers.rig import (
    ASIDE,
    KEYS,
    SOURCE,
    TARGET,
    Rig,
    blocks,
    check_that_k1_is_lost,
    layout_of,
    read,
    turns,
    write,
)
from transferd.runtime import threads
from transferd.runtime.native import NativeCall
from transferd.storage import directory, file, file_io
from transferd.storage.base import Drainer, Item, Outcome
from transferd.storage.file import FileStorage
from transferd.storage.file_io import UNIT
from transferd.tasks import Stop
from transferd.workers import cpu_blocks
from transferd.workers import read as read_module

PIECE = 4 * UNIT  # bytes for which a thread takes the loan: an object is copied in two of them

_files: Any = getattr(file_io, "_files", None)  # there is none without a compiler
pytestmark = pytest.mark.skipif(not (cpu_blocks.NATIVE and file_io.NATIVE), reason="the installation had no compiler")


class NotingStore(FileStorage):
    """Tells how its objects are asked for: the number of objects of each call.

    drained: by a slot each. whole: to slots that stay the caller's.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(file_config(directory, 64 * 1024**2, direct_io=True))
        self.whole: list[int] = []
        self.drained: list[int] = []
        self.most_at_once = 0

    def load(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> Awaitable[list[Outcome]]:
        if drain is None:
            self.whole.append(len(items))
        else:
            self.drained.append(len(items))
            self.most_at_once = max(self.most_at_once, len(slots))
        return super().load(items, drain, slots)


Make = Callable[..., Awaitable[Rig]]


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes a rank with six stored blocks."""
    skip_without_direct_io(tmp_path)
    monkeypatch.setattr(cpu_blocks, "PIECE_BYTES", PIECE)
    # A look at the disk, at any time, would forget a file that a test has replaced but not read yet.
    monkeypatch.setattr(file, "OLDEST", 0)
    made: list[Rig] = []

    async def rank(slots: int = 8, **cache: Any) -> Rig:
        cache = {"block_size": 64, "head_dim": 64} | cache  # 32 KiB a block
        monkeypatch.setattr(read_module, "CHUNK_BYTES", 4 * layout_of(**cache).block_bytes)
        rig = Rig(slots=slots, storage=NotingStore(tmp_path / "store"), **cache)
        made.append(await rig.open())
        await rig.run(write(KEYS, SOURCE))
        rig.sim_device.addressable = True
        return rig

    yield rank
    for rig in made:
        await rig.close()
        assert rig.staging.statistics()["used"] == 0
    assert open_below(tmp_path) == []


@pytest.fixture
async def rig(make: Make) -> Rig:
    return await make()


def store_of(rig: Rig) -> NotingStore:
    assert isinstance(rig.storage, NotingStore)
    return rig.storage


def file_of(rig: Rig, key: str) -> Path:
    return Path(store_of(rig)._directory.path(rig.name(key)))


class Held:
    """Holds the thread that reads the first file, until `go_on`; read_before: once the slot has its bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, read_before: bool = False) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        real, taken = _files.prepared_load, threading.Lock()

        def hold() -> None:
            self.begun.set()
            assert self.go_on.wait(60)

        class HeldDrain:
            wanted = True

            def __init__(self, drain: Any) -> None:
                self._drain = drain

            def __call__(self, i: int, data: memoryview) -> bool:
                hold()
                taken: bool = self._drain(i, data)
                return taken

        class HeldCall(NativeCall):
            """The first one waits."""

            def __call__(self) -> None:
                if taken.acquire(blocking=False):
                    hold()
                super().__call__()

        def held(orders: Any, slots: Any, nbytes: int, run: int, lent: Any, take: Any, busy: Any, *more: Any) -> Any:
            if not taken.acquire(blocking=False):
                return real(orders, slots, nbytes, run, lent, take, busy, *more)
            return real(orders, slots, nbytes, run, None, HeldDrain(take), b"", *more)

        if read_before:
            monkeypatch.setattr(_files, "prepared_load", held)
        else:
            monkeypatch.setattr(threads, "NativeCall", ())  # so that it runs in a thread of Python's
            monkeypatch.setattr(directory, "NativeCall", HeldCall)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 60)


async def test_every_block_arrives_and_no_other_byte_changes(rig: Rig) -> None:
    before = blocks(rig, ASIDE)
    outcome = await rig.run(read(KEYS, TARGET))
    assert (list(outcome.moved), outcome.error) == ([0, 1, 2, 3, 4, 5], None)
    assert blocks(rig, TARGET) == blocks(rig, SOURCE)
    assert blocks(rig, ASIDE) == before
    assert (store_of(rig).drained, store_of(rig).whole) == ([4, 2], [])
    assert store_of(rig).most_at_once == 2, "half of the slots of reads"
    assert rig.sim_device.counts["copy_in"] == 0


@pytest.mark.parametrize(
    ("head_dim", "layers", "piece"),
    [
        (4, 1, PIECE),  # less than a unit
        (31, 2, PIECE),  # the last unit is not whole
        (32, 2, PIECE),
        (64, 3, 16 * PIECE),  # one piece
        (64, 3, 2 * PIECE),
        (80, 2, PIECE),  # a piece begins between two units
    ],
)
async def test_objects_of_any_length_arrive(
    make: Make, monkeypatch: pytest.MonkeyPatch, head_dim: int, layers: int, piece: int
) -> None:
    monkeypatch.setattr(cpu_blocks, "PIECE_BYTES", piece)
    rig = await make(head_dim=head_dim, layers=layers)
    outcome = await rig.run(read(KEYS, TARGET))
    assert list(outcome.moved) == list(range(6))
    assert blocks(rig, TARGET) == blocks(rig, SOURCE)
    assert (bool(store_of(rig).drained), bool(store_of(rig).whole)) == (True, False)


async def test_a_single_block_is_loaded_in_place(rig: Rig) -> None:
    outcome = await rig.run(read(KEYS[:1], TARGET[:1]))
    assert (list(outcome.moved), store_of(rig).drained, store_of(rig).whole) == ([0], [1], [])
    assert rig.block(TARGET[0]) == rig.block(SOURCE[0])
    missing = await rig.run(read(["other"], TARGET[:1]))
    assert (list(missing.moved), missing.error) == ([], None)


@pytest.mark.parametrize("at", [0, 100, PIECE - 1, PIECE, 2 * PIECE - 1])
@pytest.mark.parametrize("prefix", [True, False])
async def test_a_damaged_payload_is_no_block_of_the_result(rig: Rig, at: int, prefix: bool) -> None:
    damage(file_of(rig, "k1"), at)
    outcome = await rig.run(read(KEYS, TARGET, prefix=prefix))
    check_that_k1_is_lost(rig, outcome, prefix=prefix)
    await rig.background.settled()
    assert not file_of(rig, "k1").exists(), "it was put aside"


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


async def test_an_object_with_a_wrong_footer_never_touches_its_block(rig: Rig) -> None:
    file_of(rig, "k1").write_bytes(file_of(rig, "k3").read_bytes())  # intact, but of another key
    before = rig.block(TARGET[1])
    outcome = await rig.run(read(KEYS, TARGET, prefix=False))
    assert (list(outcome.moved), outcome.error) == ([0, 2, 3, 4, 5], None)
    assert rig.block(TARGET[1]) == before
    assert rig.worker.corrupt == 1
    await rig.background.settled()
    assert not file_of(rig, "k1").exists()


@pytest.mark.parametrize("stranger", ["gone", "shorter", "longer", "directory", "link"])
async def test_a_changed_or_replaced_file_is_a_miss_or_an_error(rig: Rig, stranger: str, tmp_path: Path) -> None:
    path, kept = file_of(rig, "k1"), tmp_path / "kept"
    content = path.read_bytes()
    kept.write_bytes(content)
    path.unlink()
    if stranger == "directory":
        path.mkdir()
    elif stranger == "link":
        path.symlink_to(kept)
    elif stranger != "gone":
        path.write_bytes(content[:-1] if stranger == "shorter" else content + b"\0")
    before = rig.block(TARGET[1])
    outcome = await rig.run(read(KEYS, TARGET, prefix=False))
    assert list(outcome.moved) == [0, 2, 3, 4, 5]
    assert rig.block(TARGET[1]) == before
    assert (outcome.error is not None) == (stranger in ("directory", "link"))


async def test_a_disk_error_is_reported_after_one_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = _files.answers
    monkeypatch.setattr(_files, "answers", lambda call: [errno.EIO for _ in answers(call)])
    outcome = await rig.run(read(KEYS, TARGET, prefix=False))
    assert list(outcome.moved) == []
    assert outcome.error is not None
    assert outcome.error.code == "storage_io"
    assert store_of(rig).whole == []


@pytest.mark.parametrize("read_before", [False, True])
async def test_a_stopped_task_answers_while_the_disk_hangs_and_its_blocks_are_not_touched_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, read_before: bool
) -> None:
    held = Held(monkeypatch, read_before=read_before)
    job = rig.start(read(KEYS[:1], TARGET[:1]))
    await held.reached()
    job.stop.set(Stop.CANCELLED)
    outcome = await rig.stopped(job)
    assert (list(outcome.moved), outcome.stop) == ([], Stop.CANCELLED)
    mine = bytes(len(rig.block(TARGET[0])))
    rig.memory[:] = 0  # the engine uses its blocks
    assert rig.slots_used == 1, "the disk may still write to the slot"
    held.go_on.set()
    await rig.background.settled()
    await asyncio.sleep(0)
    assert rig.block(TARGET[0]) == mine
    assert rig.slots_used == 0


@pytest.mark.parametrize("seed", range(5))
async def test_no_block_changes_after_its_task_was_stopped(
    make: Make, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Threads take and give back the loan all the time, and the task is stopped at any moment."""
    print(f"seed {seed}")
    monkeypatch.setattr(cpu_blocks, "PIECE_BYTES", UNIT)
    rig = await make()
    dice, stopped = random.Random(seed), 0
    for number in range(100):
        job = rig.start(read(KEYS, TARGET, f"r{number}"))
        for _ in range(dice.randrange(300)):
            await asyncio.sleep(0)
        job.stop.set(Stop.CANCELLED)
        outcome = await rig.ended_alone(job)
        rig.memory[rig.device.arena.geometry.extent // 2 :] = number  # the engine uses its blocks
        after = rig.memory.tobytes()
        stopped += outcome.stop is Stop.CANCELLED
        await rig.background.settled()
        assert rig.memory.tobytes() == after
    assert stopped


async def test_tasks_that_want_the_same_objects_share_one_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await make(slots=24)
    held = Held(monkeypatch)
    jobs = [rig.start(read(KEYS[:2], TARGET[:2], "a"))]
    await held.reached()
    jobs += [rig.start(read(KEYS[:2], TARGET[at : at + 2], f"{at}")) for at in (2, 4)]
    await turns()
    held.go_on.set()
    for job in jobs:
        assert list((await rig.ended_alone(job)).moved) == [0, 1]
    assert blocks(rig, TARGET) == blocks(rig, SOURCE[:2]) * 3
    assert sum(store_of(rig).drained) <= 4, "k0 was read once; k1 may have arrived before the others asked"
    await rig.run(read(KEYS[:2], TARGET[:2], "d"))
    assert store_of(rig).drained[-1] == 2, "nobody else wants them now"


async def test_an_object_named_twice_arrives_in_both_blocks(rig: Rig) -> None:
    outcome = await rig.run(read(["k0", "k1", "k0"], TARGET[:3]))
    assert list(outcome.moved) == [0, 1, 2]
    assert blocks(rig, TARGET[:3]) == blocks(rig, [0, 1, 0])


async def test_without_a_free_slot_a_task_waits_where_objects_go_whole(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make(slots=4)  # two of reads, and one for a chunk
    held = Held(monkeypatch)
    first = rig.start(read(KEYS[:4], TARGET[:4], "a"))
    await held.reached()
    second = rig.start(read(KEYS[4:], TARGET[4:], "b"))
    third = rig.start(read(KEYS[5:], ASIDE[-1:], "c"))
    held.go_on.set()
    for job, count in ((first, 4), (second, 2), (third, 1)):
        assert list((await rig.ended(job)).moved) == list(range(count))
    assert blocks(rig, [*TARGET, ASIDE[-1]]) == blocks(rig, [*SOURCE, 5])


async def test_without_the_extension_objects_go_whole(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_blocks, "NATIVE", False)
    rig = await make()
    assert list((await rig.run(read(KEYS, TARGET))).moved) == list(range(6))
    assert blocks(rig, TARGET) == blocks(rig, SOURCE)
    assert store_of(rig).drained == []
