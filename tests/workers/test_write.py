"""What one rank does for a WriteStorageTask: what it stores, in which order, and what it holds meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.storage.harness import file_config, memory_config
from tests.support.blobs import put
from tests.support.simulation.faults import StorageFaults
from tests.support.simulation.memory import MemoryWatch
from tests.support.simulation.storage import SimStorage
from tests.workers.rig import LAYOUT, MODEL, Rig, turns, until, write
from transferd.blocks.formats import SealedBlocks
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.admission import SecondUse
from transferd.storage.base import Blob, Found
from transferd.storage.file import FileStorage
from transferd.storage.memory import MemoryStorage
from transferd.tasks import Stop
from transferd.workers.cpu_blocks import NATIVE
from transferd.workers.rank import RankWorker

KEYS = [f"k{i}" for i in range(6)]
IDS = [3, 9, 1, 12, 7, 5]


@pytest.fixture(params=["by the device", "by the CPU"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """Four slots for writes: a chunk is two blocks, and two chunks fit. The parameter says how blocks are copied."""
    storage = SimStorage(watch=MemoryWatch())
    storage.slots_at_once = None  # as a pool: every object is made in a slot
    made = await Rig(slots=8, storage=storage).open()
    made.sim_device.addressable = request.param == "by the CPU"
    yield made
    await made.close()


async def test_every_block_is_stored_with_its_bytes_and_its_identity(rig: Rig) -> None:
    outcome = await rig.run(write(KEYS, IDS))
    assert list(outcome.moved) == list(range(6))
    assert [rig.stored(key) for key in KEYS] == [rig.block(block) for block in IDS]
    assert outcome.error is None
    assert outcome.queue_s == 2.0


async def test_a_stored_key_counts_and_is_not_moved_again(rig: Rig) -> None:
    await rig.run(write(KEYS[2:4], IDS[2:4]))
    copies = rig.sim_device.counts["copy_out"]
    outcome = await rig.run(write(KEYS[2:4], IDS[2:4], "again"))
    assert list(outcome.moved) == [0, 1]
    assert outcome.bytes == 0
    assert rig.sim_device.counts["copy_out"] == copies


async def test_the_next_chunk_is_gathered_while_one_is_being_stored(rig: Rig) -> None:
    job = await rig.begin(write(KEYS, IDS))
    await until(lambda: rig.sim_storage.gate.held == 2, "two puts under way")
    copies = 0 if rig.sim_device.addressable and NATIVE else 2
    assert rig.sim_device.counts["copy_out"] == copies
    await turns()
    assert (rig.sim_device.counts["copy_out"], rig.slots_used) == (copies, 4), "the third chunk waits for slots"
    rig.sim_storage.gate.release()
    assert list((await rig.ended(job)).moved) == list(range(6))


async def test_staging_bounds_a_write_of_any_length(rig: Rig) -> None:
    keys = [f"long-{i}" for i in range(16)]
    outcome = await rig.run(write(keys, range(16)))
    assert len(outcome.moved) == 16
    assert rig.staging.statistics()["peak"] <= rig.staging.statistics()["capacity"] // 2
    assert rig.slots_used == 0


async def test_a_stop_answers_while_a_put_hangs_and_its_slots_stay_lent(rig: Rig) -> None:
    job = await rig.begin(write(KEYS[:2], IDS[:2]))
    await until(lambda: rig.sim_storage.gate.held == 1)
    job.stop.set(Stop.EXPIRED)
    outcome = await rig.ended(job)
    assert (list(outcome.moved), outcome.stop) == ([], Stop.EXPIRED)
    assert rig.slots_used == 2, "the put still reads them"
    rig.sim_storage.gate.release()
    await until(lambda: rig.slots_used == 0)


async def test_a_stop_before_the_copy_touches_no_block(rig: Rig) -> None:
    rig.sim_storage.gate.hold()
    job = rig.start(write(KEYS, IDS))
    await turns()
    job.stop.set(Stop.CANCELLED)
    outcome = await rig.ended(job)
    assert (list(outcome.moved), outcome.stop) == ([], Stop.CANCELLED)
    rig.sim_storage.gate.release()
    await turns()
    assert rig.sim_device.counts["copy_out"] == 0


async def test_one_objects_error_is_reported_and_the_other_objects_count(rig: Rig) -> None:
    rig.sim_storage.dice.script("object put", None, "full")
    outcome = await rig.run(write(KEYS[:2], IDS[:2]))
    assert list(outcome.moved) == [0]
    assert outcome.error is not None
    assert outcome.error.code == "storage_full"


async def test_a_storage_that_does_not_answer_fails_the_write_and_stores_nothing(rig: Rig) -> None:
    rig.sim_storage.faults = StorageFaults(unavailable=1.0)
    outcome = await rig.run(write(KEYS, IDS))
    assert list(outcome.moved) == []
    assert outcome.error is not None
    assert outcome.error.code == "storage_unavailable"
    assert not rig.sim_storage.objects


async def test_a_failed_copy_stores_nothing_of_its_chunk(rig: Rig) -> None:
    rig.sim_device.addressable = False  # a copy by the CPU does not fail
    rig.sim_device.dice.script("copy_out", None, "fail")
    outcome = await rig.run(write(KEYS[:4], IDS[:4]))
    assert list(outcome.moved) == [0, 1]
    assert outcome.error is not None
    assert outcome.error.code == "tier_error"
    assert len(rig.sim_storage.objects) == 2


async def test_a_lost_device_is_reported_once_and_ends_the_rank(rig: Rig) -> None:
    rig.sim_device.addressable = False
    rig.sim_device.dice.script("copy_out", "lost")
    outcome = await rig.run(write(KEYS[:2], IDS[:2]))
    assert outcome.error is not None
    assert outcome.error.code == "device_lost"
    assert [rank for rank, _ in rig.died] == [0]


async def test_objects_evicted_for_another_rank_are_not_confirmed() -> None:
    """A rank that is ahead stores the tail of a chain, which goes again when the rank behind stores its root."""
    nbytes = SealedBlocks(MODEL, LAYOUT).slot_bytes
    rig = await Rig(storage=MemoryStorage(memory_config(6 * nbytes))).open()
    job = rig.start(write(KEYS, IDS))
    outcome = await rig.ended(job)
    assert (list(outcome.moved), outcome.error) == (list(range(6)), None)
    assert rig.worker.confirmed(job, outcome) is outcome, "nothing has gone"
    behind = [Blob(f"{i}@1", memoryview(bytes(nbytes)), job.use, i) for i in range(4)]
    assert [stored.found for stored in await put(rig.storage, behind)] == [Found.STORED] * 3 + [Found.FAILED]
    confirmed = rig.worker.confirmed(job, outcome)
    assert (list(confirmed.moved), confirmed.bytes) == ([0, 1, 2], outcome.bytes)
    assert confirmed.error is not None
    assert (confirmed.error.code, confirmed.error.message[:8]) == ("storage_full", "3 blocks")
    await rig.close()


async def test_only_what_was_asked_for_before_is_stored_and_that_is_no_failure(rig: Rig) -> None:
    """All ranks of a task agree, whichever of them is first."""
    admission = SecondUse(3600.0, SYSTEM_CLOCK.monotonic)
    rig.worker = RankWorker(dataclasses.replace(rig.context, admission=admission))
    first = await rig.run(write(KEYS[:3], IDS[:3], "first"))
    assert first.error is not None
    assert (list(first.moved), first.not_admitted, first.error.code) == ([], 3, "not_admitted")
    assert first.error.message.startswith("3 blocks were asked to be stored for the first time")
    assert not rig.sim_storage.objects
    second = await rig.run(write(KEYS[1:4], IDS[1:4], "second"))
    assert second.error is not None
    assert (list(second.moved), second.not_admitted, second.error.code) == ([0, 1], 1, "not_admitted")
    assert [rig.stored(key) for key in KEYS[1:3]] == [rig.block(block) for block in IDS[1:3]]
    third = await rig.run(write(KEYS[1:4], IDS[1:4], "third"))
    assert (list(third.moved), third.not_admitted, third.error) == ([0, 1, 2], 0, None)


async def test_objects_lost_by_the_medium_are_stored_again_although_the_index_has_them(tmp_path: Path) -> None:
    """The answer `ok` is a promise."""
    rig = await Rig(storage=FileStorage(file_config(tmp_path, 64 * 1024**2))).open()
    try:
        assert (await rig.run(write(KEYS, IDS))).error is None
        files = {path.read_bytes(): path for path in (tmp_path / "objects").rglob("*") if path.is_file()}
        assert len(files) == len(KEYS)
        lost = [path for content, path in files.items() if content[: LAYOUT.block_bytes] in map(rig.block, IDS[2:4])]
        assert len(lost) == 2
        for path in lost:
            path.unlink()
        outcome = await rig.run(write(KEYS, IDS, "again"))
        assert (list(outcome.moved), outcome.error, outcome.bytes) == (list(range(6)), None, 2 * LAYOUT.block_bytes)
        assert [path.read_bytes() for path in lost] == [content for content, path in files.items() if path in lost]
    finally:
        await rig.close()


async def test_a_stop_while_the_medium_is_looked_at_confirms_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs has not said that it has the blocks, and the others were never written."""
    storage = FileStorage(file_config(tmp_path, 64 * 1024**2))
    rig = await Rig(storage=storage).open()
    looking, answers = threading.Event(), threading.Event()

    def hangs(name: str, nbytes: int) -> str:
        looking.set()
        assert answers.wait(60)
        return ""

    try:
        assert (await rig.run(write(KEYS[:2], IDS[:2]))).error is None
        monkeypatch.setattr(storage._directory, "missing", hangs)
        job = rig.start(write(KEYS, IDS, "again"))
        assert await asyncio.to_thread(looking.wait, 60)
        job.stop.set(Stop.EXPIRED)
        outcome = await rig.ended(job)
        assert (list(outcome.moved), outcome.stop) == ([], Stop.EXPIRED)
    finally:
        answers.set()
        await rig.close()


async def test_a_call_that_ends_with_an_error_costs_its_own_chunk(rig: Rig) -> None:
    """The question what is stored was answered; then the pool went away for one call."""
    rig.sim_storage.dice.script("put", None, "unavailable")
    outcome = await rig.run(write(KEYS[:4], IDS[:4]))
    assert outcome.error is not None
    assert (list(outcome.moved), outcome.error.code) == ([0, 1], "storage_unavailable")
    assert rig.slots_used == 0
