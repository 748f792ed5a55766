"""A node leaves: what only it has is copied to the others first, on a command or at its stop; bytes are compared."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.machine.rack.engine import Engine, engine
from tests.machine.rack.lab import WHOLE, Lab, laboratory
from tests.support.waits import stats_until, until
from transferd import Status
from transferd.cli.pool.master import master_executable
from transferd.client.launch import DaemonProcess
from transferd.daemon.process import STILL_RUNNING
from transferd.errors import TransferError

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
CHAIN = 12
OBJECTS = 2 * CHAIN  # of a chain, of both ranks
CHAINS = [range(100 * n, 100 * n + CHAIN) for n in range(8)]
# With levels above the pool, its answer that comes late is a miss: when some process has stood still for a second. What
# is lost stays a miss.
PATIENCE_S = 10.0
SLOW = "15mbit"  # 1.8 MiB a second: what copies is seen at it, also by a test that stands still meanwhile
POOL: dict[str, Any] = {"drain_at_stop": 60, "global_segment_size": "64MiB"}


async def has_segments(lab: Lab, number: int) -> None:
    """Wait until the master knows of so many nodes."""
    await until(lambda: len(lab.master.segments()) == number, f"{number} nodes", within=60)


def command(process: DaemonProcess, *words: str) -> tuple[int, dict[str, Any]]:
    """Run `transferd pool`, and return its exit code and report."""
    line = [sys.executable, "-m", "transferd", "pool", *words, "--endpoint", process.endpoint, "--format", "json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


async def share_that_matches(reader: Engine, chains: Sequence[range], patience: float = 0.0) -> float:
    """The share of blocks that are still found at the beginning of their chain. All of these are read and compared.

    patience: for so many seconds a chain is looked for again. See PATIENCE_S.
    """
    found = 0
    for chain in chains:
        give_up = time.monotonic() + patience
        while True:
            there = await reader.matches(chain)
            result = await reader.read(chain[:there]) if there else None
            whole = there == len(chain) and result is not None and result.status is Status.OK
            if whole or time.monotonic() >= give_up:
                break
            await asyncio.sleep(0.1)
        assert result is None or result.status is Status.OK, result
        found += there
    return found / sum(map(len, chains))


async def test_a_rolling_restart_of_four_nodes_that_drain_keeps_what_fits(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=4))
        processes = {number: lab.daemon(number, **POOL) for number in range(1, 5)}
        await has_segments(lab, 4)
        for number, process in processes.items():
            async with engine(process) as writer:
                for chain in CHAINS[number - 1 :: 4]:
                    await writer.until_stored(chain)
        for number in (1, 2, 3, 4) if WHOLE else (1, 2):  # so that the second copies what came from the first
            assert processes[number].stop(timeout=100) == 0, processes[number].log
            processes[number] = lab.daemon(number, **POOL)
            await has_segments(lab, 4)
            async with engine(processes[number % 4 + 1]) as reader:
                share = await share_that_matches(reader, CHAINS)
            print(f"after the restart of node {number}: {share:.2f} match")
            assert share >= 0.9


async def test_a_drain_on_command_shows_its_end_and_the_bytes_survive_the_nodes_death(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=3))
        leaver, *others = [lab.daemon(number, global_segment_size="64MiB") for number in (1, 2, 3)]
        await has_segments(lab, 3)
        readers = [await stack.enter_async_context(engine(process)) for process in others]
        async with engine(leaver) as writer:
            for chain in CHAINS[:4]:
                await writer.until_stored(chain)
            lab.slow_down(1, SLOW)
            draining = asyncio.ensure_future(writer.client.drain_pool())
            await stats_until(writer.client, lambda report: report["storage"]["copying_bytes"] > 0)
            lab.speed_up(1)
            made = await draining
            assert (made.left, made.why) == (0, "")
            assert made.objects >= OBJECTS * 4
            assert made.bytes >= OBJECTS * 4 * 2**18
            assert (await writer.storage())["copying_bytes"] == 0
            for chain in CHAINS[:4]:
                assert (await writer.read(chain)).status is Status.OK, "it serves as before"
            code, report = command(leaver, "drain")
            assert (code, report["objects"], report["left"]) == (0, 0, 0), "nothing twice"
        leaver.kill()
        await has_segments(lab, 2)
        for reader in readers:
            assert await share_that_matches(reader, CHAINS[:4]) == 1.0


async def test_a_node_that_dies_while_it_drains_loses_no_copy_that_was_made(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=2))
        leaver, other = [lab.daemon(number, **POOL) for number in (1, 2)]
        await has_segments(lab, 2)
        reader = await stack.enter_async_context(engine(other))
        await reader.until_stored(CHAINS[7])
        async with engine(leaver) as writer:
            for chain in CHAINS[:6]:
                await writer.until_stored(chain)
            last = CHAINS[5]
            assert await writer.matches(last) == CHAIN  # so it is the one that was asked for last
            lab.slow_down(1, SLOW)
            leaver.signal(signal.SIGTERM)
            await until(lambda: list(lab.master.copies().values()).count(2) >= OBJECTS, "copies are made", within=60)
        leaver.kill()
        await has_segments(lab, 1)
        share = await share_that_matches(reader, CHAINS[:6])
        print(f"killed in the middle: {share:.2f} match")
        assert 0 < share < 1
        assert await share_that_matches(reader, [last]) > 0, "what was asked for last went first"
        assert await share_that_matches(reader, [CHAINS[7]]) == 1.0
        assert (await reader.storage())["corrupt"] == 0


async def test_other_nodes_that_are_full_evict_nothing_for_a_drain(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=2))
        leaver, other = [lab.daemon(number, global_segment_size="32MiB") for number in (1, 2)]
        await has_segments(lab, 2)
        reader = await stack.enter_async_context(engine(other))
        async with engine(leaver) as writer:
            for chain in CHAINS[:3]:  # 20 of 32 MiB
                await reader.until_stored(chain)
            for chain in CHAINS[3:7]:  # 27 of 32 MiB
                await writer.until_stored(chain)
            assert lab.master.counter("master_evicted_key_count") == 0
            code, report = command(leaver, "drain")
            assert code == 1
            assert report["left"] > 0
            assert "the other nodes have no room" in report["why"]
            assert report["objects"] > 0, "what fits is copied"
            assert lab.master.counter("master_evicted_key_count") == 0
            assert await share_that_matches(reader, CHAINS[:7]) == 1.0


async def test_a_drain_goes_round_a_node_that_has_fallen_silent(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=3))
        leaver, _, other = [lab.daemon(number, **POOL) for number in (1, 2, 3)]
        await has_segments(lab, 3)
        reader = await stack.enter_async_context(engine(other))
        async with engine(leaver) as writer:
            for chain in CHAINS[:4]:
                await writer.until_stored(chain)
            lab.cut(1, 2)
            lab.cut(2, 1)
            begun = time.monotonic()
            code, report = command(leaver, "drain")
            print(f"{time.monotonic() - begun:.1f} s", report)
            assert (code, report["left"]) == (0, 0)
        assert leaver.stop(timeout=100) == 0
        assert await share_that_matches(reader, CHAINS[:4]) == 1.0


async def test_a_stop_goes_on_if_nothing_can_be_copied(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=2))
        no_pages = lab.daemon(1, **POOL, master_pages="10.77.0.2:9")
        await has_segments(lab, 1)
        async with engine(no_pages) as writer:
            await writer.until_stored(CHAINS[0])
            with pytest.raises(TransferError, match=r"no Mooncake master answers at 10\.77\.0\.2:9"):
                await writer.client.drain_pool()
        assert no_pages.stop(timeout=60) == 0, no_pages.log
        assert "cannot copy to other nodes what only this one has" in no_pages.log
        alone = lab.daemon(2, **POOL)
        await has_segments(lab, 1)
        async with engine(alone) as writer:
            await writer.until_stored(CHAINS[0])
            code, report = command(alone, "drain")
            assert (code, report["objects"], report["why"]) == (1, 0, "no other node takes copies now")
        lab.master.stop()
        assert alone.stop(timeout=60) == 0, alone.log


@pytest.mark.skipif(not WHOLE, reason="it takes half a minute: `make rack` runs it")
@pytest.mark.parametrize(("within", "levels"), [(1, ()), (3, ()), (3, ("memory", "mooncake"))])
async def test_a_stop_whose_time_for_copies_is_up_ends_as_a_stop(
    tmp_path: Path, within: int, levels: tuple[str, ...]
) -> None:
    """The library begins the copies that the master has handed out, also while its client closes: that aborts."""
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=4))  # each other node adds to what may be under way
        leaver = lab.daemon(1, levels=levels, **POOL | {"drain_at_stop": within})
        for number in (2, 3, 4):
            lab.daemon(number, levels=levels, **POOL)
        await has_segments(lab, 4)
        async with engine(leaver) as writer:
            for chain in CHAINS:
                await writer.until_stored(chain)
            running = asyncio.ensure_future(writer.until_stored(range(5000, 5000 + CHAIN)))
            began = time.monotonic()
            code = await asyncio.to_thread(leaver.stop, timeout=100)
            assert time.monotonic() - began >= within, "it gets the time that was configured"
            assert "the time was up" in leaver.log
            running.cancel()
        assert code in (0, STILL_RUNNING), leaver.log
