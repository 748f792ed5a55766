"""Device memory shared between processes: the contents of a "cuda_ipc" handle, and how to export and map one.

The process that allocated the memory with cudaMalloc exports it, and the other process maps it.
The engine may be on either side:

* `create`: `CudaDeviceTier.handle()` exports; the engine maps the handle (`engine.attach`) and gets arrays;
* `attach`: the engine exports what it has allocated (`engine.export`); `CudaDeviceTier.attach` maps it.
  FastDeploy's exchange through named shared memory ends in the same data (`adapters.fastdeploy.memory.handle_of`).

A handle's data consists of plain types:

    device   UUID of the GPU, 32 hex digits: indices differ between processes, the UUID does not
    owner    the allocating process, as owner.as_data() describes it
    regions  [{handle, offset, nbytes}]: the 64 bytes of a CUDA IPC handle in hex, which names a whole
             allocation; where in it the region starts; how long the region is; `into`, see ExportedRegion
    arrays   [{plane, layer, offset, shape, dtype, region}], as for every kind (arrays.py)
    segments [[offset, block_stride, region], …] instead of arrays, if the layout is pages (arrays.py)
    event    the 64 bytes of a CUDA IPC event handle in hex, or "". Copies wait for the work recorded into it
             before they read or write device blocks
    timelines  the words that an engine advances, in memory of the daemon (timeline.py); nil or absent without them

A process maps an allocation only once, however many handles and regions name it. Closing the last `Mapping`
that uses the allocation unmaps it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from transferd.errors import DeviceLost, RequestError, TierError
from transferd.runtime.compat import converted
from transferd.tiers.arrays import MISMATCH, Region
from transferd.tiers.cuda.driver import DeviceInfo, Driver
from transferd.tiers.cuda.owned import Owned
from transferd.tiers.owner import this_process

log = structlog.get_logger(__name__)

KIND = "cuda_ipc"
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
# Smaller allocations of a process share a block of this size, and whoever maps one of them maps the block (CUDA's
# manual, cuIpcGetMemHandle).
BLOCK = 2 * 1024**2


class ExportedRegion(msgspec.Struct, frozen=True, kw_only=True):
    """A range of one allocation."""

    handle: str  # the allocation's IPC handle in hex
    nbytes: int
    offset: int = 0  # where the range starts in it
    into: int = 0  # where the allocation starts in its block of the driver's (see BLOCK); 0 if unknown


class ExportedPage(msgspec.Struct, frozen=True, kw_only=True):
    """A memfd of the daemon's with the words of a rank's timelines (host_words.py)."""

    fd: int  # in the owner's process
    inode: tuple[int, int]  # device and inode
    owner: dict[str, Any]  # as owner.as_data() describes it


class ExportedTimelines(msgspec.Struct, frozen=True, kw_only=True):
    """The words of a rank's timelines."""

    handle: str  # hex of their allocation's IPC handle
    slots: int
    stride: int  # bytes between words
    page: ExportedPage | None = None  # the same words in host memory


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a DeviceHandle of this kind; see the module."""

    device: str
    owner: dict[str, Any]
    regions: list[ExportedRegion]
    arrays: list[dict[str, Any]] = []
    event: str = ""
    timelines: ExportedTimelines | None = None
    segments: list[list[int]] = []


def as_data(handle: CudaHandle) -> dict[str, Any]:
    """Plain data for a DeviceHandle."""
    data: dict[str, Any] = msgspec.to_builtins(handle)
    del data["arrays" if handle.segments else "segments"]
    return data


def read(data: object) -> CudaHandle:
    """Convert plain data to a handle. Raises RequestError if the data is malformed."""
    handle = converted(data, CudaHandle, "the handle cannot be read")
    for region in handle.regions:
        if region.nbytes <= 0 or region.offset < 0 or not 0 <= region.into < BLOCK:
            raise RequestError(f"a region of {region.nbytes} bytes at {region.offset}", code="bad_value")
    words = handle.timelines
    if words is not None and not (words.slots > 0 and words.stride >= 8 and words.slots * words.stride <= 1 << 21):
        raise RequestError(f"{words.slots} timelines of {words.stride} bytes", code="bad_value")
    for text in (handle.event, "" if words is None else words.handle, *(region.handle for region in handle.regions)):
        _bytes_of(text)
    return handle


def _bytes_of(text: str) -> bytes:
    try:
        handle = bytes.fromhex(text)
    except ValueError:
        handle = b"?"
    if text and len(handle) != HANDLE_BYTES:
        raise RequestError(f"an IPC handle is {2 * HANDLE_BYTES} hex digits", code="bad_value")
    return handle


def _contents(handle: CudaHandle, region: int) -> str:
    """What a handle says to be in a region, if that is one array: then one layer's memory is of another size."""
    arrays = [array for array in handle.arrays if array.get("region", 0) == region]
    return f"{arrays[0].get('plane')} of layer {arrays[0].get('layer')}: " if len(arrays) == 1 else ""


