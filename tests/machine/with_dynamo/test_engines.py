"""Several engines of one daemon, which share a socket of events: to Dynamo's indexer each is a data-parallel rank."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.kv_events.test_feed import BLOCK
from tests.daemon.test_engines import serving
from tests.machine.with_dynamo.test_indexer import AGREE_S, BLOCKS, Indexer, chain, closing, truth, write
from transferd.blocks.keys import block_keys
from transferd.cli.pool.master import free_port
from transferd.client.launch import running
from transferd.runtime.compat import timeout

pytestmark = pytest.mark.one_loop


async def test_each_engines_blocks_come_and_go_by_themselves(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"storage": {"backend": "file", "file": {"path": str(tmp_path / "blocks")}}}
    tree["events"] = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    async with contextlib.AsyncExitStack() as stack:
        indexer = stack.enter_context(closing(Indexer(tmp_path / "indexer.log", tree)))
        daemon = stack.enter_context(running(tree, tmp_path))
        clients = []
        for rank in (0, 1):
            named: dict[str, Any] = {"generation": f"G{rank}", "dp_rank": rank, "layout": {"block_size": BLOCK}}
            client, _ = await stack.enter_async_context(serving(daemon.endpoint, f"engine{rank}", **named))
            clients.append(client)
            await indexer.register(rank)
        one, other = clients
        await write(one, 1, 2, 3)
        await write(other, 3, 4)

        async def agree() -> list[int]:
            """Of an instance's blocks on disk the indexer says the most that one of its ranks has."""
            expected = [max([await truth(client, number) for client in clients]) for number in range(1, 6)]
            async with timeout(AGREE_S):
                while [await indexer.blocks_of(chain(n)) for n in range(1, 6)] != expected:  # noqa: ASYNC110 - asked
                    await asyncio.sleep(0.05)
            return expected

        assert await agree() == [*[BLOCKS] * 4, 1]
        await one.set_generation("G2")
        assert await agree() == [1, 1, BLOCKS, BLOCKS, 1], "what the other engine has is still there"
        await write(one, 5)
        await other.purge(keys=block_keys(chain(3), BLOCK)[1:])
        assert await agree() == [1, 1, 1, BLOCKS, BLOCKS]
