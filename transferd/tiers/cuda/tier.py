"""One rank's KV cache on an NVIDIA GPU.

Memory of a rank, all of it owned by the tier from `open` to `close`:

    the cache          layout.device.extent bytes, one cudaMalloc (or the engine's, mapped: `attach`)
    staging            2 directions × slots × slot_bytes (2 × 32 MiB; less for a smaller cache)
    timelines          2 MiB
    segment tables     32 bytes for each layer and plane, once for each order of segments in host memory

Copies run in two pipelines, one per direction, with a thread and streams of their own. Ranks share only the compiled
kernel and the device's primary context, which is reference-counted. A copy begins once its blocks are computed: the
engine pushes the task then, or the task names a point of a timeline (`after`), or the engine has recorded the shared
event. The daemon sends the result once the host has seen the copy end (docs/adr/0012, 0043).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.layout.base import Arena, BlockLayout, align
from transferd.config import Config
from transferd.config.sections import CudaSection
from transferd.errors import DeviceLost, RequestError, TierError, TransferError
from transferd.runtime.threads import Direction, Threads, noted
from transferd.tiers.base import DeviceHandle, DeviceTier, HostMemory
from transferd.tiers.cuda.bindings import check_packages, open_daemons_driver
from transferd.tiers.cuda.copy_pipeline import Copy, CopyPipeline, Stopped
from transferd.tiers.cuda.device_resources import DeviceResources
from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.kernel import SLOT_ALIGNMENT
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.cuda.submitter import CopyPath
from transferd.tiers.cuda.tuning import SLOT_BYTES, Tuning
from transferd.tiers.extents import Extents, extents_of
from transferd.tiers.pinned import Pinning

SETTINGS = CudaSection()


class CudaDeviceTier(DeviceTier):
    """A DeviceTier on a GPU. See the module for memory and ordering.

    device: the GPU's CUDA index in this process, or its UUID.
    driver: default: the real one.
    settings: [cuda] of the configuration.
    copy_path, tuning, slot_bytes: for measurements and tests; default: what suits the GPU (tuning.py).
    """

    attaches = True
    timelines = True

    def __init__(
        self,
        layout: BlockLayout,
        rank: int,
        device: int | str,
        threads: Threads,
        *,
        driver: Driver | None = None,
        copy_path: CopyPath | None = None,
        tuning: Tuning | None = None,
        slot_bytes: int = SLOT_BYTES,
        settings: CudaSection = SETTINGS,
    ) -> None:
        self.rank = rank
        self.device = device
        self._layout = layout
        self._threads = threads
        self._driver = driver
        self._copy_path = copy_path
        self._tuning = tuning
        self._settings = settings
        longest = max(segment.nbytes for segment in layout.segments)
        everything = layout.device_blocks * align(layout.block_bytes, SLOT_ALIGNMENT)
        self._slot_bytes = align(max(min(slot_bytes, everything), longest))
        self._resources: DeviceResources | None = None

    @classmethod
    def configured(
        cls, config: Config, layout: BlockLayout, rank: int, device: int | str, threads: Threads
    ) -> CudaDeviceTier:
        """The tier for a rank of a daemon with this configuration."""
        return cls(layout, rank, device, threads, settings=config.cuda)

    @staticmethod
    def pinning(device: int | str) -> Pinning:
        """Pins host memory for this device. Raises TierError without a driver, the device or a matching NVRTC.

        A daemon creates this first for each rank, so these errors appear before any memory is allocated.
        """
        driver = open_daemons_driver()
        check_packages(driver)
        return CudaPinning(device, driver)

    @property
    def arena(self) -> Arena:
        return self.resources.arena

    @property
    def resources(self) -> DeviceResources:
        """The tier's resources on its device, for measurements and checks. Raises TierError if it is not open."""
        if self._resources is None:
            raise TierError(f"the device memory of rank {self.rank} is not open")
        return self._resources

    async def open(self) -> None:
        await self._make(None)

    async def attach(self, handle: DeviceHandle) -> None:
        await self._make(handle)

    async def _make(self, handle: DeviceHandle | None) -> None:
        if self._resources is not None:
            raise TierError(f"the device memory of rank {self.rank} is already open")

        loop = asyncio.get_running_loop()

        def lost(error: DeviceLost) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._tell_lost, str(error))

        def make() -> DeviceResources:
            driver = self._driver if self._driver is not None else open_daemons_driver()
            return DeviceResources(
                driver,
                self.device,
                self._layout,
                self._slot_bytes,
                self._settings,
                handle=handle,
                copy_path=self._copy_path,
                tuning=self._tuning,
                lost=lost,
            )

        self._resources = await self._threads.run(Direction.SETUP, make, "allocating device memory")

    def _tell_lost(self, cause: str) -> None:
        if self.on_lost is not None:
            self.on_lost(cause)

    @property
    def waiting_s(self) -> float:
        return 0.0 if self._resources is None else self._resources.waiting_s

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(self.resources.outward, plan, host)

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(self.resources.inward, plan, host)

    async def reached(self, after: tuple[int, int]) -> None:
        timelines = self.resources.timelines
        if timelines is None:
            raise RequestError(
                f"device {self.device} has no timelines: push tasks once their blocks are computed", code="no_timelines"
            )
        slot, value = after
        if timelines.reached(slot) >= value:
            return
        loop = asyncio.get_running_loop()
        there: asyncio.Future[None] = loop.create_future()

        def passed(error: TransferError | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no waiter
                loop.call_soon_threadsafe(_settle, there, error)

        held = timelines.hold(slot, value, passed)
        try:
            await there
        finally:
            held.withdraw()

    async def _copy(self, pipeline: CopyPipeline, plan: CopyPlan, host: HostMemory) -> None:
        if not plan.nbytes:
            return
        ended = _CopyEnd()
        ended.copy = pipeline.submit(plan, host, ended.completed)
        if (notes := noted.get()) is not None:
            notes.append(ended)
        await ended

    def handle(self) -> DeviceHandle:
        return self.resources.handle()

    def with_timelines(self, handle: DeviceHandle) -> DeviceHandle:
        return self.resources.with_timelines(handle)

    def extents(self) -> Extents:
        """Extents by address: a process maps each allocation once (ipc.py), and no two have the same address."""
        return extents_of(self._layout, self.arena, self.resources.info.uuid)

    async def close(self) -> None:
        resources, self._resources = self._resources, None
        if resources is not None:
            await self._threads.run(Direction.SETUP, resources.close, "closing device memory")

    def statistics(self) -> dict[str, Any]:
        """Bytes of the cache; if open, also of staging, the device's name, and copies by direction and path."""
        report: dict[str, Any] = {"bytes": self._layout.device.extent, "open": self._resources is not None}
        return report | (self._resources.statistics() if self._resources is not None else {})


class _CopyEnd(asyncio.Future[None]):
    """The end of a copy. Cancelling withdraws the copy; if it has begun, the future is done only at its end."""

    copy: Copy

    def cancel(self, msg: object = None) -> bool:
        """False if the copy has begun: it ends soon, and counts as cancelled unless all of its bytes have moved."""
        return not self.done() and self.copy.withdraw() and super().cancel(msg)

    def completed(self, error: TransferError | None) -> None:
        """Report the end of the copy. Called in the pipeline's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no waiter
            self.get_loop().call_soon_threadsafe(self._deliver, error)

    def _deliver(self, error: TransferError | None) -> None:
        if isinstance(error, Stopped):
            super().cancel()
        else:
            _settle(self, error)


def _settle(future: asyncio.Future[None], error: TransferError | None) -> None:
    if future.done():  # its waiter was cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
