"""An engine of either version: stores blocks whose bytes follow from their keys, and compares what it loads.

    python engine.py ENDPOINT [register RANKS 0] [write FIRST COUNT] … [read FIRST COUNT] …

It attaches to the daemon's memory, or registers with its own. Prints the numbers of the blocks that the last of these
has stored or found; ends with 1 if a byte is wrong. Written for the API of 0.3.0, and run with either version on its
path.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from typing import Any

import numpy as np

from transferd import Client, Engine, ReadStorageTask, WriteStorageTask
from transferd.adapters.shared_caches import SharedCaches

BLOCKS = 16
LAYOUT = {"layers": 2, "kv_heads": 1, "head_dim": 64, "block_size": 128, "device_blocks": BLOCKS}  # of what registers


def content(key: str, rank: int, size: int) -> bytes:
    """The bytes of one layer's part of a block."""
    return hashlib.shake_128(f"{key} {rank}".encode()).digest(size)


def layers(caches: list[dict[str, list[Any]]]) -> list[tuple[int, Any]]:
    return [
        (rank, layer.view(np.uint8))
        for rank, cache in enumerate(caches)
        for name in sorted(cache)
        for layer in cache[name]
    ]


async def main(endpoint: str, commands: list[tuple[str, int, int]]) -> None:
    if commands[0][0] == "register":
        done = await registered(endpoint, commands[0][1], commands[1:])
    else:
        async with Client(endpoint, connect_timeout=30) as client:
            arrays = layers([await client.attach(rank) for rank in range(len((await client.stats())["ranks"]))])
            done = await carried_out(client, arrays, commands)
    print(json.dumps([int(key.partition("-")[2]) for key in done]))


async def registered(endpoint: str, ranks: int, commands: list[tuple[str, int, int]]) -> list[str]:
    with contextlib.ExitStack() as memory:
        own = [memory.enter_context(SharedCaches(LAYOUT | {"ranks": ranks})) for _ in range(ranks)]
        async with Client(endpoint, engine="upgraded", await_ready=False, connect_timeout=30) as client:
            await client.register(Engine(ranks=ranks, model="m", generation="g", layout=LAYOUT, host_blocks=0))
            for rank, mine in enumerate(own):
                await client.offer(rank, mine.handle, caches=mine.caches)
            await client.wait_ready()
            done = await carried_out(client, layers([mine.caches for mine in own]), commands)
            await client.unregister()
    return done


async def carried_out(client: Client, arrays: list[tuple[int, Any]], commands: list[tuple[str, int, int]]) -> list[str]:
    """The keys of the last command."""
    done: list[str] = []
    for what, first, count in commands:
        done = await moved(client, arrays, what, first, count)
    return done


async def moved(client: Client, arrays: list[tuple[int, Any]], what: str, first: int, count: int) -> list[str]:
    """Write or read these blocks; return the keys of those that were."""
    unique = os.urandom(8).hex()  # an id that was used before would get that task's result
    keys = [f"block-{number}" for number in range(first, first + count)]
    done: list[str] = []
    for begin in range(0, count, BLOCKS):
        some = keys[begin : begin + BLOCKS]
        blocks = list(range(len(some)))
        for block, key in enumerate(some):
            for rank, array in arrays:
                row = array[block].reshape(-1)
                row[...] = np.frombuffer(content(key, rank, row.size), np.uint8) if what == "write" else 0
        if what == "write":
            result = await client.submit(WriteStorageTask(task_id=f"{unique} {begin}", keys=some, gpu_block_ids=blocks))
            assert result.status == "ok", result
            done += some
            continue
        task = ReadStorageTask(task_id=f"{unique} {begin}", keys=some, gpu_block_ids=blocks, prefix=False)
        for block in (await client.submit(task)).block_ids:
            for rank, array in arrays:
                row = array[block].reshape(-1)
                assert row.tobytes() == content(some[block], rank, row.size), f"{some[block]} has wrong bytes"
            done.append(some[block])
    return done


if __name__ == "__main__":
    words = iter(sys.argv[2:])
    asyncio.run(main(sys.argv[1], [(what, int(next(words)), int(next(words))) for what in words]))
