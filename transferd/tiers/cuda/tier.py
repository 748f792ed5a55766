"""One rank's KV cache on an NVIDIA GPU.

Memory of a rank, all of it owned by the tier from `open` to `close`:

    the cache          layout.device.extent bytes, one cudaMalloc (or the engine's, mapped: `attach`)
    staging            2 directions × slots × slot_bytes (2 × 32 MiB; less for a smaller cache)
    timelines          2 MiB
    segment tables     32 bytes for each layer and plane, once for each order of segments in host memory

Copies run in two pipelines, one per direction, each with its own thread and streams. Ranks share only the compiled
kernel and the device's primary context, which is reference-counted. A copy begins once its blocks are computed: the
engine pushes the task then, or the task names a point of a timeline (`after`), or the engine has recorded the shared
event. The daemon sends the result once the host has noticed the copy's end (docs/adr/0012, 0043).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import structlog

from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.layout.base import Arena, BlockLayout, align
from transferd.config import Config
from transferd.config.sections import CudaSection
from transferd.errors import DeviceLost, RequestError, TierError, TransferError
from transferd.runtime.threads import Direction, Threads, noted, start_thread
from transferd.tiers.arrays import describe, locate_offered
from transferd.tiers.base import DeviceHandle, DeviceTier, HostMemory
from transferd.tiers.cuda import ipc, waits
from transferd.tiers.cuda.batches import row_batches_work
from transferd.tiers.cuda.bindings import check_packages, open_daemons_driver
from transferd.tiers.cuda.copy_pipeline import Copy, CopyPipeline, EventGate, Pace, Stopped
from transferd.tiers.cuda.costs import CopyPath
from transferd.tiers.cuda.driver import OUT_OF_MEMORY, Driver, find_device
from transferd.tiers.cuda.kernel import SLOT_ALIGNMENT, give_kernel, source, take_kernel
from transferd.tiers.cuda.owned import CopyHung, Owned
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.cuda.submitter import KernelTable, plan_order, upload_table
from transferd.tiers.cuda.timeline import CLOSE_S, Timelines
from transferd.tiers.cuda.tuning import SLOT_BYTES, Tuning, mps_runs, tuning_for
from transferd.tiers.extents import Extents, extents_of
from transferd.tiers.owner import as_data, this_process
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

        def report(cause: str) -> None:
            if self.on_lost is not None:
                self.on_lost(cause)

        def lost(error: DeviceLost) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(report, str(error))

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
            # First, so that ranks that close together end each other's waits: what frees memory waits for all of them.
            await self._threads.run(Direction.SETUP, resources.stop_waiting, "ending waits for an engine")
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


log = structlog.get_logger(__name__)

_DEFAULT_STREAM = 0  # for the set-up, before the pipelines exist


class DeviceResources:
    """Context, cache, timelines, kernel, segment table and two pipelines.

    handle: of the engine's cache to map; None allocates one.
    event: the event that copies wait for, or 0.
    timelines: None if the device or the driver cannot share words.
    Creating and closing block.
    Raises TierError, and RequestError for a handle that does not fit; then nothing is left behind.
    """

    def __init__(
        self,
        driver: Driver,
        device: int | str,
        layout: BlockLayout,
        slot_bytes: int,
        settings: CudaSection,
        *,
        handle: DeviceHandle | None,
        copy_path: CopyPath | None,
        tuning: Tuning | None = None,
        lost: Callable[[DeviceLost], None] | None = None,
    ) -> None:
        self.info = find_device(driver, device)
        self._mps = mps_runs()
        if self.info.exclusive and not self._mps:
            what = "the GPU lets one process in at a time, so no engine can use it: nvidia-smi -c DEFAULT, or run MPS"
            log.warning(what, device=device, name=self.info.name)
        image = driver.compile(source(), self.info.capability)  # before anything is allocated
        self.driver = driver
        self._lost = lost
        self._layout = layout
        self._slot_bytes = slot_bytes
        self._settings = settings
        self._tuning = tuning or tuning_for(self.info, mps=self._mps)
        self._staging = 2 * self._tuning.slots * slot_bytes
        self._mapped: ipc.Mapping | None = None
        self.event = 0
        self._owned = Owned()
        self._pipelines: list[CopyPipeline] = []
        self.timelines: Timelines | None = None
        self._engine: EventGate | None = None
        self.context = driver.retain(self.info.index)
        try:
            with driver.current(self.context):
                self.arena = self._create() if handle is None else self._map(handle)
                self.timelines = self._timelines()
                self._engine = EventGate(driver, self.context, self.event)
                self._owned.add(self._engine.gate.close)
                self.kernel_table = self._kernel_table(image, copy_path)
                if not self.kernel_table.function:
                    self._staging = 0
                self.inward = self._pipeline(outward=False, copy_path=copy_path)
                self.outward = self._pipeline(outward=True, copy_path=copy_path)
        except BaseException as error:
            problem = None
            with contextlib.suppress(TierError):
                problem = self._with_memory_figures(error)
            self.close()
            if problem is not None:
                raise problem from error
            raise

    def _with_memory_figures(self, error: BaseException) -> TierError | None:
        """For an out-of-memory error, one that adds how much was free before the clean-up; None for any other error."""
        if not isinstance(error, TierError) or error.reason != OUT_OF_MEMORY:
            return None
        with self.driver.current(self.context):
            free, total = self.driver.memory_info()
        need, staging = self._layout.device.extent, self._staging
        return TierError(
            f"device {self.info.index} ({self.info.name}) has too little free memory: the cache needs {need} bytes and "
            f"staging {staging}; {free} of {total} are free; each process's CUDA context has taken about half a GiB",
            code=OUT_OF_MEMORY,
        )

    def _create(self) -> Arena:
        driver, nbytes = self.driver, self._layout.device.extent
        address = driver.allocate(align(nbytes, ipc.BLOCK))  # whole blocks: what shares one is shared along with it
        self._owned.add(lambda: driver.free(address))
        driver.fill(address, 0, nbytes, _DEFAULT_STREAM)  # it may still contain another process's bytes
        driver.synchronize_stream(_DEFAULT_STREAM)
        self.event = self._shared_event()
        return Arena(self._layout.device, address)

    def _shared_event(self) -> int:
        """The event that engines record. 0 if it cannot be shared: engines then push when compute is done."""
        driver, event = self.driver, 0
        try:
            event = driver.create_event(shared=True)
            driver.export_event(event)  # a driver may create such an event and still refuse to share it
        except DeviceLost:
            raise
        except TierError:
            if event:
                driver.destroy_event(event)
            return 0
        self._owned.add(lambda: driver.destroy_event(event))
        return event

    def _timelines(self) -> Timelines | None:
        if not self.info.words:
            return None
        try:
            host = self._tuning.host_words and self.info.same_address
            timelines = Timelines(self.driver, self.context, host=host)
        except DeviceLost:
            raise
        except TierError as error:
            if error.reason == OUT_OF_MEMORY:
                raise
            return None
        self._owned.add(timelines.close)
        return timelines

    def _map(self, handle: DeviceHandle) -> Arena:
        if handle.kind != ipc.KIND:
            what = f"the handle is of kind {handle.kind[:40]!r}; this daemon's device tier needs {ipc.KIND!r}"
            raise RequestError(what, code="wrong_kind")
        mapping = ipc.Mapping(self.driver, self.info, ipc.read(handle.data))
        self._mapped = mapping
        self._owned.add(mapping.close)
        self.event = mapping.event
        return locate_offered(self._layout, handle.data, mapping.regions)

    def _kernel_table(self, image: bytes, copy_path: CopyPath | None) -> KernelTable:
        """Loads the kernel only if blocks are gathered: a block in one piece, or in rows, needs none."""
        driver, tuning = self.driver, self._tuning
        regions = [] if self._mapped is None else self._mapped.regions
        allocations = [(one.address, one.nbytes) for one in regions] or [
            (self.arena.origin, self._layout.device.extent)
        ]
        order, function = np.arange(len(self.arena.geometry.nbytes)), 0
        row_batches = self._settings.batches and self.info.same_address and row_batches_work(driver)
        main, table = plan_order(self.arena, order, self._slot_bytes, allocations, tuning, pairs=row_batches)
        if copy_path == "gather" or (copy_path is None and "gather" in main.usual_ways):
            function = take_kernel(driver, self.info.index, image)
            self._owned.add(lambda: give_kernel(driver, self.info.index))
            main = replace(main, table=upload_table(driver, table, _DEFAULT_STREAM, self._owned))
        return KernelTable(
            self.arena,
            function,
            main,
            self._slot_bytes,
            batches=self._settings.batches and driver.batches and self.info.same_address,
            row_batches=row_batches,
            tuning=tuning,
            allocations=allocations,
        )

    def _pipeline(self, *, outward: bool, copy_path: CopyPath | None) -> CopyPipeline:
        pipeline = CopyPipeline(
            self.driver,
            self.context,
            self.kernel_table,
            outward=outward,
            engine=self._engine,
            copy_path=copy_path,
            lost=self._lost,
            pace=Pace(self._store_rate) if outward else None,
        )
        self._owned.add(pipeline.close)
        self._pipelines.append(pipeline)
        return pipeline

    def _store_rate(self) -> int:
        """Bytes per second that copies out of the device may take now; 0 for no limit."""
        settings = self._settings
        beside = settings.store_rate_beside_loads if self.inward.busy else 0
        return beside or settings.store_rate

    def _stop_gates(self) -> None:
        """Release everything that waits for the engine. Raises CopyHung."""
        if self._engine is not None:
            self._engine.gate.dismiss()
        if self.timelines is not None:
            with contextlib.suppress(DeviceLost):
                self.timelines.stop()
        if self._engine is not None and not self._engine.gate.ended(CLOSE_S):
            raise CopyHung("the GPU never reached the engine's event; the device's memory stays allocated")

    def handle(self) -> DeviceHandle:
        """A handle for an engine that attaches. Raises TierError if an engine allocated the memory."""
        if self._mapped is not None:
            raise TierError("an engine allocated this memory: the daemon has no memory of its own to share")
        driver = self.driver
        with driver.current(self.context):
            exported = driver.export_memory(self.arena.origin).hex()
            event = driver.export_event(self.event).hex() if self.event else ""
        data = ipc.CudaHandle(
            device=self.info.uuid,
            owner=as_data(this_process()),
            regions=[ipc.ExportedRegion(handle=exported, nbytes=self._layout.device.extent)],
            arrays=describe(self._layout),
            event=event,
            timelines=None if self.timelines is None else self.timelines.exported(),
        )
        return DeviceHandle(ipc.KIND, ipc.as_data(data))

    def with_timelines(self, handle: DeviceHandle) -> DeviceHandle:
        if self.timelines is None:
            return handle
        return DeviceHandle(handle.kind, handle.data | {"timelines": msgspec.to_builtins(self.timelines.exported())})

    @property
    def waiting_s(self) -> float:
        return max((pipeline.waiting_s for pipeline in self._pipelines), default=0.0)

    def statistics(self) -> dict[str, Any]:
        return {
            "name": self.info.name,
            "mps": self._mps,
            "staging": self._staging,
            "copies": {"out": dict(self.outward.counts), "in": dict(self.inward.counts)},
            "unregistered": self.outward.submitter.unregistered + self.inward.submitter.unregistered,
            "batches": self.outward.submitter.batching and self.inward.submitter.batching,
            "waits_for": {} if self.timelines is None else {str(k): v for k, v in self.timelines.waiting.items()},
        }

    def stop_waiting(self) -> None:
        """Let everything go that waits for the engine. Idempotent. `close` reports what does not end."""
        with contextlib.suppress(CopyHung, DeviceLost):
            self._stop_gates()

    def close(self) -> None:
        """Free everything in reverse order. Idempotent. Raises the first TierError, after the rest.

        Raises CopyHung if a copy does not end. Then it frees nothing and keeps the context until the process ends:
        freeing anything in a context may wait for everything that runs in it. Raises CopyHung also while a task of
        another rank waits for an engine that hangs; then everything is freed when that wait ends.
        """
        context, self.context = self.context, 0
        if not context:
            return
        hung: CopyHung | None = None
        for stop in (self._stop_gates, *(pipeline.stop for pipeline in self._pipelines)):
            try:
                stop()
            except CopyHung as error:
                hung = hung or error
        if hung is not None:
            raise hung
        try:
            self._free(context, waits.PATIENCE_S)
        except waits.WaitLasts:
            start_thread("transferd-cuda-free", lambda: self._free(context, None))
            raise

    def _free(self, context: int, patience: float | None) -> None:
        apart = waits.waits_of(self.driver, context).apart("freeing device memory", patience)
        with apart, contextlib.suppress(DeviceLost):  # the driver freed everything when it lost the context
            try:
                with self.driver.current(context):
                    self._owned.release()
            finally:
                self.driver.release(self.info.index)
