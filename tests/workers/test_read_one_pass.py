"""Reads through staging into blocks that the CPU can address: one pass copies an object and checks its payload."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from tests.support.simulation.memory import MemoryWatch
from tests.support.simulation.storage import SimStorage
from tests.workers.rig import LAYOUT, Rig, read, turns, until, write
from transferd.runtime.threads import Direction
from transferd.tasks import Stop
from transferd.workers import block_memory
from transferd.workers.context import RankContext

KEYS = [f"k{i}" for i in range(6)]
SOURCE = [0, 1, 2, 3, 4, 5]
TARGET = [8, 15, 10, 9, 14, 12]

pytestmark = pytest.mark.skipif(not block_memory.NATIVE, reason="the installation found no compiler")


@pytest.fixture(params=["on the loop", "in a thread"])
async def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """Six stored blocks. Storage has none in memory, so all come through staging; a chunk is two blocks."""
    monkeypatch.setattr(RankContext, "is_cheap", lambda _self, _slots: request.param == "on the loop")
    storage = SimStorage(watch=MemoryWatch())
    storage.loads_in_place = False
    made = await Rig(slots=8, storage=storage).open()
    await made.run(write(KEYS, SOURCE))
    made.sim_device.addressable = True
    yield made
    await made.close()


def blocks(rig: Rig, numbers: Sequence[int]) -> list[bytes]:
    return [rig.block(number) for number in numbers]


async def test_every_block_arrives_and_no_other_byte_changes(rig: Rig) -> None:
    before = blocks(rig, range(16))
    outcome = await rig.run(read(KEYS, TARGET))
    assert (list(outcome.moved), outcome.error, outcome.bytes) == ([0, 1, 2, 3, 4, 5], None, 6 * LAYOUT.block_bytes)
    wanted = list(before)
    for source, target in zip(SOURCE, TARGET, strict=True):
        wanted[target] = before[source]
    assert blocks(rig, range(16)) == wanted
    assert rig.sim_device.counts["copy_in"] == 0, "the device tier copies nothing"
    assert rig.slots_used == 0


@pytest.mark.parametrize("prefix", [True, False])
async def test_a_damaged_payload_is_never_reported_and_set_aside_once(rig: Rig, prefix: bool) -> None:
    rig.sim_storage.damage(rig.name("k3"), bit=77)
    outcome = await rig.run(read(KEYS, TARGET, prefix=prefix))
    assert [i for i in outcome.moved if i < 4 or not prefix] == ([0, 1, 2] if prefix else [0, 1, 2, 4, 5])
    assert outcome.bytes == len(outcome.moved) * LAYOUT.block_bytes
    for i in outcome.moved:
        assert rig.block(TARGET[i]) == rig.block(SOURCE[i])
    assert rig.worker.corrupt == 1
    await until(lambda: rig.name("k3") in rig.sim_storage.quarantined)


async def test_another_objects_bytes_touch_no_block(rig: Rig) -> None:
    objects = rig.sim_storage.objects
    objects[rig.name("k1")] = objects[rig.name("k5")]
    before = rig.block(TARGET[1])
    outcome = await rig.run(read(KEYS, TARGET, prefix=False))
    assert list(outcome.moved) == [0, 2, 3, 4, 5]
    assert rig.block(TARGET[1]) == before
    assert rig.worker.corrupt == 1


async def test_tasks_that_share_a_fetch_each_check_their_own_copy_and_one_sets_the_object_aside(rig: Rig) -> None:
    rig.sim_storage.damage(rig.name("k1"), bit=77)
    quarantined: list[str] = []
    quarantine = rig.sim_storage.quarantine

    async def told(name: str) -> None:
        quarantined.append(name)
        await quarantine(name)

    rig.sim_storage.quarantine = told  # type: ignore[method-assign]
    first = await rig.begin(read(KEYS[:2], [8, 9], "first", prefix=False))
    await until(lambda: rig.sim_storage.gate.held == 1, "its get")
    second = rig.start(read(KEYS[:2], [10, 11], "second", prefix=False))
    await until(lambda: rig.sim_storage.gate.held == 2, "the second's question")
    rig.sim_storage.gate.release()
    outcomes = [await rig.ended(job) for job in (first, second)]
    assert [list(outcome.moved) for outcome in outcomes] == [[0], [0]]
    assert rig.sim_storage.counts["hits"] == 2, "one fetch"
    assert blocks(rig, [8, 10]) == blocks(rig, [0, 0])
    assert (rig.worker.corrupt, quarantined) == (1, [rig.name("k1")])
    assert rig.slots_used == 0


@pytest.mark.parametrize("rig", ["in a thread"], indirect=True)
async def test_no_byte_moves_after_a_stop(rig: Rig) -> None:
    before = blocks(rig, range(16))
    rig.threads.gates[Direction.IN].hold()  # type: ignore[attr-defined]
    job = rig.start(read(KEYS[:2], TARGET[:2]))
    await until(lambda: rig.threads.gates[Direction.IN].held == 1, "the copy")  # type: ignore[attr-defined]
    job.stop.set(Stop.CANCELLED)
    outcome = await rig.stopped(job)
    rig.threads.gates[Direction.IN].release()  # type: ignore[attr-defined]
    await turns()
    assert (list(outcome.moved), outcome.stop) == ([], Stop.CANCELLED)
    assert blocks(rig, range(16)) == before
    assert rig.slots_used == 0
