"""What one rank does for a ReadStorageTask: the prefix it loads, what it shares, and what it never delivers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.support.simulation.faults import Gate
from tests.support.simulation.memory import MemoryWatch
from tests.support.simulation.storage import SimStorage
from tests.support.simulation.threads import SimThreads
from tests.workers.rig import Rig, read, turns, until, write
from transferd.runtime.threads import Direction
from transferd.storage.base import Blob, Outcome
from transferd.tasks import Stop
from transferd.workers.context import INLINE_CHECK_BYTES
from transferd.workers.cpu_blocks import NATIVE, BlockDrain
from transferd.workers.job import Job

KEYS = [f"k{i}" for i in range(6)]
SOURCE = [0, 1, 2, 3, 4, 5]
TARGET = [8, 15, 10, 9, 14, 12]


@pytest.fixture(params=["by the device", "by the CPU"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """Six stored blocks; four slots for reads: a chunk is two blocks, and two chunks fit.

    The parameter says how blocks are copied from staging. The CPU copies and checks them in one pass, in a thread.
    """
    storage = SimStorage(watch=MemoryWatch())
    storage.slots_at_once = None  # as a pool
    by_cpu = request.param == "by the CPU"
    made = await Rig(slots=8, storage=storage, inline_check_bytes=0 if by_cpu else INLINE_CHECK_BYTES).open()
    made.sim_device.addressable = by_cpu
    await made.run(write(KEYS, SOURCE))
    yield made
    await made.close()


def copies_of(rig: Rig) -> Gate:
    """Holds copies from staging to blocks."""
    if rig.sim_device.addressable and NATIVE:
        assert isinstance(rig.threads, SimThreads)
        return rig.threads.gates[Direction.IN]
    return rig.sim_device.gate


async def two_at_once(rig: Rig, keys: list[str], *, prefix: bool) -> tuple[Job, Job]:
    """Two reads of these keys, to blocks 8, 9 and 10, 11: the first one's load is held, the second has joined it."""
    gate = rig.sim_storage.gate
    real, loads = rig.sim_storage._get, asyncio.Event()

    async def held(blobs: Sequence[Blob]) -> list[Outcome]:
        await loads.wait()
        return await real(blobs)

    rig.sim_storage._get = held  # type: ignore[method-assign]
    first = rig.start(read(keys, [8, 9], "first", prefix=prefix))
    await turns()
    second = rig.start(read(keys, [10, 11], "second", prefix=prefix))
    await turns()
    gate.hold()
    loads.set()
    return first, second


async def test_every_block_arrives_where_it_is_wanted_and_nowhere_else(rig: Rig) -> None:
    before = {number: rig.block(number) for number in range(16)}
    outcome = await rig.run(read(KEYS, TARGET))
    assert list(outcome.moved) == list(range(6))
    for number in range(16):
        expected = before[SOURCE[TARGET.index(number)]] if number in TARGET else before[number]
        assert rig.block(number) == expected


async def test_a_hole_ends_the_prefix_and_what_is_behind_it_is_not_touched(rig: Rig) -> None:
    del rig.sim_storage.objects[rig.name("k3")]
    before = rig.block(TARGET[4])
    outcome = await rig.run(read(KEYS, TARGET))
    assert list(outcome.moved) == [0, 1, 2]
    assert outcome.error is None
    assert rig.block(TARGET[4]) == before


async def test_a_damaged_object_is_set_aside_counted_and_never_delivered(rig: Rig) -> None:
    rig.sim_storage.damage(rig.name("k1"), bit=77)
    before = rig.block(TARGET[1])
    outcome = await rig.run(read(KEYS, TARGET))
    assert list(outcome.moved)[:1] == [0]
    assert 1 not in outcome.moved
    assert rig.block(TARGET[1]) == before or rig.sim_device.addressable
    assert rig.worker.corrupt == 1
    await until(lambda: rig.name("k1") in rig.sim_storage.quarantined)


