"""What tests need whose engine brings its own memory: that memory, two tasks, and a look at a result."""

from __future__ import annotations

import os

from transferd.blocks.layout.base import BlockLayout
from transferd.runtime.compat import Self
from transferd.runtime.threads import ThreadPools
from transferd.tasks import ReadStorageTask, TaskResult, WriteStorageTask
from transferd.tiers.base import DeviceHandle
from transferd.tiers.offered import PEER
from transferd.tiers.shm import ShmDeviceTier


class OwnMemory:
    """An engine's own memory for some ranks, in this process, from entry to exit."""

    def __init__(self, layout: BlockLayout, ranks: int) -> None:
        self.layout = layout
        self._threads = ThreadPools(1)
        self._tiers = [ShmDeviceTier(layout, rank, 0, self._threads) for rank in range(ranks)]

    async def __aenter__(self) -> Self:
        for tier in self._tiers:
            await tier.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        for tier in self._tiers:
            await tier.close()
        self._threads.close()

    def handle(self, rank: int = 0) -> DeviceHandle:
        return self._tiers[rank].handle()


def from_me(handle: DeviceHandle) -> DeviceHandle:
    """As the daemon's server passes it on: with the process that the kernel named."""
    return DeviceHandle(handle.kind, handle.data | {PEER: (os.getuid(), os.getpid())})


def write(task_id: str, keys: list[str], blocks: list[int]) -> WriteStorageTask:
    return WriteStorageTask(task_id=task_id, keys=keys, gpu_block_ids=blocks)


def read(task_id: str, keys: list[str], blocks: list[int]) -> ReadStorageTask:
    return ReadStorageTask(task_id=task_id, keys=keys, gpu_block_ids=blocks)


def code(result: TaskResult) -> str | None:
    return None if result.error is None else result.error.code
