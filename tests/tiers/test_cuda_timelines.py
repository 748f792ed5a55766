"""Timelines: copies see what the engine has computed, whatever order of push and record, rank, stream or death."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Literal, get_args

import numpy as np
import pytest

from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from transferd.blocks.copyplan import plan_copy
from transferd.blocks.layout import build_layout
from transferd.client import offers as attachments
from transferd.client.timeline import Timeline
from transferd.config import CacheSection
from transferd.errors import Closed, RequestError
from transferd.runtime.compat import timeout, wait_for
from transferd.runtime.threads import ThreadPools
from transferd.tasks import TIMELINE_SLOTS
from transferd.tiers.base import DeviceHandle
from transferd.tiers.cuda import CudaDeviceTier, engine, ipc, timeline, waits
from transferd.tiers.cuda.owned import CopyHung
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.cuda.tuning import DEFAULT
from transferd.tiers.cuda.waits import ForeignWaits
from transferd.tiers.pinned import HostPool

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")

LAYOUT = build_layout(CacheSection(layers=2, kv_heads=1, head_dim=8, block_size=4, device_blocks=6, host_blocks=6))
OLD, NEW = 0x11, 0x5A
# Which words a task waits for. An engine of 0.3.0 knows no page, and one in another container cannot open it.
Words = Literal["device", "host", "old engine", "other page"]
in_words = pytest.mark.parametrize("words", get_args(Words))


@pytest.fixture
def threads() -> Iterator[ThreadPools]:
    threads = ThreadPools(2)
    yield threads
    threads.close()


class Rank:
    """A rank's tier in the daemon, and the engine's process of that rank with its own view of the GPU."""

    def __init__(self, tier: CudaDeviceTier, gpu: FakeGpu, pool: HostPool, words: Words) -> None:
        self.tier = tier
        self.gpu = gpu
        self.pool = pool
        self.engine = FakeGpu(seed=3)
        self.attached = self.attach(words)
        self.context = self.engine.retain(0)
        with self.engine.current(self.context):
            self.streams = [self.engine.create_stream() for _ in range(2)]
        self.compute(OLD)
        self.finish()

    def attach(self, words: Words) -> engine.Attached:
        data = self.tier.handle().data
        if words == "old engine":
            del data["timelines"]["page"]
        if words == "other page":
            data["timelines"]["page"]["inode"] = (1, 1)
        return engine.attach(data, self.engine)

    def compute(self, value: int, blocks: range = range(LAYOUT.device_blocks)) -> None:
        """Put work on the first stream that writes these blocks. It is done when somebody waits for it."""
        with self.engine.current(self.context):
            for array in self.attached.caches["key"] + self.attached.caches["value"]:
                size = array.nbytes // array.shape[0]
                start = array.address + blocks.start * size
                self.engine.fill(start, value, len(blocks) * size, self.streams[0])

    def advance(self, after: tuple[int, int], stream: int = 0) -> None:
        assert self.attached.timelines is not None
        self.attached.timelines.advance(after, self.streams[stream])

    def record(self, stream: int = 0) -> None:
        assert self.attached.ready is not None
        self.attached.ready.record(self.streams[stream])

    def finish(self, stream: int = 0) -> None:
        with self.engine.current(self.context):
            self.engine.synchronize_stream(self.streams[stream])

    async def task(self, after: tuple[int, int] | None = None, block: int = 2) -> int:
        """What a swap-out of one block does on this rank. Returns what it found in the block."""
        if after is not None:
            await self.tier.reached(after)
        plan = plan_copy(self.tier.arena.geometry, [block], LAYOUT.host, [block])
        await self.tier.copy_out(plan, self.pool.memory)
        start = block * int(LAYOUT.host.strides[0])
        found = np.unique(np.frombuffer(self.pool.memory.view[start : start + LAYOUT.block_bytes], dtype=np.uint8))
        assert len(found) == 1, "the block is torn"
        return int(found[0])

    def leave(self) -> None:
        with self.engine.current(self.context):
            for stream in self.streams:
                self.engine.synchronize_stream(stream)
                self.engine.destroy_stream(stream)
        del self.attached
        self.engine.release(0)
        assert self.engine.leaks() == []


@asynccontextmanager
async def rank(threads: ThreadPools, seed: int = 0, words: Words = "device") -> AsyncIterator[Rank]:
    gpu = FakeGpu(seed=seed)
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu, tuning=replace(DEFAULT, host_words=words != "device"))
    await tier.open()
    pool = HostPool(LAYOUT, CudaPinning(0, gpu))
    made = Rank(tier, gpu, pool, words)
    try:
        yield made
    finally:
        made.leave()
        await tier.close()
        pool.close()
    assert gpu.wrong() == []
    assert gpu.leaks() == []


async def _waits(made: Rank, after: tuple[int, int]) -> None:
    """Until the rank waits for this."""
    timelines, (slot, number) = made.tier.resources.timelines, after
    assert timelines is not None
    async with timeout(30):
        while timelines.waiting.get(slot) != number:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0.001)


@in_words
async def test_a_rank_that_is_behind_when_the_task_is_pushed_is_waited_for(threads: ThreadPools, words: Words) -> None:
    """Tensor parallelism: one push for all ranks, and each rank's process launches its kernels when it gets there."""
    async with rank(threads, words=words) as first, rank(threads, words=words) as behind:
        after = Timeline().next()
        for made in (first,):
            made.compute(NEW)
            made.advance(after)
        tasks = [asyncio.ensure_future(made.task(after)) for made in (first, behind)]
        await _waits(behind, after)
        behind.compute(NEW)
        behind.advance(after)
        for made in (first, behind):
            made.finish()
        assert await wait_for(asyncio.gather(*tasks), 60) == [NEW, NEW]
        assert ("wait_value" in behind.gpu.calls) == (words != "host"), "who sees host words waits for nothing else"


