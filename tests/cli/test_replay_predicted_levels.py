"""The prediction of a store in levels against a stack with bytes behind the real daemon, on a simulated loop.

Both have the storage's own rules; the prediction leaves out the daemon, its workers, ranks and bytes.

Between two tasks virtual time passes in which the stack copies down and up whatever it wants to. Then every figure of
every level must be the predicted one: hits, objects stored, copied up, evicted, and what it holds in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.cli.test_replay_engine import Stage, quiet
from tests.storage.harness import memory_config
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.threads import SimThreads
from transferd.cli.replay.engine import ReplayEngine, Tiers
from transferd.cli.replay.predicted import GivenLevel, PredictedDaemon, predict
from transferd.cli.replay.report import ReplayReport
from transferd.cli.replay.trace import TraceRequest, generated_workload
from transferd.config import LevelSection
from transferd.storage.effects import Effects
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.tasks import Task, TaskResult

__all__ = ["quiet"]
SETTLE_S = 2.0  # virtual: more than the stack takes to copy everything and to pass uses on
DEVICE_BLOCKS, HOST_BLOCKS = 24, 8


class Store(MemoryStorage):
    """A real store with a real index, whose threads are simulated."""

    def __init__(self, capacity: int) -> None:
        super().__init__(memory_config(capacity))
        self._threads = SimThreads()
        self._effects = Effects(self._threads, 2)


class AskedStore(Store):
    """It has to be asked what it has."""

    asks_first = False
    tries = 1

    def find(self, names: Sequence[str], use: Use | None) -> list[bool] | None:  # type: ignore[override]
        return None

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return MemoryStorage.find(self, names, Use())


class Settled(ReplayEngine):
    """An engine that waits before each task until nothing moves between the levels."""

    async def _submit(self, task: Task) -> TaskResult:
        await asyncio.sleep(SETTLE_S)
        return await super()._submit(task)

    async def _match(self, keys: list[str]) -> int:
        await asyncio.sleep(SETTLE_S)
        return await super()._match(keys)


def really(
    requests: Sequence[TraceRequest], levels: Sequence[GivenLevel], ranks: int
) -> tuple[ReplayReport, list[dict[str, Any]]]:
    """Play the requests, one at a time. Returns the report and each level's statistics."""

    async def main(loop: SimLoop) -> tuple[ReplayReport, list[dict[str, Any]]]:
        stage = Stage(loop, device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS, ranks=ranks, staging="1MiB")
        nbytes = stage.world.daemon.default.objects.slot_bytes
        clock = stage.world.clock
        stack = LevelsStorage(
            [
                StoreLevel(
                    number,
                    f"l{number}",
                    (Store if level.known else AskedStore)(level.capacity * ranks * nbytes),
                    LevelSection(promote=level.promote),
                    clock.monotonic,
                )
                for number, level in enumerate(levels)
            ],
            clock,
            SimThreads(),
        )
        stage.world.build(stack)
        await stage.open()
        engine = Settled(stage.client, stage.data, stage._tiers, stage.report, stage._threads, clock=clock)
        await engine.play(requests, 1)
        await asyncio.sleep(SETTLE_S)
        rows = [
            level.storage.statistics() | {"promoted": level.counts["promoted"], "lost": level.lost.total()}
            for level in stack.all_levels
        ]
        del engine
        await stage.close()
        assert stage.report.verify_failures == 0
        assert stage.report.errors == []
        return stage.report, rows

    return simulate(main, 0)


def figures(daemon: PredictedDaemon, ranks: int) -> list[dict[str, int]]:
    """Of all ranks, as stores count them."""
    return [
        {
            "hits": ranks * level.hits,
            "stored": ranks * level.written,
            "promoted": ranks * level.promoted,
            "objects": ranks * level.objects,
            "evictions": ranks * (level.written - level.objects),
        }
        for level in daemon.figures()
    ]


STACKS = {
    "both full": [GivenLevel(40), GivenLevel(120, 2)],
    "promoted at the first use": [GivenLevel(60), GivenLevel(120, 1)],
    "smaller than a request": [GivenLevel(6), GivenLevel(200, 2)],
    "nothing above": [GivenLevel(0), GivenLevel(120, 2)],
    "three levels": [GivenLevel(30), GivenLevel(80, 2), GivenLevel(100000, 1, known=False)],
}


@pytest.mark.parametrize("stack", STACKS)
def test_each_level_does_what_was_predicted_for_it(stack: str) -> None:
    requests = generated_workload(22, 60)
    levels = STACKS[stack]
    ranks = 1 if stack == "smaller than a request" else 2  # there, ranks displace each other's objects for a moment
    predicted, daemon = predict(requests, Tiers(DEVICE_BLOCKS, HOST_BLOCKS, storage=True), levels)
    report, rows = really(requests, levels, ranks)
    wanted = figures(daemon, ranks)
    assert [{key: row[key] for key in one} for row, one in zip(rows, wanted, strict=True)] == wanted
    assert (report.hits, report.blocks_written) == (predicted.hits, predicted.blocks_written)
    assert daemon.hits.total() == predicted.hits["storage"] > 0
