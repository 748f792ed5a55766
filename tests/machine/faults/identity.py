"""What happens when somebody could be taken for somebody else: engines, halves, lives, weights, a daemon that wakes up.

Each engine is a process of its own (hostile/lender.py), and knows its bytes. Who is not served must be told why,
and whoever is served gets what it would have computed itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from tests.integration.caches import fill, snapshot
from tests.machine.faults.contents import BLOCK_SIZE
from tests.machine.faults.operator import Operator
from tests.machine.faults.resources import SERVE_S, Finding, Scenario, config, serving
from tests.machine.hostile.test_memory import Engine
from tests.support.freezing import freeze, thaw
from tests.support.looking import new_stats
from tests.support.waits import wait_until
from transferd import Client, ReadStorageTask, Status, TransferError
from transferd.client import launch
from transferd.client.launch import DaemonProcess
from transferd.runtime.compat import timeout, wait_for

PAGE = 64 * 1024
HALVES = [0, 1, 2]  # blocks of a task
BLOCKS = [10, 11, 12, 13]
KEYS = [f"identity-{number}" for number in range(4)]
GIVEN_UP_S = 30.0
BOOT_S = 60.0


@contextlib.contextmanager
def engines(endpoint: str, *names: str) -> Iterator[list[Engine]]:
    """Processes of root, which is the daemon's user here. Nothing is registered yet."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in names:
            made.append(Engine(endpoint, 0, name, page=PAGE))
            stack.callback(made[-1].end)
        yield made


async def _others_count(operator: Operator) -> None:
    """The daemon counts the tasks of other engines and handovers, too, which the operator has not submitted."""
    operator.submitted = sum((await new_stats(operator.client))["tasks"].values())


def come(engine: Engine, weights: str, colour: int) -> None:
    """Register, offer memory, and paint it."""
    assert engine.register(weights) == "ok"
    assert engine.offer(engine.make("")) == "ok"
    engine.paint("", colour)


async def half_without_token(directory: Path, finding: Finding) -> None:
    async with serving(directory, config(), [], finding) as (daemon, operator):
        await asyncio.to_thread(_half_without_token, daemon, finding)
        await _others_count(operator)


def _half_without_token(daemon: DaemonProcess, finding: Finding) -> None:
    with engines(daemon.endpoint, "e", "e") as (engine, half):
        come(engine, "w", 3)
        finding.expect(engine.write("k", HALVES)[:2] == ["ok", 3], "the engine is not served")
        for task in (half.write("stolen", HALVES), half.read("k", HALVES)):
            finding.told.append(f"{task[0]}, {task[2]}")
            finding.expect(task[2] == "not_this_engine" and not task[1], f"a half without the token: {task}")
        said = half.offer(half.make(""), False, 0, True)
        finding.told.append(said.partition(":")[0])
        finding.expect(said.startswith("not_this_engine"), f"its memory: {said}")
        finding.expect(engine.colours("", 1) == [3], "its engine's blocks were written to")
        finding.expect(engine.read("k", [4, 5, 6])[:2] == ["ok", 3], "the engine is not served any more")


async def engines_of_one_name(directory: Path, finding: Finding) -> None:
    async with serving(directory, config(), [], finding) as (daemon, operator):
        await asyncio.to_thread(_engines_of_one_name, daemon, finding)
        await _others_count(operator)


def _engines_of_one_name(daemon: DaemonProcess, finding: Finding) -> None:
    with engines(daemon.endpoint, "e", "e") as (one, two):
        come(one, "w1", 1)
        finding.expect(one.write("k", HALVES)[:2] == ["ok", 3], "the first one is not served")
        refused = two.register("w2")
        finding.told.append(refused.partition(":")[0])
        finding.expect(refused.startswith("engine_exists"), f"the second one: {refused}")
        one.end()
        wait_until(lambda: two.register("w2") == "ok", "the name is free again")
        finding.expect(two.offer(two.make("")) == "ok", "its memory was refused")
        two.paint("", 2)
        found = two.read("k", HALVES)
        finding.told.append(found[0])
        finding.expect(found[:2] == ["miss", 0], f"the second one reads what the first one has computed: {found}")
        finding.expect(two.colours("", 0) == [2], "and its blocks were written to")


async def two_models_on_one_store(directory: Path, finding: Finding) -> None:
    async with serving(directory, config(), [], finding) as (daemon, operator):
        await asyncio.to_thread(_two_models_on_one_store, daemon, finding)
        await _others_count(operator)


def _two_models_on_one_store(daemon: DaemonProcess, finding: Finding) -> None:
    with engines(daemon.endpoint, "a", "b", "c") as (one, two, same):
        for engine, weights, colour in ((one, "w1", 1), (two, "w2", 2), (same, "w1", 3)):
            come(engine, weights, colour)
        finding.expect(one.write("k", HALVES)[:2] == ["ok", 3], "the first one is not served")
        found = two.read("k", HALVES)
        finding.told.append(found[0])
        finding.expect(found[:2] == ["miss", 0], f"another model's block was loaded: {found}")
        finding.expect(two.write("k", HALVES)[:2] == ["ok", 3], "the second one cannot store its own")
        for engine, colour in ((one, 1), (two, 2), (same, 1)):
            engine.paint("", 9)
            loaded = engine.read("k", [4, 5, 6])
            finding.told.append(loaded[0])
            finding.expect(loaded[:2] == ["ok", 3], f"its own blocks: {loaded}")
            finding.expect(engine.colours("", 5) == [colour], f"wrong bytes: {engine.colours('', 5)}, not {colour}")


# --- a daemon that is given up, and wakes up -----------------------------------------------------------


