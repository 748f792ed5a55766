"""The simulated threads, device and storage: their contracts, their faults, and what they find out about callers.

On the two real loops as well (without delays), because a fake that works in a simulation only would
be a second contract.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from tests.support.blobs import get, put
from tests.support.simulation.device import SimDevice
from tests.support.simulation.faults import DeviceFaults, Dice, Gate, Latency, StorageFaults, ThreadFaults
from tests.support.simulation.loop import START, SimLoop, simulate
from tests.support.simulation.memory import MemoryWatch, SimMemory
from tests.support.simulation.storage import SimStorage
from tests.support.simulation.threads import SimThreads
from transferd.blocks.copyplan import CopyPlan, plan_copy
from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.errors import (
    Closed,
    DeviceLost,
    InvariantError,
    StillRunning,
    StorageError,
    StorageFull,
    StorageUnavailable,
    TierError,
)
from transferd.runtime.compat import wait_for
from transferd.runtime.threads import Direction
from transferd.storage.base import EXISTS, FOUND, MISSING, STORED, Blob, Found

LAYOUT = build_layout(CacheSection(layers=2, kv_heads=1, head_dim=4, block_size=4, device_blocks=8, host_blocks=8))
SECOND = Latency(1.0, 1.0)


def test_the_test_layout_is_small_but_has_several_segments() -> None:
    assert len(LAYOUT.segments) == 4
    assert LAYOUT.block_bytes == 128


# --- threads --------------------------------------------------------------------------------------


async def test_threads_return_what_the_function_returns_or_raises() -> None:
    threads = SimThreads()
    assert await threads.run(Direction.OUT, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await threads.run(Direction.IN, lambda: 1 // 0)


def test_a_function_has_its_effect_between_start_and_end_and_answers_at_the_end() -> None:
    async def main(loop: SimLoop) -> tuple[float, float]:
        threads = SimThreads(faults=ThreadFaults(SECOND), rng=loop.stream("threads"))
        effect = await threads.run(Direction.OUT, loop.time)
        return effect - START, loop.time() - START

    effects = {simulate(main, seed) for seed in range(5)}
    assert all(0 < effect < end == 1 for effect, end in effects)
    assert len(effects) == 5


def test_there_are_as_many_threads_per_direction_as_were_asked_for() -> None:
    async def main(loop: SimLoop) -> list[float]:
        threads = SimThreads(size=2, faults=ThreadFaults(SECOND))

        async def done(direction: Direction) -> float:
            await threads.run(direction, int)
            return loop.time() - START

        return sorted(await asyncio.gather(*(done(Direction.OUT) for _ in range(3)), done(Direction.IN)))

    assert simulate(main, 0) == [1, 1, 1, 2]


def test_a_started_function_runs_to_its_end_and_a_waiting_one_can_be_taken_back() -> None:
    async def main(_: SimLoop) -> list[str]:
        threads = SimThreads(size=1, faults=ThreadFaults(SECOND))
        ran: list[str] = []
        first = threads.run(Direction.OUT, lambda: ran.append("first"))
        second = threads.run(Direction.OUT, lambda: ran.append("second"))
        third = threads.run(Direction.OUT, lambda: ran.append("third"))
        await asyncio.sleep(0.999)  # the first has had its effect or has it now, and has not ended
        assert (first.cancel(), second.cancel()) == (False, True)
        await third
        assert first.done()
        return ran

    assert simulate(main, 0) == ["first", "third"]


async def test_threads_can_stall_in_one_direction_fail_and_close() -> None:
    threads = SimThreads()
    threads.gates[Direction.OUT].hold()
    stalled = threads.run(Direction.OUT, lambda: 1)
    assert await threads.run(Direction.IN, lambda: 2) == 2
    await asyncio.sleep(0)
    assert not stalled.done()
    threads.gates[Direction.OUT].release()
    assert await stalled == 1
    threads.close()
    with pytest.raises(Closed):
        threads.run(Direction.IN, lambda: 1)


async def test_closing_the_threads_takes_back_what_waits() -> None:
    threads = SimThreads(size=1)
    threads.gates[Direction.OUT].hold()
    first, second = (threads.run(Direction.OUT, lambda: 1) for _ in range(2))
    await asyncio.sleep(0)
    threads.close()
    with pytest.raises(Closed):
        await second
    threads.gates[Direction.OUT].release()
    assert await first == 1


# --- device ---------------------------------------------------------------------------------------


def fill(array: np.ndarray[Any, Any], seed: int) -> None:
    array[:] = np.random.default_rng(seed).integers(0, 256, len(array), dtype=np.uint8)


async def opened(**options: Any) -> tuple[SimDevice, SimMemory]:
    device = SimDevice(LAYOUT, **options)
    await device.open()
    host = SimMemory(LAYOUT.host.extent)
    fill(device.memory, 1)
    fill(host.array, 2)
    return device, host


def out(device_ids: list[int], host_ids: list[int]) -> CopyPlan:
    return plan_copy(LAYOUT.device, device_ids, LAYOUT.host, host_ids)


def back(host_ids: list[int], device_ids: list[int]) -> CopyPlan:
    return plan_copy(LAYOUT.host, host_ids, LAYOUT.device, device_ids)


def copied(plan: CopyPlan, source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the target must look like afterwards, the slow and obvious way."""
    expected = target.copy()
    for start, to, nbytes in plan.runs.tolist():
        for i in range(nbytes):
            expected[to + i] = source[start + i]
    return expected


