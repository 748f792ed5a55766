"""An engine registers itself at a daemon that many engines share, brings its own memory, and moves a block.

    python examples/register_engine.py [ENDPOINT]

Without an endpoint it starts a daemon without [cache], which has storage and waits for engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

from transferd import Client, Engine, ReadStorageTask, WriteStorageTask
from transferd.adapters.shared_caches import SharedCaches
from transferd.client.launch import running

RANKS = 2
LAYOUT = {"layers": 2, "kv_heads": 2, "head_dim": 64, "block_size": 16, "device_blocks": 16}


async def main(endpoint: str) -> None:
    engine = Engine(ranks=RANKS, model="tiny-1", generation="step-0", layout=LAYOUT, host_blocks=8)
    with contextlib.ExitStack() as memory:
        ranks = [memory.enter_context(SharedCaches(LAYOUT | {"ranks": RANKS})) for _ in range(RANKS)]
        # The engine is ready once each rank has memory. In an engine of several processes, each offers its own rank's:
        # pass them the token that `register` returns.
        async with Client(endpoint, engine="tiny", await_ready=False, connect_timeout=60.0) as client:
            await client.register(engine)
            for rank, mine in enumerate(ranks):
                await client.offer(rank, mine.handle, caches=mine.caches)
            await client.wait_ready()
            for mine in ranks:
                mine.caches["key"][0][3] = 42  # "compute" block 3
            written = await client.submit(WriteStorageTask(task_id="w", keys=["a block"], gpu_block_ids=[3]))
            read = await client.submit(ReadStorageTask(task_id="r", keys=["a block"], gpu_block_ids=[7]))
            print(
                written.status, read.status, read.block_ids, [float(mine.caches["key"][0][7].flat[0]) for mine in ranks]
            )
            # It may be registered by several clients, and ends with the last of them. This ends it now.
            await client.unregister()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with (
            tempfile.TemporaryDirectory() as directory,
            running({"storage": {"backend": "memory"}}, Path(directory)) as daemon,
        ):
            asyncio.run(main(daemon.endpoint))