async def test_a_sparse_read_loads_what_is_behind_a_hole_and_touches_no_other_block(rig: Rig) -> None:
    for key in ("k0", "k3", "k4"):
        del rig.sim_storage.objects[rig.name(key)]
    before = {number: rig.block(number) for number in range(16)}
    outcome = await rig.run(read(KEYS, TARGET, prefix=False))
    assert (list(outcome.moved), outcome.error) == ([1, 2, 5], None)
    for number in range(16):
        position = TARGET.index(number) if number in TARGET else None
        expected = before[SOURCE[position]] if position in (1, 2, 5) else before[number]
        assert rig.block(number) == expected
    assert rig.worker.missed == 3


async def test_a_sparse_read_goes_on_behind_a_damaged_object_and_never_delivers_it(rig: Rig) -> None:
    rig.sim_storage.damage(rig.name("k1"), bit=77)
    before = rig.block(TARGET[1])
    outcome = await rig.run(read(KEYS, TARGET, prefix=False))
    assert (list(outcome.moved), outcome.error) == ([0, 2, 3, 4, 5], None)
    assert [rig.block(TARGET[i]) for i in (0, 2, 3, 4, 5)] == [rig.block(SOURCE[i]) for i in (0, 2, 3, 4, 5)]
    assert rig.block(TARGET[1]) == before or rig.sim_device.addressable
    assert rig.worker.corrupt == 1


async def test_a_sparse_read_goes_on_behind_an_object_that_cannot_be_read_and_says_so(rig: Rig) -> None:
    rig.sim_storage.dice.script("object get", None, "error")
    outcome = await rig.run(read(KEYS, TARGET, prefix=False))
    assert list(outcome.moved) == [0, 2, 3, 4, 5]
    assert outcome.error is not None
    assert outcome.error.code == "storage_error"


async def test_a_sparse_read_ends_where_a_whole_chunk_failed(rig: Rig) -> None:
    rig.sim_storage.dice.script("get", *["unavailable"] * 3)  # as many chunks as are under way at a time
    outcome = await rig.run(read([*KEYS, *KEYS], list(range(4, 16)), prefix=False))
    assert list(outcome.moved) == []
    assert outcome.error is not None
    assert outcome.error.code == "storage_unavailable"
    assert rig.sim_storage.counts["hits"] == 0, "it tried no further chunk"
    await until(lambda: rig.slots_used == 0)


async def test_a_sparse_read_shares_loads_with_reads_of_a_prefix(rig: Rig) -> None:
    first, second = await two_at_once(rig, ["k0", "k2"], prefix=False)
    rig.sim_storage.gate.release()
    assert [list((await rig.ended(job)).moved) for job in (first, second)] == [[0, 1], [0, 1]]
    assert rig.sim_storage.counts["hits"] == 2
    assert [rig.block(n) for n in (10, 11)] == [rig.block(n) for n in (0, 2)]
    assert rig.slots_used == 0


async def test_two_tasks_that_want_the_same_object_share_one_load(rig: Rig) -> None:
    first, second = await two_at_once(rig, ["k0", "k1"], prefix=True)
    rig.sim_storage.gate.release()
    assert [list((await rig.ended(job)).moved) for job in (first, second)] == [[0, 1], [0, 1]]
    assert rig.sim_storage.counts["hits"] == 2
    assert [rig.block(n) for n in (8, 9, 10, 11)] == [rig.block(n) for n in (0, 1, 0, 1)]
    assert rig.slots_used == 0


async def test_an_object_of_another_key_never_touches_a_block(rig: Rig) -> None:
    rig.sim_storage.objects[rig.name("k1")] = rig.sim_storage.objects[rig.name("k3")]
    before = rig.block(TARGET[1])
    outcome = await rig.run(read(KEYS, TARGET, prefix=False))
    assert (list(outcome.moved), outcome.error) == ([0, 2, 3, 4, 5], None)
    assert rig.block(TARGET[1]) == before
    assert rig.sim_storage.quarantined.keys() == {rig.name("k1")}


