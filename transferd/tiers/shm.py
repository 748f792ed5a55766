"""The device tier without a device: shared memory takes its place, on machines without an accelerator.

Every other tier must match it byte for byte. Daemon and engine map the same memory (segment.py), so they share
"device" blocks without a copy. Either of them may create it.
"""

from __future__ import annotations

import os
from typing import Any

from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.layout.base import Arena, BlockLayout
from transferd.errors import RequestError, TierError
from transferd.runtime.threads import Direction, Threads
from transferd.tiers.arrays import Region, describe, locate_offered
from transferd.tiers.base import INLINE_BYTES, DeviceHandle, DeviceTier, HostMemory
from transferd.tiers.extents import Extents, extents_of
from transferd.tiers.hostcopy import copy_runs
from transferd.tiers.offered import INODE, identity_of, open_offered
from transferd.tiers.owner import as_data, this_process
from transferd.tiers.segment import SharedSegment, fresh_name

KIND = "shm"


class ShmDeviceTier(DeviceTier):
    """One rank's blocks in POSIX shared memory. Owns the segment, or after `attach` a mapping of the engine's."""

    attaches = addressable = True
    outlives_close = True  # a mapping stays valid after the name and the creator are gone

    def __init__(self, layout: BlockLayout, rank: int, device: int, threads: Threads) -> None:
        self.rank = rank
        self.device = device
        self._layout = layout
        self._threads = threads
        self._memory: tuple[SharedSegment, Arena] | None = None

    @property
    def arena(self) -> Arena:
        return self._mapped[1]

    @property
    def _mapped(self) -> tuple[SharedSegment, Arena]:
        if self._memory is None:
            raise TierError(f"the device memory of rank {self.rank} is not open")
        return self._memory

    async def open(self) -> None:
        self._check_closed()
        await self._threads.run(Direction.SETUP, self._create, f"making shared memory of rank {self.rank}")

    def _create(self) -> None:
        """In a thread. It keeps what it has made: if the caller is cancelled meanwhile, only `close` can free it."""
        segment = SharedSegment(fresh_name(f"rank{self.rank}"), self._layout.device.extent, create=True)
        self._memory = segment, Arena(self._layout.device, segment.address)

    async def attach(self, handle: DeviceHandle) -> None:
        self._check_closed()
        # An engine chooses how many places its handle names.
        await self._threads.run(Direction.SETUP, lambda: self._map(handle), f"mapping memory of rank {self.rank}")

    def _map(self, handle: DeviceHandle) -> None:
        self._memory = map_offered(self._layout, handle)

    def resolved(self, handle: DeviceHandle) -> DeviceHandle:
        return resolved(handle)

    def _check_closed(self) -> None:
        if self._memory is not None:
            raise TierError(f"the device memory of rank {self.rank} is already open")

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.OUT, self.arena.origin, host.address, plan)

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.IN, host.address, self.arena.origin, plan)

    async def _copy(self, direction: Direction, source: int, target: int, plan: CopyPlan) -> None:
        if plan.nbytes <= INLINE_BYTES:
            copy_runs(source, target, plan.runs)
        else:
            await self._threads.run(
                direction, lambda: copy_runs(source, target, plan.runs), "copy between device and host"
            )

    def handle(self) -> DeviceHandle:
        return created_handle(self._layout, self._mapped[0])

    def extents(self) -> Extents:
        segment, arena = self._mapped
        return extents_of(self._layout, arena, segment.identity, segment.address)

    async def close(self) -> None:
        if self._memory is not None:
            segment, _ = self._memory
            closing = self._threads.run(Direction.SETUP, segment.close, f"freeing shared memory of rank {self.rank}")
            self._memory = None
            await closing

    def statistics(self) -> dict[str, Any]:
        return {"bytes": self._layout.device.extent, "open": self._memory is not None}


def created_handle(layout: BlockLayout, segment: SharedSegment) -> DeviceHandle:
    """A handle of memory that this process created with the geometry `layout.device`."""
    where = {"name": segment.name} if segment.named else {"fd": segment.descriptor}
    data = {"nbytes": segment.nbytes, "arrays": describe(layout), "owner": as_data(this_process())}
    return DeviceHandle(KIND, where | data)


def map_offered(layout: BlockLayout, handle: DeviceHandle) -> tuple[SharedSegment, Arena]:
    """Map a segment that another process created. The caller owns the mapping, not the segment. Blocks: see `allocate`.

    handle.data: as in `created_handle`; the arrays may lie anywhere in the segment, in any order. Pages have
    `segments` instead (arrays.py), and memory without a name has `fd` instead of `name` (offered.py). Raises
    RequestError if the handle is malformed, not the client's own or does not fit the layout, TierError if it cannot be
    mapped.
    """
    fd, label, nbytes = _opened(handle)
    segment = SharedSegment(label, nbytes, create=False, fd=fd)
    try:
        return segment, locate_offered(layout, handle.data, [Region(segment.address, segment.nbytes)])
    except RequestError:
        segment.close()
        raise


def _opened(handle: DeviceHandle) -> tuple[int, str, int]:
    if handle.kind != KIND:
        what = f"the handle is of kind {handle.kind[:40]!r}; this daemon's device tier needs {KIND!r}"
        raise RequestError(what, code="wrong_kind")
    nbytes = handle.data.get("nbytes")
    if not isinstance(nbytes, int) or nbytes <= 0:
        raise RequestError("the handle names no shared memory: it needs nbytes above 0", code="bad_value")
    if "fd" not in handle.data and not isinstance(handle.data.get("name"), str):
        raise RequestError("the handle names no shared memory: it needs a name, or an fd", code="bad_value")
    return *open_offered(handle.data, nbytes), nbytes


def resolved(handle: DeviceHandle) -> DeviceHandle:
    """The handle, with the identity of the memory to which it leads now. Blocks, and raises, like `map_offered`."""
    fd, _, _ = _opened(handle)
    try:
        return DeviceHandle(handle.kind, handle.data | {INODE: list(identity_of(fd))})
    finally:
        os.close(fd)
