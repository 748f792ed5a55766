"""Blocks between a device and slots of staging: every byte, each block's own, and nothing of a damaged object."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.workers.rig import GENERATION, KEYS, SOURCE, TARGET, Rig
from transferd.blocks.formats import FOOTER_BYTES
from transferd.tasks import ReadStorageTask, Stop, WriteStorageTask
from transferd.workers.device_blocks import DeviceBlocks
from transferd.workers.job import Job, Share


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = await Rig(slots=16).open()
    yield made
    await made.close()


def share_of(rig: Rig, task: WriteStorageTask | ReadStorageTask) -> Share:
    return Share(Job(task, len(KEYS), GENERATION, 0.0, 0.0, 0.0), rig.context)


async def test_gathered_blocks_are_scattered_byte_for_byte_except_damaged_ones(rig: Rig) -> None:
    written = share_of(rig, WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=SOURCE))
    lease = await written.lease("write", 3)
    assert lease is not None
    positions = [4, 0, 5]
    assert await DeviceBlocks(written).gather(positions, lease.slots)
    slots = rig.staging.views(lease.slots)
    payload = rig.block(SOURCE[0])
    assert len({bytes(slot) for slot in slots}) == 3
    assert len(payload) + FOOTER_BYTES <= slots[1].nbytes

    slots[2][0] ^= 1
    read = share_of(rig, ReadStorageTask(task_id="r", keys=KEYS, gpu_block_ids=TARGET))
    kept = rig.block(TARGET[5])
    results = await DeviceBlocks(read).scatter(positions, lease.slots)
    assert [rig.block(TARGET[i]) for i in (4, 0)] == [rig.block(SOURCE[i]) for i in (4, 0)]
    assert rig.block(TARGET[5]) == kept
    assert (results[4], results[0]) == (None, None)
    assert results[5] is not None
    lease.release()


async def test_a_stopped_task_gathers_nothing(rig: Rig) -> None:
    share = share_of(rig, WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=SOURCE))
    lease = await share.lease("write", 1)
    assert lease is not None
    before = bytes(rig.staging.views(lease.slots)[0])
    share.job.stop.set(Stop.CANCELLED)
    assert not await DeviceBlocks(share).gather([0], lease.slots)
    assert bytes(rig.staging.views(lease.slots)[0]) == before
    lease.release()
