"""The device tier built on Paddle's own operations, for any device that Paddle supports.

Each (plane, layer) is one tensor [blocks, elements]. A copy out gathers rows by index and packs them block by
block on the device, then transfers each piece to pinned host memory at once; a copy in does the reverse. Rows are moved
as the widest integer type whose size divides all of them: Paddle lacks gather and scatter for some element types (3.3:
float16 and float8). It needs no kernel of ours, so it serves XPU and other hardware, more slowly than the cuda tier.

On the CPU place the blocks lie in POSIX shared memory, which an engine maps as with the shm tier, and are copied as
there: Paddle's operations would end the process if another one truncated that memory.

Paddle has one compute stream per process and place, so its operations run in one order. Threads that copy at the
same time do not disturb each other, because each touches only its own rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from transferd.blocks.copyplan import CopyPlan, Moves, plan_copy
from transferd.blocks.layout.base import Arena, BlockLayout
from transferd.errors import InvariantError, TierError
from transferd.runtime.threads import Direction, Threads
from transferd.tiers.base import DeviceHandle, DeviceTier, HostMemory
from transferd.tiers.extents import Extents
from transferd.tiers.hostcopy import copy_runs
from transferd.tiers.paddle_memory import DeviceMemory, SharedMemory, TensorMemory, default_place, import_paddle
from transferd.tiers.paddle_ops import ERRORS, FastDeployOperators, Operators
from transferd.tiers.segment import fresh_name
from transferd.tiers.shm import resolved

PIECE_BYTES = 32 * 1024**2  # moved at once, at least one block: large enough to pay for one operation per layer
SCATTERED = ("int64", "int32")  # types that scatter_ takes; index_put_ takes all and is ten times slower
Int64s = npt.NDArray[np.int64]


class PaddleDeviceTier(DeviceTier):
    """One rank's blocks as paddle tensors. Owns the tensors and their memory from `open` or `attach` until `close`.

    shared: on the CPU place, keep the tensors in shared memory; False uses the code for devices even there.
    operators: share a device's tensors; default: those of an installed FastDeploy, or no sharing without one.
    Raises ConfigError if paddle is not installed.
    """

    device: int
    attaches = True

    def __init__(
        self,
        layout: BlockLayout,
        rank: int,
        device: int,
        threads: Threads,
        *,
        shared: bool = True,
        operators: Operators | None = None,
    ) -> None:
        self.rank = rank
        self.device = device
        self._layout = layout
        self._threads = threads
        self._paddle = import_paddle()
        self.place = default_place(self._paddle, device)
        self._shared = self.addressable = shared and self.place == "cpu"
        self._operators = operators or self._installed_operators()
        self._memory: TensorMemory | None = None
        self._copier: _Copier | None = None

    def _installed_operators(self) -> Operators | None:
        if self.place == "cpu":
            return None
        with contextlib.suppress(TierError):
            return FastDeployOperators(self.place, self._paddle)
        return None

    @property
    def arena(self) -> Arena:
        """The blocks' location. Only the CPU place has real addresses; on a device, offsets only identify arrays."""
        return self._opened.arena

    @property
    def outlives_close(self) -> bool:
        return self._memory is None or self._memory.outlives_close

    async def open(self) -> None:
        await self._make(self._create)

    async def attach(self, handle: DeviceHandle) -> None:
        await self._make(lambda: self._map(handle))

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.OUT, plan, host, lambda copier, moves: copier.gather(moves, host.address))

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.IN, plan, host, lambda copier, moves: copier.scatter(moves, host.address))

    def handle(self) -> DeviceHandle:
        """On the CPU place, a handle like the shm tier's; elsewhere, what FastDeploy's operators have published."""
        return self._opened.handle()

    def resolved(self, handle: DeviceHandle) -> DeviceHandle:
        return resolved(handle) if self._shared else handle

    def extents(self) -> Extents:
        return self._opened.extents()

    async def close(self) -> None:
        memory = self._memory
        if memory is not None:
            closing = self._threads.run(Direction.SETUP, memory.close, f"freeing memory of rank {self.rank}")
            self._memory = self._copier = None
            await closing

    def statistics(self) -> dict[str, Any]:
        return {"bytes": self._layout.device.extent, "open": self._memory is not None, "place": self.place}

    @property
    def _opened(self) -> TensorMemory:
        if self._memory is None:
            raise TierError(f"the device memory of rank {self.rank} is not open")
        return self._memory

    def _create(self) -> TensorMemory:
        if self._shared:
            return SharedMemory.create(self._layout, fresh_name(f"rank{self.rank}"))
        return DeviceMemory.create(self._paddle, self._layout, self.place, self._operators, self.rank, self.device)

    def _map(self, handle: DeviceHandle) -> TensorMemory:
        if self._shared:
            return SharedMemory.attach(self._layout, handle)
        return DeviceMemory.attach(self._paddle, self._layout, self.place, self._operators, handle)

    async def _make(self, make: Callable[[], TensorMemory]) -> None:
        if self._memory is not None:
            raise TierError(f"the device memory of rank {self.rank} is already open")

        def made() -> TensorMemory:  # it keeps the memory: if we are cancelled meanwhile, only `close` can free it
            self._memory = memory = make()
            return memory

        try:
            memory = await self._threads.run(Direction.SETUP, made, f"making or mapping memory of rank {self.rank}")
        except ERRORS as error:
            what = f"rank {self.rank}: cannot allocate or map memory on {self.place}"
            raise TierError(f"{what}: {_line(error)}") from error
        if not self._shared:
            self._copier = _Copier(self._paddle, memory.tensors, self._layout, self.place)

    async def _copy(
        self, direction: Direction, plan: CopyPlan, host: HostMemory, work: Callable[[_Copier, Moves], None]
    ) -> None:
        if self._shared:
            blocks, what = self._opened.arena.origin, "copy between device and host"
            source, target = (blocks, host.address) if direction is Direction.OUT else (host.address, blocks)
            await self._threads.run(direction, lambda: copy_runs(source, target, plan.runs), what)
            return
        copier = self._copier
        if copier is None:
            raise TierError(f"the device memory of rank {self.rank} is not open")
        if not plan.nbytes:
            return
        moves = plan.moves
        if moves is None:
            raise InvariantError("the paddle tier moves only blocks; it cannot execute a plan made only of byte runs")
        try:
            # Always in a thread: one operation costs little, but a plan may need two for each layer and plane.
            await self._threads.run(direction, lambda: work(copier, moves), "copy between device and host")
        except ERRORS as error:
            raise TierError(f"rank {self.rank}: a copy on {self.place} failed: {_line(error)}") from error


