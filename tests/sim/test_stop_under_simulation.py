"""A stop of a whole simulated daemon in which something never ends: in time, named, and nothing freed under it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.simulation.engine import SimEngine
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.world import SimWorld, small_config
from transferd.errors import NoThreads
from transferd.tasks import Status, SwapOutTask, TaskResult, WriteStorageTask

BUDGET_S = 8.0


async def begun(loop: SimLoop) -> tuple[SimWorld, SimEngine]:
    world = SimWorld(loop, small_config())
    await world.open()
    engine = SimEngine(world, "engine", range(48))
    await engine.connect()
    return world, engine


async def hung(loop: SimLoop, world: SimWorld, engine: SimEngine, task: SwapOutTask | WriteStorageTask) -> TaskResult:
    """Push what hangs, begin the stop a moment later; the task's answer, which came in time."""
    pushed = asyncio.ensure_future(engine.client.submit(task))
    await asyncio.sleep(0.5)
    assert not pushed.done()
    end = loop.time() + BUDGET_S
    hanging = await world.daemon.stop(lambda: max(0.0, end - loop.time()))
    assert loop.time() <= end + 2.0, "a step took longer than the least that each may take"
    assert "rank 0: bytes in flight" in hanging
    for worker in world.daemon.default.coordinator.workers[:1]:
        assert worker.context.staging.memory.allocated
        assert worker.context.device.statistics()["open"]
    return await pushed


def held_copy(world: SimWorld) -> Callable[[], None]:
    world.devices[0].gate.hold()
    return world.devices[0].gate.release


def held_storage(world: SimWorld) -> Callable[[], None]:
    world.storage.gate.hold()
    return world.storage.gate.release


@pytest.mark.parametrize("hold", [held_copy, held_storage])
def test_a_stop_ends_in_its_budget_names_the_rank_and_frees_nothing_under_what_hangs(
    hold: Callable[[SimWorld], Callable[[], None]],
) -> None:
    async def main(loop: SimLoop) -> None:
        world, engine = await begun(loop)
        release = hold(world)
        task = WriteStorageTask(task_id="t", keys=["a", "b"], gpu_block_ids=[0, 1], timeout=60.0)
        result = await hung(loop, world, engine, task)
        assert result.status is not Status.OK
        release()  # it ends after all: the step that was left behind frees what it could not
        await engine.leave()
        await asyncio.sleep(1.0)
        assert world.watch.conflicts == []

    simulate(main, 0)


def test_without_threads_a_daemon_does_not_open_and_says_so() -> None:
    async def main(loop: SimLoop) -> None:
        world = SimWorld(loop, small_config())
        world.threads.dice.script("start", None, None, "refused")
        with pytest.raises(NoThreads):
            await world.open()
        assert world.threads.started == 0

    simulate(main, 0)
