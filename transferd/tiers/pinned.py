"""Host memory that stays in place: page-aligned, populated, next to its device, and pinned if that is allowed.

Copies to and from a GPU, and zero-copy transfers over a network, need memory that the kernel does not move. If pinning
is refused, the memory still works, only more slowly: `degraded` says why, and the process logs one warning.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import mmap
import os
import platform
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from transferd.blocks.layout.base import Arena, BlockLayout, align
from transferd.errors import InvariantError, TierError
from transferd.tiers.populate import PROGRESS, give_back, last_error, libc, pieces_of, populate

log = structlog.get_logger(__name__)

# Bytes of one registration. Drivers refused one of 512 GiB (vLLM #51081), and during a registration (0.1 s per GiB) no
# thread of the process can map memory.
REGISTER_MOST = 1024**3
COLLECTIONS, COLLECTION_S = 5, 0.05  # how often to try to collect garbage views, and the seconds between two tries

_collecting = threading.Lock()
_warned = False


class Pinning(Protocol):
    """Pins ranges of host memory. A refusal is an answer, not an error, because unpinned memory also works."""

    @property
    def node(self) -> int | None:
        """The preferred NUMA node of the memory; None for any."""

    def pin(self, address: int, nbytes: int) -> str:
        """Pin the range. Returns "", or why it was refused."""

    def unpin(self, address: int, nbytes: int) -> None:
        """Undo a successful `pin`, once. Raises TierError."""


class MemoryLock:
    """mlock(2). Limited by RLIMIT_MEMLOCK."""

    node: int | None = None

    def pin(self, address: int, nbytes: int) -> str:
        for at, length in pieces_of(address, nbytes):
            if libc.mlock(at, length) != 0:
                problem = last_error()
                libc.munlock(address, at - address)
                return f"{problem}; raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity in the unit)"
        return ""

    def unpin(self, address: int, nbytes: int) -> None:
        for at, length in pieces_of(address, nbytes):
            libc.munlock(at, length)


MEMORY_LOCK = MemoryLock()


class HostRegion:
    """An anonymous range of host memory. Owns it, and its pinning, from `allocate` until `close`.

    grain: no copy crosses a multiple of this many bytes; registrations are cut at such multiples.
    later: the caller calls `allocate` later.
    urgent, rank, lender: see HostMemory; the region's user sets them.
    degraded: why the memory is not pinned; "" if it is.
    misplaced: how it misses its NUMA node; "" if it does not.
    Raises TierError if there is not enough memory.
    """

    def __init__(
        self, nbytes: int, pinning: Pinning = MEMORY_LOCK, *, grain: int = mmap.PAGESIZE, later: bool = False
    ) -> None:
        self.nbytes = align(max(nbytes, 1), mmap.PAGESIZE)
        self._address = 0
        self.pinned = False
        self.urgent = False
        self.rank = 0
        self.lender: Hashable = None
        self.degraded = self.misplaced = ""
        self.view = memoryview(b"")
        self._pinning = pinning
        self._grain = math.lcm(grain, mmap.PAGESIZE)
        self._pieces: list[tuple[int, int]] = []
        if not later:
            self.allocate()

    @property
    def allocated(self) -> bool:
        return self._address != 0

    @property
    def address(self) -> int:
        """Raises InvariantError while there is no memory, so that no one copies to address 0."""
        if not self._address:
            raise InvariantError(f"{self.nbytes} bytes of host memory are in use before or after they exist")
        return self._address

    def allocate(self) -> None:
        """Map, populate and pin, unless that was done. Blocks, mostly without the GIL. Raises TierError."""
        if self.allocated:
            return
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # A plugin may fork: the child gets no copy of the pool, and ours stays on the pages that are registered.
            self._map.madvise(mmap.MADV_DONTFORK)
        except (OSError, ValueError) as error:
            raise TierError(f"cannot allocate {self.nbytes} bytes of host memory: {error}") from error
        self._anchor = (ctypes.c_char * self.nbytes).from_buffer(self._map)
        self.view = memoryview(self._map)
        self._address = ctypes.addressof(self._anchor)
        try:
            self._populate(self._address)
            self._pin()
        except BaseException:
            with contextlib.suppress(TierError):  # the first error is the one to raise
                self.close()
            raise
        if self.degraded:
            _warn(self.degraded)

    def _populate(self, address: int) -> None:
        node = self._pinning.node
        if node is None:
            populate(address, self.nbytes)
            return
        refused = prefer_node(address, self.nbytes, node)  # before the first page exists
        populate(address, self.nbytes, cpus_of_node(node) if refused else ())  # else the touching CPU decides
        where = placement(address, self.nbytes, node)
        self.misplaced = f"{where} (mbind: {refused or 'allowed'})" if where else ""

    def _pin(self) -> None:
        """Pin the region in pieces, see REGISTER_MOST. Raises TierError if the process is ending."""
        step = max(1, REGISTER_MOST // self._grain) * self._grain
        self.degraded = ""
        for offset in range(0, self.nbytes, step):
            PROGRESS.check()
            piece = (self.address + offset, min(step, self.nbytes - offset))
            self.degraded = self._pinning.pin(*piece)
            if self.degraded:
                self._unpin()
                return
            self._pieces.append(piece)
            PROGRESS.add(pinned=piece[1])
        self.pinned = True

    def _unpin(self) -> None:
        first: TierError | None = None
        while self._pieces:
            try:
                self._pinning.unpin(*self._pieces.pop())
            except TierError as error:
                first = first or error
        if first is not None:
            raise first

    def close(self) -> None:
        """Unpin and free the memory, which must have no view in use. Idempotent."""
        address, self._address = self._address, 0
        if not address:
            return
        self.pinned = False
        try:
            self._unpin()
        finally:
            give_back(address, self.nbytes)
            del self._anchor
            self.view.release()
            self._unmap()

    def _unmap(self) -> None:
        with contextlib.suppress(BufferError):
            self._map.close()
            return
        # The traceback of a failed transfer holds the view that it used, in a cycle with the task that raised it.
        # Such views are garbage, but only the collector frees them, and a collection does nothing while another thread
        # collects. The lock keeps out threads that free other ranks' memory; the tries outlast an automatic collection.
        with _collecting:
            for left in reversed(range(COLLECTIONS)):
                gc.collect()
                try:
                    self._map.close()
                    return
                except BufferError as error:
                    if not left:
                        raise TierError(f"host memory is still in use at close: {error}") from error
                threading.Event().wait(COLLECTION_S)  # Python does not report the end of the other collection


def _warn(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning("host memory is not pinned: copies to a device will be slower", reason=reason)


class HostPool:
    """One rank's host tier: `host_blocks` packed blocks. Owns its memory."""

    def __init__(self, layout: BlockLayout, pinning: Pinning = MEMORY_LOCK, *, later: bool = False) -> None:
        """later: the caller calls `memory.allocate` later, as after `close`."""
        self._geometry = layout.host
        grain = int(layout.host.strides[0])
        self.memory = HostRegion(layout.host.extent, pinning, grain=grain, later=later)

    @property
    def arena(self) -> Arena:
        """Where the blocks are. Raises InvariantError while there is no memory."""
        return Arena(self._geometry, self.memory.address)

    def close(self) -> None:
        self.memory.close()


libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
_MBIND = {"x86_64": 237, "aarch64": 235}  # asm/unistd_64.h, asm-generic/unistd.h
_MPOL_PREFERRED = 1  # linux/mempolicy.h: there if it has room, else anywhere


def node_of_pci(address: str, sysfs: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The node next to a PCI device (0000:17:00.0), according to the kernel; None if unknown."""
    try:
        node = int((sysfs / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, nbytes: int, node: int) -> str:
    """Make the kernel take the range's new pages from `node`. Returns "", or why the kernel refused."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < 1024:
        return f"mbind is not supported on {platform.machine()} with node {node}"
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << (node % 64)
    arguments = (ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(_MPOL_PREFERRED))
    if libc.syscall(*arguments, mask, ctypes.c_ulong(words * 64 + 1), ctypes.c_uint(0)) == 0:
        return ""
    return last_error()


def cpus_of_node(node: int, sysfs: Path = Path("/sys/devices/system/node")) -> list[int]:
    """The CPUs of a node that this process may run on; [] if they are unknown."""
    try:
        text = (sysfs / f"node{node}" / "cpulist").read_text().strip()
        spans = [part.partition("-") for part in text.split(",") if part]
        cpus = {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return []
    return sorted(cpus & os.sched_getaffinity(0))


def nodes_of_pages(addresses: Sequence[int]) -> list[int]:
    """The node of the page at each address; negative for an unknown one. Returns [] if the kernel reports none."""
    number, count = _MOVE_PAGES.get(platform.machine()), len(addresses)
    if number is None or not count:
        return []
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)()
    arguments = (ctypes.c_long(number), ctypes.c_int(0), ctypes.c_ulong(count), pages, None, status, ctypes.c_int(0))
    return list(status) if libc.syscall(*arguments) == 0 else []


def placement(address: int, nbytes: int, node: int, samples: int = 64) -> str:
    """Sample pages of a range. Returns "" if all are on the node, else how many are not."""
    step = max(1, nbytes // samples)
    found = [where for where in nodes_of_pages(range(address, address + nbytes, step)) if where >= 0]
    elsewhere = [where for where in found if where != node]
    if not elsewhere:
        return ""
    return f"{len(elsewhere)} of {len(found)} sampled pages are on NUMA node {elsewhere[0]}, the device is on {node}"