class _Copier:
    """Copies blocks between host memory and rows of tensors, one tensor for each segment.

    tensors: the TensorMemory's own list, which its `close` empties. device: the tensors' place.
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

    def gather(self, moves: Moves, host_address: int) -> None:
        """Blocks → host memory. Returns when the last byte is there."""
        for rows, host_ids in self._pieces(moves.source_ids, moves.target_ids):
            index = self._to_device(rows)
            packed = self._paddle.concat([self._paddle.gather(t, index, axis=0) for t in self._tensors], axis=1)
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
        if self._device != "cpu":
            self._paddle.device.synchronize(self._device)

    def _to_device(self, array: npt.NDArray[Any]) -> Any:
        tensor = self._paddle.utils.dlpack.from_dlpack(array)
        return tensor._copy_to(self._place, True)  # noqa: SLF001

    def _pieces(self, rows: Int64s, host_ids: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
        for start in range(0, len(rows), self._most):
            piece = slice(start, start + self._most)
            yield np.ascontiguousarray(rows[piece]), host_ids[piece]


def _pinned_place(paddle: Any, place: Any) -> Any:
    """The kind of host memory that this device reaches fastest."""
    if place.is_gpu_place():
        return paddle.CUDAPinnedPlace()
    if place.is_xpu_place() and hasattr(paddle, "XPUPinnedPlace"):
        return paddle.XPUPinnedPlace()
    return paddle.CPUPlace()


def _line(error: Exception) -> str:
    """The last line with words in it: Paddle's errors are pages long, and that line says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not set(line.strip()) <= set("-=^")]
    return lines[-1] if lines else type(error).__name__