async def test_a_device_copies_every_byte_of_the_plan_and_no_other() -> None:
    device, host = await opened()
    plan = out([3, 0, 5], [1, 2, 7])
    expected = copied(plan, device.memory, host.array)
    await device.copy_out(plan, host)
    assert np.array_equal(host.array, expected)
    plan = back([4, 1], [2, 6])
    expected = copied(plan, host.array, device.memory)
    await device.copy_in(plan, host)
    assert np.array_equal(device.memory, expected)
    assert device.arena.origin == device.memory.ctypes.data
    await device.close()
    with pytest.raises(TierError, match="not open"):
        _ = device.arena


async def test_a_failed_copy_raises_and_the_next_one_works() -> None:
    device, host = await opened()
    before = host.array.copy()
    device.dice.script("copy_out", "fail")
    with pytest.raises(TierError, match="copy_out of rank 0 failed"):
        await device.copy_out(out([0], [0]), host)
    assert not np.array_equal(host.array, before), "the target is undefined, not untouched"
    await device.copy_out(out([0], [0]), host)
    assert device.counts == {"failed": 1, "copy_out": 1}


async def test_a_lost_device_never_works_again() -> None:
    device, host = await opened()
    device.dice.script("copy_in", "lost")
    for copy in (device.copy_in(back([0], [0]), host), device.copy_out(out([0], [0]), host)):
        with pytest.raises(DeviceLost):
            await copy


async def test_a_device_that_cannot_open_leaves_nothing_behind() -> None:
    device = SimDevice(LAYOUT)
    device.dice.script("open", "fail")
    with pytest.raises(TierError, match="no device memory"):
        await device.open()
    await device.open()
    with pytest.raises(TierError, match="already open"):
        await device.open()
    assert device.handle().data == {"address": int(device.memory.ctypes.data)}


async def test_a_copy_under_way_is_lost_with_its_device() -> None:
    device, host = await opened()
    device.gate.hold()
    under_way = asyncio.create_task(device.copy_out(out([0], [0]), host))
    while not device.gate.held:  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0)
    device.lost = True
    device.gate.release()
    with pytest.raises(DeviceLost):
        await under_way


def test_a_copy_runs_to_its_end_when_its_waiter_is_cancelled() -> None:
    async def main(_: SimLoop) -> None:
        device, host = await opened(faults=DeviceFaults(SECOND))
        plan = out([3], [1])
        expected = copied(plan, device.memory, host.array)
        waiter = asyncio.create_task(device.copy_out(plan, host))
        await asyncio.sleep(0.5)
        waiter.cancel()
        await asyncio.wait([waiter])
        assert waiter.cancelled()
        assert device.under_way == 1
        with pytest.raises(InvariantError, match="closed with 1 copies under way"):
            await device.close()
        assert not np.array_equal(host.array, expected)
        await asyncio.sleep(1)
        assert device.under_way == 0
        assert np.array_equal(host.array, expected)

    simulate(main, 0)


