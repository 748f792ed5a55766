"""Scripted stories of a whole simulated daemon, for what a storm (test_storms.py) meets too rarely or cannot tell."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.simulation.engine import SimEngine
from tests.support.simulation.faults import NetworkFaults
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.oracle import Oracle
from tests.support.simulation.threads import SimThreads
from tests.support.simulation.world import SimWorld, small_config
from transferd.blocks.copyplan import plan_copy
from transferd.errors import RequestError, TransferError
from transferd.runtime.threads import Direction
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, WriteStorageTask
from transferd.wire import protocol as wire


def calm(program: Callable[[SimWorld, SimEngine], Coroutine[Any, Any, None]], seed: int = 0) -> None:
    """Run a scripted story on a calm world with one engine, and stop the daemon."""

    async def main(loop: SimLoop) -> None:
        world = SimWorld(loop, small_config())
        await world.open()
        engine = SimEngine(world, "engine", range(48))
        await engine.connect()
        await program(world, engine)
        await engine.leave()
        await world.close()
        assert world.watch.conflicts == []

    simulate(main, seed)


def test_a_deadline_is_answered_after_the_running_copy_with_the_blocks_done_so_far() -> None:
    async def program(world: SimWorld, engine: SimEngine) -> None:
        blocks = list(range(40))
        task = WriteStorageTask(task_id="t", timeout=0.06, keys=[f"k{i}" for i in blocks], gpu_block_ids=blocks)
        pushed_at = world.loop.time()
        result = await engine.client.submit(task)
        assert result.status is Status.PARTIAL
        assert result.error is not None
        assert result.error.code == "expired"
        assert 0 < len(result.block_ids) < 40
        # A copy and a put take at most 10 ms each; the slack for ranks that do not react is a second.
        assert world.loop.time() - pushed_at < 0.09

    for seed in range(10):
        calm(program, seed)


def test_a_copy_that_waits_for_a_thread_when_its_rank_dies_never_begins() -> None:
    async def program(world: SimWorld, engine: SimEngine) -> None:
        before = SwapOutTask(task_id="before", gpu_block_ids=[1], cpu_block_ids=[1])
        assert (await engine.client.submit(before)).status is Status.OK
        device, threads, begun = world.devices[1], SimThreads(), list[str]()
        threads.gates[Direction.OUT].hold()
        device._threads = threads
        device.begins = lambda operation, _plan, _host: begun.append(operation)
        device.dice.script("copy_in", "lost")
        waiting = asyncio.ensure_future(
            engine.client.submit(SwapOutTask(task_id="waiting", gpu_block_ids=[0], cpu_block_ids=[0]))
        )
        await asyncio.sleep(0.5)
        assert world.daemon.default.barrier.missing("waiting") == (1,)
        fatal = await engine.client.submit(SwapInTask(task_id="fatal", gpu_block_ids=[1], cpu_block_ids=[1]))
        for result in (await waiting, fatal):
            assert result.error is not None
            assert result.error.code in ("rank_died", "device_lost"), result
        threads.gates[Direction.OUT].release()
        await asyncio.sleep(1)
        assert begun == ["copy_in"]

    calm(program)


def test_a_failed_transfer_does_not_keep_the_memory_it_was_working_on() -> None:
    async def program(world: SimWorld, engine: SimEngine) -> None:
        write = WriteStorageTask(task_id="w", keys=["a", "b"], gpu_block_ids=[0, 1])
        assert (await engine.client.submit(write)).status is Status.OK
        world.storage.dice.script("get", "unavailable", "unavailable")
        read = ReadStorageTask(task_id="r", keys=["a", "b"], gpu_block_ids=[2, 3])
        result = await engine.client.submit(read)
        assert result.error is not None
        assert result.error.code == "storage_unavailable"

    gc.disable()  # the collector must not come to help by luck
    try:
        calm(program)
    finally:
        gc.enable()


def test_a_match_that_failed_on_one_rank_leaves_no_call_behind_on_another() -> None:
    async def program(world: SimWorld, engine: SimEngine) -> None:
        write = WriteStorageTask(task_id="w", keys=["a"], gpu_block_ids=[0])
        assert (await engine.client.submit(write)).status is Status.OK
        world.storage.dice.script("exists", "unavailable")
        with pytest.raises(TransferError, match="does not answer"):
            await engine.client.match(["a"])

    for seed in range(10):
        calm(program, seed)  # SimStorage raises when it is closed under a call


def test_the_flight_recorder_has_every_step_of_a_task() -> None:
    async def program(world: SimWorld, engine: SimEngine) -> None:
        write = WriteStorageTask(task_id="w", keys=["a"], gpu_block_ids=[0])
        assert (await engine.client.submit(write)).status is Status.OK
        notes = world.daemon.recorder.notes("w")
        first = [note.what for note in notes if note.detail.get("rank") in (None, 0)]
        assert first == ["admitted", "from", "started", "to store", "copy", "put", "stored", "arrived", "done"]
        assert world.daemon.recorder.story("w").count("\n") == len(notes) - 1

    calm(program)


def test_a_swap_of_no_blocks_touches_no_device() -> None:
    async def program(world: SimWorld, engine: SimEngine) -> None:
        for device in world.devices:
            device.dice.script("copy_out", "lost")
        nothing = SwapOutTask(task_id="nothing", gpu_block_ids=[], cpu_block_ids=[])
        assert (await engine.client.submit(nothing)).status is Status.OK
        assert not any(device.dice.drawn for device in world.devices)

    calm(program)


def test_the_oracle_sees_a_copy_to_a_block_that_no_task_names() -> None:
    async def main(loop: SimLoop) -> None:
        world = SimWorld(loop, small_config())
        Oracle(world)
        await world.open()
        context = world.daemon.default.coordinator.workers[1].context
        plan = plan_copy(context.staging.packed, [0], context.device.arena.geometry, [41])
        await context.device.copy_in(plan, context.staging.memory)

    with pytest.raises(AssertionError, match=r"copy_in of rank 1 writes to device blocks \[41\], which no task names"):
        simulate(main, 0)


def test_the_daemons_own_notes_are_no_story_of_a_task() -> None:
    """They are noted under the empty id, which no task may have."""

    async def program(world: SimWorld, engine: SimEngine) -> None:
        assert world.daemon.recorder.notes("")
        with pytest.raises(RequestError) as refused:
            await engine.client.explain("")
        assert refused.value.reason == "unknown_task"

    calm(program)


@pytest.mark.parametrize("hold", [wire.Pause, wire.Drain])
def test_a_hold_and_its_end_that_come_together_take_effect_in_their_order(hold: type[wire.Pause | wire.Drain]) -> None:
    """As from a client that finds its daemon again after a while: it repeats its pause, and its user resumes."""

    async def program(world: SimWorld, _: SimEngine) -> None:
        world.network.faults = NetworkFaults()  # all at once, as messages lie in a socket
        raw = world.network.client("raw")
        raw.start(lambda _: None)
        raw.send(wire.encode_request(1, wire.Hello()))
        await asyncio.sleep(0.1)
        raw.send(wire.encode_request(2, hold("operator")))
        raw.send(wire.encode_request(3, wire.Resume("operator")))
        await asyncio.sleep(0.1)
        assert world.daemon.default.dispatcher.gate.held == []
        raw.send(wire.encode_request(4, hold("operator")))
        await asyncio.sleep(0.1)
        assert [held.holder for held in world.daemon.default.dispatcher.gate.held] == ["operator"]
        raw.send(wire.encode_request(5, wire.Bye()))
        await asyncio.sleep(0.1)
        raw.close()

    calm(program)
