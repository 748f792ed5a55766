"""An engine on the throw-away machine, as a user of its own: talks to the packaged daemon over its packaged socket.

    python engine.py roundtrip        write, read, swap out, swap in on every rank, every byte compared
    python engine.py flood N          push N writes and wait for every answer; one line a status when they are in
    python engine.py pages NAME       register as NAME, offer private memory of its own, write, read, compare every byte
    python engine.py register         register an engine, and say what came of it
    python engine.py drain            and leave it so
    python engine.py events PUB       write, and wait for the KV event of it
    python engine.py ping ENDPOINT SERVER_KEY PUBLIC SECRET    by tcp, with keys

TRANSFERD_ENDPOINT says where the daemon listens, where that is not the packaged socket.

Prints JSON. `flood` prints `{"pushed": N}` first, so that who started it knows when.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import mmap
import os
import sys
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from transferd import (
    Client,
    Engine,
    Pages,
    ReadStorageTask,
    Status,
    SwapInTask,
    SwapOutTask,
    TransferError,
    WriteStorageTask,
    shm_pages,
)
from transferd.runtime.compat import timeout
from transferd.tasks import Task
from transferd.wire.curve import ClientCurve
from transferd.wire.transport import ZmqClientTransport

BLOCKS = 8
KEYS = [f"key-{i}" for i in range(BLOCKS)]


async def attach_all(client: Client) -> list[dict[str, list[Any]]]:
    return [await client.attach(rank) for rank in range(len((await client.stats())["ranks"]))]


async def roundtrip() -> None:
    async with Client() as client:
        caches = await attach_all(client)
        layers = [layer for cache in caches for plane in cache.values() for layer in plane]
        random = np.random.default_rng(1)
        for layer in layers:
            raw = layer[:BLOCKS].view(np.uint8)
            raw[...] = random.integers(0, 256, raw.shape, dtype=np.uint8)
        source, target = list(range(BLOCKS)), list(range(BLOCKS, 2 * BLOCKS))
        before = [layer[source].tobytes() for layer in layers]
        tasks: list[Task] = [
            WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=source),
            ReadStorageTask(task_id="r", keys=KEYS, gpu_block_ids=target),
            SwapOutTask(task_id="o", gpu_block_ids=target, cpu_block_ids=source),
            SwapInTask(task_id="i", gpu_block_ids=[i + BLOCKS for i in target], cpu_block_ids=source),
        ]
        statuses = [(await client.submit(task)).status for task in tasks]
        same = [
            [layer[blocks].tobytes() for layer in layers] == before for blocks in (target, [i + BLOCKS for i in target])
        ]
    print(json.dumps({"ranks": len(caches), "ok": all(s is Status.OK for s in statuses), "same": all(same)}))


async def pages(name: str) -> None:
    """As vLLM's tier does: memory with a name that only its user may open; and memory without one."""
    layout = Pages(layers=2, page_bytes=4096, blocks=BLOCKS, identity="an engine's")
    size = BLOCKS * 4096
    path = f"/dev/shm/of-{os.getuid()}-{name}"
    try:
        memories = [
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600),
            os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING),
        ]
        arrays = []
        for fd in memories:
            os.ftruncate(fd, size)
            arrays.append(np.frombuffer(mmap.mmap(fd, size), np.uint8).reshape(BLOCKS, 4096))
        handle = shm_pages([os.path.basename(path), memories[1]], [(0, 4096), (0, 4096, 1)])
        async with Client(engine=name, await_ready=False) as client:
            await client.register(Engine(ranks=1, model="m", layout=layout))
            await client.offer(0, handle, caches={"page": list(arrays)})
            await client.wait_ready(30)
            found = await client.exists(KEYS)
            random = np.random.default_rng(os.getuid())
            for array in arrays:
                array[...] = random.integers(0, 256, array.shape, np.uint8)
            before = [array.tobytes() for array in arrays]
            blocks = list(range(BLOCKS))
            written = await client.submit(WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=blocks))
            for array in arrays:
                array[...] = 0
            read = await client.submit(ReadStorageTask(task_id="r", keys=KEYS, gpu_block_ids=blocks))
            same = [array.tobytes() for array in arrays] == before
    finally:
        os.unlink(path)
    print(json.dumps({"found": sum(found), "ok": written.status is read.status is Status.OK, "same": same}))


async def flood(tasks: int) -> None:
    async with Client() as client:
        await attach_all(client)
        futures = [
            await client.push(
                WriteStorageTask(task_id=f"t{i}", keys=[f"{i}-{k}" for k in KEYS], gpu_block_ids=list(range(BLOCKS)))
            )
            for i in range(tasks)
        ]
        print(json.dumps({"pushed": tasks}), flush=True)
        results = await asyncio.gather(*futures)
        counts = Counter(r.status if r.error is None else f"{r.status}: {r.error.code}" for r in results)
        print(json.dumps(counts), flush=True)


async def drain() -> None:
    """Drain, and hold it until stdin ends: it ends with its client."""
    async with Client() as client:
        await client.drain()
        print(json.dumps({"drained": True}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def register() -> None:
    layout = Pages(layers=1, page_bytes=64, blocks=1, identity="an engine's")
    async with Client(engine=f"of-{os.getuid()}", await_ready=False) as client:
        try:
            await client.register(Engine(ranks=1, model="m", layout=layout))
            await client.unregister()
        except TransferError as error:
            print(json.dumps({"register": error.reason}))
        else:
            print(json.dumps({"register": "ok"}))


async def events(endpoint: str) -> None:
    """The first batch with events that a subscriber gets; writes go on until it has joined."""
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        async with timeout(30), Client() as client:
            await attach_all(client)
            numbers, types = itertools.count(), list[str]()
            while not types:  # a new subscription gets an empty batch at once
                if await socket.poll(100):
                    _, _, batch = await socket.recv_multipart()
                    types = [event["type"] for event in msgspec.msgpack.decode(batch)[1]]
                else:
                    task_id = f"event-{next(numbers)}"
                    await client.submit(WriteStorageTask(task_id=task_id, keys=[task_id], gpu_block_ids=[0]))
    print(json.dumps({"types": types}))


async def ping(endpoint: str, *keys: str) -> None:
    """By tcp with keys: exit 1 when nobody answers."""
    transport = ZmqClientTransport(endpoint, curve=ClientCurve(*(key.encode() for key in keys)))
    async with Client(endpoint, connect_timeout=3, transport=transport) as client:
        await client.ping()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["events", endpoint]:
            asyncio.run(events(endpoint))
        case ["ping", endpoint, *keys]:
            asyncio.run(ping(endpoint, *keys))
        case ["flood", count]:
            asyncio.run(flood(int(count)))
        case ["pages", name]:
            asyncio.run(pages(name))
        case ["register"]:
            asyncio.run(register())
        case ["drain"]:
            asyncio.run(drain())
        case _:
            asyncio.run(roundtrip())
