"""The device tier on Paddle's own operations, for any device that Paddle knows.

Each (plane, layer) is one tensor [blocks, elements]. A copy out gathers rows by index on the device, packs
them block by block there, and brings each piece to pinned host memory in one transfer; a copy in does the
same backwards. A piece is at most PIECE_BYTES, of which the device holds two copies meanwhile. Rows travel
as the widest integer type that divides all of them, since gather and scatter are not there for every
element type (paddle 3.3: none for float16 and float8), and bytes are all that matters.

This is the portable way, not the fastest one: it needs no kernel of ours, so it is how XPU and other
hardware is reached. On NVIDIA GPUs the cuda tier does the same with less.

On the CPU place the tensors lie in POSIX shared memory, which an engine maps like that of the shm tier,
and every operation but the transfer between place and host is the same as on a device.

Operations of one process and place run in one order (Paddle has one compute stream a place), so threads
that copy at the same time do not disturb each other: the rows they touch are theirs.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from transferd.copyplan import CopyPlan, Moves, plan_copy
from transferd.errors import ConfigError, InvariantError, TierError
from transferd.layout.base import Arena, BlockLayout
from transferd.offload import Direction, Offload
from transferd.tiers.base import DeviceHandle, HostMemory
from transferd.tiers.hostcopy import copy_runs
from transferd.tiers.segment import PREFIX, Segment
from transferd.tiers.shm import created_handle, map_offered

PIECE_BYTES = 32 * 1024**2  # gathered or scattered at once, a block at least: an operation for each layer pays
ELEMENTS = (("int64", 8), ("int32", 4), ("int16", 2), ("uint8", 1))  # widest first
SCATTERED = ("int64", "int32")  # types that scatter_ takes; index_put_ takes all and is ten times slower
ERRORS = (RuntimeError, ValueError, OSError, MemoryError)  # what Paddle's enforcements arrive as

Int64s = npt.NDArray[np.int64]


class PaddleDeviceTier:
    """One rank's blocks as paddle tensors. Owns them, and the shared memory under them, from open to close.

    place: such as "cpu" or "xpu:1"; by default this rank's device of the kind that this Paddle was built for.
    shared: lie in shared memory, which only the CPU place can; False makes it do all that a device does.
    Raises ConfigError without paddle.
    """

    attaches = True
    outlives_close = True  # only shared memory is handed out

    def __init__(
        self,
        layout: BlockLayout,
        rank: int,
        device: int,
        offload: Offload,
        *,
        place: str | None = None,
        shared: bool = True,
    ) -> None:
        self.rank = rank
        self.device = device
        self._layout = layout
        self._offload = offload
        self._paddle = _import_paddle()
        self.place = place or _default_place(self._paddle, device)
        self._shared = shared and self.place == "cpu"
        self._cache: _Tensors | None = None
        self._arena: Arena | None = None
        self._segment: Segment | None = None

    # --- the contract -------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena:
        """On the CPU place real addresses; on a device, whose arrays are tensors of their own, names of places only."""
        if self._arena is None:
            raise TierError(f"the device memory of rank {self.rank} is not open")
        return self._arena

    async def open(self) -> None:
        self._check_closed()
        if self._shared:
            name = f"{PREFIX}{os.getpid()}.{id(self):x}.rank{self.rank}"
            segment = Segment(name, self._layout.device.extent, create=True)
            self._over(segment, Arena(self._layout.device, segment.address))
            return
        try:
            self._cache = await self._offload.run(Direction.IN, self._allocate)
        except ERRORS as error:
            raise TierError(f"rank {self.rank}: {self.place} has no room for the cache: {_line(error)}") from error
        self._arena = Arena(self._layout.device, 0)

    async def attach(self, handle: DeviceHandle) -> None:
        self._check_closed()
        if not self._shared:
            raise TierError(f"rank {self.rank}: memory of {self.place} cannot be attached by this tier")
        segment, arena = map_offered(self._layout, handle)
        self._over(segment, arena)

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.OUT, plan, lambda cache, moves: cache.gather(moves, host.address))

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.IN, plan, lambda cache, moves: cache.scatter(moves, host.address))

    def handle(self) -> DeviceHandle:
        """As the shm tier's on the CPU place."""
        if self._cache is None:
            raise TierError(f"the device memory of rank {self.rank} is not open")
        if self._segment is None:
            raise TierError(f"rank {self.rank}: memory of {self.place} cannot be shared with another process")
        return created_handle(self._layout, self._segment)

    async def close(self) -> None:
        segment, cache = self._segment, self._cache
        self._segment = self._cache = self._arena = None
        if cache is not None:
            cache.drop()
        if segment is not None:
            segment.close()

    def statistics(self) -> dict[str, Any]:
        return {"bytes": self._layout.device.extent, "open": self._cache is not None, "place": self.place}

    # --- inside -------------------------------------------------------------------------------------

    def _check_closed(self) -> None:
        if self._cache is not None:
            raise TierError(f"the device memory of rank {self.rank} is open already")

    async def _copy(self, direction: Direction, plan: CopyPlan, work: Callable[[_Tensors, Moves], None]) -> None:
        cache = self._cache
        if cache is None:
            raise TierError(f"the device memory of rank {self.rank} is not open")
        if not plan.nbytes:
            return
        moves = plan.moves
        if moves is None:
            raise InvariantError("the paddle tier moves blocks; a plan of byte runs alone was given")
        try:
            # Always in a thread: one operation costs little, but a plan may need two for each layer and plane.
            await self._offload.run(direction, lambda: work(cache, moves))
        except ERRORS as error:
            raise TierError(f"rank {self.rank}: a copy on {self.place} failed: {_line(error)}") from error

    def _over(self, segment: Segment, arena: Arena) -> None:
        """Make tensors over mapped memory; takes the segment over."""
        memory = np.frombuffer(segment.buffer, dtype=np.uint8)
        element = _element(self._layout, arena)
        tensors: list[Any] = []
        for part, offset in zip(self._layout.segments, arena.geometry.offsets, strict=True):
            start, blocks = arena.origin - segment.address + int(offset), self._layout.device_blocks_of(part.layer)
            array = memory[start : start + blocks * part.nbytes].view(element).reshape(blocks, -1)
            tensors.append(self._paddle.utils.dlpack.from_dlpack(array))
        self._cache = _Tensors(self._paddle, tensors, self._layout, "")
        self._arena, self._segment = arena, segment

    def _allocate(self) -> _Tensors:
        """Tensors on the device, zeroed: what another process left there is none of our readers' business."""
        element = _element(self._layout, Arena(self._layout.device, 0))
        tensors: list[Any] = []
        for part in self._layout.segments:
            shape = (self._layout.device_blocks_of(part.layer), part.nbytes // np.dtype(element).itemsize)
            tensors.append(self._paddle.to_tensor(np.zeros(shape, dtype=element), place=self.place))
        return _Tensors(self._paddle, tensors, self._layout, self.place)


class _Tensors:
    """One tensor for each segment, and copies of blocks between their rows and host memory.

    device: where they are, "" if that is host memory and blocks need no transfer.
    """

    def __init__(self, paddle: Any, tensors: list[Any], layout: BlockLayout, device: str) -> None:
        self._paddle = paddle
        self._tensors = tensors
        self._widths = [tensor.shape[1] for tensor in tensors]
        self._element = str(tensors[0].dtype).removeprefix("paddle.")
        self._device = device
        self._place = tensors[0].place
        self._host_place = _pinned_place(paddle, self._place)
        self._most = max(1, PIECE_BYTES // layout.block_bytes)
        self._packed = layout.packed(self._most, layout.block_bytes)

    def drop(self) -> None:
        """Let go of the tensors: Paddle frees device memory here, also while a copy thread still holds this object."""
        self._tensors.clear()

    def gather(self, moves: Moves, host_address: int) -> None:
        """Blocks → host memory. Returns when the last byte is there."""
        for rows, host_ids in self._pieces(moves.source_ids, moves.target_ids):
            index = self._to_device(rows)
            packed = self._paddle.concat([self._paddle.gather(t, index, axis=0) for t in self._tensors], axis=1)
            if self._device:
                packed = packed._copy_to(self._host_place, True)  # noqa: SLF001 - has no other name; blocks
            out = plan_copy(self._packed, range(len(rows)), moves.target, host_ids.tolist())
            copy_runs(packed.data_ptr(), host_address, out.runs)

    def scatter(self, moves: Moves, host_address: int) -> None:
        """Host memory → blocks. Returns when the device has every byte."""
        for rows, host_ids in self._pieces(moves.target_ids, moves.source_ids):
            packed = np.empty((len(rows), sum(self._widths)), dtype=self._element)
            into = plan_copy(moves.source, host_ids.tolist(), self._packed, range(len(rows)))
            copy_runs(host_address, packed.ctypes.data, into.runs)
            index, parts = self._to_device(rows), self._paddle.split(self._to_device(packed), self._widths, axis=1)
            for tensor, part in zip(self._tensors, parts, strict=True):
                if self._element in SCATTERED:
                    self._paddle.scatter_(tensor, index, part, overwrite=True)
                else:
                    self._paddle.index_put_(tensor, (index,), part)
        if self._device not in ("", "cpu"):
            self._paddle.device.synchronize(self._device)

    def _to_device(self, array: npt.NDArray[Any]) -> Any:
        tensor = self._paddle.utils.dlpack.from_dlpack(array)
        return tensor._copy_to(self._place, True) if self._device else tensor  # noqa: SLF001

    def _pieces(self, rows: Int64s, host_ids: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
        for start in range(0, len(rows), self._most):
            piece = slice(start, start + self._most)
            yield np.ascontiguousarray(rows[piece]), host_ids[piece]


def _element(layout: BlockLayout, arena: Arena) -> str:
    """The widest integer type that divides every row and its place."""
    common = math.gcd(*(part.nbytes for part in layout.segments), *(arena.geometry.offsets + arena.origin).tolist())
    return next(name for name, size in ELEMENTS if common % size == 0)


def _import_paddle() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # at import, of tools for building extensions
            import paddle
            import paddle.utils.dlpack
    except ImportError as error:
        raise ConfigError("cache.device", "needs paddle: pip install 'transferd[paddle]'", "paddle") from error
    return paddle


def _default_place(paddle: Any, device: int) -> str:
    kind = str(paddle.device.get_device()).partition(":")[0]
    return kind if kind == "cpu" else f"{kind}:{device}"


def _pinned_place(paddle: Any, place: Any) -> Any:
    """Host memory that this device reaches best."""
    if place.is_gpu_place():
        return paddle.CUDAPinnedPlace()
    if place.is_xpu_place() and hasattr(paddle, "XPUPinnedPlace"):
        return paddle.XPUPinnedPlace()
    return paddle.CPUPlace()


def _line(error: Exception) -> str:
    """Paddle's errors are pages; the last line with words in it says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not set(line.strip()) <= set("-=^")]
    return lines[-1] if lines else type(error).__name__
