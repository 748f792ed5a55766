"""The kernel (kernels/move_blocks.cu): its two structs as ctypes, its launch parameters, and its loading."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from transferd.blocks.layout.base import Arena, Geometry
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

    order: the index of each row's segment; None: segment order. packed_offsets: the offset of each row's segment in a
    packed block.
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
class _Loaded:
    module: int
    function: int
    holders: int = 0


_lock = threading.Lock()  # ranks open at the same time: one loads, the others wait for it
_loaded: weakref.WeakKeyDictionary[Driver, dict[int, _Loaded]] = weakref.WeakKeyDictionary()


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
                here[device] = _Loaded(module, driver.function(module, NAME))
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