class _Allocations:
    """The allocations of other processes that this process has mapped on one device, with a reference count each.

    A finalizer may call `give` at any point where the collector runs, even inside a `take` on the same thread. So
    `give` only queues the handle; a thread that holds the lock, or can take it without waiting, empties the queue.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[bytes, tuple[int, int]] = {}  # handle → address, holders
        self._given: deque[bytes] = deque()

    def take(self, driver: Driver, handle: bytes) -> int:
        try:
            with self._lock:
                address, holders = self._mapped.get(handle) or (driver.open_memory(handle), 0)
                self._mapped[handle] = (address, holders + 1)
                return address
        finally:
            self._settle(driver)

    def give(self, driver: Driver, handle: bytes) -> None:
        self._given.append(handle)
        self._settle(driver)

    def _settle(self, driver: Driver) -> None:
        # A thread checks the queue again after it releases the lock, so no queued handle is left.
        while self._given and self._lock.acquire(blocking=False):
            try:
                while self._given:
                    self._release(driver, self._given.popleft())
            finally:
                self._lock.release()

    def _release(self, driver: Driver, handle: bytes) -> None:
        address, holders = self._mapped.pop(handle)
        if holders > 1:
            self._mapped[handle] = (address, holders - 1)
        else:
            driver.close_memory(address)


_allocations: weakref.WeakKeyDictionary[Driver, dict[str, _Allocations]] = weakref.WeakKeyDictionary()


def _hint(owner: dict[str, Any]) -> str:
    """A known reason why CUDA cannot map the memory of that process; "" if none applies."""
    here = this_process()
    if owner.get("namespace") != here.namespace:
        if owner.get("pid") == here.pid:
            return f". Both processes are number {here.pid}, each in its PID namespace: CUDA takes them for one"
        return ". It is in another PID namespace (container): share it (--pid=host, shareProcessNamespace)"
    try:
        uid = os.stat(f"/proc/{owner.get('pid')}").st_uid
    except OSError:
        return ""
    if uid == os.geteuid():
        return ""
    return f". It runs as user {uid}, this process as {os.geteuid()}: CUDA requires the same user (User= in the unit)"


class Mapping:
    """The regions and the event of a handle, mapped here. Owns the mapping until `close`.

    regions: in the handle's order.
    event: 0 without one, or if it cannot be shared.
    words: the address of the first timeline; 0 without them.
    Requires the device's context to be current, in `close` too.
    Raises RequestError for a handle of another device or of less memory than it claims, TierError if it cannot be
    mapped; then nothing stays mapped.
    """

    def __init__(self, driver: Driver, info: DeviceInfo, handle: CudaHandle) -> None:
        if handle.device != info.uuid:
            problem = f"the memory is on GPU {handle.device[:40]!r}, this rank's is {info.uuid} (device {info.index})"
            raise RequestError(problem, code="wrong_device")
        self.regions: list[Region] = []
        self.event = 0
        self.words = 0
        self._driver = driver
        self._owned = Owned()
        self._allocations = _allocations.setdefault(driver, {}).setdefault(info.uuid, _Allocations())
        try:
            for number, region in enumerate(handle.regions):
                self.regions.append(self._map(region, _contents(handle, number)))
            if handle.event:
                self._open_event(handle)
            if handle.timelines is not None:
                words = handle.timelines
                self.words = self._map(ExportedRegion(handle=words.handle, nbytes=words.slots * words.stride)).address
        except TierError as error:
            self.close()
            pid = handle.owner.get("pid")
            what = f"memory of process {pid} cannot be mapped: {error}{_hint(handle.owner)}"
            raise type(error)(what, code=error.reason) from error
        except RequestError:
            self.close()
            raise

    def _open_event(self, handle: CudaHandle) -> None:
        """Containers with separate /dev/shm cannot share an event; they can share memory and timelines."""
        try:
            self.event = self._driver.open_event(_bytes_of(handle.event))
        except DeviceLost:
            raise
        except TierError as error:
            what = "the event of a shared cache cannot be opened: use its timelines, or share /dev/shm (--ipc=host)"
            log.warning(what, owner=handle.owner.get("pid"), reason=str(error))
            return
        self._owned.add(lambda: self._driver.destroy_event(self.event))

    def _map(self, region: ExportedRegion, contents: str = "") -> Region:
        driver, handle = self._driver, _bytes_of(region.handle)
        address = self._allocations.take(driver, handle)
        self._owned.add(lambda: self._allocations.give(driver, handle))
        address += self._into(address, region)
        room = self._room(address)
        if room is not None and region.offset + region.nbytes > room:
            problem = f"{contents}a region of {region.nbytes} bytes at {region.offset} of an allocation that has {room}"
            raise RequestError(problem, code=MISMATCH)
        return Region(address + region.offset, region.nbytes)

    def _into(self, address: int, region: ExportedRegion) -> int:
        """Bytes from the start of the mapping to the allocation: `into` if the handle names a shared block, else 0.

        A mapping of a whole block begins at a multiple of BLOCK; elsewhere, the mapping's length decides.
        """
        if not region.into or address % BLOCK == region.into:
            return 0
        try:
            start, nbytes = self._driver.address_range(address)
        except DeviceLost:
            raise
        except TierError:
            return 0
        last = region.into + region.offset + region.nbytes
        return region.into if start == address and last <= nbytes else 0

    def _room(self, address: int) -> int | None:
        """Bytes of a mapped allocation; None if the driver does not report them for another process's memory."""
        try:
            start, nbytes = self._driver.address_range(address)
        except DeviceLost:
            raise
        except TierError:
            return None
        return start + nbytes - address

    def keep(self, undo: Callable[[], None]) -> None:
        """Call `undo` when this is closed, first."""
        self._owned.add(undo)

    def close(self) -> None:
        """Unmap. Idempotent. Raises the first TierError, after the rest."""
        self._owned.release()
