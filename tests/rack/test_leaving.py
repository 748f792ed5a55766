"""A node leaves: what only it has is copied to the others first, on a command or at its stop; bytes are compared."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rack.engine import Engine, engine
from tests.rack.lab import Lab, laboratory
from tests.support.waits import until
from transferd import Status
from transferd.cli.pool.master import master_executable
from transferd.client.launch import DaemonProcess

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
CHAIN = 12
CHAINS = [range(100 * n, 100 * n + CHAIN) for n in range(8)]
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


async def share_that_matches(reader: Engine, chains: Sequence[range]) -> float:
    """The share of blocks that are still found at the beginning of their chain. All of these are read and compared."""
    found = 0
    for chain in chains:
        there = await reader.matches(chain)
        if there:
            result = await reader.read(chain[:there])
            assert result.status is Status.OK, result
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
        for number in processes:
            assert processes[number].stop(timeout=100) == 0, processes[number].log
            processes[number] = lab.daemon(number, **POOL)
            await has_segments(lab, 4)
            async with engine(processes[number % 4 + 1]) as reader:
                share = await share_that_matches(reader, CHAINS)
            print(f"after the restart of node {number}: {share:.2f} match")
            assert share >= 0.9