def test_copies_on_the_same_bytes_are_found_out_and_others_are_not() -> None:
    async def main(_: SimLoop) -> None:
        device, host = await opened(faults=DeviceFaults(SECOND))
        other_host = SimMemory(host.nbytes)
        first = asyncio.create_task(device.copy_out(out([0, 1], [0, 1]), host))
        reading_too = asyncio.create_task(device.copy_out(out([1], [0]), other_host))
        elsewhere = asyncio.create_task(device.copy_in(back([5], [5]), host))
        await asyncio.sleep(0.1)
        with pytest.raises(InvariantError, match=r"copy_in of rank 0 and copy_out of rank 0 are at work on the same"):
            await device.copy_in(back([6], [1]), host)
        with pytest.raises(InvariantError, match="same memory"):
            await device.copy_out(out([4], [1]), host)
        await asyncio.gather(first, reading_too, elsewhere)
        assert len(device.watch) == 0
        await device.copy_in(back([6], [1]), host)

    simulate(main, 0)


async def test_a_plan_that_leaves_its_memory_is_found_out() -> None:
    device, host = await opened()
    for runs in ([[0, host.nbytes - 3, 4]], [[-1, 0, 4]], [[device.memory.size - 3, 0, 4]]):
        with pytest.raises(InvariantError, match="leaves the memory"):
            await device.copy_out(CopyPlan(4, runs=np.array(runs, dtype=np.int64)), host)


# --- storage --------------------------------------------------------------------------------------


class Store:
    """A SimStorage with one registered buffer, cut into slots of 16 bytes."""

    def __init__(self, **options: Any) -> None:
        self.storage = SimStorage(**options)
        self.memory = SimMemory(256)
        self.storage.register(self.memory)

    def blob(self, name: str, slot: int, data: bytes | None = None) -> Blob:
        view = self.memory.view[16 * slot : 16 * slot + 16]
        if data is not None:
            view[:] = data
        return Blob(name, view)


async def opened_store(**options: Any) -> Store:
    store = Store(**options)
    await store.storage.open()
    return store


A, B, C = bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48))


async def test_storage_gives_back_what_was_put_and_keeps_it_across_close() -> None:
    store = await opened_store()
    storage = store.storage
    assert await put(storage, [store.blob("a", 0, A), store.blob("b", 1, B)]) == [STORED, STORED]
    assert await put(storage, [store.blob("a", 0, A)]) == [EXISTS]
    assert await storage.exists(["b", "x", "a"]) == [True, False, True]
    await storage.close()
    with pytest.raises(Closed):
        await storage.exists(["a"])
    await storage.open()
    blobs = [store.blob("b", 2), store.blob("x", 3), store.blob("a", 4)]
    assert await get(storage, blobs) == [FOUND, MISSING, FOUND]
    assert (bytes(blobs[0].data), bytes(blobs[2].data)) == (B, A)
    statistics = storage.statistics()
    assert {k: statistics[k] for k in ("objects", "bytes", "hits", "misses")} == {
        "objects": 2,
        "bytes": 32,
        "hits": 2,
        "misses": 1,
    }


async def test_an_object_of_another_length_is_missing_and_counted() -> None:
    store = await opened_store()
    await put(store.storage, [store.blob("a", 0, A)])
    assert await get(store.storage, [Blob("a", store.memory.view[32:40])]) == [MISSING]
    assert store.storage.counts["wrong length"] == 1
    assert await store.storage.exists(["a"]) == [False]


async def test_quarantine_makes_an_object_unreachable() -> None:
    store = await opened_store()
    await put(store.storage, [store.blob("a", 0, A)])
    await store.storage.quarantine("a")
    await store.storage.quarantine("never")
    assert await store.storage.exists(["a"]) == [False]
    assert store.storage.quarantined == {"a": A}
    assert store.storage.statistics()["bytes"] == 0


async def test_capacity_is_kept_by_evicting_the_least_recently_used() -> None:
    store = await opened_store(capacity=32)
    storage = store.storage
    await put(storage, [store.blob("a", 0, A), store.blob("b", 1, B)])
    await get(storage, [store.blob("a", 2)])
    assert await put(storage, [store.blob("c", 3, C)]) == [STORED]
    assert await storage.exists(["a", "b", "c"]) == [True, False, True]
    [outcome] = await put(storage, [Blob("huge", store.memory.view[:64])])
    assert isinstance(outcome.error, StorageFull)


