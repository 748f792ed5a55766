"""Where the SDK finds a slice's blocks: in device memory or, if other processes may truncate that, in a copy of ours.

The SDK reads and writes at addresses, and no guard of ours (tiers/_guard.c) covers its code. So it never gets the
address of shared memory: the blocks of a slice are copied, guarded, from or to memory that no other process has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from transferd.blocks.copyplan import plan_copy
from transferd.blocks.layout.base import Arena, BlockLayout
from transferd.tiers.hostcopy import copy_runs

Tensors = tuple[list[int], list[int]]
"""The addresses of each layer's key tensor, and of each layer's value tensor."""


def tensors_of(layout: BlockLayout, arena: Arena) -> Tensors:
    """Where the tensors of this memory are."""
    at: dict[str, list[int]] = {"key": [], "value": []}
    for segment, offset in zip(layout.segments, arena.geometry.offsets.tolist(), strict=True):
        at[segment.plane.name].append(arena.origin + offset)
    return at["key"], at["value"]


class OwnBlocks:
    """Memory for a slice. Its block i is block `blocks[i]` of the device."""

    def __init__(self, layout: BlockLayout, device: Arena, blocks: Sequence[int]) -> None:
        count = len(blocks)
        geometry = dataclasses.replace(layout, device_blocks=count, mtp_blocks=count).device
        self._memory = np.empty(geometry.extent, np.uint8)
        self._arena = Arena(geometry, self._memory.ctypes.data)
        self._device, self._blocks = device, blocks
        self.tensors = tensors_of(layout, self._arena)

    def copy_out(self) -> None:
        """Copy all blocks from the device. Raises DeviceLost."""
        plan = plan_copy(self._device.geometry, self._blocks, self._arena.geometry, range(len(self._blocks)))
        copy_runs(self._device.origin, self._arena.origin, plan.runs)

    def copy_in(self, count: int) -> None:
        """Copy the first `count` blocks to the device. Raises DeviceLost."""
        blocks = self._blocks[:count]
        plan = plan_copy(self._arena.geometry, range(len(blocks)), self._device.geometry, blocks)
        copy_runs(self._arena.origin, self._device.origin, plan.runs)
