"""The README's example: store a block, read it into another one. Start a daemon, then run this: [ENDPOINT [VALUE]]."""

from __future__ import annotations

import asyncio
import sys
import uuid

from transferd import Client, ReadStorageTask, WriteStorageTask


async def main(endpoint: str | None, value: int) -> None:
    run = uuid.uuid4().hex  # a repeated task_id gets the old result, and a stored key is not stored again
    async with Client(endpoint) as client:  # waits until every rank is ready
        ranks = [await client.attach(rank) for rank in (0, 1)]  # per rank: {plane: [one array per layer]}, zero-copy
        for caches in ranks:
            caches["key"][0][3] = value  # "compute" block 3
        written = await client.submit(WriteStorageTask(task_id=f"w-{run}", keys=[run], gpu_block_ids=[3]))
        loaded = await client.submit(ReadStorageTask(task_id=f"r-{run}", keys=[run], gpu_block_ids=[7]))
        print(written.status, loaded.status, loaded.block_ids, ranks[1]["key"][0][7].flat[0])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None, int(sys.argv[2]) if len(sys.argv) > 2 else 42))
