"""Everything one rank has on its GPU between open and close, created and freed together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import structlog

from transferd.blocks.layout.base import Arena, BlockLayout, align
from transferd.config.sections import CudaSection
from transferd.errors import DeviceLost, RequestError, TierError
from transferd.tiers.arrays import describe
from transferd.tiers.base import DeviceHandle
from transferd.tiers.cuda import ipc
from transferd.tiers.cuda.copy_pipeline import CopyPipeline, EventGate, Pace
from transferd.tiers.cuda.driver import OUT_OF_MEMORY, Driver, find_device
from transferd.tiers.cuda.gate import CLOSE_S
from transferd.tiers.cuda.kernel import give_kernel, source, take_kernel
from transferd.tiers.cuda.owned import CopyHung, Owned
from transferd.tiers.cuda.submitter import CopyPath, KernelTable, upload_order
from transferd.tiers.cuda.timeline import Timelines
from transferd.tiers.cuda.tuning import Tuning, mps_runs, tuning_for
from transferd.tiers.owner import as_data, this_process
from transferd.tiers.pages import locate_offered

log = structlog.get_logger(__name__)

_DEFAULT_STREAM = 0  # for the set-up, before the pipelines exist


class DeviceResources:
    """Context, cache, timelines, kernel, segment table and two pipelines.

    handle: of the engine's cache to map; None: allocate one. event: the event that copies wait for, or 0.
    timelines: None if the device or the driver cannot share words. Creating and closing block. Raises TierError, and
    RequestError for a handle that does not fit; then nothing is left behind.
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
                self.kernel_table = self._kernel_table(image)
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
        """If `error` says that memory ran out, an error that adds how much was free before the clean-up; else None."""
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
            timelines = Timelines(self.driver, self.context)
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

    def _kernel_table(self, image: bytes) -> KernelTable:
        driver = self.driver
        function = take_kernel(driver, self.info.index, image)
        self._owned.add(lambda: give_kernel(driver, self.info.index))
        order = np.arange(len(self.arena.geometry.nbytes))
        main = upload_order(driver, self.arena, order, self._slot_bytes, _DEFAULT_STREAM, self._owned)
        batches = self._settings.batches and driver.batches and self.info.same_address
        return KernelTable(self.arena, function, main, self._slot_bytes, batches, self._tuning)

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
        """Bytes per second that copies out of the device may take now; 0: as many as they can."""
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
            timelines=None if self.timelines is None else self.timelines.exported,
        )
        return DeviceHandle(ipc.KIND, ipc.as_data(data))

    def with_timelines(self, handle: DeviceHandle) -> DeviceHandle:
        if self.timelines is None:
            return handle
        return DeviceHandle(handle.kind, handle.data | {"timelines": msgspec.to_builtins(self.timelines.exported)})

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

    def close(self) -> None:
        """Free everything in reverse order. Idempotent. Raises the first TierError, after the rest.

        Raises CopyHung if a copy does not end. Then it frees nothing and keeps the context until the process ends:
        freeing anything in a context may wait for everything that runs in it.
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
        with contextlib.suppress(DeviceLost):  # the driver freed everything when it lost the context
            try:
                with self.driver.current(context):
                    self._owned.release()
            finally:
                self.driver.release(self.info.index)
