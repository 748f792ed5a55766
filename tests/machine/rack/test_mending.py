"""Copies come back: objects that lost one with a node are counted, and get another one, on command or by themselves."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.machine.rack.engine import engine
from tests.machine.rack.lab import Lab, laboratory
from tests.machine.rack.test_leaving import CHAINS, OBJECTS, command, has_segments
from tests.support.waits import stats_until, until
from transferd import Status
from transferd.cli.pool.master import master_executable
from transferd.runtime.compat import timeout
from transferd.storage.mooncake.layout_records import PREFIX as RECORDS

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
POOL: dict[str, Any] = {"replica_num": 2, "mend_interval": 0.3}


@pytest.mark.parametrize("mend", [False, True])
async def test_copies_that_died_with_a_node_are_counted_and_come_back(tmp_path: Path, mend: bool) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=4))
        processes = [lab.daemon(number, **POOL, mend=mend) for number in (1, 2, 3)]
        await has_segments(lab, 3)
        engines = [await stack.enter_async_context(engine(process)) for process in processes]
        for each, chain in zip(engines, CHAINS, strict=False):
            await each.until_stored(chain)
        one, two, _ = engines
        for each in engines:
            await stats_until(each.client, lambda report: report["storage"].get("copies_missing") == 0)
        processes[2].kill()
        await has_segments(lab, 2)
        if not mend:
            missing = [0, 0]
            async with timeout(60):
                while sum(missing) < OBJECTS:  # its own chain, at least
                    await asyncio.sleep(0.5)  # so that a look of each lies between two of ours
                    missing = [(await each.storage()).get("copies_missing", 0) for each in (one, two)]
            print("each counts", missing)
            lacking = next(each for each, number in zip((one, two), missing, strict=True) if number)
            await stats_until(lacking.client, lambda report: "copies_missing" in names(report))
            code, report = command(processes[0], "mend")
            assert (code, report["left"]) == (0, 0)
            assert report["objects"] >= OBJECTS
        else:  # a node that has not looked yet counts none
            await until(lambda: all_have_two_copies(lab), "the copies come back", within=60)
        for each in (one, two):
            await stats_until(each.client, lambda report: report["storage"].get("copies_missing") == 0, within=60)
            assert "copies_missing" not in names(await each.client.stats())
        processes[1].kill()
        await has_segments(lab, 1)
        for chain in CHAINS[:3]:
            assert (await one.read(chain)).status is Status.OK, "whoever is left has all of it"


def all_have_two_copies(lab: Lab) -> bool:
    """Whether the master knows two nodes for each object. A record of a layout is stored before there are two."""
    return all(nodes == 2 for key, nodes in lab.master.copies().items() if not key.startswith(RECORDS))


def names(report: dict[str, Any]) -> set[str]:
    return {concern["name"] for concern in report["concerns"]}


async def test_with_one_copy_each_there_is_nothing_to_mend(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=1))
        process = lab.daemon(1)
        async with engine(process) as one:
            with pytest.raises(Exception, match="replica_num = 1"):
                await one.client.mend_pool()