async def test_words_in_host_memory_leave_nothing_to_keep_apart(threads: ThreadPools) -> None:
    """No stream waits, so what frees memory goes at once beside an engine that hangs (ADR 133)."""
    async with rank(threads, words="host") as made:
        other = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=made.gpu)
        await other.open()
        hung = asyncio.ensure_future(made.task((4, 10**18)))
        await _waits(made, (4, 10**18))
        await wait_for(other.close(), 60)
        assert not hung.done()
        next_one = made.attach("old engine")  # the engine's next life is of an older release
        after = Timeline(5).next()
        task = asyncio.ensure_future(made.task(after))
        await _waits(made, after)
        assert next_one.timelines is not None
        next_one.timelines.advance(after, made.streams[1])
        made.finish(stream=1)
        assert await wait_for(task, 60) == OLD
        hung.cancel()
        del next_one


async def test_the_shared_event_is_wrong_for_a_rank_that_is_behind(threads: ThreadPools) -> None:
    """Why there are timelines: an event that was not recorded yet is no reason to wait (docs/adr/0043)."""
    async with rank(threads) as first, rank(threads) as behind:
        first.compute(NEW)
        first.record()
        tasks = [asyncio.ensure_future(made.task()) for made in (first, behind)]
        stale = await wait_for(tasks[1], 60)
        behind.compute(NEW)
        behind.record()
        for made in (first, behind):
            made.finish()
        assert await wait_for(tasks[0], 60) == NEW
        assert stale == OLD, "the copy saw what nobody had computed yet"


@in_words
async def test_two_streams_are_waited_for_each_by_its_own_tasks(threads: ThreadPools, words: Words) -> None:
    """A quick step that another stream records later says nothing of the slow one's work."""
    async with rank(threads, words=words) as made:
        slow, quick = Timeline(0).next(), Timeline(1).next()
        made.compute(NEW, range(3))
        made.advance(slow, stream=0)
        of_the_slow = asyncio.ensure_future(made.task(slow))
        await _waits(made, slow)
        made.advance(quick, stream=1)
        made.finish(stream=1)
        assert await wait_for(made.task(quick, block=4), 60) == OLD
        made.finish(stream=0)
        assert await wait_for(of_the_slow, 60) == NEW


async def test_an_old_task_does_not_wait_for_newer_work_of_its_stream(threads: ThreadPools) -> None:
    async with rank(threads) as made:
        line = Timeline()
        old, new = line.next(), line.next()
        made.compute(NEW)
        made.advance(old)
        made.finish()
        made.advance(new)  # behind a long prefill, say
        assert await wait_for(made.task(old), 60) == NEW
        newer = asyncio.ensure_future(made.task(new))
        await _waits(made, new)
        assert await wait_for(made.task(old), 60) == NEW, "a number that was reached once is"
        made.finish()
        assert await wait_for(newer, 60) == NEW


