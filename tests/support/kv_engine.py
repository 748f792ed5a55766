"""An engine's process as the vLLM adapter makes one, without vLLM: memory in /dev/shm, and a link to a daemon.

    python -m tests.support.kv_engine ENDPOINT tier|connector store|load

It writes blocks, or reads them, and then prints for each key the sha256 of its block, as JSON. Every byte that it does
not write or load is STALE.

tier        as vLLM's host pool: a block is one range of bytes
connector   as vLLM's own KV memory: a block is a page in each layer, behind a header, and block 0 has a canary
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
from pathlib import Path

import numpy as np

from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.entry import EngineFacts, OfferedMemory
from transferd.adapters.common.link import Link
from transferd.adapters.common.memory import shared_memory_at
from transferd.adapters.vllm.settings import VLLM
from transferd.tasks import ReadStorageTask, TaskResult, WriteStorageTask

BLOCKS, PAGE = 24, 16384
LAYERS = {"tier": 1, "connector": 2}
NAMES = {"tier": "vllm_offload_test-{}.mmap", "connector": "torch_test_{}"}  # torch removes its name at once
KEYS = [f"{number:064x}" for number in range(20)]
FIRST_STORED, FIRST_LOADED = 1, 3  # block ids: a load does not find its bytes where they were written
STALE = 0xA5
WAIT_S = 60.0


def memory_of(kind: str, pid: int) -> Path:
    """The file in /dev/shm that this process makes, and leaves behind if it is a tier's and killed."""
    return Path("/dev/shm") / NAMES[kind].format(pid)


def main(endpoint: str, kind: str, deed: str) -> None:
    file, layers = memory_of(kind, os.getpid()), LAYERS[kind]
    file.write_bytes(bytes([STALE]) * (layers * BLOCKS * PAGE))
    opened = file.open("r+b")
    memory = np.memmap(opened, dtype=np.uint8, mode="r+")
    if kind == "connector":
        file.unlink()
    pages = memory.reshape(layers, BLOCKS, PAGE)
    segments = [(layer * BLOCKS * PAGE, PAGE) for layer in range(layers)]
    where = shared_memory_at(memory.ctypes.data, memory.nbytes)
    offered = OfferedMemory(0, where, segments, memory if kind == "connector" else None)
    engine = EngineFacts(f"{kind}-{os.getpid()}", "model", "", kind, 1, BLOCKS, [PAGE] * layers, offered)
    link = Link(DaemonFinder(VLLM, endpoint=endpoint), engine.name, engine.enter)
    assert link.wait_ready(WAIT_S)
    result: queue.SimpleQueue[TaskResult] = queue.SimpleQueue()
    first = FIRST_STORED if deed == "store" else FIRST_LOADED
    blocks = list(range(first, first + len(KEYS)))
    if deed == "store":
        pages[:, blocks] = np.random.default_rng(1).integers(0, 256, (layers, len(KEYS), PAGE), dtype=np.uint8)
        link.submit(WriteStorageTask(task_id="store", keys=KEYS, gpu_block_ids=blocks), result.put)
    else:
        link.submit(ReadStorageTask(task_id="load", keys=KEYS, gpu_block_ids=blocks, prefix=False), result.put)
    moved = result.get(timeout=WAIT_S).block_ids
    print(json.dumps({key: _digest(pages[:, b]) for key, b in zip(KEYS, blocks, strict=True) if b in moved}))
    link.close(WAIT_S)
    opened.close()
    file.unlink(missing_ok=True)


def _digest(block: np.ndarray) -> str:
    return hashlib.sha256(block.tobytes()).hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