async def _prepared(operator: Operator) -> tuple[Client, Any]:
    """KEYS are stored, and BLOCKS hold something else."""
    assert (await operator.write(KEYS, BLOCKS)).status is Status.OK
    return operator.client, await operator._attached()


async def _nothing_came_later(operator: Operator, caches: Any, mine: list[bytes], finding: Finding) -> None:
    """After everything that the daemon still had to do."""
    await operator.served(SERVE_S)
    await operator.client.drain()
    await operator.client.resume()
    finding.expect(snapshot(caches, BLOCKS) == mine, "blocks were written to after they were free")


async def suspended_and_given_up(directory: Path, finding: Finding) -> None:
    async with serving(directory, config(), [], finding) as (daemon, operator):
        client, caches = await _prepared(operator)
        freeze(daemon.pid)
        try:
            task = ReadStorageTask(task_id="given up", keys=KEYS, gpu_block_ids=BLOCKS, timeout=20.0)
            result = await wait_for(client.submit(task), GIVEN_UP_S)
            operator.submitted += 1
            finding.heard(result)
            finding.expect(not result.settled, "nobody knows whether the daemon has the task, and it counts as settled")
        finally:
            thaw(daemon.pid)
        finding.expect(await client.settled("given up", timeout=GIVEN_UP_S), "it is never settled")
        fill(caches, BLOCKS, seed=8)
        await _nothing_came_later(operator, caches, snapshot(caches, BLOCKS), finding)


async def handover_cancelled(directory: Path, finding: Finding) -> None:
    async with serving(directory, config(), [], finding) as (daemon, operator):
        client, caches = await _prepared(operator)
        tokens = list(range(len(BLOCKS) * BLOCK_SIZE))
        await client.write_all("r", tokens, BLOCKS)
        freeze(daemon.pid)
        try:
            reading = asyncio.ensure_future(client.read_all("r", tokens, BLOCKS, timeout=20.0))
            await asyncio.sleep(0)  # its first step hands the request to the socket
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, TransferError):
                await wait_for(asyncio.shield(reading), GIVEN_UP_S)
            unknown = list(client.unsettled)
            finding.told.append("cancelled" if reading.cancelled() else "ended")
            finding.expect(unknown, "the call says that its blocks are free, and the daemon has not answered")
            if not unknown:
                fill(caches, BLOCKS, seed=7)
                mine = snapshot(caches, BLOCKS)
        finally:
            thaw(daemon.pid)
        for task_id in unknown:
            finding.expect(await client.settled(task_id, timeout=GIVEN_UP_S), "it is never settled")
        if unknown:
            fill(caches, BLOCKS, seed=8)
            mine = snapshot(caches, BLOCKS)
        await _nothing_came_later(operator, caches, mine, finding)
        await _others_count(operator)


# --- generations across lives --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _lives(tree: dict[str, Any], directory: Path) -> AsyncIterator[list[DaemonProcess]]:
    """Daemons, one after the other; the last one is stopped."""
    lives = [await asyncio.to_thread(launch.start, tree, directory)]
    try:
        yield lives
    finally:
        await asyncio.to_thread(lives[-1].stop)


async def generations_across_lives(directory: Path, finding: Finding) -> None:
    """The daemon is killed twice: after the weights were changed in place, and after a clear closed a generation."""
    tree = config()
    async with _lives(tree, directory) as lives:
        operator = Operator(lives[0].endpoint)
        await operator.open()
        client = operator.client
        client.on_new_boot = lambda: None
        try:
            finding.expect((await operator.write(["old"], [1])).status is Status.OK, "it is not served")
            await client.set_generation("step 1")
            await operator.write(["new"], [1])
            await _reborn(lives, tree, directory, client)
            for key, status in (("old", Status.MISS), ("new", Status.OK)):
                result = await operator.read([key], [2])
                finding.heard(result)
                finding.expect(result.status is status, f"{key}: {result}")
                finding.expect(not operator.wrong_blocks(result, [key], [2]), f"wrong bytes of {key}")
            await client.clear_cache()
            await client.restore_cache("step 2")
            operator._boot = ""  # its memory is new
            await operator.write(["newer"], [1])
            await _reborn(lives, tree, directory, client)
            with contextlib.suppress(TransferError):
                await client.set_generation("step 1")
                finding.problems.append("a generation that a clear has closed was opened again")
            for key, status in (("old", Status.MISS), ("new", Status.MISS), ("newer", Status.OK)):
                result = await operator.read([key], [2])
                finding.heard(result)
                finding.expect(result.status is status, f"{key} after the clear: {result}")
        finally:
            await operator.close()


async def _reborn(lives: list[DaemonProcess], tree: dict[str, Any], directory: Path, client: Client) -> None:
    before = client.boot_id
    await asyncio.to_thread(lives[-1].kill)
    lives.append(await asyncio.to_thread(launch.start, tree, directory))
    async with timeout(BOOT_S):
        while client.boot_id == before:  # noqa: ASYNC110 - a heartbeat brings it
            await asyncio.sleep(0.01)
    await client.wait_ready(BOOT_S)


IDENTITY_SCENARIOS = [
    Scenario("a half without its engine's token", "running", half_without_token),
    Scenario("two engines of one name", "running", engines_of_one_name),
    Scenario("two models on one store", "running", two_models_on_one_store),
    Scenario("daemon suspended until its client gives up", "running", suspended_and_given_up, root=False),
    Scenario("handover cancelled while the daemon is suspended", "running", handover_cancelled, root=False),
    Scenario(
        "generations across lives of the daemon",
        "killed",
        generations_across_lives,
        root=False,
        fate="its successor serves the generation of its engine, and no other",
    ),
]
