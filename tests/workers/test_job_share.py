"""One rank's share of a task: the error it keeps, the slots that it gives back, and the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.workers.rig import GENERATION, KEYS, SOURCE, Rig
from transferd.errors import DeviceLost, MemoryLost, StorageError, StorageUnavailable
from transferd.storage.base import STORED, Outcome
from transferd.tasks import Stop, WriteStorageTask
from transferd.workers.job import Job, Share


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = await Rig().open()
    yield made
    await made.close()


@pytest.fixture
def share(rig: Rig) -> Share:
    job = Job(WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=SOURCE), len(KEYS), GENERATION, 0.0, 0.0, 0.0)
    return Share(job, rig.context)


async def test_the_first_error_stays_and_only_a_lost_device_replaces_it(share: Share) -> None:
    share.failed(StorageUnavailable("first"))
    share.failed(StorageError("second"))
    outcome = share.outcome()
    assert outcome.error is not None
    assert (outcome.error.message, outcome.lost) == ("first", False)
    share.failed(DeviceLost("gone"))
    outcome = share.outcome()
    assert outcome.error is not None
    assert (outcome.error.message, outcome.lost) == ("gone", True)


async def test_lost_memory_names_the_rank_and_the_engine(share: Share) -> None:
    share.failed(MemoryLost("the file was truncated"))
    error = share.outcome().error
    assert error is not None
    assert f"memory of rank {share.context.rank} of the engine {share.context.engine!r}" in error.message
    assert "the file was truncated" in error.message


async def test_a_share_with_all_its_blocks_has_no_error_whatever_happened_on_the_way(share: Share) -> None:
    share.failed(StorageUnavailable("tried again"))
    share.done([3, 1, 5], 30)
    share.job.stop.set(Stop.CANCELLED)
    outcome = share.outcome()
    assert (list(outcome.moved), outcome.bytes, outcome.stop) == ([1, 3, 5], 30, Stop.CANCELLED)
    assert outcome.error is not None
    share.done([0, 2, 4], 30)
    outcome = share.outcome()
    assert (list(outcome.moved), outcome.bytes, outcome.stop, outcome.error) == (list(range(6)), 60, None, None)


async def test_items_name_the_objects_of_the_blocks_at_these_positions(share: Share) -> None:
    names = share.context.format.names(GENERATION, share.job.key_ids(share.context.format), share.context.object_rank)
    items = share.items([4, 1])
    assert [(item.name, item.depth) for item in items] == [(names[4], 4), (names[1], 1)]
    assert {item.nbytes for item in items} == {share.context.format.slot_bytes}


async def test_slots_come_back_when_the_call_ends_even_if_nobody_waits_for_it(rig: Rig, share: Share) -> None:
    lease = await share.lease("write", 1)
    assert lease is not None
    assert rig.slots_used == 1
    answer: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
    begun = share.begin(answer, lease)
    share.job.stop.set(Stop.CANCELLED)
    assert not await share.answered(begun)
    assert rig.slots_used == 1, "the call may still write to them"
    answer.set_result([STORED])
    await asyncio.wait([begun])
    await asyncio.sleep(0)
    assert rig.slots_used == 0


async def test_a_stopped_task_gets_no_slots(rig: Rig, share: Share) -> None:
    share.job.stop.set(Stop.CANCELLED)
    assert await share.lease("write", 1) is None
    assert rig.slots_used == 0
