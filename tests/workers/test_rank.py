"""A rank: what runs each kind of task, what becomes of errors, and memory that is freed whatever fails.

What the handlers do is in the tests of their modules.
"""

from __future__ import annotations

import pytest

from tests.support.simulation.carrier import Fabric
from tests.workers.rig import GENERATION, KEYS, SOURCE, Rig, swap_out, write
from transferd.errors import (
    DeviceLost,
    InvariantError,
    RequestError,
    StillRunning,
    StorageError,
    StorageUnavailable,
    TierError,
)
from transferd.tasks import Lane, RankOutcome
from transferd.workers.job import Job
from transferd.workers.rank import HUNG_S

DIRECT = {Lane.SEND, Lane.RECEIVE}  # handled where there is a transport to peers


@pytest.mark.parametrize("direct", [False, True])
async def test_each_lane_has_a_handler(direct: bool) -> None:
    carrier = Fabric().carrier("here") if direct else None
    assert set(Rig(carrier=carrier).worker._handlers) == (set(Lane) if direct else set(Lane) - DIRECT)


@pytest.fixture
async def rig() -> Rig:
    """Open; a test closes it, or finds out what happens."""
    return await Rig().open()


def lane(rig: Rig, name: Lane) -> tuple[int, int, int]:
    counted = rig.worker.lanes[name]
    return counted.running, counted.done, counted.failed


@pytest.mark.parametrize(
    ("error", "code", "lost"),
    [
        (DeviceLost("fell off the bus"), "device_lost", True),
        (StorageUnavailable("no route"), "storage_unavailable", False),
        (InvariantError("impossible"), "internal", False),
        (ZeroDivisionError("a bug"), "internal", False),
    ],
)
async def test_any_error_of_a_handler_is_one_outcome_and_a_lost_device_is_reported_after_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, lost: bool
) -> None:
    async def fails(job: Job) -> RankOutcome:
        raise error

    order: list[str] = []
    monkeypatch.setitem(rig.worker._handlers, Lane.WRITE, fails)
    job = Job(write(KEYS, SOURCE), len(KEYS), GENERATION, admitted_at=1.0, started_at=3.0, queue_s=2.0)

    def arrive(job: Job, outcome: RankOutcome) -> None:
        rig._arrive(job, outcome)
        order.append("arrived")

    rig.worker.start(job, arrive, lambda rank, cause: order.append(f"rank {rank} died: {cause}"))
    outcome = await rig.ended(job)
    assert outcome.error is not None
    assert (outcome.error.code, outcome.lost, list(outcome.moved), outcome.queue_s) == (code, lost, [], 2.0)
    assert str(error) in outcome.error.message
    assert order == ["arrived", *(["rank 0 died: fell off the bus"] if lost else [])]
    assert lane(rig, Lane.WRITE) == (0, 0, 1)
    assert (await rig.run(swap_out([1], [2]))).error is None, "the rank goes on"
    assert lane(rig, Lane.SWAP_OUT) == (0, 1, 0)
    await rig.close()


async def test_a_device_that_cannot_be_claimed_is_unmapped_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its engine could not free it, and no other offer could be taken."""
    await rig.worker.close_device()

    async def taken(*_: object, **__: object) -> None:
        raise RequestError("overlaps the memory of another engine", code="overlaps")

    with monkeypatch.context() as patch:
        patch.setattr(rig.context.claims, "take", taken)
        with pytest.raises(RequestError, match="overlaps"):
            await rig.worker.open_device()
    assert not rig.device.statistics()["open"]
    await rig.worker.open_device()
    await rig.close()


@pytest.mark.parametrize("keep_host", [False, True])
async def test_a_device_that_cannot_be_closed_keeps_no_host_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, keep_host: bool
) -> None:
    async def fails() -> None:
        raise TierError("cuIpcCloseMemHandle failed")

    with monkeypatch.context() as patch:
        patch.setattr(rig.device, "close", fails)
        with pytest.raises(TierError, match="cuIpcCloseMemHandle"):
            await rig.worker.free(keep_host=keep_host)
    assert rig.host.memory.allocated == keep_host
    assert rig.staging.memory.allocated, "staging stays"
    await rig.worker.allocate_host()
    assert rig.host.memory.allocated
    await rig.close()


@pytest.mark.parametrize("still_running", [False, True])
async def test_a_close_frees_everything_whatever_fails_and_raises_what_counts_most(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, still_running: bool
) -> None:
    def refuses(memory: object) -> None:
        raise StorageError("cannot unregister")

    async def fails() -> None:
        raise StillRunning("a copy hangs") if still_running else TierError("later")

    monkeypatch.setattr(rig.storage, "unregister", refuses)
    monkeypatch.setattr(rig.device, "close", fails)
    with pytest.raises(StillRunning if still_running else StorageError):
        await rig.worker.close()
    assert not any(region.allocated for region in rig.context.regions.values())


async def test_a_device_that_does_not_answer_is_named_after_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, hangs in ((0.0, False), (HUNG_S, False), (HUNG_S + 1, True)):
        monkeypatch.setattr(type(rig.device), "waiting_s", seconds)
        assert bool(rig.worker.hung) == hangs
    assert rig.worker.hung == f"the device of rank 0 has not answered for {HUNG_S + 1:.0f} s"
    await rig.close()
