"""Blocks that a write lends to storage: what is stored, and what is taken back when the task ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path

import pytest

from tests.storage.harness import file_config, skip_without_direct_io
from tests.workers.rig import LAYOUT, Rig, read, turns, write
from transferd.runtime.compat import timeout
from transferd.runtime.threads import ThreadPools
from transferd.storage.base import MISSING, STORED, Blob, Lent, Outcome
from transferd.storage.batch import Wanted
from transferd.storage.file import FileStorage
from transferd.storage.joined import JoinedStorage
from transferd.storage.lru import Use
from transferd.tasks import Stop
from transferd.workers.block_memory import NATIVE, BlockMemory
from transferd.workers.lent import BlockLender
from transferd.workers.loan import Loan

KEYS = [f"k{i}" for i in range(6)]
SOURCE = [3, 9, 1, 12, 7, 5]
TARGET = [8, 15, 10, 2, 14, 0]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """On files, with every copy in a thread."""
    if not NATIVE:
        pytest.skip("the extension is not there, so blocks go to storage in chunks")
    made = await Rig(slots=8, storage=FileStorage(file_config(tmp_path, 64 * 1024**2)), inline_check_bytes=0).open()
    made.sim_device.addressable = True
    yield made
    await made.close()


async def test_every_lent_block_is_stored_with_its_bytes_and_few_slots(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[int] = []
    collect = BlockLender.collect
    monkeypatch.setattr(
        BlockLender, "collect", lambda lender, at, slot: collected.append(at) or collect(lender, at, slot)
    )
    outcome = await rig.run(write(KEYS, SOURCE))
    assert (list(outcome.moved), outcome.error, rig.sim_device.counts["copy_out"]) == (list(range(6)), None, 0)
    assert sorted(collected) == list(range(6))
    loaded = await rig.run(read(KEYS, TARGET))
    assert list(loaded.moved) == list(range(6))
    assert [rig.block(block) for block in TARGET] == [rig.block(block) for block in SOURCE]
    again = await rig.run(write(KEYS, SOURCE, "again"))
    assert (list(again.moved), len(collected)) == (list(range(6)), 6), "what is stored is not collected"
    assert rig.slots_used == 0


@pytest.mark.parametrize("direct_io", [False, True])
@pytest.mark.parametrize("several", [False, True])
async def test_a_copy_goes_past_the_caches_if_a_device_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_io: bool, several: bool
) -> None:
    """Through the page cache, the same core reads the copy at once (docs/adr/0064)."""
    if direct_io:
        skip_without_direct_io(tmp_path)
    told: list[bool] = []
    collect = BlockMemory.collect

    def telling(memory: BlockMemory, block: int, slot: memoryview, loan: Loan, *, kept: bool) -> int | None:
        told.append(kept)
        return collect(memory, block, slot, loan, kept=kept)

    monkeypatch.setattr(BlockMemory, "collect", telling)
    files = FileStorage(file_config(tmp_path, 64 * 1024**2, direct_io=direct_io))
    storage = JoinedStorage(files, ThreadPools(1), lambda: True) if several else files
    rig = await Rig(slots=8, storage=storage, inline_check_bytes=0).open()
    rig.sim_device.addressable = True
    assert list((await rig.run(write(KEYS, SOURCE))).moved) == list(range(6))
    assert told == [not direct_io] * 6
    assert list((await rig.run(read(KEYS, TARGET))).moved) == list(range(6))
    assert [rig.block(block) for block in TARGET] == [rig.block(block) for block in SOURCE]
    await rig.close()


async def test_blocks_that_no_thread_has_collected_when_the_loan_ends_are_not_stored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loan, "take", lambda _loan: False)
    outcome = await rig.run(write(KEYS, SOURCE))
    assert (list(outcome.moved), outcome.error) == ([], None)
    assert await rig.storage.exists([rig.name(key) for key in KEYS]) == [False] * 6
    assert rig.slots_used == 0
    monkeypatch.undo()
    outcome = await rig.run(write(KEYS, SOURCE, "again"))
    assert list(outcome.moved) == list(range(6)), "their names and their room are free again"
    await turns()


class _Block:
    """A lent block that gives one object, or nothing."""

    def __init__(self, data: bytes | None, nbytes: int) -> None:
        self.nbytes = nbytes
        self.given_back = 0
        self._data = data

    def collect(self) -> memoryview | None:
        return None if self._data is None else memoryview(self._data)

    def give_back(self) -> None:
        self.given_back += 1


async def test_storage_gives_back_each_block_it_collected_and_evicts_nothing_for_others(tmp_path: Path) -> None:
    storage = FileStorage(file_config(tmp_path, 8192))
    await storage.open()
    try:
        names = [f"demo/0123456789abcdef/RL-1/{i:02x}/0" for i in range(3)]
        blocks = [_Block(b"a" * 4096, 4096), _Block(b"b" * 4096, 4096), _Block(None, 4096)]
        lent = [Lent(name, block, Use(), 0) for name, block in zip(names, blocks, strict=True)]
        assert await storage.put_lent(lent[:2], 1) == [STORED, STORED]
        assert await storage.put_lent(lent[2:], 1) == [MISSING]
        assert [block.given_back for block in blocks] == [1, 1, 0]
        assert await storage.exists(names) == [True, True, False]
        assert storage.statistics()["errors"] == 0
    finally:
        await storage.close()


async def test_a_subclass_with_a_put_and_a_get_of_its_own_gets_every_object_there(tmp_path: Path) -> None:
    """As a backend of another package does that counts, encrypts or logs."""
    passed: list[str] = []

    class Told(FileStorage):
        def put(self, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
            passed.extend(f"put {blob.name}" for blob in blobs)
            return super().put(blobs)

        def get(self, blobs: Sequence[Wanted]) -> Awaitable[list[Outcome]]:
            passed.extend(f"get {blob.name}" for blob in blobs)
            return super().get(blobs)

    rig = await Rig(slots=8, storage=Told(file_config(tmp_path, 64 * 1024**2)), inline_check_bytes=0).open()
    rig.sim_device.addressable = True
    await rig.run(write(KEYS, SOURCE))
    await rig.run(read(KEYS, TARGET))
    names = [rig.name(key) for key in KEYS]
    assert sorted(passed) == sorted([f"put {name}" for name in names] + [f"get {name}" for name in names])
    await rig.close()


@pytest.mark.parametrize("ends", ["cancelled", "expired"])
async def test_a_task_that_ends_meanwhile_waits_for_the_copy_that_runs_and_begins_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A thread stands still in the middle of a copy. Until it goes on, the blocks are not the engine's again."""
    loop, entered, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    copied: list[int] = []
    collect = BlockMemory.collect

    def slowly(memory: BlockMemory, block: int, slot: memoryview, loan: Loan, *, kept: bool) -> int | None:
        if not loan.take():
            return None
        try:
            copied.append(block)
            loop.call_soon_threadsafe(entered.set)
            assert go_on.wait(30)
            return collect(memory, block, slot, kept=kept)
        finally:
            loan.give_back()

    monkeypatch.setattr(BlockMemory, "collect", slowly)
    job = rig.start(write(KEYS, SOURCE))
    async with timeout(30):
        await entered.wait()
    job.stop.set(Stop.CANCELLED if ends == "cancelled" else Stop.EXPIRED)
    await turns()
    assert rig.outcome(job) is None, "a thread still copies one of its blocks"
    before = list(copied)
    go_on.set()
    outcome = await rig.ended(job)
    assert outcome.stop is not None
    for block in SOURCE:
        rig.memory[LAYOUT.device.offsets + block * LAYOUT.device.strides] ^= 0xFF  # the engine goes on
    await rig.background.settled()
    assert copied == before
    assert rig.slots_used == 0
    monkeypatch.undo()
    stored = await rig.storage.exists([rig.name(key) for key in KEYS])
    assert sum(stored) <= len(before)
    loaded = await rig.run(read(KEYS, TARGET, "r", prefix=False))
    assert len(loaded.moved) == sum(stored), "what is stored is intact"