@in_words
async def test_an_engine_that_died_holds_up_nobody_else_and_is_let_go_of_at_the_end(
    threads: ThreadPools, words: Words
) -> None:
    async with rank(threads, words=words) as made:
        dead = Timeline(0).next()
        waiting = asyncio.ensure_future(made.task(dead))
        await _waits(made, dead)
        waiting.cancel()  # its client has gone, or its deadline has come
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await wait_for(made.task(), 60) == OLD
        other = Timeline(1).next()
        made.advance(other)
        made.finish()
        assert await wait_for(made.task(other), 60) == OLD
        successor = Timeline(0)  # the engine's next life, on the same slot
        after = successor.next()
        task = asyncio.ensure_future(made.task(after))
        made.advance(after)
        made.finish()
        assert await wait_for(task, 60) == OLD
        left = asyncio.ensure_future(made.tier.reached((5, 1)))  # and this one is never reached
        await _waits(made, (5, 1))
        left.cancel()


async def test_an_engine_leaves_while_another_one_is_waited_for(threads: ThreadPools) -> None:
    """Freeing memory beside a wait would stop every call of the context, so it comes behind the wait."""
    async with rank(threads) as made:
        other = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=made.gpu)
        await other.open()
        pool = HostPool(LAYOUT, CudaPinning(0, made.gpu))
        after = Timeline(0).next()
        task = asyncio.ensure_future(made.task(after))
        await _waits(made, after)
        leaving = [asyncio.ensure_future(other.close()), asyncio.ensure_future(asyncio.to_thread(pool.close))]
        assert await wait_for(made.task(), 60) == OLD  # copies go on meanwhile
        assert not task.done()
        made.advance(after)
        made.finish()
        assert await wait_for(task, 60) == OLD
        await wait_for(asyncio.gather(*leaving), 60)


async def test_memory_is_freed_when_a_wait_that_seemed_to_hang_has_ended(
    threads: ThreadPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "PATIENCE_S", 0.05)
    async with rank(threads) as made:
        held = len(made.gpu.memory.owned)
        other = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=made.gpu)
        await other.open()
        after = Timeline(0).next()
        task = asyncio.ensure_future(made.task(after))
        await _waits(made, after)
        with pytest.raises(CopyHung, match="a task has waited for an engine"):
            await other.close()
        made.advance(after)
        made.finish()
        assert await wait_for(task, 60) == OLD
        async with timeout(30):
            while len(made.gpu.memory.owned) > held:  # noqa: ASYNC110 - another thread frees it
                await asyncio.sleep(0.001)


async def test_ranks_that_close_together_end_each_others_waits() -> None:
    """With one thread for closing, the first rank's memory cannot be freed before the last one's wait has ended."""
    threads, gpu = ThreadPools(1, setup=1), FakeGpu()
    tiers = [CudaDeviceTier(LAYOUT, rank, 0, threads, driver=gpu) for rank in range(3)]
    for tier in tiers:
        await tier.open()
    waiting = [asyncio.ensure_future(tier.reached((3, 77))) for tier in tiers]
    async with timeout(30):
        while any(not tier.resources.timelines.waiting for tier in tiers):  # type: ignore[union-attr]  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await wait_for(asyncio.gather(*(tier.close() for tier in tiers)), waits.PATIENCE_S / 2)
    for one in waiting:
        with pytest.raises(Closed):
            await one
    threads.close()
    assert gpu.wrong() == []
    assert gpu.leaks() == []


async def test_a_new_wait_lets_a_call_go_first_but_not_for_ever() -> None:
    waiting, order = ForeignWaits(), list[str]()
    with waiting.waiting():
        call = asyncio.ensure_future(asyncio.to_thread(_apart, waiting, order))
        async with timeout(30):
            while not waiting._wanted:  # noqa: ASYNC110 - a few turns of the loop
                await asyncio.sleep(0.001)
        second = asyncio.ensure_future(asyncio.to_thread(_waiting, waiting, order))
        await wait_for(second, 60)  # the first wait lasts: the second one begins all the same
        assert not call.done()
    await wait_for(call, 60)
    assert order == ["wait", "call"]


