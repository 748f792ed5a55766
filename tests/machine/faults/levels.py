"""Two levels of storage: a daemon killed with blocks on their way between them; a lower one that fails, hangs, is full.

The levels are the real stores. Gates in them (gates.py) hold a copy where the fault shall meet it.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tests.machine.faults.contents import BLOCK_BYTES, DEVICE_BLOCKS, RANKS
from tests.machine.faults.gates import VARIABLE, gate
from tests.machine.faults.keeper import Keeper
from tests.machine.faults.operator import Operator
from tests.machine.faults.resources import (
    SERVE_S,
    SMALL_DISK,
    Finding,
    Scenario,
    config,
    fill,
    in_own_mounts,
    keys_of,
    serving,
    with_environment,
)
from tests.support.looking import new_stats
from tests.support.native.page import HANGS, FaultPage
from transferd import Status
from transferd.client import launch
from transferd.runtime import compat
from transferd.storage.base import Drainer, Fill, Item, Outcome
from transferd.storage.file import FileStorage
from transferd.storage.memory import MemoryStorage

GATE_S = 60.0
OBJECTS = "/objects/"
FEW = 4
SMALL_MEMORY = (DEVICE_BLOCKS + FEW) * RANKS * BLOCK_BYTES  # without footers: a few blocks less than that


class GatedMemory(MemoryStorage):
    """The memory backend, which pauses halfway through a store."""

    async def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        if fill is not None:
            return await super().store(items, fill, slots)
        middle = len(items) // 2
        first = list(await super().store(items[:middle], None, slots[:middle]))
        await gate("half above")
        return first + list(await super().store(items[middle:], None, slots[middle:]))


class GatedLowerFile(FileStorage):
    """The file backend, which pauses before a store, halfway through it, and before a load."""

    async def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        if fill is not None:
            return await super().store(items, fill, slots)
        await gate("before below")
        middle = len(items) // 2
        first = list(await super().store(items[:middle], None, slots[:middle]))
        await gate("half below")
        return first + list(await super().store(items[middle:], None, slots[middle:]))

    async def load(self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        await gate("load below")
        return list(await super().load(items, drain, slots))


LOWER, UPPER = "tests.machine.faults.levels:GatedLowerFile", "tests.machine.faults.levels:GatedMemory"


def levels(directory: Path, upper: str, lower: str, **memory: Any) -> dict[str, dict[str, Any]]:
    tree = config(
        levels=[upper, lower],
        memory={"capacity": "64MiB"} | memory,
        file={"path": str(directory / "blocks"), "reserve": "0%"},
        level={lower: {"promote": 1}},
    )
    return tree | {"host": {"staging": "4MiB"}}


async def copied(operator: Operator) -> None:
    """Wait until nothing waits to be copied down."""
    async with compat.timeout(SERVE_S):
        while (await new_stats(operator.client))["storage"]["levels"][1]["pending_bytes"]:
            pass


async def _killed(
    directory: Path,
    finding: Finding,
    tree: dict[str, dict[str, Any]],
    phase: str,
    before: Callable[[Operator], Awaitable[None]],
    during: Callable[[Operator], Awaitable[Any]],
    *,
    lost: int,
) -> None:
    """Kill the daemon while it stands at a gate, and start it again: all that it called stored is right, or a miss.

    before: what is done until then. during: what leads to the gate. lost: how many stored keys may be gone.
    """
    keeper = Keeper(directory / "gates.sock")
    await keeper.open()
    prefix = with_environment(**{VARIABLE: str(keeper.path)})
    keys: dict[str, bool] = {}
    daemon = await asyncio.to_thread(launch.start, tree, directory, prefix=prefix)
    operator = Operator(daemon.endpoint)
    try:
        await operator.open()
        await before(operator)
        keeper.arm(phase, lambda _: True)
        doing = asyncio.ensure_future(during(operator))
        await keeper.reached(GATE_S)
        finding.told.append(str(doing.result().status) if doing.done() else "(died)")
        keys = dict(operator.known)
    finally:
        daemon.kill()
        await asyncio.gather(doing, return_exceptions=True)
        await operator.close()
        keeper.release()
    began = time.monotonic()
    left = [path.name for path in Path("/dev/shm").glob(f"transferd.{daemon.pid}.*")]
    finding.expect(not left, f"shared memory left behind: {left}")
    async with serving(directory, tree, prefix, finding) as (_, after):
        finding.seconds = time.monotonic() - began
        after.expect(list(keys))
        after.stored([key for key, stored in keys.items() if stored])
        half = [path.name for path in (directory / "blocks").rglob("*.tmp")]
        finding.expect(not half, f"half a file left behind: {half}")
    await keeper.close()
    finding.expect((finding.gone or 0) <= lost, f"{finding.gone} stored keys are gone, at most {lost} may be")


async def _nothing(_: Operator) -> None:
    """Nothing is done before."""


async def killed_before_the_copy(directory: Path, finding: Finding) -> None:
    tree = levels(directory, "memory", LOWER)
    write = keys_of("above", DEVICE_BLOCKS)
    await _killed(directory, finding, tree, "before below", _nothing, lambda o: o.write(*write), lost=DEVICE_BLOCKS)


async def killed_during_the_copy(directory: Path, finding: Finding) -> None:
    tree = levels(directory, "memory", LOWER)
    write = keys_of("above", DEVICE_BLOCKS)
    await _killed(directory, finding, tree, "half below", _nothing, lambda o: o.write(*write), lost=DEVICE_BLOCKS)


async def _below_alone(operator: Operator) -> None:
    """Store blocks, and then so many that the upper level has let go of the first ones."""
    await operator.write(*keys_of("cold", FEW))
    await copied(operator)
    await operator.write(*keys_of("hot", DEVICE_BLOCKS))
    await copied(operator)


async def killed_during_a_promotion(directory: Path, finding: Finding) -> None:
    tree = levels(directory, UPPER, LOWER, capacity=SMALL_MEMORY)
    cold = keys_of("cold", FEW)
    await _killed(directory, finding, tree, "half above", _below_alone, lambda o: o.read(*cold), lost=0)


async def killed_during_a_prefetch(directory: Path, finding: Finding) -> None:
    tree = levels(directory, "memory", LOWER, capacity=SMALL_MEMORY)
    keys, _ = keys_of("cold", FEW)
    await _killed(
        directory, finding, tree, "load below", _below_alone, lambda o: o.client.prefetch(keys, to="memory"), lost=0
    )


async def lower_level_full(directory: Path, finding: Finding) -> None:
    blocks = directory / "blocks"
    blocks.mkdir()
    mounts = in_own_mounts(f"mount -t tmpfs -o size={2 * SMALL_DISK} tmpfs {blocks}")
    async with serving(directory, levels(directory, "memory", "file"), mounts, finding) as (daemon, operator):
        ballast = Path(f"/proc/{daemon.pid}/root{blocks}/ballast")
        fill(ballast)
        began = time.monotonic()
        for name in ("one", "two"):
            finding.heard(await operator.write(*keys_of(name, FEW)))
        finding.seconds = time.monotonic() - began
        await copied(operator)
        row = (await new_stats(operator.client))["storage"]["levels"][1]
        # A sweep may have queued what was given up, which was then given up again.
        given_up = {name: row[name] for name in ("lost", "lost_for", "copied", "objects")}
        finding.expect(row["lost"] == row["lost_for"]["full"] >= 2 * FEW * RANKS, f"the full level: {given_up}")
        finding.expect(not row["copied"], f"a full level has taken copies: {given_up}")
        ballast.unlink()
        again = await operator.write(*keys_of("one", FEW))  # it is above: it is queued again
        finding.expect(again.status is Status.OK, f"a block that is above: {again}")
        await copied(operator)
        row = (await new_stats(operator.client))["storage"]["levels"][1]
        finding.expect(row["objects"] >= FEW * RANKS, f"with room again: {row}")
    finding.expect(set(finding.told) == {"ok"}, f"the upper level has room, and yet: {finding.told}")


async def lower_level_hangs(directory: Path, finding: Finding) -> None:
    page = FaultPage(directory / "page")
    tree = levels(directory, "memory", "file")
    async with serving(directory, tree, page.prefix, finding) as (_, operator):
        await operator.write(*keys_of("before", FEW))
        await copied(operator)
        with page.armed("pread,pwrite", HANGS, path=OBJECTS):
            began = time.monotonic()
            finding.heard(await operator.write(*keys_of("during", FEW)))
            finding.heard(await operator.read(*keys_of("before", FEW)))
            finding.heard(await operator.read(*keys_of("during", FEW)))
            finding.seconds = time.monotonic() - began
            async with compat.timeout(SERVE_S):
                while not page.hits:
                    await operator.client.stats()
        await copied(operator)
    finding.expect(set(finding.told) == {"ok"}, f"the upper level works, and yet: {finding.told}")


async def lower_level_fails(directory: Path, finding: Finding) -> None:
    page = FaultPage(directory / "page")
    tree = levels(directory, "memory", "file", capacity=SMALL_MEMORY)
    async with serving(directory, tree, page.prefix, finding, FEW * RANKS) as (_, operator):
        await _below_alone(operator)
        with page.armed("pread,pwrite,openat,open", errno.EIO, path=OBJECTS):
            began = time.monotonic()
            for result in (
                await operator.write(*keys_of("during", FEW)),
                await operator.read(*keys_of("during", FEW)),
                await operator.read(*keys_of("cold", FEW)),  # the lower level alone has them
            ):
                finding.heard(result)
                code = result.error.code if result.error else ""
                finding.expect(code in ("", "storage_io", "storage_unavailable"), f"{result}")
            finding.seconds = time.monotonic() - began
            finding.expect(page.hits, "no call failed")
        await operator.served(SERVE_S)
        await operator.write(*keys_of("during", FEW))
        await copied(operator)
    finding.expect(finding.told[:2] == ["ok", "ok"], f"the upper level works, and yet: {finding.told}")


LEVEL_SCENARIOS = [
    Scenario("levels: kill -9, stored above and not below", "running", killed_before_the_copy, root=False, often=False),
    Scenario("levels: kill -9, half copied down", "running", killed_during_the_copy, root=False),
    Scenario("levels: kill -9, half copied up", "running", killed_during_a_promotion, root=False),
    Scenario("levels: kill -9 during a prefetch", "running", killed_during_a_prefetch, root=False, often=False),
    Scenario("levels: the lower one is full", "running", lower_level_full),
    Scenario("levels: the lower one hangs", "running", lower_level_hangs, root=False, compiler=True, often=False),
    Scenario("levels: the lower one fails (EIO)", "running", lower_level_fails, root=False, compiler=True, often=False),
]