async def test_faults_of_objects_are_outcomes_and_leave_their_neighbours_alone() -> None:
    store = await opened_store()
    storage = store.storage
    storage.dice.script("object put", None, "full", "error")
    outcomes = await put(storage, [store.blob("a", 0, A), store.blob("b", 1, B), store.blob("c", 2, C)])
    assert outcomes[0] == STORED
    assert [type(o.error) for o in outcomes[1:]] == [StorageFull, StorageError]
    assert await storage.exists(["a", "b", "c"]) == [True, False, False]
    await put(storage, [store.blob("b", 1, B), store.blob("c", 2, C)])
    storage.dice.script("object get", "flip", "missing", "error")
    blobs = [store.blob(name, 3 + i) for i, name in enumerate("abc")]
    outcomes = await get(storage, blobs)
    assert [o.found for o in outcomes] == [Found.FOUND, Found.MISSING, Found.FAILED]
    wrong_bits = int.from_bytes(blobs[0].data, "little") ^ int.from_bytes(A, "little")
    assert wrong_bits.bit_count() == 1
    assert await get(storage, [store.blob("a", 3)]) == [FOUND]
    assert storage.objects["a"] == A, "the flip was on the way, not in the store"
    assert storage.dice.drawn == {"full": 1, "error": 2, "flip": 1, "missing": 1}


async def test_a_short_read_says_found_and_leaves_the_rest_of_the_buffer_as_it_was() -> None:
    store = await opened_store()
    storage = store.storage
    await put(storage, [store.blob("a", 0, A)])
    blob = store.blob("a", 1)
    blob.data[:] = bytes(len(A))
    storage.dice.script("object get", "short", "short")
    assert await get(storage, [blob]) == [FOUND]
    half = len(A) // 2
    assert bytes(blob.data) == A[:half] + bytes(len(A) - half)
    assert storage.counts["short"] == 1
    assert await get(storage, [store.blob("a", 0)]) == [FOUND]
    assert storage.counts["short"] == 1, "a buffer that held the object before has it whole"


async def test_an_unavailable_storage_raises_for_the_whole_call() -> None:
    store = await opened_store()
    for operation, call in (
        ("exists", lambda: store.storage.exists(["a"])),
        ("put", lambda: put(store.storage, [store.blob("a", 0, A)])),
        ("get", lambda: get(store.storage, [store.blob("a", 0)])),
    ):
        store.storage.dice.script(operation, "unavailable")
        with pytest.raises(StorageUnavailable):
            await call()
    assert store.storage.objects == {}
    assert len(store.storage.watch) == 0


async def test_damage_is_for_good() -> None:
    store = await opened_store()
    await put(store.storage, [store.blob("a", 0, A)])
    store.storage.damage("a", 9)
    blob = store.blob("a", 1)
    await get(store.storage, [blob])
    assert bytes(blob.data) == A[:1] + bytes([A[1] ^ 2]) + A[2:]


def test_a_put_reads_until_its_end_and_stores_what_was_there() -> None:
    async def main(_: SimLoop) -> None:
        store = await opened_store(faults=StorageFaults(SECOND))
        putting = asyncio.ensure_future(put(store.storage, [store.blob("a", 0, A)]))
        await asyncio.sleep(0.999)
        store.memory.view[0:16] = bytes(16)  # too early: the put has not returned
        await putting
        assert store.storage.objects["a"] == A[:8] + bytes(8)

    simulate(main, 0)


def test_a_cancelled_call_ends_when_its_work_has_ended() -> None:
    async def main(loop: SimLoop) -> None:
        store = await opened_store(faults=StorageFaults(SECOND))
        putting = asyncio.ensure_future(put(store.storage, [store.blob("a", 0, A)]))
        await asyncio.sleep(0.5)
        putting.cancel()
        await asyncio.sleep(0.1)
        with pytest.raises(StillRunning, match="simulated storage: put"):
            await store.storage.close()
        await asyncio.wait([putting])
        assert putting.cancelled()
        assert loop.time() == START + 1
        assert store.storage.objects == {"a": A}
        await store.storage.close()

    simulate(main, 0)


