"""What one rank has on its GPU between open and close, made and freed as one."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from transferd.blocks.layout.base import Arena, BlockLayout
from transferd.errors import DeviceLost, RequestError, TierError
from transferd.tiers.arrays import describe, locate
from transferd.tiers.base import DeviceHandle
from transferd.tiers.cuda import ipc
from transferd.tiers.cuda.chunks import Cutter
from transferd.tiers.cuda.device import find_device
from transferd.tiers.cuda.driver import OUT_OF_MEMORY, Driver
from transferd.tiers.cuda.kernel import NAME, segment_table, source
from transferd.tiers.cuda.lane import SLOTS, Lane, Program
from transferd.tiers.cuda.owned import Owned, Stuck
from transferd.tiers.owner import as_data, this_process

_DEFAULT_STREAM = 0  # for what happens once, before there are lanes


class OnDevice:
    """Context, cache (allocated, or the engine's mapped when `handle` is given), kernel, segment table, two lanes.

    event: what copies wait for, or 0. Blocks while it is made and closed. Raises TierError, and RequestError
    for a handle that does not fit; then nothing is left behind.
    """

    def __init__(
        self,
        driver: Driver,
        device: int,
        layout: BlockLayout,
        slot_bytes: int,
        *,
        handle: DeviceHandle | None,
        way: str,
    ) -> None:
        self.info = find_device(driver, device)
        self.driver = driver
        self._layout = layout
        self._slot_bytes = slot_bytes
        self._mapped: ipc.Mapping | None = None
        self.event = 0
        self._owned = Owned()
        self._lanes: list[Lane] = []
        self.context = driver.retain(device)
        try:
            with driver.current(self.context):
                self.arena = self._create() if handle is None else self._map(handle)
                self.program = self._program()
                self.outward = self._lane(outward=True, way=way)
                self.inward = self._lane(outward=False, way=way)
        except BaseException as error:
            problem = None
            with contextlib.suppress(TierError):
                problem = self._explain(error)
            self.close()
            if problem is not None:
                raise problem from error
            raise

    def _explain(self, error: BaseException) -> TierError | None:
        """Out of memory says how much there was, before anything is freed again."""
        if not isinstance(error, TierError) or error.reason != OUT_OF_MEMORY:
            return None
        with self.driver.current(self.context):
            free, total = self.driver.memory_info()
        need, staging = self._layout.device.extent, 2 * SLOTS * self._slot_bytes
        return TierError(
            f"device {self.info.index} ({self.info.name}) has no room: the cache needs {need} bytes and staging "
            f"{staging}; {free} of {total} are free now",
            code=OUT_OF_MEMORY,
        )

    def _create(self) -> Arena:
        driver, nbytes = self.driver, self._layout.device.extent
        address = self._allocate(nbytes)
        driver.fill(address, 0, nbytes, _DEFAULT_STREAM)  # nothing of anyone's is in it
        driver.synchronize_stream(_DEFAULT_STREAM)
        self.event = self._shared_event()
        return Arena(self._layout.device, address)

    def _shared_event(self) -> int:
        """What engines record; 0 where that cannot be: the handle has none, and engines push when compute is done."""
        driver, event = self.driver, 0
        try:
            event = driver.create_event(shared=True)
            driver.export_event(event)  # an event may be made, and still not be shared
        except DeviceLost:
            raise
        except TierError:
            if event:
                driver.destroy_event(event)
            return 0
        self._owned.add(lambda: driver.destroy_event(event))
        return event

    def _map(self, handle: DeviceHandle) -> Arena:
        if handle.kind != ipc.KIND:
            raise RequestError(f"a handle of kind {handle.kind[:40]!r}; {ipc.KIND!r} is needed", code="wrong_kind")
        mapping = ipc.Mapping(self.driver, self.info, ipc.read(handle.data))
        self._mapped = mapping
        self._owned.add(mapping.close)
        self.event = mapping.event
        return locate(self._layout, handle.data.get("arrays"), mapping.regions)

    def _allocate(self, nbytes: int) -> int:
        address = self.driver.allocate(nbytes)
        self._owned.add(lambda: self.driver.free(address))
        return address

    def _program(self) -> Program:
        driver = self.driver
        module = driver.load(driver.compile(source(), self.info.capability))
        self._owned.add(lambda: driver.unload(module))
        nbytes = self.arena.geometry.nbytes
        cutter = Cutter(nbytes, self._slot_bytes)
        table = segment_table(self.arena, cutter.offsets)
        address = self._allocate(len(table))
        text = ctypes.create_string_buffer(table, len(table))
        driver.copy(address, ctypes.addressof(text), len(table), _DEFAULT_STREAM)
        driver.synchronize_stream(_DEFAULT_STREAM)
        return Program(self.arena, driver.function(module, NAME), address, cutter, self._slot_bytes)

    def _lane(self, *, outward: bool, way: str) -> Lane:
        lane = Lane(self.driver, self.context, self.program, outward=outward, caller=self.event, way=way)
        self._owned.add(lane.close)
        self._lanes.append(lane)
        return lane

    def handle(self) -> DeviceHandle:
        """For an engine that attaches. Raises TierError for memory that an engine made."""
        if self._mapped is not None:
            raise TierError("this memory was made by an engine: the daemon has nothing of its own to share")
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
        )
        return DeviceHandle(ipc.KIND, ipc.as_data(data))

    def statistics(self) -> dict[str, Any]:
        return {
            "name": self.info.name,
            "staging": 2 * SLOTS * self._slot_bytes,
            "copies": {"out": dict(self.outward.counts), "in": dict(self.inward.counts)},
        }

    def close(self) -> None:
        """Free everything, the last thing first. Idempotent. Raises the first TierError, after the rest.

        Raises Stuck when a copy does not end. Then nothing is freed and the context is kept, both until the
        process ends: freeing anything in a context may wait for all that is under way in it.
        """
        context, self.context = self.context, 0
        if not context:
            return
        stuck: Stuck | None = None
        for lane in self._lanes:
            try:
                lane.stop()
            except Stuck as error:
                stuck = stuck or error
        if stuck is not None:
            raise stuck
        with contextlib.suppress(DeviceLost):  # the driver took everything when it lost the context
            try:
                with self.driver.current(context):
                    self._owned.release()
            finally:
                self.driver.release(self.info.index)
