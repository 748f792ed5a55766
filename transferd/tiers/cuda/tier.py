"""One rank's KV cache on an NVIDIA GPU.

Memory of a rank, all of it the tier's own from `open` to `close`:

    the cache          layout.device.extent bytes, one cudaMalloc (or the engine's, mapped: `attach`)
    staging            2 directions × 2 slots × slot_bytes (8 MiB, or the longest segment if that is longer)
    the segment table  32 bytes for each layer and plane

Copies run in two lanes, one each way, with streams of their own. Nothing here is shared between ranks but
the compiled kernel and the device's primary context, which are counted.

The engine's compute and these copies are ordered like this (docs/adr/0012):

* before: the engine pushes a task when what it names was computed, or records the shared event (a field of
  the handle) on its stream and pushes at once; each copy waits, on the device, for what was recorded last;
* after: a result is sent when the host has seen the copy's end, so whatever the engine starts after it
  has a result sees the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.layout.base import Arena, BlockLayout, align
from transferd.errors import TierError
from transferd.runtime.threads import Direction, Threads
from transferd.tiers.base import DeviceHandle, HostMemory
from transferd.tiers.cuda.bindings import open_driver
from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.lane import Lane
from transferd.tiers.cuda.ondevice import OnDevice
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.extents import Extent, extents_of
from transferd.tiers.pinning import Pinning

SLOT_BYTES = 8 * 1024**2  # long enough that submitting a chunk takes a fraction of moving it


class CudaDeviceTier:
    """A DeviceTier on a GPU. Memory and ordering: see the module.

    device: CUDA's index of it in this process. driver: in place of this process's real one. way: see Lane.
    """

    attaches = True

    def __init__(
        self,
        layout: BlockLayout,
        rank: int,
        device: int,
        threads: Threads,
        *,
        driver: Driver | None = None,
        way: str = "",
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self.rank = rank
        self.device = device
        self._layout = layout
        self._threads = threads
        self._driver = driver
        self._way = way
        longest = max(segment.nbytes for segment in layout.segments)
        self._slot_bytes = align(max(slot_bytes, longest))
        self._resident: OnDevice | None = None

    @staticmethod
    def pinning(device: int) -> Pinning:
        """How host memory for this device is pinned. Raises TierError without a driver or without the device."""
        return CudaPinning(device)

    # --- the contract -------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena:
        return self.on_device.arena

    @property
    def on_device(self) -> OnDevice:
        """All that it has there, for measurements and checks. Raises TierError when it is not open."""
        if self._resident is None:
            raise TierError(f"the device memory of rank {self.rank} is not open")
        return self._resident

    async def open(self) -> None:
        await self._make(None)

    async def attach(self, handle: DeviceHandle) -> None:
        await self._make(handle)

    async def _make(self, handle: DeviceHandle | None) -> None:
        if self._resident is not None:
            raise TierError(f"the device memory of rank {self.rank} is open already")

        def make() -> OnDevice:
            driver = self._driver if self._driver is not None else open_driver()
            return OnDevice(driver, self.device, self._layout, self._slot_bytes, handle=handle, way=self._way)

        self._resident = await self._threads.run(Direction.IN, make, "making of device memory")

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.OUT, self.on_device.outward, plan, host)

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.IN, self.on_device.inward, plan, host)

    async def _copy(self, direction: Direction, lane: Lane, plan: CopyPlan, host: HostMemory) -> None:
        if not plan.nbytes:
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def completed(error: TierError | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, ended, error)

        await self._threads.run(direction, lambda: lane.submit(plan, host, completed), "hand-over of a copy")
        await ended

    def handle(self) -> DeviceHandle:
        return self.on_device.handle()

    def extents(self) -> list[Extent]:
        """By address: a process has an allocation mapped once (ipc.py), and no two have the same address."""
        return extents_of(self._layout, self.arena, self.on_device.info.uuid)

    async def close(self) -> None:
        resident, self._resident = self._resident, None
        if resident is not None:
            await self._threads.run(Direction.IN, resident.close, "closing of device memory")

    def statistics(self) -> dict[str, Any]:
        """bytes of the cache; when open also of staging, the device's name, and copies by direction and way."""
        report: dict[str, Any] = {"bytes": self._layout.device.extent, "open": self._resident is not None}
        return report | (self._resident.statistics() if self._resident is not None else {})


def _settle(future: asyncio.Future[None], error: TierError | None) -> None:
    if future.done():  # its waiter was cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
