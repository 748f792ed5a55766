"""The replay's engine against the real daemon on a simulated loop: it must neither stall nor be fooled.

A stall is a SimDeadlock here, and every seed is another order of events. The faults planted in the second
half are what the engine is for: bytes that are wrong, old, or where they do not belong.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import structlog

from tests.support.simulation.device import SimDevice
from tests.support.simulation.faults import Latency
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.threads import SimThreads
from tests.support.simulation.weather import CALM, STORM, Weather
from tests.support.simulation.world import SimWorld
from transferd.blocks.copyplan import CopyPlan
from transferd.cli.replay.engine import ReplayEngine, Tiers
from transferd.cli.replay.kvdata import POISON, KvData
from transferd.cli.replay.report import ReplayReport
from transferd.cli.replay.trace import TraceRequest, generated_workload
from transferd.config import from_tree
from transferd.errors import DaemonLost, TransferError
from transferd.tiers.base import HostMemory

SEEDS = 4
WORKLOAD = generated_workload(3, 60)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    yield
    structlog.reset_defaults()


class Stage:
    """A simulated daemon with small pools, and an engine in front of it."""

    def __init__(
        self,
        loop: SimLoop,
        *,
        device_blocks: int = 48,
        host_blocks: int = 24,
        storage: bool = True,
        capacity: int | None = None,
        ranks: int = 2,
        staging: str = "32KiB",
        **server: Any,
    ) -> None:
        cache = {"ranks": ranks, "device": "tests.support.simulation.device:SimDevice", "layers": 2, "kv_heads": 1}
        cache |= {"head_dim": 4, "block_size": 4, "device_blocks": device_blocks, "host_blocks": host_blocks}
        config = from_tree(
            {
                "server": {"endpoint": "ipc:///nowhere", **server},
                "cache": cache,
                "host": {"staging": staging},
                "storage": {"backend": "none"},  # replaced by a simulated one
                "metrics": {"listen": ""},
            }
        )
        self.world = SimWorld(loop, config, capacity=capacity)
        self.client = self.world.client("engine")
        self.report = ReplayReport()
        self._tiers = Tiers(device_blocks, host_blocks, storage)
        self._threads = SimThreads(rng=loop.stream("engine's threads"))

    async def open(self) -> None:
        await self.world.open()
        await self.client.connect()
        await self.world.attach(self.client)
        geometry = self.world.daemon.default.layout.device
        places = zip(geometry.offsets.tolist(), geometry.nbytes.tolist(), strict=True)
        shares = [(slice(offset, offset + size * geometry.blocks), size) for offset, size in places]
        caches = [{"raw": [d.memory[where].reshape(-1, size) for where, size in shares]} for d in self.world.devices]
        self.data = KvData(caches)
        self.engine = ReplayEngine(
            self.client, self.data, self._tiers, self.report, self._threads, clock=self.world.clock
        )

    async def close(self) -> None:
        await self.client.close()
        del self.data, self.engine
        self.world.weather = CALM
        await asyncio.sleep(10)  # what a replay that ended early left under way
        await self.world.close()
        assert self.world.watch.conflicts == []


def play(
    seed: int,
    requests: Sequence[TraceRequest] = WORKLOAD,
    *,
    concurrency: int = 8,
    weather: Weather = CALM,
    prepare: Callable[[Stage], None] = lambda _: None,
    **options: Any,
) -> ReplayReport:
    """One replay on one seed."""

    async def main(loop: SimLoop) -> ReplayReport:
        stage = Stage(loop, **options)
        await stage.open()
        prepare(stage)
        stage.world.weather = weather
        try:
            await stage.engine.play(requests, concurrency)
        except TransferError as error:
            stage.report.aborted = error.reason
        else:
            assert stage.engine._device.obtainable == stage.engine._device.count, "every block came home"
            assert stage.engine._host.obtainable == stage.engine._host.count
        await stage.close()
        return stage.report

    return simulate(main, seed)


def chains(*chains: Sequence[int]) -> list[TraceRequest]:
    return [TraceRequest(hash_ids=tuple(chain)) for chain in chains]


# --- it plays ---------------------------------------------------------------------------------------


def test_a_replay_uses_every_tier_and_every_block_is_accounted_for() -> None:
    for seed in range(SEEDS):
        report = play(seed)
        assert report.good, report
        assert report.requests == len(WORKLOAD)
        assert sum(report.hits.values()) == sum(len(request.hash_ids) for request in WORKLOAD)
        assert min(report.hits[tier] for tier in ("device", "host", "storage", "none")) > 0, report.hits
        distinct = {content for request in WORKLOAD for content in request.hash_ids}
        assert report.hits["none"] == len(distinct) == report.blocks_written, "computed and stored once"
        assert report.blocks_verified >= report.hits.total() - report.hits["none"]


def test_requests_as_long_as_the_device_side_by_side_all_end() -> None:
    long = generated_workload(5, 40)
    for seed in range(SEEDS):
        report = play(seed, long, device_blocks=12, host_blocks=4)
        assert report.good, report
        assert report.requests == 40


def test_requests_longer_than_the_device_are_cut_and_counted() -> None:
    report = play(0, chains(range(20), range(8), range(9)), device_blocks=8)
    assert report.good
    assert (report.truncated, report.hits.total()) == (2, 24)


def test_a_request_without_blocks_or_with_doubled_ids_is_no_trouble() -> None:
    report = play(0, chains([], [1, 1, 2], [1, 2]))
    assert report.good
    assert report.hits.total() == 4


def test_the_same_prefix_at_the_same_time_is_computed_once() -> None:
    for seed in range(SEEDS):
        report = play(seed, chains(*[range(6)] * 8))
        assert report.good
        assert (report.hits["none"], report.hits["device"]) == (6, 42)
        assert report.blocks_written == 6


def test_without_host_and_storage_blocks_are_computed_again() -> None:
    report = play(0, WORKLOAD, host_blocks=0, storage=False)
    assert report.good
    assert report.statuses.total() == 0
    assert report.hits["host"] == report.hits["storage"] == 0


def test_a_small_queue_answers_busy_and_every_task_is_pushed_again() -> None:
    busy = 0
    for seed in range(SEEDS):
        report = play(seed, max_queued_tasks=1, lane_depth=1)
        assert report.good, report
        assert set(report.statuses) == {"ok"}
        busy += report.busy
    assert busy > SEEDS


def test_blocks_evicted_from_storage_are_computed_and_stored_again() -> None:
    distinct = {content for request in WORKLOAD for content in request.hash_ids}
    report = play(1, capacity=40 * 256, host_blocks=4)
    assert report.verify_failures == 0
    assert report.hits["none"] > len(distinct)
    assert report.blocks_written > len(distinct)


def test_eviction_leaves_a_prefix_of_a_chain() -> None:
    report = play(0, chains(range(6), [100, 101], range(4)), concurrency=1, device_blocks=6, host_blocks=0)
    assert report.hits == Counter(none=8, device=4)


def test_a_host_pool_too_small_for_all_keeps_the_roots() -> None:
    requests = chains(range(4), range(100, 104), range(4))
    report = play(0, requests, concurrency=1, device_blocks=4, host_blocks=2, storage=False)
    assert report.hits == Counter(none=10, host=2)


# --- it is not fooled -------------------------------------------------------------------------------


def test_a_storm_costs_work_and_never_a_byte() -> None:
    ended_early = errors = 0
    for seed in range(SEEDS):
        report = play(seed, weather=STORM)
        assert report.verify_failures == 0, (seed, report.mismatches)
        assert report.aborted in ("", "left_behind")
        ended_early += bool(report.aborted)
        errors += report.error_count
        assert not report.good
    assert errors > SEEDS
    assert ended_early < SEEDS


def test_a_rank_that_dies_ends_the_replay_or_leaves_it_to_compute() -> None:
    for seed in range(SEEDS):
        report = play(seed, weather=replace(CALM, device=replace(CALM.device, lost=0.05)))
        assert not report.good
        assert report.verify_failures == 0


@pytest.mark.parametrize("storage", [True, False], ids=["while matching", "while swapping"])
def test_a_daemon_that_falls_silent_ends_the_replay(storage: bool) -> None:
    async def main(loop: SimLoop) -> None:
        stage = Stage(loop, storage=storage)
        await stage.open()
        stage.world.weather = replace(CALM, network=replace(CALM.network, latency=Latency(0.1, 0.1)))
        loop.call_later(3.0, stage.world.network.cut, "engine")
        with pytest.raises(DaemonLost):
            await stage.engine.play(WORKLOAD, 8)
        assert stage.report.requests < len(WORKLOAD)
        await stage.close()

    simulate(main, 0)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_rank_left_behind_on_our_blocks_ends_the_replay(seed: int) -> None:
    """Its copy may still land in blocks that the engine would use again; no report could be believed."""

    def stall(stage: Stage) -> None:
        gate = stage.world.devices[1].gate
        stage.world.loop.call_later(0.2, gate.hold)
        stage.world.loop.call_later(65.0, gate.release)  # task timeout, slack, and then some

    report = play(seed, prepare=stall)
    assert (report.aborted, report.verify_failures) == ("left_behind", 0)
    assert report.requests < len(WORKLOAD)
    assert "expired" in report.statuses


def watching(watch: Callable[[Any, CopyPlan], None]) -> Callable[[Stage], None]:
    """Look at every rank's memory before each copy into it."""

    def prepare(stage: Stage) -> None:
        for device in stage.world.devices:
            device.addressable = False  # or reads would do without copies

            async def copy_in(plan: CopyPlan, host: HostMemory, device: SimDevice = device) -> None:
                watch(device.memory, plan)
                await SimDevice.copy_in(device, plan, host)

            device.copy_in = copy_in  # type: ignore[method-assign]

    return prepare


