"""Peers at `pd.listen`, where daemons hand over blocks to each other: real daemons, plain sockets.

The socket has no authentication, so whatever comes in takes bounded memory, and honest handovers go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from tests.integration.caches import fill, snapshot, wipe
from tests.integration.test_handover import TOKENS, Side, pair
from tests.machine.hostile.transfer_peers import MOST, Address, never_arrive, never_read, wait
from transferd.cli.pool.master import master_executable

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]

BLOCKS = [1, 2, 3, 4, 5, 6]


def resident(node: Side) -> int:
    status = Path(f"/proc/{node.daemon.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024


def address(node: Side) -> Address:
    host, _, port = node.client.pd_address.rpartition(":")
    return host, int(port)


async def hands_over(prefill: Side, decode: Side) -> None:
    request = f"honest-{time.monotonic_ns()}"
    fill(prefill.caches, BLOCKS, seed=3)
    wipe(decode.caches, BLOCKS)
    await asyncio.gather(
        prefill.client.write_all(request, TOKENS, BLOCKS),
        decode.client.read_all(request, TOKENS, BLOCKS, peer=prefill.client.pd_address),
    )
    assert snapshot(decode.caches, BLOCKS) == snapshot(prefill.caches, BLOCKS)


async def test_peers_that_hand_over_nothing_take_bounded_memory(tmp_path: Path) -> None:
    async with pair("direct", None, tmp_path) as (prefill, decode):
        await hands_over(prefill, decode)
        for attack in (wait, never_arrive, never_read):
            before = resident(prefill)
            with contextlib.ExitStack() as stack:
                await asyncio.to_thread(attack, address(prefill), stack)
                assert resident(prefill) - before < MOST, attack.__doc__
                await hands_over(prefill, decode)
            await hands_over(prefill, decode)
