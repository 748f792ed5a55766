"""What a pool promises is seen and kept with levels above it as without: the shapes that docs/levels.md recommends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine.rack.engine import Engine, engine
from tests.machine.rack.lab import WHOLE, Lab, laboratory
from tests.machine.rack.test_leaving import has_segments
from tests.support.freezing import freeze, thaw
from tests.support.waits import stats_until
from transferd.cli.pool.master import master_executable

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
SHAPES = [("memory", "file", "mooncake"), *([("memory", "mooncake")] if WHOLE else [])]
THEIRS = {1: range(100, 112), 2: range(200, 212), 3: range(300, 312)}
MORE = range(220, 224)  # of node 2


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with laboratory(tmp_path, nodes=3) as running:
        yield running


@contextlib.asynccontextmanager
async def rack(lab: Lab, levels: tuple[str, ...], **mooncake: Any) -> AsyncIterator[dict[int, Engine]]:
    """An engine on each node. Each node's contents are in its own levels and in the pool; nobody has read any."""
    async with contextlib.AsyncExitStack() as stack:
        processes = [lab.daemon(number, levels=levels, **mooncake) for number in THEIRS]
        await has_segments(lab, 3)
        engines = {
            number: await stack.enter_async_context(engine(process))
            for number, process in zip(THEIRS, processes, strict=True)
        }
        for number, contents in THEIRS.items():
            await engines[number].until_stored(contents)
        await engines[2].until_stored(MORE)
        for each in engines.values():
            await stats_until(each.client, lambda report: not any(one["pending_bytes"] for one in levels_of(report)))
        yield engines


def levels_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report["storage"]["levels"]
    return found


@pytest.mark.parametrize("levels", SHAPES, ids=" ".join)
async def test_a_node_that_does_not_answer_is_named(lab: Lab, levels: tuple[str, ...]) -> None:
    """A load ended as `miss` without an error, and no report, concern or metric knew of the node."""
    async with rack(lab, levels) as engines:
        reader = engines[1]
        await reader.reads_within(MORE, 20)  # it has met the node; an answer that comes late is a miss
        freeze(engines[2].process.pid)
        try:
            mixed = [*THEIRS[1][:4], *THEIRS[3][:4], *THEIRS[2][:4]]
            result = await reader.read(mixed)
            assert result.block_ids == list(range(8)), "what is reachable is delivered"
            assert result.error is not None
            assert lab.address(2) in result.error.message
            report = await reader.client.stats()
            assert [endpoint.split(":")[0] for endpoint in report["storage"]["peers_down"]] == [lab.address(2)]
            assert lab.address(2) in {one["name"]: one["text"] for one in report["concerns"]}["node_down"]
        finally:
            thaw(engines[2].process.pid)
        await reader.reads_within(THEIRS[2], 20)
        assert (await reader.storage())["peers_down"] == {}


@pytest.mark.parametrize("levels", SHAPES, ids=" ".join)
async def test_copies_that_died_with_a_node_are_counted(lab: Lab, levels: tuple[str, ...]) -> None:
    async with rack(lab, levels, replica_num=2, mend_interval=0.3) as engines:
        engines[3].process.kill()
        await has_segments(lab, 2)
        missing = 0
        give_up = time.monotonic() + 60
        while not missing:
            assert time.monotonic() < give_up
            missing = sum([(await engines[number].storage()).get("copies_missing", 0) for number in (1, 2)])
        made = await engines[1].client.mend_pool()
        assert made.left == 0
        for number in (1, 2):
            await stats_until(
                engines[number].client, lambda report: report["storage"].get("copies_missing") == 0, within=60
            )
