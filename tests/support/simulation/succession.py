"""Succession: the memory that a daemon made goes, by a restart or a clear, while engines keep what they have mapped.

An engine that has not noticed looks at memory that nobody moves. It goes on: writes blocks, reads keys, swaps in.
What it is then told to be done is compared with the bytes it has, and what it stored is read back once it has
mapped the new memory. Statuses prove nothing here: a write of the wrong memory is `ok` as well.

    blind     everybody goes on with the old mapping, before, while and after the new memory is made
    one more  each engine attaches in turn; those that have not yet go on, though the ranks are mapped by others.
              Not those that push with another client than they attach with: the daemon cannot know of whose bytes
              they speak (docs/adr/0022)
    forgetful after it has attached, an engine swaps in host blocks that it had filled before
    after     every key that was ever written is read back, and new work goes well
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.support.simulation.engine import Act, SimEngine
from transferd.tasks import ReadStorageTask

if TYPE_CHECKING:
    from tests.support.simulation.story import Story

LONGEST_GAP_S = 7.0  # between two daemons: some clients have noticed by then, some have not


async def succeed(story: Story, how: str) -> None:
    """how: "restart" or "clear"."""
    loop, engines = story.loop, story.engines
    chance = loop.stream("succession")
    for engine in engines:
        engine.host.memories.clear()
    going_on = [loop.create_task(_go_on(story, engine, "blind")) for engine in engines]
    await asyncio.sleep(chance.uniform(0, 0.05))
    await (_restart(story, chance.uniform(0, LONGEST_GAP_S)) if how == "restart" else _clear(story))
    await asyncio.gather(*going_on)
    for number, engine in enumerate(engines):
        for client in engine.clients:
            await client.wait_ready(LONGEST_GAP_S)
            assert client in engine.heard, f"a client of {engine.name} was not told"
        await _go_on(story, engine, "still")
        await engine.attach()
        pools, engine.host.memories = engine.host.memories, []  # they do not hold what it believes
        await engine.act("swap_in", Act(f"forgetful-{number}", chance, patient=True))
        engine.begin_anew()
        engine.host.memories = pools
    for engine in engines:
        await _read_back(story, engine)
        await story.all_goes_well(engine, how)


async def _restart(story: Story, seconds: float) -> None:
    """The daemon dies; nobody is told. It is stopped only to give back its memory, which engines have mapped."""
    story.world.network.crash()
    await story.daemon_ends()
    await asyncio.sleep(seconds)
    await story.daemon_begins()


async def _clear(story: Story) -> None:
    async with story.world.client("operator") as operator:
        await operator.clear_cache()
        await operator.restore_cache("after the clear")


async def _go_on(story: Story, engine: SimEngine, when: str) -> None:
    """Work as if nothing had happened."""
    if when == "still" and engine is not story.engines[0] and story.plan.apart:
        return
    chance = story.loop.stream(f"{when} {engine.name}")
    for number in range(6):
        what = chance.choice(("write", "write", "read", "swap_in"))
        await engine.act(what, Act(f"{when}-{engine.name}-{number}", chance, patient=True))
        await asyncio.sleep(chance.uniform(0, 1))


async def _read_back(story: Story, engine: SimEngine) -> None:
    """What any key holds is what was written under it."""
    for key in dict.fromkeys(engine.stored):
        [block] = engine.device.take(1)
        engine.device.fill(block, "junk")
        task = ReadStorageTask(task_id=f"back-{engine.name}-{key}", keys=[key], gpu_block_ids=[block])
        story.judge.read(task, await engine.client.submit(task), engine.device)
        engine.device.free.append(block)
