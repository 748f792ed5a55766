"""Routing replay (R3): which experts each token of a block was sent to, moved with the block's KV.

The engine keeps it in shared memory, a row for each token of each device block (`routing_host_buffer.PORT`);
FastDeploy's transfer process of rank 0 copied rows along with the blocks. Here the engine's process does it, before the
engine hears that a transfer has ended: rows for swaps in memory of our own, and an object for each stored block.

A block whose routing is not there counts as not read: training with another prompt's routing would be wrong, silently.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from transferd.adapters.common.link import ENTER_S
from transferd.adapters.fastdeploy.arguments import RoutingShape
from transferd.adapters.fastdeploy.items import Item, StorageItem, SwapItem
from transferd.adapters.fastdeploy.objects import NodeDaemon, Objects
from transferd.blocks.fingerprint import Facts
from transferd.errors import TransferError
from transferd.tasks import Lane, Status, TaskResult

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
NOTHING = -1  # FastDeploy's value of a token without routing, in its unsigned type
KIND = "fastdeploy routing"


class Routing:
    """The routing of one group's blocks. Used on one thread.

    Raises TransferError if the engine's memory is not there, TierError without memory for our own.
    """

    def __init__(self, shape: RoutingShape, port: int, device_blocks: int, host_blocks: int) -> None:
        """port: the engine_worker_queue_port, after which the engine's memory is named."""
        self.shape = shape
        name = f"routing_host_buffer.{port}"
        try:
            with (SHARED_MEMORY / name).open("r+b") as file:
                self._shared = mmap.mmap(file.fileno(), device_blocks * shape.nbytes)
        except (OSError, ValueError) as error:
            raise TransferError(f"routing replay: the engine's memory {name} cannot be used: {error}") from None
        row = (shape.tokens, shape.layers, shape.experts)
        self.device: npt.NDArray[Any] = np.frombuffer(self._shared, dtype=shape.dtype).reshape(device_blocks, *row)
        nothing = np.array(NOTHING).astype(shape.dtype)
        self.host: npt.NDArray[Any] = np.full((host_blocks, *row), nothing, dtype=shape.dtype)
        self._objects: Objects | None = None

    def store_with(self, daemon: NodeDaemon, model: str, facts: Facts, port: int) -> None:
        """Store and load routing through this daemon from now on. Raises TransferError."""
        name = f"fastdeploy-routing-{os.getpid()}-{port}"
        self._objects = Objects(self.shape.nbytes, daemon, model, facts, name, KIND)
        if not self._objects.link.wait_ready(ENTER_S):
            raise TransferError(f"routing replay: the daemon does not take objects of {self.shape.nbytes} bytes")

    def moved(self, item: Item, result: TaskResult) -> TaskResult:
        """Move the routing of what a transfer has moved. The result, with fewer blocks if some routing is missing."""
        if isinstance(item, SwapItem):
            if result.status is Status.OK:
                self._swapped(item)
            return result
        blocks = list(result.block_ids)
        if not blocks or self._objects is None:
            return result
        rows, numbers = self._rows(item, blocks)
        keys = [f"{result.generation}/{key}_routing" for key in list(item.keys)[: len(blocks)]]
        places = [[(int(rows[number].ctypes.data), self.shape.nbytes)] for number in numbers]
        if item.lane is Lane.WRITE:
            self._objects.store(keys, places)
            return result
        there = self._objects.load(keys, places)
        whole = there.index(False) if False in there else len(there)
        if whole == len(blocks):
            return result
        what = "routing replay: %d of %d blocks have no stored routing, so they are not read"
        log.warning(what, len(blocks) - whole, len(blocks))
        return msgspec.structs.replace(result, block_ids=blocks[:whole])

    def _swapped(self, item: SwapItem) -> None:
        device, host = list(item.gpu), list(item.cpu)
        if item.lane is Lane.SWAP_OUT:
            self.host[host] = self.device[device]
        else:
            self.device[device] = self.host[host]

    def _rows(self, item: StorageItem, blocks: Sequence[int]) -> tuple[npt.NDArray[Any], Sequence[int]]:
        """Where the routing of these blocks is: of the device's, or of the host's in a write of evicted blocks."""
        of_host = getattr(item.source, "cpu_block_ids", None) is not None
        return (self.host if of_host else self.device), blocks

    def close(self) -> None:
        if self._objects is not None:
            self._objects.close()
