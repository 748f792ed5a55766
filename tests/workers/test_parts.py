"""Loads by parts: what is reported is there, verified, in every block; after the first bad part nothing is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import pytest

from tests.workers.rig import KEYS, SOURCE, TARGET, Rig, blocks, layout_of, read, until, write
from tests.workers.test_in_place import Warm
from transferd.blocks.formats import FOOTER_BYTES, ObjectNamer, seal
from transferd.storage.base import MISSING, Drainer, Item, Outcome
from transferd.tasks import RankOutcome, ReadStorageTask, Stop
from transferd.workers import read as read_module
from transferd.workers.cpu_blocks import NATIVE, BlockDrain, CpuBlocks
from transferd.workers.job import Job

pytestmark = pytest.mark.skipif(not NATIVE, reason="the installation had no compiler")

LAYERS = 7
LAYOUT = layout_of(layers=LAYERS)
ENDS = [256, 512, 896]  # bytes of 2, 4 and 7 layers
ALL = list(range(len(KEYS)))


@pytest.fixture
def storage() -> Warm:
    return Warm()


@pytest.fixture
async def rig(storage: Warm, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """Six stored blocks, on a device that the CPU can address. A chunk in place has two blocks."""
    monkeypatch.setattr(read_module, "CHUNK_BYTES", 2 * LAYOUT.block_bytes)
    made = await Rig(slots=8, storage=storage, layers=LAYERS).open()
    made.sim_device.addressable = True
    await made.run(write(KEYS, SOURCE))
    yield made
    await made.close()


class Reported(list[int]):
    """The layers that a load has reported; each time every block of the task must have exactly these bytes there."""

    def __init__(self, rig: Rig, then: Callable[[int], None] = lambda _: None) -> None:
        super().__init__()
        self._rig, self._then = rig, then
        self._wanted = blocks(rig, SOURCE)

    def __call__(self, _: Job, rank: int, layers: int) -> None:
        assert rank == 0
        end = dict(LAYOUT.part_ends)[layers]
        assert [block[:end] for block in blocks(self._rig, TARGET)] == [block[:end] for block in self._wanted]
        self.append(layers)
        self._then(layers)


def by_parts(*, prefix: bool = False) -> ReadStorageTask:
    return msgspec.structs.replace(read(KEYS, TARGET, prefix=prefix), by_parts=True)


def begin(rig: Rig, reported: Reported, task: ReadStorageTask | None = None) -> Job:
    job = rig.start(task or by_parts())
    job.part_there = reported  # it begins in the next turn of the loop
    return job


async def load(rig: Rig, reported: Reported, task: ReadStorageTask | None = None) -> RankOutcome:
    return await rig.ended(begin(rig, reported, task))


def check_moved(rig: Rig, outcome: RankOutcome, wanted: Sequence[int]) -> None:
    assert list(outcome.moved) == list(wanted)
    assert [rig.block(TARGET[i]) for i in outcome.moved] == [rig.block(SOURCE[i]) for i in outcome.moved]
    assert outcome.bytes == len(wanted) * LAYOUT.block_bytes


def test_parts_end_between_layers_and_are_about_as_long() -> None:
    assert LAYOUT.part_ends == ((2, 256), (4, 512), (7, 896))
    few = layout_of(layers=2)
    assert few.part_ends == ((2, few.block_bytes),)


@pytest.mark.parametrize("prefix", [True, False])
async def test_each_part_is_reported_once_it_is_there_in_all_blocks(rig: Rig, storage: Warm, prefix: bool) -> None:
    reported = Reported(rig)
    outcome = await load(rig, reported, by_parts(prefix=prefix))
    check_moved(rig, outcome, ALL)
    assert reported == [2, 4]
    assert outcome.error is None
    assert len(storage.tried) == 9, "three parts of three chunks"
    assert rig.sim_device.counts["copy_in"] == 0


async def test_a_task_that_does_not_ask_gets_whole_blocks(rig: Rig, storage: Warm) -> None:
    reported = Reported(rig)
    check_moved(rig, await load(rig, reported, read(KEYS, TARGET)), ALL)
    assert (reported, len(storage.tried)) == ([], 3)


async def test_blocks_that_the_cpu_cannot_address_are_one_part(rig: Rig) -> None:
    rig.sim_device.addressable = False
    reported = Reported(rig)
    check_moved(rig, await load(rig, reported), ALL)
    assert reported == []


async def test_a_source_that_would_read_whole_objects_for_each_part_is_asked_once(rig: Rig, storage: Warm) -> None:
    storage.slots_at_once = 2
    reported = Reported(rig)
    check_moved(rig, await load(rig, reported), ALL)
    assert (reported, len(storage.tried)) == ([], 3)


@pytest.mark.parametrize("bad", [0, 3, 5])
@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("where", ["first", "last"])
async def test_damage_in_a_part_is_seen_with_that_part(
    rig: Rig, storage: Warm, bad: int, part: int, where: str
) -> None:
    at = [0, *ENDS][part] if where == "first" else ENDS[part] - 1
    storage.damage(rig.name(KEYS[bad]), bit=8 * at)
    reported = Reported(rig)
    outcome = await load(rig, reported)
    check_moved(rig, outcome, [i for i in ALL if i != bad])
    assert reported == [2, 4][:part]
    assert rig.worker.corrupt == 1
    await until(lambda: rig.name(KEYS[bad]) in storage.quarantined)


@pytest.mark.parametrize("at", [40, 52, 104, 112, 125])  # in the footer
async def test_damage_in_a_footer_reports_nothing(rig: Rig, storage: Warm, at: int) -> None:
    storage.damage(rig.name("k2"), bit=8 * (LAYOUT.block_bytes + at))
    before = rig.block(TARGET[2])
    reported = Reported(rig)
    check_moved(rig, await load(rig, reported), [0, 1, 3, 4, 5])
    assert reported == []
    assert rig.block(TARGET[2]) == before
    await until(lambda: rig.name("k2") in storage.quarantined)


async def test_a_block_that_the_engine_may_be_reading_is_not_loaded_again(rig: Rig, storage: Warm) -> None:
    """Its third part was scribbled on in memory: the object is intact, and stays, and the block is not reported."""
    reported = Reported(rig)
    begin, take, left = BlockDrain.__init__, BlockDrain.__call__, [1]
    of_last: list[BlockDrain] = []

    def begun(
        drain: BlockDrain,
        blocks: CpuBlocks,
        positions: Sequence[int],
        part: int = -1,
        states: Sequence[bytearray] = (),
    ) -> None:
        begin(drain, blocks, positions, part, states)
        if part == blocks.parts - 1:
            of_last.append(drain)

    def scribbled(drain: BlockDrain, i: int, data: memoryview) -> bool:
        return take(drain, i, data) and not (drain in of_last and left and left.pop())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockDrain, "__init__", begun)
        patch.setattr(BlockDrain, "__call__", scribbled)
        outcome = await load(rig, reported)
    assert len(outcome.moved) == 5
    assert reported == [2, 4]
    assert (rig.worker.corrupt, storage.quarantined) == (0, {})


@pytest.mark.parametrize("prefix", [True, False])
async def test_objects_without_seals_of_parts_are_loaded_whole(rig: Rig, storage: Warm, prefix: bool) -> None:
    """As versions before this one have stored them; one of them is enough."""
    (stamp,) = ObjectNamer("m", LAYOUT.fingerprint).stamps("g", rig.format.ids(["k4"]), rig.worker.rank)
    old = bytearray(storage.objects[rig.name("k4")])
    seal(memoryview(old), LAYOUT.block_bytes, stamp)
    assert old != storage.objects[rig.name("k4")]
    assert old[:-FOOTER_BYTES] == storage.objects[rig.name("k4")][:-FOOTER_BYTES]
    storage.objects[rig.name("k4")] = bytes(old)
    reported = Reported(rig)
    check_moved(rig, await load(rig, reported, by_parts(prefix=prefix)), ALL)
    assert reported == []
    assert rig.worker.corrupt == 0


@pytest.mark.parametrize("part", [0, 1, 2])
async def test_an_object_that_goes_between_two_parts_ends_the_reports(rig: Rig, storage: Warm, part: int) -> None:
    passes = [0]

    def reading(name: str) -> None:
        if name == rig.name("k0"):
            passes[0] += 1

    storage.reading = reading
    real = storage._load_one

    def gone(i: int, item: Item, drain: Drainer) -> Outcome:
        return MISSING if item.name == rig.name("k3") and passes[0] == part + 1 else real(i, item, drain)

    storage._load_one = gone  # type: ignore[method-assign]
    reported = Reported(rig)
    check_moved(rig, await load(rig, reported), [0, 1, 2, 4, 5])
    assert reported == [2, 4][:part]


@pytest.mark.parametrize("after", [2, 4])
async def test_a_stopped_load_reports_no_more_and_claims_nothing(rig: Rig, after: int) -> None:
    reported = Reported(rig, lambda layers: job.stop.set(Stop.CANCELLED) if layers == after else None)
    job = begin(rig, reported)
    outcome = await rig.ended(job)
    assert (list(outcome.moved), outcome.stop) == ([], Stop.CANCELLED)
    assert reported == [2, 4][: [2, 4].index(after) + 1]


async def test_a_part_that_storage_cannot_read_is_an_error(rig: Rig, storage: Warm) -> None:
    storage.dice.script("object get", *[None] * 7, "error")
    reported = Reported(rig)
    outcome = await load(rig, reported)
    assert len(outcome.moved) == 5
    assert reported == [2]
    assert outcome.error is not None
    assert outcome.error.code == "storage_error"
