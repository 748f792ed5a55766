"""Blocks that a write lends to storage: what is stored, and what is taken back when the task ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from tests.storage.harness import file_config, skip_without_direct_io
from tests.workers.rig import LAYOUT, Rig, read, turns, write
from transferd.runtime.compat import timeout
from transferd.runtime.threads import ThreadPools
from transferd.storage.base import LEFT, STORED, Fill, Item
from transferd.storage.file import FileStorage
from transferd.storage.joined import JoinedStorage
from transferd.storage.lent import Lent
from transferd.storage.lru import Use
from transferd.tasks import Stop
from transferd.workers import cpu_blocks
from transferd.workers.cpu_blocks import NATIVE, BlockFill, CpuBlocks

KEYS = [f"k{i}" for i in range(6)]
SOURCE = [3, 9, 1, 12, 7, 5]
TARGET = [8, 15, 10, 2, 14, 0]


Make = Callable[[CpuBlocks, int, bool, Callable[[], bool]], bool]


def watch(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """Have `make` called in the place of each copy: with the task's blocks, the block, `near`, and the copy."""

    def watched(blocks: CpuBlocks, positions: Sequence[int]) -> Fill:
        fill = BlockFill(blocks, positions)

        def told(i: int, data: memoryview, near: bool) -> bool:
            return make(blocks, blocks._blocks[positions[i]], near, lambda: fill(i, data, near))

        return told  # it lends nothing, so the extension calls it

    monkeypatch.setattr("transferd.workers.write.BlockFill", watched)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """On files, with every copy in a thread."""
    if not NATIVE:
        pytest.skip("the extension is not there, so blocks go to storage in chunks")
    made = await Rig(
        slots=8, storage=FileStorage(file_config(tmp_path, 64 * 1024**2), threads=ThreadPools(1)), inline_check_bytes=0
    ).open()
    made.sim_device.addressable = True
    yield made
    await made.close()


async def test_every_lent_block_is_stored_with_its_bytes_and_few_slots(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[int] = []

    def telling(_: CpuBlocks, block: int, __: bool, copy: Callable[[], bool]) -> bool:
        collected.append(block)
        return copy()

    watch(monkeypatch, telling)
    outcome = await rig.run(write(KEYS, SOURCE))
    assert (list(outcome.moved), outcome.error, rig.sim_device.counts["copy_out"]) == (list(range(6)), None, 0)
    assert sorted(collected) == sorted(SOURCE)
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
    """Through the page cache, the same core reads the copy at once (docs/files.md)."""
    if direct_io:
        skip_without_direct_io(tmp_path)
    told: list[bool] = []

    def telling(_: CpuBlocks, __: int, near: bool, copy: Callable[[], bool]) -> bool:
        told.append(near)
        return copy()

    watch(monkeypatch, telling)
    files = FileStorage(file_config(tmp_path, 64 * 1024**2, direct_io=direct_io))
    storage = JoinedStorage(files, ThreadPools(1)) if several else files  # type: ignore[abstract]
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
    lend = CpuBlocks.lend

    def ended(blocks: CpuBlocks, positions: Sequence[int]) -> Lent:
        vars(cpu_blocks)["_inplace"].end_loan(blocks.loan.shared)
        return lend(blocks, positions)

    monkeypatch.setattr(CpuBlocks, "lend", ended)
    outcome = await rig.run(write(KEYS, SOURCE))
    assert (list(outcome.moved), outcome.error) == ([], None)
    assert await rig.storage.exists([rig.name(key) for key in KEYS]) == [False] * 6
    assert rig.slots_used == 0
    monkeypatch.undo()
    outcome = await rig.run(write(KEYS, SOURCE, "again"))
    assert list(outcome.moved) == list(range(6)), "their names and their room are free again"
    await turns()


async def test_storage_evicts_nothing_for_an_object_that_was_not_made(tmp_path: Path) -> None:
    storage = FileStorage(file_config(tmp_path, 8192))
    await storage.open()
    try:
        names = [f"demo/0123456789abcdef/RL-1/{i:02x}/0" for i in range(3)]
        slots = [memoryview(bytearray(4096))]
        items = [Item(name, 4096, Use(), 0) for name in names]
        assert await storage.store(items[:2], lambda *_: True, slots) == [STORED, STORED]
        assert await storage.store(items[2:], lambda *_: False, slots) == [LEFT]
        assert await storage.exists(names) == [True, True, False]
        assert storage.statistics()["errors"] == 0
    finally:
        await storage.close()


@pytest.mark.parametrize("ends", ["cancelled", "expired"])
async def test_a_task_that_ends_meanwhile_waits_for_the_copy_that_runs_and_begins_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A thread stands still in the middle of a copy. Until it goes on, the blocks are not the engine's again."""
    loop, entered, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    copied: list[int] = []

    def slowly(blocks: CpuBlocks, block: int, near: bool, copy: Callable[[], bool]) -> bool:
        if blocks.loan.over:
            return False
        blocks.loan.shared[0] += 1  # as the extension takes it; there is one thread
        try:
            copied.append(block)
            loop.call_soon_threadsafe(entered.set)
            assert go_on.wait(30)
            return copy()
        finally:
            blocks.loan.shared[0] -= 1
            if blocks.loan.over:
                blocks.loan.returned()

    watch(monkeypatch, slowly)
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
