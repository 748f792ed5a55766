"""A fleet on paper against a real one: four daemons, a real master, and the same requests to the same nodes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.machine.rack.lab import WHOLE
from transferd import Client
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.cli.replay.engine import ReplayEngine, Tiers
from transferd.cli.replay.fleet import Fleet, FleetCosts, fleet_point
from transferd.cli.replay.kvdata import KvData
from transferd.cli.replay.report import ReplayReport
from transferd.cli.replay.sizing import BlockSizes, Rates
from transferd.cli.replay.trace import TraceRequest, read_trace
from transferd.client.launch import DaemonProcess, start
from transferd.config import from_tree
from transferd.runtime.threads import ThreadPools
from transferd.tasks import TRACE_BLOCK_TOKENS

SHARED_TRACE = Path(__file__).parents[4] / "shared" / "traces" / "conversation_trace.jsonl"
pytestmark = [
    pytest.mark.skipif(not WHOLE, reason="it takes minutes: `make rack` runs it"),
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the conversation trace is not on this machine"),
]
NODES = 4
POINTS = 0.03
# A block of the cache is a block of the trace, so that both count the same.
CACHE = {"ranks": 1, "layers": 4, "kv_heads": 1, "head_dim": 2, "block_size": TRACE_BLOCK_TOKENS}
LEVELS = {"all fits": ("4MiB", "128MiB"), "both full": ("4MiB", "32MiB")}  # of memory, and lent to the pool


def settings(memory: str, pool: str, address: str) -> dict[str, Any]:
    mooncake = {"master_server_addr": address, "local_hostname": "127.0.0.1", "local_buffer_size": 0}
    storage = {"levels": ["memory", "mooncake"], "model": "m", "memory": {"capacity": memory}}
    return {
        "cache": CACHE | {"device_blocks": 200, "host_blocks": 0},
        "host": {"staging": "16MiB"},
        "storage": storage | {"mooncake": mooncake | {"global_segment_size": pool}},
    }


class RealNode:
    """A daemon and its engine."""

    def __init__(self, process: DaemonProcess, client: Client, engine: ReplayEngine, report: ReplayReport) -> None:
        self.process, self.client, self.engine, self.report = process, client, engine, report

    async def levels(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await self.client.stats())["storage"]["levels"]
        return rows

    async def settled(self) -> None:
        """Nothing waits to be copied to the pool."""
        while sum(row["pending_bytes"] for row in await self.levels()):
            pass


async def real_hits(requests: list[TraceRequest], memory: str, pool: str, directory: Path) -> dict[str, float]:
    """Hits by place of a real fleet, of which each request gets a node at random."""
    threads = ThreadPools(1)
    blocks, chance = Counter[str](), random.Random(0)
    async with contextlib.AsyncExitStack() as stack:
        master = stack.enter_context(Master(directory / "master.log"))
        nodes = []
        stack.callback(threads.close)
        for number in range(NODES):
            process = start(settings(memory, pool, master.address), directory, name=f"node{number}")
            stack.callback(process.kill)
            client = await stack.enter_async_context(Client(process.endpoint))
            report, tiers = ReplayReport(), Tiers.of(await client.stats())
            data = KvData([await client.attach(rank=0)])
            nodes.append(RealNode(process, client, ReplayEngine(client, data, tiers, report, threads), report))
        while len(master.segments()) < NODES:
            await nodes[0].levels()
        for request in requests:
            node = nodes[chance.choice(range(NODES))]
            await node.engine.request(request)
            await node.settled()
        for node in nodes:
            assert (node.report.mismatches, node.report.errors) == ([], [])
            for row in await node.levels():
                blocks[row["name"]] += row["hits"]
            blocks["device"] += node.report.hits["device"]
            blocks["computed"] += node.report.hits["none"]
            node.engine = None  # type: ignore[assignment] # it borrows the memory that the client unmaps
    total = sum(blocks[place] for place in ("device", "memory", "mooncake", "computed"))
    return {place: blocks[place] / total for place in ("device", "memory", "mooncake", "computed")}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", LEVELS)
def test_a_predicted_fleet_has_the_hits_of_a_real_one(sizes: str, tmp_path: Path) -> None:
    requests = read_trace(SHARED_TRACE, 900)
    memory, pool = LEVELS[sizes]
    footprint = BlockSizes.of(from_tree(settings(memory, pool, "127.0.0.1:1")))
    real = asyncio.run(real_hits(requests, memory, pool, tmp_path))
    rates = Rates(host=1e9, storage=(1e9, 1e9), prefill=1e4)
    predicted = fleet_point(requests, footprint, rates, FleetCosts(), Fleet(NODES, "random"))
    for place, share in real.items():
        print(f"{sizes}, {place}: {share:.2%} real, {predicted.hit_rate[place]:.2%} predicted")
    for place, share in real.items():
        assert predicted.hit_rate[place] == pytest.approx(share, abs=POINTS), place
    assert real["mooncake"] > POINTS
