"""The device tier without a device: shared memory takes its place, on machines without an accelerator.

Every other tier must match it byte for byte. Daemon and engine map the same memory (segment.py), so they share
"device" blocks without a copy. Either of them may create it.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.layout.base import Arena, BlockLayout
from transferd.errors import RequestError, TierError
from transferd.runtime.threads import Direction, Threads
from transferd.tiers.arrays import Region, describe, locate_offered
from transferd.tiers.base import INLINE_BYTES, DeviceHandle, DeviceTier, HostMemory
from transferd.tiers.extents import Extent, Extents, extents_of
from transferd.tiers.hostcopy import copied, copy_runs
from transferd.tiers.offered import MORE, PASSED, PEER, identity_of, open_offered, with_inodes
from transferd.tiers.owner import as_data, this_process
from transferd.tiers.segment import SharedSegment, fresh_name

KIND = "shm"
MOST_MEMORIES = 64  # of one handle


class ShmDeviceTier(DeviceTier):
    """One rank's blocks in POSIX shared memory. Owns the segment, or after `attach` a mapping of the engine's."""

    attaches = addressable = windows = True
    outlives_close = True  # a mapping stays valid after the name and the creator are gone

    def __init__(self, layout: BlockLayout, rank: int, device: int, threads: Threads) -> None:
        self.rank = rank
        self.device = device
        self._layout = layout
        self._threads = threads
        self._memory: tuple[list[SharedSegment], Arena] | None = None

    @property
    def arena(self) -> Arena:
        return self._mapped[1]

    @property
    def _mapped(self) -> tuple[list[SharedSegment], Arena]:
        if self._memory is None:
            raise TierError(f"the device memory of rank {self.rank} is not open")
        return self._memory

    async def open(self) -> None:
        self._check_closed()
        await self._threads.run(Direction.SETUP, self._create, f"making shared memory of rank {self.rank}")

    def _create(self) -> None:
        """Runs in a thread, and keeps the segment: if the caller is cancelled meanwhile, only `close` can free it."""
        segment = SharedSegment(fresh_name(f"rank{self.rank}"), self._layout.device.extent, create=True)
        self._memory = [segment], Arena(self._layout.device, segment.address)

    async def attach(self, handle: DeviceHandle) -> None:
        self._check_closed()
        # An engine chooses how many places its handle names.
        await self._threads.run(Direction.SETUP, lambda: self._map(handle), f"mapping memory of rank {self.rank}")

    def _map(self, handle: DeviceHandle) -> None:
        self._memory = map_offered(self._layout, handle)

    def resolved(self, handle: DeviceHandle) -> DeviceHandle:
        found: list[tuple[int, int]] = []
        for place in _memories(handle):
            fd, _, _ = _opened(place)
            try:
                found.append(identity_of(fd))
            finally:
                os.close(fd)
        return DeviceHandle(handle.kind, with_inodes(handle.data, found))

    def _check_closed(self) -> None:
        if self._memory is not None:
            raise TierError(f"the device memory of rank {self.rank} is already open")

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.OUT, self._mapped[1].origin, host.address, plan)

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.IN, host.address, self._mapped[1].origin, plan)

    async def _copy(self, direction: Direction, source: int, target: int, plan: CopyPlan) -> None:
        if plan.nbytes <= INLINE_BYTES:
            copy_runs(source, target, plan.runs)
        else:
            await copied(self._threads, direction, source, target, plan.runs, "copy between device and host")

    def handle(self) -> DeviceHandle:
        return created_handle(self._layout, self._mapped[0][0])

    def extents(self) -> Extents:
        segments, arena = self._mapped
        return Extents(_within(segments, one) for one in extents_of(self._layout, arena, None))

    async def close(self) -> None:
        if self._memory is not None:
            segments, _ = self._memory
            what = f"freeing shared memory of rank {self.rank}"
            closing = self._threads.run(Direction.SETUP, lambda: _close(segments), what)
            self._memory = None
            await closing

    def statistics(self) -> dict[str, Any]:
        nbytes = self._layout.device.extent
        if self._layout.windows:  # their sizes do not add up to the memory's
            nbytes = 0 if self._memory is None else self.arena.geometry.extent
        return {"bytes": nbytes, "open": self._memory is not None}


def created_handle(layout: BlockLayout, segment: SharedSegment) -> DeviceHandle:
    """A handle of memory that this process created with the geometry `layout.device`."""
    where = {"name": segment.name} if segment.named else {"fd": segment.descriptor}
    data = {"nbytes": segment.nbytes, "arrays": describe(layout), "owner": as_data(this_process())}
    return DeviceHandle(KIND, where | data)


def _within(segments: list[SharedSegment], one: Extent) -> Extent:
    """An extent of absolute addresses as one of the memory in which it lies."""
    segment = next(some for some in segments if 0 <= one.start - some.address < some.nbytes)
    return one._replace(memory=segment.identity, start=one.start - segment.address)


def _close(segments: list[SharedSegment]) -> None:
    """Close all segments, even if one raises."""
    with contextlib.ExitStack() as stack:
        for segment in segments:
            stack.callback(segment.close)


def map_offered(layout: BlockLayout, handle: DeviceHandle) -> tuple[list[SharedSegment], Arena]:
    """Map segments that another process created. The caller owns the mappings alone. Blocks: see `allocate`.

    handle.data: as in `created_handle`; the arrays may lie anywhere in the segment, in any order. Pages have
    `segments` instead (arrays.py), and memory without a name has `fd` instead of `name` (offered.py).
    Raises RequestError if the handle is malformed, not the client's own or does not fit the layout, TierError if it
    cannot be mapped.
    """
    segments: list[SharedSegment] = []
    try:
        for place in _memories(handle):
            fd, label, nbytes = _opened(place)
            segments.append(SharedSegment(label, nbytes, create=False, fd=fd))
            if segments[-1].identity in [one.identity for one in segments[:-1]]:
                raise RequestError(f"{label} is the same memory as another one of this handle", code="bad_value")
        regions = [Region(one.address, one.nbytes) for one in segments]
        return segments, locate_offered(layout, handle.data, regions)
    except (RequestError, TierError):
        _close(segments)
        raise


def _memories(handle: DeviceHandle) -> list[dict[str, Any]]:
    """The data of each memory that a handle names: its own first, then those under `more`. Raises RequestError."""
    if handle.kind != KIND:
        what = f"the handle is of kind {handle.kind[:40]!r}; this daemon's device tier needs {KIND!r}"
        raise RequestError(what, code="wrong_kind")
    more = handle.data.get(MORE, [])
    if not isinstance(more, list) or not all(isinstance(one, dict) for one in more):
        raise RequestError(f"the handle's {MORE} must be a list of tables", code="bad_value")
    if len(more) >= MOST_MEMORIES:
        what = f"the handle names {len(more) + 1} memories, at most {MOST_MEMORIES} are possible"
        raise RequestError(what, code="bad_value")
    peer, passed = handle.data.get(PEER), handle.data.get(PASSED)
    return [
        {**one, PEER: peer, PASSED: None if passed is None else (passed, which)}
        for which, one in enumerate((handle.data, *more))
    ]


def _opened(data: dict[str, Any]) -> tuple[int, str, int]:
    nbytes = data.get("nbytes")
    if not isinstance(nbytes, int) or nbytes <= 0:
        raise RequestError("the handle names no shared memory: it needs nbytes above 0", code="bad_value")
    if "fd" not in data and not isinstance(data.get("name"), str):
        raise RequestError("the handle names no shared memory: it needs a name, or an fd", code="bad_value")
    return *open_offered(data, nbytes), nbytes
