"""A daemon is restarted, stopped or killed, and what its node lends stays: another process lends it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine.rack.engine import Engine, engine
from tests.machine.rack.lab import WHOLE, Lab, laboratory
from tests.machine.rack.test_leaving import CHAINS, PATIENCE_S, has_segments, share_that_matches
from tests.support.waits import stats_until
from transferd import Status
from transferd.cli.pool.master import master_executable

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
OURS = CHAINS[:6]


@contextlib.contextmanager
def lending(lab: Lab, number: int) -> Iterator[dict[str, Any]]:
    """`transferd pool lend` on a node. Yields what its daemon's settings have besides."""
    pool = {"lender": f"{lab.address(number)}:17999", "global_segment_size": "64MiB"}
    sets = [f"--set=storage.mooncake.{name}={value}" for name, value in pool.items()]
    sets.append(f"--set=storage.mooncake.master_server_addr={lab.master.address}")
    with (lab.directory / "lend.log").open("wb") as log:
        line = [*lab.inside(number), sys.executable, "-m", "transferd", "pool", "lend", *sets]
        process = subprocess.Popen(line, stdout=log, stderr=log)
    try:
        yield pool
    finally:
        process.kill()
        process.wait()


async def reads_on(reader: Engine, ended: asyncio.Event, patience: float) -> list[Status]:
    """Reads of the node's chains, one after the other, until `ended`. patience: see `share_that_matches`."""
    statuses = list[Status]()
    while not ended.is_set():
        for chain in OURS:
            give_up = time.monotonic() + patience
            while True:
                status = (await reader.read(chain)).status
                if status is Status.OK or time.monotonic() >= give_up:
                    break
                await asyncio.sleep(0.1)
            statuses.append(status)
    return statuses


@contextlib.asynccontextmanager
async def reading(reader: Engine, patience: float) -> AsyncIterator[list[Status]]:
    ended, statuses = asyncio.Event(), list[Status]()
    running = asyncio.ensure_future(reads_on(reader, ended, patience))
    yield statuses
    ended.set()
    statuses += await running


@pytest.mark.parametrize(
    "levels", [("memory", "mooncake"), *([()] if WHOLE else [])], ids=lambda levels: " ".join(levels) or "alone"
)
async def test_a_restarted_node_has_every_chain_and_the_others_read_it_meanwhile(
    tmp_path: Path, levels: tuple[str, ...]
) -> None:
    patience = PATIENCE_S if levels else 0.0
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=2))
        lent = stack.enter_context(lending(lab, 1))
        await has_segments(lab, 1)
        other = await stack.enter_async_context(engine(lab.daemon(2, levels=levels)))
        await has_segments(lab, 2)
        process = lab.daemon(1, levels=levels, **lent)
        async with engine(process) as writer:
            for chain in OURS:
                await writer.until_stored(chain)
            if levels:
                await stats_until(writer.client, lambda report: not any_pending(report))
        for end in ("stop", "kill", "stop"):
            async with reading(other, patience) as statuses:
                began = time.monotonic()
                process.kill() if end == "kill" else process.stop()
                process = lab.daemon(1, levels=levels, **lent)
                async with engine(process) as restarted:
                    took = time.monotonic() - began
                    assert await share_that_matches(restarted, OURS, patience) == 1.0
            print(f"{levels or 'alone'}, {end}: back after {took:.1f} s; {len(statuses)} reads of others meanwhile")
            assert set(statuses) == {Status.OK}


def any_pending(report: dict[str, Any]) -> bool:
    return any(level["pending_bytes"] for level in report["storage"]["levels"])
