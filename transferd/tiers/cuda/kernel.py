"""The kernel (kernels/move_blocks.cu): its two structs as ctypes, its launch parameters, and its loading."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transferd.blocks.layout.base import Arena, Geometry, align
from transferd.tiers.cuda.driver import Driver

SOURCE = Path(__file__).parent.parent / "kernels" / "move_blocks.cu"
NAME = "move_blocks"
TILE = 16384  # bytes of one segment: what a thread block moves at a time
MAX_BLOCKS = 448  # cache blocks a launch can name
THREADS = 256  # per thread block; each thread moves four 16-byte vectors of a full tile


class KernelSegment(ctypes.Structure):
    """The location of one segment: in the cache (address of block 0, stride) and in a packed block (offset)."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("stride", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    )


ROW = ctypes.sizeof(KernelSegment)


class Move(ctypes.Structure):
    """The kernel's parameter. reserved makes the padding explicit."""

    _fields_ = (
        ("segments", ctypes.c_uint64),
        ("packed", ctypes.c_uint64),
        ("packed_stride", ctypes.c_int64),
        ("first_segment", ctypes.c_int32),
        ("segment_count", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("tiles", ctypes.c_int32),
        ("gather", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("cache_ids", ctypes.c_int32 * MAX_BLOCKS),
        ("packed_ids", ctypes.c_int32 * MAX_BLOCKS),
    )

    def name_blocks(self, cache_ids: npt.NDArray[np.int64], packed_ids: npt.NDArray[np.int64]) -> None:
        """Set the blocks to move. Both arrays have the same length, at most MAX_BLOCKS."""
        self.blocks = len(cache_ids)
        np.frombuffer(self.cache_ids, dtype=np.int32)[: len(cache_ids)] = cache_ids
        np.frombuffer(self.packed_ids, dtype=np.int32)[: len(packed_ids)] = packed_ids

    def grid(self, most: int) -> int:
        """How many thread blocks to launch: as many as there is work for, at most `most`."""
        return max(1, min(most, int(self.blocks) * int(self.segment_count) * int(self.tiles)))


def segment_table(
    cache: Arena, packed_offsets: npt.NDArray[np.int64], order: npt.NDArray[np.int64] | None = None
) -> bytes:
    """The kernel's table for a cache: one KernelSegment each.

    order: the index of each row's segment; None for segment order.
    packed_offsets: the offset of each row's segment in a packed block.
    """
    geometry = cache.geometry
    if order is None:
        order = np.arange(len(geometry.nbytes))
    table = np.empty((len(order), ROW // 8), dtype=np.int64)
    table[:, 0] = geometry.offsets[order] + cache.origin
    table[:, 1] = geometry.strides[order]
    table[:, 2] = geometry.nbytes[order]
    table[:, 3] = packed_offsets
    return table.tobytes()


def tiles_of(nbytes: npt.NDArray[np.int64]) -> int:
    """Tiles of the longest of these segments."""
    return -(-int(nbytes.max()) // TILE)


@functools.lru_cache(maxsize=64)
def packed_order(geometry: Geometry) -> npt.NDArray[np.int64] | None:
    """The segments in the order of their offsets in a block, if a block is one dense range; otherwise None.

    Our own host pool and staging have segments in the layout's order. FastDeploy's object format stores one plane
    after the other, so its order is different.
    """
    order = np.argsort(geometry.offsets, kind="stable")
    offsets, nbytes = geometry.offsets[order], geometry.nbytes[order]
    dense = (offsets[1:] == offsets[:-1] + nbytes[:-1]).all() and (geometry.strides == geometry.strides[0]).all()
    return order if dense else None


@functools.cache
def source() -> bytes:
    """The kernel's source."""
    return SOURCE.read_bytes()


@dataclass(slots=True)
class _LoadedKernel:
    module: int
    function: int
    holders: int = 0


_lock = threading.Lock()  # ranks open at the same time: one loads, the others wait for it
_loaded: weakref.WeakKeyDictionary[Driver, dict[int, _LoadedKernel]] = weakref.WeakKeyDictionary()


def take_kernel(driver: Driver, device: int, image: bytes) -> int:
    """Load the kernel once on each device of this process, however many ranks use it; return its function.

    Loading may wait for everything that is under way in the context (CUDA's guide, lazy loading), so for as long as
    another rank waits for its engine. The first rank on a device loads it, when no rank can be waiting there.

    Give it back with `give_kernel`. Needs the device's context. Raises TierError.
    """
    with _lock:
        here = _loaded.setdefault(driver, {})
        if device not in here:
            module = driver.load(image)
            try:
                here[device] = _LoadedKernel(module, driver.function(module, NAME))
            except BaseException:
                driver.unload(module)
                raise
        here[device].holders += 1
        return here[device].function


def give_kernel(driver: Driver, device: int) -> None:
    """The last holder's call unloads the kernel. Needs the device's context. Raises TierError."""
    with _lock:
        held = _loaded[driver][device]
        held.holders -= 1
        if not held.holders:
            del _loaded[driver][device]
            driver.unload(held.module)


SLOT_ALIGNMENT = 16  # bytes: the kernel moves 16-byte vectors


class BlockPart(NamedTuple):
    """Consecutive segments of a block that fit a slot together. offset, nbytes: in the packed block."""

    first_segment: int
    segments: int
    offset: int
    nbytes: int
    tiles: int  # of its longest segment, for the kernel


class CopyChunk(NamedTuple):
    """One part of the blocks at positions start … stop-1 of the copy."""

    start: int
    stop: int
    part: BlockPart


class Cutter:
    """Cuts copies of blocks of one shape.

    nbytes: int64 [segments].
    slot_bytes: at least the longest segment.
    stride: bytes from block to block in a slot.
    offsets: the start of each segment in a packed block.
    parts: those of one block.
    blocks: the most blocks in a chunk; a block of several parts has its chunks to itself.
    """

    def __init__(self, nbytes: npt.NDArray[np.int64], slot_bytes: int) -> None:
        self.stride = align(int(nbytes.sum()), SLOT_ALIGNMENT)
        ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(nbytes)))
        self.offsets: npt.NDArray[np.int64] = ends[:-1]
        self.parts = _parts(nbytes, ends, slot_bytes)
        self.blocks = max(1, min(MAX_BLOCKS, slot_bytes // self.stride))

    def cut(self, blocks: int) -> Iterator[CopyChunk]:
        """Chunks of a copy of `blocks` blocks, in its order: several blocks each, or parts of one block."""
        for start in range(0, blocks, self.blocks):
            for part in self.parts:
                yield CopyChunk(start, min(start + self.blocks, blocks), part)


def _parts(nbytes: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], slot_bytes: int) -> list[BlockPart]:
    """The whole block if it fits, otherwise parts of as many segments as fit. ends: 0, then each segment's end."""
    parts: list[BlockPart] = []
    first = 0
    while first < len(nbytes):
        last = int(np.searchsorted(ends, ends[first] + slot_bytes, side="right")) - 1
        assert last > first, "a slot holds the longest segment"
        inside = nbytes[first:last]
        parts.append(BlockPart(first, last - first, int(ends[first]), int(inside.sum()), tiles_of(inside)))
        first = last
    return parts


Runs = npt.NDArray[np.int64]


class SlotDmas:
    """The DMAs between slots and host memory for a whole copy, computed once; each chunk uses some of them.

    hosts: uint64, host addresses.
    offsets: uint64, where in its slot each DMA begins.
    sizes: uint64.
    first: the index of each chunk's first DMA, in the order of `Cutter.cut`, then the number of DMAs.
    """

    def __init__(self, cutter: Cutter, places: Runs, stride: int, cuts: Sequence[int], most: int) -> None:
        """Compute the DMAs of one copy.

        places: int64, where each block of the copy begins in host memory.
        most: the most bytes of one DMA.
        stride: bytes from host block to host block.
        cuts: addresses that no DMA may cross.
        """
        rows = _rows(cutter, places)
        if stride == cutter.stride == int(rows[0, 2]):  # dense on both sides: blocks with consecutive ids are one run
            rows = _joined(rows, cuts)
        rows = shortened(rows, most)
        self.hosts, self.offsets, self.sizes = (np.ascontiguousarray(rows[:, i]).view(np.uint64) for i in range(3))
        chunks = int(rows[-1, 3]) + 1
        self.first: list[int] = np.searchsorted(rows[:, 3], np.arange(chunks + 1)).tolist()


def _rows(cutter: Cutter, places: Runs) -> Runs:
    """[host address, offset in the slot, bytes, chunk] of each part of each block."""
    parts = cutter.parts
    count = len(places) * len(parts)
    rows = np.zeros((count, 4), dtype=np.int64)
    rows[:, 0] = (places[:, None] + np.array([part.offset for part in parts])).ravel()
    rows[:, 2] = np.tile([part.nbytes for part in parts], len(places))
    number = np.arange(count)
    rows[:, 1] = number % cutter.blocks * cutter.stride
    rows[:, 3] = number // cutter.blocks
    return rows


def _joined(rows: Runs, cuts: Sequence[int]) -> Runs:
    """Join each row with the row before it if the two are adjacent within the same chunk."""
    continues = (rows[1:, 0] == rows[:-1, 0] + rows[:-1, 2]) & (rows[1:, 3] == rows[:-1, 3])
    if not continues.any():
        return rows
    if len(cuts):
        continues &= ~np.isin(rows[1:, 0], np.array(cuts, dtype=np.int64))
    starts = np.flatnonzero(np.concatenate((np.ones(1, dtype=bool), ~continues)))
    joined = rows[starts]
    joined[:, 2] = np.add.reduceat(rows[:, 2], starts)
    return joined


def cut(runs: Runs, column: int, addresses: Sequence[int], origin: int) -> Runs:
    """Split runs at these addresses. column: the one with offsets from `origin`."""
    for address in addresses:
        start, end = runs[:, column], runs[:, column] + runs[:, 2]
        crosses = (start < address - origin) & (address - origin < end)
        if not crosses.any():
            continue
        second = runs[crosses].copy()
        length = address - origin - second[:, column]
        runs = runs.copy()
        runs[crosses, 2] = length
        second[:, :2] += length[:, None]
        second[:, 2] -= length
        runs = np.concatenate((runs, second))
    return np.ascontiguousarray(runs)


def shortened(runs: Runs, most: int) -> Runs:
    """Split runs into pieces of at most `most` bytes, in order. Further columns stay as they are."""
    if not len(runs) or int(runs[:, 2].max()) <= most:
        return runs
    counts = -(-runs[:, 2] // most)
    pieces = np.repeat(runs, counts, axis=0)
    number = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces[:, :2] += (number * most)[:, None]
    pieces[:, 2] = np.minimum(most, pieces[:, 2] - number * most)
    return np.ascontiguousarray(pieces)
