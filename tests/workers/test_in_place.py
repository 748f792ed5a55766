"""Loads into blocks where they lie: what goes that way, what is left to staging, and who touches a block when."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.support.simulation.storage import SimStorage
from tests.workers.rig import (
    ASIDE,
    KEYS,
    LAYOUT,
    SOURCE,
    TARGET,
    Rig,
    blocks,
    check_that_k1_is_lost,
    read,
    turns,
    until,
    write,
)
from transferd.blocks.copyplan import plan_copy
from transferd.blocks.formats import FOOTER_BYTES
from transferd.blocks.layout import Geometry, build_layout
from transferd.config import CacheSection
from transferd.errors import StorageError
from transferd.runtime.aio import answered
from transferd.runtime.clock import Clock
from transferd.runtime.compat import wait_for
from transferd.storage.base import FOUND, Drainer, Item, Outcome
from transferd.tasks import Lane, ReadStorageTask, Stop
from transferd.workers import cpu_blocks
from transferd.workers import read as read_module
from transferd.workers.cpu_blocks import NATIVE, BlockDrain, Loan, pieces_of
from transferd.workers.rank import RankWorker

_inplace: Any = getattr(cpu_blocks, "_inplace", None)  # there is none without a compiler
pytestmark = pytest.mark.skipif(not NATIVE, reason="the installation had no compiler")


class Warm(SimStorage):
    """A storage whose loads in place are told: `reading` of each object before it is drained.

    tried: the objects of every call in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slots_at_once = 0
        self.tried: list[list[str]] = []
        self.reading: Callable[[str], None] = lambda _name: None

    def load(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> Awaitable[list[Outcome]]:
        if drain is not None:
            self.tried.append([item.name for item in items])
        return super().load(items, drain, slots)

    def _load_one(self, i: int, item: Item, drain: Drainer) -> Outcome:
        self.reading(item.name)
        return super()._load_one(i, item, drain)


@pytest.fixture
def storage() -> Warm:
    return Warm()


@pytest.fixture
async def rig(storage: Warm, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """Six stored blocks, on a device that the CPU can address. A chunk in place has two blocks."""
    monkeypatch.setattr(read_module, "CHUNK_BYTES", 2 * LAYOUT.block_bytes)
    made = await Rig(slots=8, storage=storage).open()
    await made.run(write(KEYS, SOURCE))
    made.sim_device.addressable = True
    yield made
    await made.close()


async def test_every_block_arrives_without_staging_and_no_other_byte_changes(rig: Rig) -> None:
    before = blocks(rig, ASIDE)
    outcome = await rig.run(read(KEYS, TARGET))
    assert (list(outcome.moved), outcome.error, outcome.bytes) == ([0, 1, 2, 3, 4, 5], None, 6 * LAYOUT.block_bytes)
    assert blocks(rig, TARGET) == blocks(rig, SOURCE)
    assert blocks(rig, ASIDE) == before
    assert rig.sim_device.counts["copy_in"] == 0


async def test_one_block_is_loaded_or_missed_without_a_lookup(
    rig: Rig, storage: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_up(*_: object) -> NoReturn:
        raise AssertionError("the load finds out as much")

    monkeypatch.setattr(storage, "exists", looked_up)
    monkeypatch.setattr(storage, "find", looked_up)
    before = blocks(rig, TARGET)
    there = await rig.run(read(KEYS[:1], TARGET[:1]))
    gone = await rig.run(read(["never stored"], TARGET[1:2]))
    assert (list(there.moved), list(gone.moved), there.error, gone.error) == ([0], [], None, None)
    assert blocks(rig, TARGET) == [rig.block(SOURCE[0]), *before[1:]]


async def test_the_time_of_a_load_that_ends_before_its_call_returns_is_storages(
    rig: Rig, storage: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [5.0]
    rig.worker = RankWorker(dataclasses.replace(rig.context, clock=Clock(monotonic=lambda: now[0])))

    def load(*_: object) -> Awaitable[list[Outcome]]:
        now[0] += 2.0
        return answered([FOUND])

    monkeypatch.setattr(storage, "load", load)
    assert (await rig.run(read(KEYS[:1], TARGET[:1]))).storage_s == 2.0


async def test_a_load_that_raises_before_it_returns_keeps_no_slot(
    rig: Rig, storage: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> NoReturn:
        raise StorageError("no memory")

    monkeypatch.setattr(storage, "load", load)
    storage.slots_at_once = 1
    outcome = await rig.run(read(KEYS[:1], TARGET[:1]))
    assert outcome.error is not None
    assert (outcome.error.message, list(outcome.moved), rig.slots_used) == ("no memory", [], 0)


async def test_a_device_that_the_cpu_cannot_address_is_read_through_staging(rig: Rig, storage: Warm) -> None:
    rig.sim_device.addressable = False
    await rig.run(read(KEYS, TARGET))
    assert (storage.tried, blocks(rig, TARGET)) == ([], blocks(rig, SOURCE))
    assert rig.sim_device.counts["copy_in"] > 0


async def test_an_object_with_a_wrong_footer_never_touches_its_block(rig: Rig, storage: Warm) -> None:
    storage.objects[rig.name("k1")] = storage.objects[rig.name("k3")]  # intact, but of another key
    before = rig.block(TARGET[1])
    outcome = await rig.run(read(KEYS, TARGET, prefix=False))
    assert (list(outcome.moved), outcome.error) == ([0, 2, 3, 4, 5], None)
    assert rig.block(TARGET[1]) == before
    assert rig.worker.corrupt == 1
    await until(lambda: rig.name("k1") in storage.quarantined)


@pytest.mark.parametrize("prefix", [True, False])
async def test_a_damaged_payload_is_no_block_of_the_result(rig: Rig, storage: Warm, prefix: bool) -> None:
    storage.damage(rig.name("k1"), bit=77)
    outcome = await rig.run(read(KEYS, TARGET, prefix=prefix))
    check_that_k1_is_lost(rig, outcome, prefix=prefix)
    await until(lambda: rig.name("k1") in storage.quarantined)


async def test_a_foreign_write_to_a_block_being_loaded_quarantines_no_object(
    rig: Rig, storage: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine does that was killed and restarted, while a task of its predecessor still runs."""

    take, left = BlockDrain.__call__, [1]

    def scribbled(drain: BlockDrain, i: int, data: memoryview) -> bool:
        return take(drain, i, data) and not (left and left.pop())

    monkeypatch.setattr(BlockDrain, "__call__", scribbled)
    outcome = await rig.run(read(KEYS, TARGET))
    assert list(outcome.moved) == list(range(6))
    assert blocks(rig, TARGET) == blocks(rig, SOURCE)
    assert rig.worker.corrupt == 0
    assert storage.quarantined == {}


async def test_an_unreadable_object_is_reported_and_a_sparse_read_goes_on(rig: Rig, storage: Warm) -> None:
    storage.dice.script("object get", None, "error")
    outcome = await rig.run(read(KEYS, TARGET, prefix=False))
    assert list(outcome.moved) == [0, 2, 3, 4, 5]
    assert outcome.error is not None
    assert outcome.error.code == "storage_error"


async def test_a_chunk_that_fails_as_a_whole_ends_the_read(rig: Rig, storage: Warm) -> None:
    storage.dice.script("object get", "error", "error")
    outcome = await rig.run(read(KEYS, TARGET, prefix=False))
    assert outcome.error is not None
    assert sum(map(len, storage.tried)) <= 4  # the next chunk was under way already
    assert rig.sim_device.counts["copy_in"] == 0


async def test_a_stopped_task_answers_while_storage_hangs_and_its_blocks_are_not_touched_later(
    rig: Rig, storage: Warm
) -> None:
    before = blocks(rig, TARGET)
    job = await rig.begin(read(KEYS, TARGET))
    await until(lambda: storage.tried)
    await turns()
    job.stop.set(Stop.CANCELLED)
    outcome = await rig.stopped(job)
    assert (list(outcome.moved), outcome.stop) == ([], Stop.CANCELLED)
    storage.gate.release()
    await rig.background.settled()
    assert blocks(rig, TARGET) == before


async def test_damage_that_a_stopped_task_no_longer_waits_for_is_noted_all_the_same(
    rig: Rig, storage: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.objects[rig.name("k0")] = storage.objects[rig.name("k3")]
    real, drained = storage._load, asyncio.Event()

    async def late(items: Sequence[Item], drain: Drainer) -> list[Outcome]:
        outcomes = await real(items, drain)
        drained.set()
        await storage.gate.passed()
        return outcomes

    monkeypatch.setattr(storage, "_load", late)
    job = rig.start(read(KEYS, TARGET))
    storage.reading = lambda _name: storage.gate.hold()
    await drained.wait()
    job.stop.set(Stop.CANCELLED)
    await rig.stopped(job)
    storage.reading = lambda _name: None
    storage.gate.release()
    await until(lambda: rig.name("k0") in storage.quarantined)
    assert rig.worker.corrupt == 1


async def test_no_block_is_touched_before_its_engine_has_got_there(rig: Rig, storage: Warm) -> None:
    task = ReadStorageTask(task_id="r", keys=KEYS, gpu_block_ids=TARGET, after=(3, 7))
    job = rig.start(task)
    await until(lambda: rig.sim_device.counts["waits"])
    assert storage.tried == []
    rig.sim_device.advance((3, 7))
    outcome = await rig.ended(job)
    assert list(outcome.moved) == list(range(6))


async def test_a_storage_that_fails_as_a_whole_fails_the_task(rig: Rig, storage: Warm) -> None:
    def refuse(_name: str) -> None:
        raise StorageError("the medium is on fire")

    storage.reading = refuse
    outcome = await rig.run(read(KEYS, TARGET))
    assert outcome.error is not None
    assert "on fire" in outcome.error.message


# --- a single block -------------------------------------------------------------------------------


@pytest.fixture(params=[0.0, 1.0], ids=["later", "at once"])
def answers(request: pytest.FixtureRequest, storage: Warm) -> None:
    """When storage answers a load of one block."""
    storage.at_once = request.param


async def test_a_block_that_storage_has_at_once_takes_a_turn_of_the_loop_and_no_task(rig: Rig, storage: Warm) -> None:
    storage.at_once = 1.0
    tasks = asyncio.all_tasks()
    job = rig.start(read(KEYS[:1], TARGET[:1]))
    assert rig.outcome(job) is None, "whoever starts it is not called back meanwhile"
    await asyncio.sleep(0)
    outcome = rig.outcome(job)
    assert outcome is not None
    assert (list(outcome.moved), outcome.bytes, outcome.queue_s) == ([0], LAYOUT.block_bytes, 2.0)
    assert asyncio.all_tasks() == tasks
    assert rig.block(TARGET[0]) == rig.block(SOURCE[0])
    lane = rig.worker.lanes[Lane.READ]
    assert (lane.running, lane.done, lane.bytes) == (0, 1, LAYOUT.block_bytes)


@pytest.mark.usefixtures("answers")
async def test_freeing_memory_waits_for_a_load_that_has_not_begun(rig: Rig) -> None:
    job = rig.start(read(KEYS[:1], TARGET[:1]))
    await rig.worker.settled()
    outcome = rig.outcome(job)
    assert outcome is not None
    assert list(outcome.moved) == [0]


@pytest.mark.usefixtures("answers")
async def test_a_block_whose_task_is_stopped_before_its_turn_is_not_touched(rig: Rig, storage: Warm) -> None:
    before = blocks(rig, TARGET)
    job = rig.start(read(KEYS[:1], TARGET[:1]))
    job.stop.set(Stop.EXPIRED)
    outcome = await rig.ended(job)
    assert (list(outcome.moved), outcome.stop) == ([], Stop.EXPIRED)
    assert (blocks(rig, TARGET), storage.tried) == (before, [])


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize("wrong", ["footer", "payload"])
async def test_a_single_damaged_object_is_a_miss_and_is_put_aside(rig: Rig, storage: Warm, wrong: str) -> None:
    before = blocks(rig, ASIDE)
    if wrong == "footer":
        storage.objects[rig.name("k1")] = storage.objects[rig.name("k3")]
    else:
        storage.damage(rig.name("k1"), bit=77)
    outcome = await rig.run(read(KEYS[1:2], TARGET[1:2]))
    assert (list(outcome.moved), outcome.error) == ([], None)
    assert blocks(rig, ASIDE) == before
    assert rig.worker.corrupt == 1
    await until(lambda: rig.name("k1") in storage.quarantined)


@pytest.mark.usefixtures("answers")
async def test_a_single_unreadable_object_is_reported(rig: Rig, storage: Warm) -> None:
    storage.dice.script("object get", "error")
    outcome = await rig.run(read(KEYS[:1], TARGET[:1]))
    assert outcome.error is not None
    assert (list(outcome.moved), outcome.error.code) == ([], "storage_error")


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize(
    ("raised", "code"), [(StorageError("on fire"), "storage_error"), (ZeroDivisionError("on fire"), "internal")]
)
async def test_any_error_of_storage_for_a_single_block_becomes_the_outcome(
    rig: Rig, storage: Warm, raised: Exception, code: str
) -> None:
    def refuse(_name: str) -> None:
        raise raised

    storage.reading = refuse
    outcome = await rig.run(read(KEYS[:1], TARGET[:1]))
    assert outcome.error is not None
    assert (outcome.error.code, list(outcome.moved)) == (code, [])
    assert "on fire" in outcome.error.message
    assert rig.worker.lanes[Lane.READ].failed == 1


@pytest.mark.usefixtures("answers")
async def test_a_single_block_is_not_touched_before_its_engine_has_got_there(rig: Rig, storage: Warm) -> None:
    job = rig.start(ReadStorageTask(task_id="r", keys=KEYS[:1], gpu_block_ids=TARGET[:1], after=(3, 7)))
    await until(lambda: rig.sim_device.counts["waits"])
    assert storage.tried == []
    rig.sim_device.advance((3, 7))
    assert list((await rig.ended(job)).moved) == [0]


# --- the loan -------------------------------------------------------------------------------------


async def test_the_end_of_a_loan_waits_for_the_thread_that_holds_a_block_and_no_other_gets_one() -> None:
    nbytes = 16 * 1024**2
    source, data = np.ones(nbytes, np.uint8), memoryview(bytearray(nbytes + FOOTER_BYTES))
    table = np.array([(0, nbytes, nbytes)], np.int64)
    memory = _inplace.new_memory(source.ctypes.data, (nbytes,), ((0, table),))
    waited = False
    while not waited:  # until it ends while the thread copies, which takes a while
        loan = Loan()
        lent = _inplace.lend_blocks(memory, loan, [0], bytes(FOOTER_BYTES), -1, [])
        holder = asyncio.ensure_future(asyncio.to_thread(_inplace.fill, lent, 0, data, False))
        while not (loan.shared[0] or holder.done()):  # noqa: ASYNC110 - the extension sets no event
            await asyncio.sleep(0)
        if (ending := loan.end()) is not None:
            await wait_for(ending, 30)
            waited = True
            assert not loan.shared[0]
        assert await holder is (waited or not loan.shared[0])
        assert _inplace.fill(lent, 0, data, False) is False


async def test_a_loan_without_holders_ends_at_once_and_only_once() -> None:
    loan = Loan()
    assert (loan.end(), loan.over) == (None, True)
    assert loan.end() is None


@pytest.mark.parametrize("piece", [1, 100, 256, 1000, 1 << 20])
@pytest.mark.parametrize("buffers", [2, 1024])
def test_pieces_are_the_blocks_bytes_in_the_order_of_its_object(
    piece: int, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_blocks, "PIECE_BYTES", piece)
    monkeypatch.setattr(cpu_blocks, "MOST_PARTS", buffers)
    odd = CacheSection(layers=3, attention="mla", device_blocks=5, kv_lora_rank=50, qk_rope_head_dim=7, block_size=3)
    layout = build_layout(odd)
    packed, memory = layout.packed(1, layout.block_bytes), layout.device
    pieces = pieces_of(packed, memory)
    assert [one.offset for one in pieces] == [0, *itertools.accumulate(one.nbytes for one in pieces)][:-1]
    assert sum(one.nbytes for one in pieces) == layout.block_bytes
    for one in pieces:
        assert 0 < one.nbytes == sum(nbytes for _, _, nbytes in one.parts) <= max(piece, one.parts[0][2])
        assert len(one.parts) <= buffers
    for block in range(layout.device_blocks):
        parts = [(first + stride * block, nbytes) for one in pieces for first, stride, nbytes in one.parts]
        found = [at + i for at, nbytes in parts for i in range(nbytes)]
        runs = plan_copy(packed, [0], memory, [block]).runs.tolist()
        assert found == [target + i for _, target, nbytes in sorted(runs) for i in range(nbytes)]


def test_segments_that_touch_in_memory_are_one_part_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a block lie together (vLLM's BLHNC)."""
    layout = build_layout(CacheSection(layers=6, kv_heads=1, head_dim=64, block_size=16, device_blocks=4))
    nbytes = layout.device.nbytes
    stride = layout.block_bytes + 128
    memory = Geometry(np.cumsum([0, *nbytes[:-1]]), np.full(len(nbytes), stride), nbytes, 4, 4 * stride)
    packed = layout.packed(1, layout.block_bytes)
    [one] = pieces_of(packed, memory)
    assert one.parts == [(0, stride, layout.block_bytes)]
    monkeypatch.setattr(cpu_blocks, "PIECE_BYTES", int(nbytes[0]) + 1)
    assert sum(len(piece.parts) for piece in pieces_of(packed, memory)) == len(nbytes)
    assert len(pieces_of(packed, memory, [int(nbytes[:3].sum())])[0].parts) == 1, "a part may end where a piece ends"
