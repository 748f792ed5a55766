"""FastDeploy's documented settings name no address: what one machine stores, another one must be able to read."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.machine.rack.engine import engine
from tests.machine.rack.lab import laboratory
from tests.support.waits import until
from transferd import Status
from transferd.cli.pool.master import master_executable

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
CHAIN = range(12)


async def test_without_a_name_nodes_read_each_others_blocks_and_lend_for_each_rank(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=2))
        processes = [lab.daemon(number, local_hostname="", segment_per_rank=True) for number in (1, 2)]
        one, two = [await stack.enter_async_context(engine(process)) for process in processes]
        await until(lambda: len(lab.master.segments()) == 2 * 2)
        assert {host.partition(":")[0] for host in lab.master.segments()} == {lab.address(1), lab.address(2)}
        await one.until_stored(CHAIN)
        assert (await two.read(CHAIN)).status is Status.OK


async def test_a_node_that_would_lend_at_loopback_does_not_start_and_says_why(tmp_path: Path) -> None:
    with laboratory(tmp_path, nodes=1) as lab:
        process = lab.daemon(1, wait=False, local_hostname="127.0.0.1")
        assert process.process.wait(60) != 0
        assert "storage.mooncake.local_hostname: is loopback" in process.ended()