def test_every_block_is_poisoned_before_a_swap_in_or_a_read_fills_it() -> None:
    filled = 0

    def watch(memory: Any, plan: CopyPlan) -> None:
        nonlocal filled
        for _, target, nbytes in plan.runs.tolist():
            assert (memory[target : target + nbytes] == POISON).all()
            filled += nbytes

    report = play(1, prepare=watching(watch))
    assert report.good
    assert filled == 2 * 128 * (report.hits["host"] + report.hits["storage"])  # ranks x block bytes


def scribbling(nth: int, corrupt: Callable[[Any, CopyPlan], None]) -> Callable[[Stage], None]:
    """After the nth copy into the device of the last rank, do something to its memory."""

    def prepare(stage: Stage) -> None:
        device = stage.world.devices[-1]
        device.addressable = False  # or reads would do without copies
        count = itertools.count(1)
        copy_in = device.copy_in

        async def copy_in_and_scribble(plan: CopyPlan, host: HostMemory) -> None:
            await copy_in(plan, host)
            if next(count) == nth:
                corrupt(device.memory, plan)

        device.copy_in = copy_in_and_scribble  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize("nth", [1, 4, 9])
def test_one_wrong_byte_on_one_rank_is_found_and_named(nth: int) -> None:
    def flip(memory: Any, plan: CopyPlan) -> None:
        target, nbytes = (int(plan.runs[-1, i]) for i in (1, 2))
        memory[target + nbytes - 1] ^= 1

    report = play(2, prepare=scribbling(nth, flip))
    assert report.verify_failures >= 1
    assert not report.good
    assert {mismatch.rank for mismatch in report.mismatches} == {1}