async def test_a_damaged_object_that_two_tasks_share_is_delivered_to_neither(rig: Rig) -> None:
    rig.sim_storage.damage(rig.name("k0"), bit=3)
    first, second = await two_at_once(rig, ["k0", "k1"], prefix=False)
    rig.sim_storage.gate.release()
    assert [list((await rig.ended(job)).moved) for job in (first, second)] == [[1], [1]]
    assert [rig.block(n) for n in (9, 11)] == [rig.block(1)] * 2
    assert 1 <= rig.worker.corrupt <= 2  # each task checks what it got
    assert rig.sim_storage.quarantined.keys() == {rig.name("k0")}
    assert rig.slots_used == 0


async def test_a_copy_that_waits_for_a_thread_never_runs_after_a_stop(rig: Rig) -> None:
    gate = copies_of(rig)
    gate.hold()
    before = [rig.block(n) for n in (8, 9)]
    job = rig.start(read(KEYS[:2], [8, 9]))
    await until(lambda: gate.held == 1)
    job.stop.set(Stop.CANCELLED)
    gate.release()
    outcome = await rig.ended(job)
    if rig.sim_device.addressable and NATIVE:  # a device's copy may have begun
        assert (list(outcome.moved), outcome.stop) == ([], Stop.CANCELLED)
        assert [rig.block(n) for n in (8, 9)] == before
    assert rig.slots_used == 0


async def test_a_block_that_someone_else_writes_to_during_the_copy_costs_no_object(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine does that was killed and restarted. Where what arrived is checked, that looks like damage."""
    take = BlockDrain.__call__

    def scribbled(drain: BlockDrain, i: int, data: memoryview) -> bool:
        return take(drain, i, data) and drain._blocks._blocks[drain.positions[i]] != 9

    monkeypatch.setattr(BlockDrain, "__call__", scribbled)
    outcome = await rig.run(read(KEYS[:2], [8, 9]))
    assert list(outcome.moved) == ([0] if rig.sim_device.addressable and NATIVE else [0, 1])
    assert outcome.error is None
    assert rig.worker.corrupt == 0
    assert rig.sim_storage.quarantined == {}


async def test_a_task_that_is_stopped_does_not_disturb_one_that_shares_its_load(rig: Rig) -> None:
    first, second = await two_at_once(rig, ["k0", "k1"], prefix=True)
    before = rig.block(8)
    first.stop.set(Stop.CANCELLED)
    outcome = await rig.stopped(first)
    assert (list(outcome.moved), outcome.stop) == ([], Stop.CANCELLED)
    rig.sim_storage.gate.release()
    assert list((await rig.ended(second)).moved) == [0, 1]
    assert rig.block(8) == before
    await until(lambda: rig.slots_used == 0)


async def test_a_stop_answers_while_a_get_hangs_and_its_slots_stay_lent(rig: Rig) -> None:
    job = await rig.begin(read(KEYS[:2], [8, 9]))
    await until(lambda: rig.sim_storage.gate.held == 1)
    before = rig.block(8)
    job.stop.set(Stop.EXPIRED)
    outcome = await rig.stopped(job)
    assert (list(outcome.moved), outcome.stop) == ([], Stop.EXPIRED)
    assert rig.slots_used == 2, "the get still fills them"
    rig.sim_storage.gate.release()
    await until(lambda: rig.slots_used == 0)
    assert rig.block(8) == before


async def test_a_get_that_raises_is_the_tasks_error_and_every_slot_comes_back(rig: Rig) -> None:
    rig.sim_storage.dice.script("get", "unavailable")
    outcome = await rig.run(read(KEYS, TARGET))
    assert outcome.error is not None
    assert outcome.error.code == "storage_unavailable"
    await until(lambda: rig.slots_used == 0)


async def test_the_same_key_twice_in_one_task_is_fetched_once(rig: Rig) -> None:
    outcome = await rig.run(read(["k0", "k0"], [8, 9]))
    assert list(outcome.moved) == [0, 1]
    assert rig.block(8) == rig.block(9) == rig.block(0)
    assert rig.sim_storage.counts["hits"] == 1
