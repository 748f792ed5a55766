"""The engine makes the device memory, and offers it: cache.ownership = "attach".

    python examples/engine_creates.py [ENDPOINT]

Without an endpoint it starts a daemon with the same [cache] for as long as it needs one.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from transferd import Client, ReadStorageTask, WriteStorageTask
from transferd.adapters.shared_caches import SharedCaches
from transferd.client.launch import start

CACHE = {"ranks": 1, "layers": 2, "kv_heads": 2, "head_dim": 64, "block_size": 16, "device_blocks": 16}


async def main(endpoint: str) -> None:
    # On a GPU the arrays are your framework's own: tiers/cuda/engine.py `export` makes the handle, `rows` the caches.
    with SharedCaches(CACHE) as mine:
        mine.caches["key"][0][3] = 42
        # It is our offer that makes the daemon ready; on a busy machine a daemon may take a while to answer.
        async with Client(endpoint, await_ready=False, connect_timeout=60.0) as client:
            # With `caches`, the daemon first finds a pattern in block 1 of every array, or refuses the handle.
            await client.offer(0, mine.handle, caches=mine.caches)
            await client.wait_ready()
            written = await client.submit(WriteStorageTask(task_id="w", keys=["a block"], gpu_block_ids=[3]))
            read = await client.submit(ReadStorageTask(task_id="r", keys=["a block"], gpu_block_ids=[7]))
            print(written.status, read.status, read.block_ids, mine.caches["key"][0][7].flat[0])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            tree = {"cache": CACHE | {"ownership": "attach", "host_blocks": 0}, "storage": {"backend": "memory"}}
            daemon = start(tree, Path(directory), wait=False)  # it is not ready before the offer
            try:
                asyncio.run(main(daemon.endpoint))
            finally:
                daemon.stop()