def test_a_copy_that_never_happened_is_found() -> None:
    async def nothing(plan: CopyPlan, host: HostMemory) -> None:
        """Claims to have copied."""

    def prepare(stage: Stage) -> None:
        stage.world.devices[0].addressable = False  # or reads would do without copies
        stage.world.devices[0].copy_in = nothing  # type: ignore[method-assign]

    requests = chains([1], [2], [1])
    assert play(0, requests, concurrency=1, device_blocks=1).good
    assert play(0, requests, concurrency=1, device_blocks=1, prepare=prepare).verify_failures >= 1


def test_bytes_in_a_block_that_no_task_named_are_found() -> None:
    """A read names more blocks than keys; one of the spare ones is written."""

    def prepare(stage: Stage) -> None:
        device = stage.world.devices[0]
        device.addressable = False  # or reads would do without copies
        copy_in = device.copy_in

        async def copy_too_much(plan: CopyPlan, host: HostMemory) -> None:
            await copy_in(plan, host)
            for offset, nbytes in zip(*(stage.world.daemon.default.layout.device.offsets, [32] * 4), strict=True):
                spare = device.memory[int(offset) : int(offset) + nbytes * 48].reshape(48, nbytes)
                spare[(spare == POISON).all(axis=1)] = 0

        device.copy_in = copy_too_much  # type: ignore[method-assign]

    # 1 and 2 are stored and have left; 3 and 4 are new, so their blocks are named and spare.
    requests = chains([1, 2], range(100, 148), [1, 2, 3, 4])
    assert play(0, requests, concurrency=1, host_blocks=0).good
    report = play(0, requests, concurrency=1, host_blocks=0, prepare=prepare)
    assert {mismatch.content for mismatch in report.mismatches} == {3, 4}


def test_a_block_that_is_spoilt_while_it_lies_on_the_device_is_found_when_used_or_at_the_end() -> None:
    def spoil(stage: Stage) -> None:
        real = stage.data.fill

        def fill(block: int, content: int) -> None:
            real(block, content)
            if content == 2:
                stage.world.devices[1].memory[block * 32 + 7] ^= 0x80  # in the first segment

        stage.data.fill = fill  # type: ignore[method-assign]

    assert play(0, chains([1, 2, 3]), prepare=spoil).verify_failures == 1
    assert play(0, chains([1, 2, 3], [1, 2]), concurrency=1, prepare=spoil).verify_failures == 2


# --- storage in trouble -----------------------------------------------------------------------------


def test_a_storage_that_does_not_answer_is_counted_and_lived_without() -> None:
    report = play(0, weather=replace(CALM, storage=replace(CALM.storage, unavailable=1.0)))
    assert (report.requests, report.verify_failures) == (len(WORKLOAD), 0)
    assert report.hits["storage"] == report.blocks_written == 0
    assert report.error_count > 0
    assert len(report.errors) == 5
    assert not report.good