def test_buffers_in_use_by_others_are_found_out() -> None:
    async def main(_: SimLoop) -> None:
        store = await opened_store(faults=StorageFaults(SECOND))
        getting = asyncio.ensure_future(get(store.storage, [store.blob("a", 0)]))
        await asyncio.sleep(0.1)
        with pytest.raises(InvariantError, match="storage put of b and storage get of a are at work on the same"):
            await put(store.storage, [store.blob("b", 0)])
        await getting

    simulate(main, 0)


async def test_buffers_outside_registered_memory_are_found_out() -> None:
    store = await opened_store()
    with pytest.raises(InvariantError, match="outside of all registered memory"):
        await get(store.storage, [Blob("a", memoryview(bytearray(16)))])
    store.storage.unregister(store.memory)
    with pytest.raises(InvariantError, match="outside of all registered memory"):
        await get(store.storage, [store.blob("a", 0)])


# --- dice, gates, memory --------------------------------------------------------------------------


async def test_dice_follow_the_script_then_the_plan() -> None:
    dice = Dice(random.Random(1))
    dice.script("op", "fail", None)
    assert [dice.draw("op", {"slow": 1.0}) for _ in range(3)] == ["fail", None, "slow"]
    assert dice.draw("op", {"slow": 0.0}) is None
    counts = [dice.draw("op", {"a": 0.25, "b": 0.5}) for _ in range(1000)]
    assert 200 < counts.count("a") < 300
    assert 450 < counts.count("b") < 550
    assert dice.drawn["a"] == counts.count("a")


def test_a_slow_latency_is_a_multiple_of_the_drawn_one() -> None:
    rng = random.Random(1)
    latency = Latency(1.0, 2.0, slow=0.5, factor=100.0)
    drawn = [latency.draw(rng) for _ in range(100)]
    assert all(1 <= seconds <= 2 or 100 <= seconds <= 200 for seconds in drawn)
    assert 30 < sum(seconds >= 100 for seconds in drawn) < 70


async def test_a_stuck_copy_stands_half_done_until_it_is_let_go_on_also_if_it_was_not_there_yet() -> None:
    device, host = await opened(faults=DeviceFaults(Latency(0.02, 0.02)))
    device.dice.script("copy_out", "stuck", "stuck")
    first = asyncio.ensure_future(device.copy_out(out([0], [0]), host))
    await asyncio.sleep(0.1)
    assert not first.done()
    assert device.under_way == 1
    second = asyncio.ensure_future(device.copy_out(out([1], [1]), host))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    device.unstick()
    await wait_for(asyncio.gather(first, second), 5)
    expected = copied(out([0, 1], [0, 1]), device.memory, host.array)
    assert np.array_equal(host.array, expected)
    await device.close()


async def test_a_gate_lets_through_in_order_and_forgets_who_left() -> None:
    gate, passed = Gate(), list[int]()

    async def walk(number: int) -> None:
        await gate.passed()
        passed.append(number)

    gate.hold()
    walkers = [asyncio.create_task(walk(n)) for n in range(3)]
    await asyncio.sleep(0)
    assert gate.held == 3
    walkers[1].cancel()
    gate.release()
    await asyncio.gather(*walkers, return_exceptions=True)
    assert passed == [0, 2]
    await walk(4)
    assert passed[-1] == 4


def test_the_watch_agrees_with_an_obvious_one() -> None:
    rng = random.Random(3)
    for _ in range(300):
        ranges = [sorted(rng.sample(range(40), 2)) for _ in range(6)]
        writes = rng.random() < 0.5, rng.random() < 0.5
        one, other = ranges[: rng.randint(1, 3)], ranges[3:]
        meet = any(a < d and c < b for a, b in one for c, d in other)
        watch = MemoryWatch()
        watch.enter([a for a, _ in one], [b - a for a, b in one], writes=writes[0], who="one")

        def enter(
            watch: MemoryWatch = watch, other: list[list[int]] = other, writes: tuple[bool, bool] = writes
        ) -> None:
            watch.enter([c for c, _ in other], [d - c for c, d in other], writes=writes[1], who="other")

        if meet and any(writes):
            with pytest.raises(InvariantError, match="other and one"):
                enter()
        else:
            enter()


def test_simulated_memory_is_page_aligned_and_one_piece() -> None:
    memory = SimMemory(100)
    assert memory.address % 4096 == 0
    assert (memory.nbytes, memory.view.nbytes, memory.view.format) == (100, 100, "B")
    memory.view[99] = 7
    assert memory.array[99] == 7