async def test_beside_an_engine_that_hangs_no_call_delays_new_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(waits, "BEHIND_S", 3600.0)
    waiting, order = ForeignWaits(), list[str]()
    with waiting.waiting():
        clock[0] += waits.BEHIND_S  # it has waited for so long that it hangs
        calls = [asyncio.ensure_future(asyncio.to_thread(_apart, waiting, order)) for _ in range(2)]
        async with timeout(30):
            while waiting._wanted < 2:  # noqa: ASYNC110 - a few turns of the loop
                await asyncio.sleep(0.001)
        for _ in range(3):
            await wait_for(asyncio.to_thread(_waiting, waiting, order), 60)
    await wait_for(asyncio.gather(*calls), 60)
    assert order == ["wait", "wait", "wait", "call", "call"]


def _apart(waiting: ForeignWaits, order: list[str]) -> None:
    with waiting.apart("a test"):
        order.append("call")


def _waiting(waiting: ForeignWaits, order: list[str]) -> None:
    with waiting.waiting():
        order.append("wait")


async def test_closing_the_memory_ends_waits_with_an_error(threads: ThreadPools) -> None:
    gpu = FakeGpu()
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu)
    await tier.open()
    waiting = asyncio.ensure_future(tier.reached((3, 77)))
    await asyncio.sleep(0)
    await tier.close()
    with pytest.raises(Closed):
        await wait_for(waiting, 60)
    assert gpu.wrong() == []
    assert gpu.leaks() == []


async def test_without_words_a_task_that_names_one_is_refused(threads: ThreadPools) -> None:
    gpu = FakeGpu(words=False)
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu)
    await tier.open()
    assert tier.handle().data["timelines"] is None
    with pytest.raises(RequestError) as refused:
        await tier.reached((0, 1))
    assert refused.value.reason == "no_timelines"
    await tier.close()


async def test_memory_that_the_engine_owns_gets_timelines_of_the_daemon(threads: ThreadPools) -> None:
    gpu, owner = FakeGpu(), FakeGpu(seed=5)
    with owner.current(owner.retain(0)):
        caches: dict[str, list[engine.DeviceArray]] = {}
        for part in LAYOUT.segments:
            shape = (LAYOUT.device_blocks_of(part.layer), *part.plane.shape)
            address = owner.allocate(LAYOUT.device_blocks_of(part.layer) * part.nbytes)
            array = engine.DeviceArray(address, shape, part.plane.numpy_dtype.name, 0, None)
            caches.setdefault(part.plane.name, []).append(array)
        stream = owner.create_stream()
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu)
    handle = DeviceHandle(ipc.KIND, engine.export(caches, device=0, driver=owner))
    await tier.attach(handle)
    assert engine.timelines(handle.data, owner) is None
    words = engine.timelines(tier.with_timelines(handle).data, owner)
    assert words is not None
    after = Timeline(TIMELINE_SLOTS - 1).next()
    reached = asyncio.ensure_future(tier.reached(after))
    words.advance(after, stream)
    with owner.current(owner.retain(0)):
        owner.synchronize_stream(stream)
    await wait_for(reached, 60)
    del words
    await tier.close()
    assert gpu.wrong() == []


@pytest.mark.parametrize("slot", [-1, TIMELINE_SLOTS])
async def test_a_timeline_that_does_not_exist_is_refused_on_both_sides(threads: ThreadPools, slot: int) -> None:
    async with rank(threads) as made:
        with pytest.raises(RequestError, match="timelines 0 to"):
            await made.tier.reached((slot, 1))
        with pytest.raises(RequestError, match="timelines 0 to"):
            made.advance((slot, 1))


def test_numbers_grow_also_when_the_clock_does_not() -> None:
    now = iter([100, 100, 50, 200])
    line = Timeline(2, clock=lambda: next(now))
    assert [line.next() for _ in range(4)] == [(2, 100), (2, 101), (2, 102), (2, 200)]
    assert Timeline().next()[1] < timeline.END
    with pytest.raises(ValueError, match="slot is 0 to"):
        Timeline(TIMELINE_SLOTS)


def test_a_client_maps_timelines_of_gpus_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "timelines", lambda data: f"the words of {data}")
    assert attachments.timelines({"kind": "cuda_ipc", "data": "a rank"}) == "the words of a rank"
    assert attachments.timelines({"kind": "shm", "data": {}}) is None
