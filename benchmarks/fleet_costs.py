"""What adds up in a fleet, for `transferd replay --simulate --nodes`: index memory, events, the pool's master.

    python -m benchmarks.fleet_costs

All in CPU seconds and in bytes, so that other work on the machine changes little: of this process for an index with
names of the real length, and for a follower of KV events; of a real `mooncake_master` for what one daemon stores,
loads and looks up in its pool. What a key of a look-up costs the daemon is in docs/measurements.md (growth).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import tracemalloc
from pathlib import Path

import msgspec

from transferd import ReadStorageTask, Status, SyncClient, WriteStorageTask
from transferd.cli.pool.local import Master
from transferd.cli.terminal import stdout
from transferd.client.launch import running
from transferd.daemon.kv_events.following import Follower
from transferd.storage.attention_store.open_index import TokenIndex
from transferd.storage.lru import LruIndex, Use

OBJECTS = 200_000
CHAIN = 200
TASK = 1000  # blocks of a task of the pool's daemon
TASKS = 40
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def index() -> float:
    """Bytes of an object of an index."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    filled = LruIndex(OBJECTS)
    for start in range(0, OBJECTS, CHAIN):
        use = Use(start=0, stop=CHAIN)
        for depth in range(CHAIN):
            name = f"model/0123456789abcdef/0/{start + depth:032x}/0"
            filled.reserve(name, 1, use, depth)
            filled.commit(name)
    nbytes = (tracemalloc.get_traced_memory()[0] - before) / OBJECTS
    tracemalloc.stop()
    return nbytes


def events() -> float:
    """Seconds of a block that is announced, and leaves, for who follows the events."""
    encoder = msgspec.msgpack.Encoder()
    batches = [
        encoder.encode([0.0, [{"type": kind, "block_hashes": list(range(at, at + CHAIN)), "medium": "STORAGE"}], 0])
        for kind in ("BlockStored", "BlockRemoved")
        for at in range(0, OBJECTS, CHAIN)
    ]
    follower = Follower(TokenIndex(), "node", 2 * OBJECTS, None)
    follower.connected()
    before = time.process_time()
    for number, batch in enumerate(batches):
        follower.live(number, batch)
    return (time.process_time() - before) / (2 * OBJECTS)


def master() -> tuple[float, float]:
    """Bytes of an object of a master, and its seconds for an object that is stored, loaded or looked up."""
    tree = {
        "cache": {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 2, "block_size": 16, "device_blocks": TASK},
        "storage": {
            "backend": "mooncake",
            "mooncake": {"local_hostname": "127.0.0.1", "local_buffer_size": 0, "global_segment_size": "512MiB"},
        },
    }
    with tempfile.TemporaryDirectory() as directory, Master(Path(directory) / "master.log", "1s") as served:
        tree["storage"]["mooncake"]["master_server_addr"] = served.address  # type: ignore[index]
        with running(tree, Path(directory)) as daemon, SyncClient(daemon.endpoint) as client:
            attached = client.attach(0)
            blocks = list(range(TASK))
            keys = [[f"{task}-{i}" for i in range(TASK)] for task in range(TASKS)]
            client.submit(WriteStorageTask(task_id="warm", keys=[f"warm-{i}" for i in blocks], gpu_block_ids=blocks))
            memory, seconds = usage(served.pid)
            for number, some in enumerate(keys):
                done = client.submit(WriteStorageTask(task_id=f"w{number}", keys=some, gpu_block_ids=blocks))
                assert done.status is Status.OK, done
            nbytes = (usage(served.pid)[0] - memory) / (TASK * TASKS)
            for number, some in enumerate(keys):
                assert client.match(some) == TASK
                done = client.submit(ReadStorageTask(task_id=f"r{number}", keys=some, gpu_block_ids=blocks))
                assert done.status is Status.OK, done
            calls = 4 * TASK * TASKS  # stored, looked up to store; looked up, loaded
            del attached
            return nbytes, (usage(served.pid)[1] - seconds) / calls


def usage(pid: int) -> tuple[int, float]:
    """Resident bytes and CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), (int(fields[11]) + int(fields[12])) * TICK_S


def main() -> None:
    async def followed() -> float:
        return events()

    master_bytes, master_s = master()
    found = {"index_bytes": index(), "event_s": asyncio.run(followed())}
    for name, value in (found | {"master_bytes": master_bytes, "master_s": master_s}).items():
        stdout().print(f"{name} = {value:.3g}")


if __name__ == "__main__":
    main()
