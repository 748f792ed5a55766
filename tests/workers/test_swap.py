"""What one rank does for a swap: in pieces, two at a time, ended by a stop within the pieces under way."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.simulation.faults import DeviceFaults
from tests.support.simulation.threads import SimThreads
from tests.workers.rig import LAYOUT, Rig, swap_in, swap_out, turns, until
from transferd.runtime.threads import Direction
from transferd.tasks import Lane, Stop

GPU = [3, 9, 1, 12, 7, 5, 0]
CPU = [8, 2, 4, 11, 6, 1, 9]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A piece is two blocks: seven blocks go in four pieces."""
    made = await Rig().open()
    swapper = made.worker._handlers[Lane.SWAP_OUT].__self__  # type: ignore[attr-defined]
    assert swapper is made.worker._handlers[Lane.SWAP_IN].__self__  # type: ignore[attr-defined]
    assert swapper._piece_blocks == 8 * 4096 // 2 // LAYOUT.block_bytes, "two pieces are at most as much as staging"
    swapper._piece_blocks = 2
    yield made
    await made.close()


async def test_blocks_go_out_and_come_in_elsewhere(rig: Rig) -> None:
    before = [rig.block(block) for block in GPU]
    assert list((await rig.run(swap_out(GPU, CPU))).moved) == list(range(7))
    assert [rig.host_block(block) for block in CPU] == before
    elsewhere = [block for block in range(16) if block not in GPU][:7]
    outcome = await rig.run(swap_in(CPU, elsewhere))
    assert outcome.bytes == 7 * LAYOUT.block_bytes
    assert [rig.block(block) for block in elsewhere] == before


async def test_the_next_piece_is_handed_over_while_one_is_copied_and_never_a_third(rig: Rig) -> None:
    gate = rig.sim_device.gate
    gate.hold()
    job = rig.start(swap_out(GPU, CPU))
    await until(lambda: gate.held == 2, "two pieces")
    await turns()
    assert gate.held == 2
    gate.release()
    assert len((await rig.ended(job)).moved) == 7
    assert rig.sim_device.counts["copy_out"] == 4


async def test_a_stop_ends_a_swap_with_the_pieces_that_were_under_way(rig: Rig) -> None:
    gate = rig.sim_device.gate
    gate.hold()
    job = rig.start(swap_out(GPU, CPU))
    await until(lambda: gate.held == 2)
    job.stop.set(Stop.CANCELLED)
    await turns()
    assert rig.outcome(job) is None, "no answer while blocks of it may still be touched"
    gate.release()
    outcome = await rig.ended(job)
    assert (list(outcome.moved), outcome.stop) == ([0, 1, 2, 3], Stop.CANCELLED)
    assert rig.sim_device.counts["copy_out"] == 2


async def test_a_swap_that_is_stopped_before_it_begins_touches_nothing(rig: Rig) -> None:
    for ids in (GPU, GPU[:2]):
        job = rig.start(swap_out(ids, CPU[: len(ids)]))
        job.stop.set(Stop.EXPIRED)
        assert list((await rig.ended(job)).moved) == []
    assert not rig.sim_device.counts


async def test_after_an_error_no_piece_is_begun_and_the_one_under_way_is_waited_for(rig: Rig) -> None:
    rig.sim_device.faults = DeviceFaults(fail=1.0)
    job = rig.start(swap_out(GPU, CPU))
    outcome = await rig.ended(job)
    assert outcome.error is not None
    assert outcome.error.code == "tier_error"
    assert rig.sim_device.counts["failed"] == 2
    assert rig.sim_device.under_way == 0


async def test_a_swap_whose_copy_waits_for_a_thread_when_it_is_stopped_never_copies(rig: Rig) -> None:
    threads = rig.threads
    assert isinstance(threads, SimThreads)
    threads.gates[Direction.OUT].hold()
    job = rig.start(swap_out(GPU[:2], CPU[:2]))
    await turns()
    job.stop.set(Stop.EXPIRED)
    outcome = await rig.ended(job)
    assert (list(outcome.moved), outcome.stop, outcome.error) == ([], Stop.EXPIRED, None)
    threads.gates[Direction.OUT].release()
    await turns()
    assert not rig.sim_device.counts
