"""transferd as a user runs it: a daemon in its own process, one client attached to shared memory, checksums on.

    python -m benchmarks.peers.transferd_daemon files | full | memory

files   a write task and a read task of all blocks, on the file backend
full    the same with room for one round and a few blocks more: stores write over the files of the round before
memory  a swap-out and a swap-in of all blocks, to the daemon's host memory and back
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.program import Order, Peer, serve
from transferd import ReadStorageTask, Status, SwapInTask, SwapOutTask, SyncClient, WriteStorageTask
from transferd.blocks.formats import FOOTER_BYTES
from transferd.client.launch import running
from transferd.tasks import Task

CACHE = {"ranks": 1, "layers": 16, "kv_heads": 4, "head_dim": 128, "block_size": 64}
BLOCK_BYTES = 2 * 1024**2


class Transferd(Peer):
    def __init__(self, *, files: bool, full: bool = False) -> None:
        self._files = files
        self._full = full
        self._open = contextlib.ExitStack()

    def prepare(self, order: Order) -> str:
        self._order = order
        cache: dict[str, Any] = CACHE | {
            "device_blocks": order.blocks,
            "host_blocks": 0 if self._files else order.blocks,
        }
        tree: dict[str, Any] = {"cache": cache}
        if self._files:
            file = {"path": str(order.directory / "store"), "direct_io": order.direct}
            if self._full:
                file["capacity"] = (order.blocks + order.blocks // 16) * (order.block_bytes + FOOTER_BYTES)
            tree["storage"] = {"backend": "file", "file": file}
        place = self._open.enter_context(tempfile.TemporaryDirectory(prefix="transferd-peers-"))
        daemon = self._open.enter_context(running(tree, Path(place)))
        self._client = self._open.enter_context(SyncClient(daemon.endpoint))
        planes = self._client.attach(0).values()
        self.areas = [layer.reshape(order.blocks, -1).view(np.uint8) for layers in planes for layer in layers]
        if sum(part.shape[1] for part in self.areas) != order.block_bytes:
            raise ValueError(f"the layout makes blocks of {BLOCK_BYTES} bytes, and {order.block_bytes} are asked for")
        return f"transferd {importlib.metadata.version('transferd')}"

    def store(self, number: int) -> None:
        self._run(
            WriteStorageTask(task_id=f"w{number}", keys=self._keys(number), gpu_block_ids=self._blocks)
            if self._files
            else SwapOutTask(task_id=f"w{number}", gpu_block_ids=self._blocks, cpu_block_ids=self._blocks)
        )

    def load(self, number: int) -> None:
        self._run(
            ReadStorageTask(task_id=f"r{number}", keys=self._keys(number), gpu_block_ids=self._blocks)
            if self._files
            else SwapInTask(task_id=f"r{number}", gpu_block_ids=self._blocks, cpu_block_ids=self._blocks)
        )

    def close(self) -> None:
        self.areas = []
        self._open.close()

    @property
    def _blocks(self) -> list[int]:
        return list(range(self._order.blocks))

    def _keys(self, number: int) -> list[str]:
        return [f"{number}-{block}" for block in self._blocks]

    def _run(self, task: Task) -> None:
        result = self._client.submit(task)
        if result.status is not Status.OK:
            raise OSError(f"the task ended badly: {result}")


if __name__ == "__main__":
    serve(Transferd(files=sys.argv[1] != "memory", full=sys.argv[1] == "full"))
