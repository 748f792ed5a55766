"""The device tier without a device: shared memory that stands in for it.

It is what the daemon runs on where there is no accelerator, and what every other tier must equal byte
for byte. The engine maps the same memory (segment.py), so "device" blocks are shared without a copy.
"""

from __future__ import annotations

import os
from typing import Any

from transferd.copyplan import CopyPlan
from transferd.errors import TierError
from transferd.layout.base import Arena, BlockLayout
from transferd.offload import Direction, Offload
from transferd.tiers.base import INLINE_BYTES, DeviceHandle, HostMemory
from transferd.tiers.hostcopy import copy_runs
from transferd.tiers.segment import PREFIX, Segment


class ShmDeviceTier:
    """One rank's blocks in POSIX shared memory. Owns the segment between `open` and `close`."""

    def __init__(self, layout: BlockLayout, rank: int, device: int, offload: Offload) -> None:
        self.rank = rank
        self.device = device
        self._layout = layout
        self._offload = offload
        self._segment: Segment | None = None

    @property
    def arena(self) -> Arena:
        return Arena(self._layout.device, self._mapped.address)

    @property
    def _mapped(self) -> Segment:
        if self._segment is None:
            raise TierError(f"the device memory of rank {self.rank} is not open")
        return self._segment

    async def open(self) -> None:
        if self._segment is not None:
            raise TierError(f"the device memory of rank {self.rank} is open already")
        name = f"{PREFIX}{os.getpid()}.{id(self):x}.rank{self.rank}"
        self._segment = Segment(name, self._layout.device.extent, create=True)

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.OUT, self._mapped.address, host.address, plan)

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.IN, host.address, self._mapped.address, plan)

    async def _copy(self, direction: Direction, source: int, target: int, plan: CopyPlan) -> None:
        if plan.nbytes <= INLINE_BYTES:
            copy_runs(source, target, plan.runs)
        else:
            await self._offload.run(direction, lambda: copy_runs(source, target, plan.runs))

    def handle(self) -> DeviceHandle:
        """name and nbytes of the segment, and where each (plane, layer) array lies in it."""
        segment, layout = self._mapped, self._layout
        arrays = [
            {
                "plane": part.plane.name,
                "layer": part.layer,
                "offset": int(offset),
                "shape": [layout.device_blocks_of(part.layer), *part.plane.shape],
                "dtype": part.plane.numpy_dtype.name,
            }
            for part, offset in zip(layout.segments, layout.device.offsets, strict=True)
        ]
        return DeviceHandle("shm", {"name": segment.name, "nbytes": segment.nbytes, "arrays": arrays})

    async def close(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    def statistics(self) -> dict[str, Any]:
        return {"bytes": self._layout.device.extent, "open": self._segment is not None}
