"""One rank's share of a task: the error it keeps, the slots that it gives back, and the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.workers.rig import GENERATION, KEYS, SOURCE, Rig
from transferd.errors import DeviceLost, InvariantError, MemoryLost, RequestError, StorageError, StorageUnavailable
from transferd.runtime.aio import answered
from transferd.storage.base import STORED, Outcome, Outcomes
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


async def test_steps_and_errors_are_noted_and_only_a_bug_is_a_failure_of_ours(share: Share) -> None:
    share.step("copy", 3)
    share.failed(StorageUnavailable("no storage"))
    share.failed(InvariantError("a bug"))
    told = [(note.what, list(note.detail.values())) for note in share.context.recorder.notes("w")]
    assert sorted(what for what, _ in told) == ["copy", "error", "error", "failure"]
    assert all("a bug" in str(detail) for what, detail in told if what == "failure")
    assert any("no storage" in str(detail) for what, detail in told if what == "error")


async def test_a_share_has_done_nothing_at_first(share: Share) -> None:
    outcome = share.outcome()
    assert (list(outcome.moved), outcome.bytes, outcome.copy_s, outcome.storage_s, outcome.lost) == ([], 0, 0, 0, False)


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
    begun = share.begin(lambda *_: answer, [], None, [], lease)
    share.job.stop.set(Stop.CANCELLED)
    assert not await share.answered(begun)
    assert rig.slots_used == 1, "the call may still write to them"
    answer.set_result([STORED])
    await asyncio.wait([begun])
    await asyncio.sleep(0)
    assert rig.slots_used == 0


async def test_the_time_that_storage_took_is_that_of_the_wait_and_of_calls_that_ended_at_once(share: Share) -> None:
    began = share.context.clock.monotonic()
    answer: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(share.answered(answer))
    await asyncio.sleep(0)  # it waits now
    await asyncio.sleep(0.01)
    answer.set_result([STORED])
    assert await waiting
    waited = share.outcome().storage_s
    assert 0.005 < waited <= share.context.clock.monotonic() - began
    assert await share.answered(answer), "there is nothing to wait for"
    assert share.outcome().storage_s == waited

    assert share.begin(lambda *_: answered([STORED]), [], None, []).done()
    assert waited < share.outcome().storage_s <= share.context.clock.monotonic() - began


async def test_a_stopped_task_gets_no_slots(rig: Rig, share: Share) -> None:
    share.job.stop.set(Stop.CANCELLED)
    assert await share.lease("write", 1) is None
    assert rig.slots_used == 0


async def test_slots_that_are_granted_after_a_stop_come_back_at_once(rig: Rig, share: Share) -> None:
    taken = await rig.staging.acquire("write", 4, "others")
    leasing = asyncio.ensure_future(share.lease("write", 2))
    await asyncio.sleep(0)
    assert not leasing.done()
    share.job.stop.set(Stop.EXPIRED)
    assert await leasing is None
    assert len(rig.background) == 1, "it still queues"
    taken.release()
    await rig.background.settled()
    await asyncio.sleep(0)
    assert rig.slots_used == 0


async def test_a_call_that_cannot_begin_keeps_no_slot(rig: Rig, share: Share) -> None:
    lease = await share.lease("write", 1)
    with pytest.raises(TypeError):
        share.begin(lambda *_: None, [], None, [], lease)  # type: ignore[arg-type]
    assert rig.slots_used == 0


async def test_slots_that_a_slow_level_still_reads_stay_lent_after_the_answer(rig: Rig, share: Share) -> None:
    loop = asyncio.get_running_loop()
    lease, returned = await share.lease("write", 1), loop.create_future()
    answer: asyncio.Future[list[Outcome]] = loop.create_future()
    share.begin(lambda *_: answer, [], None, [], lease)
    answer.set_result(Outcomes([STORED], returned))
    await asyncio.sleep(0)
    assert (rig.slots_used, len(rig.background)) == (1, 1)
    returned.set_result(None)
    await rig.background.settled()
    assert rig.slots_used == 0


@pytest.mark.parametrize("timelines", [False, True])
async def test_a_task_waits_for_its_engine_where_the_device_can_say_how_far_that_is(
    rig: Rig, share: Share, monkeypatch: pytest.MonkeyPatch, timelines: bool
) -> None:
    monkeypatch.setattr(type(rig.device), "timelines", timelines)
    assert await share.computed(), "it names no timeline"
    task = WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=SOURCE, after=(0, 7))
    waiting = Share(Job(task, len(KEYS), GENERATION, 0.0, 0.0, 0.0), rig.context)
    if not timelines:
        with pytest.raises(RequestError) as refused:
            await waiting.computed()
        assert refused.value.reason == "no_timelines"
        return
    computing = asyncio.ensure_future(waiting.computed())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not computing.done()
    waiting.job.stop.set(Stop.CANCELLED)
    assert not await computing
    await rig.background.settled()
