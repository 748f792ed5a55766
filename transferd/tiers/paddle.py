"""The device tier built on Paddle's own operations, for any device that Paddle supports.

Each (plane, layer) is one tensor [blocks, elements]. A copy out gathers rows by index and packs them block by
block on the device, then transfers each piece to pinned host memory at once; a copy in does the reverse. Rows move as
integers of the largest size that divides all of them: Paddle lacks gather and scatter for some element types (3.3:
float16 and float8). It needs no kernel of ours, so it serves XPU and other hardware, more slowly than the cuda tier.

On the CPU place there is no device: there the shm tier serves, and engines map its memory as tensors
(adapters/paddle.py).

Paddle has one compute stream per process and place, so its operations run in one order. Threads that copy at the
same time do not disturb each other, because each touches only its own rows.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transferd.blocks.copyplan import CopyPlan, Moves, plan_copy
from transferd.blocks.layout.base import Arena, BlockLayout
from transferd.config import Config
from transferd.errors import ConfigError, EngineGone, InvariantError, RequestError, TierError
from transferd.runtime.threads import Direction, Threads
from transferd.tiers.arrays import Region, describe, locate
from transferd.tiers.base import DeviceHandle, DeviceTier, HostMemory
from transferd.tiers.extents import Extent, Extents
from transferd.tiers.fastdeploy import segment_name
from transferd.tiers.hostcopy import copy_runs
from transferd.tiers.offered import DIRECTORY, check_name
from transferd.tiers.owner import as_data, this_process
from transferd.tiers.shm import ShmDeviceTier

PIECE_BYTES = 32 * 1024**2  # moved at once, at least one block: large enough to pay for one operation per layer
SCATTERED = ("int64", "int32")  # types that scatter_ takes; index_put_ takes all and is ten times slower
Int64s = npt.NDArray[np.int64]


class PaddleDeviceTier(DeviceTier):
    """One rank's blocks as paddle tensors on a device, one for each segment.

    Owns the tensors and their memory from `open` or `attach` on: Paddle has allocated them, and operators published
    them, or they were adopted from another process. Without operators, no other process can share the memory.

    operators: default: those of an installed FastDeploy, or no sharing without one.
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
        operators: FastDeployOperators | None = None,
    ) -> None:
        self.rank = rank
        self.device = device
        self._layout = layout
        self._threads = threads
        self._paddle = import_paddle()
        self.place = default_place(self._paddle, device)
        self._operators = operators
        if operators is None:
            with contextlib.suppress(TierError):
                self._operators = FastDeployOperators(self.place, self._paddle)
        self._arena = Arena(layout.device, 0)
        self._tensors: list[Any] = []  # of the widest type; empty unless it is open
        self._held: list[tuple[Any, str]] = []  # the same memory, as bytes, and the names under which operators know it
        self._adopted = False
        self._most = max(1, PIECE_BYTES // layout.block_bytes)
        self._packed = layout.packed(self._most, layout.block_bytes)

    @classmethod
    def configured(
        cls, config: Config, layout: BlockLayout, rank: int, device: int | str, threads: Threads
    ) -> DeviceTier:
        """The tier for a rank of a daemon with this configuration."""
        if default_place(import_paddle(), device) == "cpu":
            return ShmDeviceTier.configured(config, layout, rank, device, threads)
        return super().configured(config, layout, rank, device, threads)

    @property
    def arena(self) -> Arena:
        """The blocks' location. It has no real addresses: offsets only identify arrays."""
        self._check_open()
        return self._arena

    async def open(self) -> None:
        await self._make(self._create)

    async def attach(self, handle: DeviceHandle) -> None:
        await self._make(lambda: self._adopt(handle))

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.OUT, plan, lambda moves: self._gather(moves, host.address))

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy(Direction.IN, plan, lambda moves: self._scatter(moves, host.address))

    def handle(self) -> DeviceHandle:
        """What FastDeploy's operators have published."""
        self._check_open()
        if self._adopted or self._operators is None:
            raise TierError(f"memory of {self.place} cannot be shared with another process without operators for it")
        return handle_of(self._layout, self.rank, self.device, self.place)

    def extents(self) -> Extents:
        """Each tensor's extent twice: by address, and by name for drivers that map one allocation at two addresses."""
        self._check_open()
        made: list[Extent] = []
        for tensor, name in self._held:
            start = int(tensor.data_ptr())
            made += [Extent(self.place, start, int(tensor.size)), Extent(("published", name), 0, 1)]
        return Extents(made)

    async def close(self) -> None:
        if self._tensors:
            await self._threads.run(Direction.SETUP, self._free, f"freeing memory of rank {self.rank}")

    def statistics(self) -> dict[str, Any]:
        return {"bytes": self._layout.device.extent, "open": bool(self._tensors), "place": self.place}

    def _check_open(self) -> None:
        if not self._tensors:
            raise TierError(f"the device memory of rank {self.rank} is not open")

    async def _make(self, fill: Callable[[], None]) -> None:
        if self._tensors:
            raise TierError(f"the device memory of rank {self.rank} is already open")

        def make() -> None:
            try:
                fill()
            except BaseException:
                self._free()
                raise

        try:
            await self._threads.run(Direction.SETUP, make, f"making or mapping memory of rank {self.rank}")
        except ERRORS as error:
            what = f"rank {self.rank}: cannot allocate or map memory on {self.place}"
            raise TierError(f"{what}: {_line(error)}") from error

    async def _copy(self, direction: Direction, plan: CopyPlan, work: Callable[[Moves], None]) -> None:
        self._check_open()
        if not plan.nbytes:
            return
        moves = plan.moves
        if moves is None:
            raise InvariantError("the paddle tier moves only blocks; it cannot execute a plan made only of byte runs")
        try:
            # Always in a thread: one operation costs little, but a plan may need two for each layer and plane.
            await self._threads.run(direction, lambda: work(moves), "copy between device and host")
        except ERRORS as error:
            raise TierError(f"rank {self.rank}: a copy on {self.place} failed: {_line(error)}") from error

    # --- in a thread --------------------------------------------------------------------------------

    def _create(self) -> None:
        """Allocate zeroed tensors and publish them. Raises Paddle's own errors."""
        self._adopted, name = False, ""
        for part in self._layout.segments:
            zeros = np.zeros((self._layout.device_blocks_of(part.layer), part.nbytes), dtype=np.uint8)
            tensor = self._paddle.to_tensor(zeros, place=self.place)
            if self._operators is not None:
                name = segment_name(part.plane.name, part.layer, self.rank, self.device)
                self._operators.publish(tensor, name)
            self._take(tensor, name)

    def _adopt(self, handle: DeviceHandle) -> None:
        """Adopt the tensors that a handle names. Raises RequestError, TierError, and Paddle's own errors."""
        if handle.kind != KIND or self._operators is None:
            what = f"attaching memory of {self.place} needs FastDeploy's operators and a handle of kind {KIND!r}"
            raise TierError(f"{what}; this one is of kind {handle.kind[:40]!r}")
        self._adopted = True
        for part, name in zip(self._layout.segments, names_of(self._layout, handle), strict=True):
            shape = [self._layout.device_blocks_of(part.layer), part.nbytes]
            self._take(self._operators.adopt(name, shape), name)

    def _take(self, tensor: Any, name: str) -> None:
        self._held.append((tensor, name))
        wide = tensor.view(_element(self._layout, self._arena))
        shares = wide.data_ptr() == tensor.data_ptr()  # False on devices where a view is a copy
        self._tensors.append(wide if shares else tensor)

    def _free(self) -> None:
        """Free or unmap the tensors."""
        self._tensors.clear()
        held, self._held = self._held, []
        for tensor, name in held:
            if self._operators is not None and name:
                self._operators.withdraw(tensor, name, adopted=self._adopted)

    def _gather(self, moves: Moves, host_address: int) -> None:
        """Blocks → host memory. Returns when the last byte is there."""
        for rows, host_ids in self._pieces(moves.source_ids, moves.target_ids):
            index = self._to_device(rows)
            packed = self._paddle.concat([self._paddle.gather(t, index, axis=0) for t in self._tensors], axis=1)
            packed = packed._copy_to(_pinned_place(self._paddle, packed.place), True)  # noqa: SLF001 - has no other name
            out = plan_copy(self._packed, range(len(rows)), moves.target, host_ids.tolist())
            copy_runs(packed.data_ptr(), host_address, out.runs)

    def _scatter(self, moves: Moves, host_address: int) -> None:
        """Host memory → blocks. Returns when the device has every byte."""
        widths = [tensor.shape[1] for tensor in self._tensors]
        element = str(self._tensors[0].dtype).removeprefix("paddle.")
        for rows, host_ids in self._pieces(moves.target_ids, moves.source_ids):
            packed = np.empty((len(rows), sum(widths)), dtype=element)
            into = plan_copy(moves.source, host_ids.tolist(), self._packed, range(len(rows)))
            copy_runs(host_address, packed.ctypes.data, into.runs)
            index, parts = self._to_device(rows), self._paddle.split(self._to_device(packed), widths, axis=1)
            for tensor, part in zip(self._tensors, parts, strict=True):
                if element in SCATTERED:
                    self._paddle.scatter_(tensor, index, part, overwrite=True)
                else:
                    self._paddle.index_put_(tensor, (index,), part)
        if self.place != "cpu":
            self._paddle.device.synchronize(self.place)

    def _to_device(self, array: npt.NDArray[Any]) -> Any:
        tensor = self._paddle.utils.dlpack.from_dlpack(array)
        return tensor._copy_to(self._tensors[0].place, True)  # noqa: SLF001

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
    """The last line with words in it: Paddle's errors are pages long, and that line names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not set(line.strip()) <= set("-=^")]
    return lines[-1] if lines else type(error).__name__


ELEMENTS = (("int64", 8), ("int32", 4), ("int16", 2), ("uint8", 1))  # widest first


def import_paddle() -> Any:
    """The module `paddle`. Raises ConfigError if it cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # paddle's import warns about tools for building extensions
            import paddle
            import paddle.utils.dlpack
    except ImportError as error:
        raise ConfigError("cache.device", "needs paddle: pip install 'transferd[paddle]'", "paddle") from error
    return paddle


def default_place(paddle: Any, device: int | str) -> str:
    """The name of the device with this index, of the kind that this Paddle was built for."""
    kind = str(paddle.device.get_device()).partition(":")[0]
    return kind if kind == "cpu" else f"{kind}:{device}"


def _element(layout: BlockLayout, arena: Arena) -> str:
    """The widest integer type that divides every row and its offset."""
    common = math.gcd(*(part.nbytes for part in layout.segments), *(arena.geometry.offsets + arena.origin).tolist())
    return next(name for name, size in ELEMENTS if common % size == 0)


KIND = "fastdeploy_ops"
ERRORS = (RuntimeError, ValueError, OSError, MemoryError)  # the types that Paddle's own errors have


# Paddle has no portable call to share tensors: CUDA, XPU and others each have their own handles. FastDeploy builds one
# set of operators per device, always under the same names:
#
#     set_data_ipc(tensor, name)                              publish
#     share_external_data(empty, name, shape[, use_ipc])      a tensor over published memory; XPU wants the flag
#     unset_data_ipc(tensor, name, close_ipc, unlink_shm)     release; missing on XPU, where we only remove the name
#
# (FastDeploy, custom_ops/{gpu,xpu}_ops and cache_manager/ops.py.) The objects they write (tiers/fastdeploy.py) contain
# neither size nor offset, so our handle carries the shapes. Tested with a fake of these operators, not on a device.
class FastDeployOperators:
    """The operators of an installed FastDeploy, which publish and map tensors. Paddle's errors (ERRORS) pass through.

    place: such as "xpu:0" or "gpu:1". Raises TierError without them.
    """

    def __init__(self, place: str, paddle: Any, *, module: Any = None, directory: Path = DIRECTORY) -> None:
        kind = place.partition(":")[0]
        try:
            self._module = module or importlib.import_module(f"fastdeploy.model_executor.ops.{kind}")
        except ImportError as error:
            what = f"memory of {place} is shared by FastDeploy's operators, which are not installed: {error}"
            raise TierError(what) from error
        self._paddle = paddle
        self._use_ipc = (True,) if kind == "xpu" else ()
        self._directory = directory

    def publish(self, tensor: Any, name: str) -> None:
        self._module.set_data_ipc(tensor, name)

    def adopt(self, name: str, shape: list[int]) -> Any:
        """A tensor of bytes."""
        if not (self._directory / name).exists():  # the operator would end the process
            raise EngineGone(f"{name} is not published")
        return self._module.share_external_data(self._paddle.empty([], dtype="uint8"), name, shape, *self._use_ipc)

    def withdraw(self, tensor: Any, name: str, *, adopted: bool) -> None:
        """Unmap an adopted tensor, or remove the name of a published one."""
        unset = getattr(self._module, "unset_data_ipc", None)
        if unset is not None:
            unset(tensor, name, adopted, not adopted)
        elif not adopted:
            with contextlib.suppress(FileNotFoundError):
                (self._directory / name).unlink()


def handle_of(layout: BlockLayout, rank: int, device: int, place: str) -> DeviceHandle:
    """A handle of tensors that this process has published under FastDeploy's names, one for each array."""
    names = [segment_name(part.plane.name, part.layer, rank, device) for part in layout.segments]
    arrays = [place_of | {"offset": 0, "region": i} for i, place_of in enumerate(describe(layout))]
    data = {"place": place, "names": names, "arrays": arrays, "owner": as_data(this_process())}
    return DeviceHandle(KIND, data)


def names_of(layout: BlockLayout, handle: DeviceHandle) -> list[str]:
    """The names of a handle's arrays, in the layout's order, after a check of the arrays against the layout.

    Raises RequestError (`layout_mismatch`, `bad_value`).
    """
    names, arrays = handle.data.get("names"), handle.data.get("arrays")
    if not isinstance(names, list):
        raise RequestError("the handle has no list of names", code="bad_value")
    for name in names:
        check_name(name)
    if not isinstance(arrays, list) or len(names) != len(arrays):
        raise RequestError("the handle does not have one name for each array", code="bad_value")
    # Each array fills its region, because its size is known only from its shape.
    longest = max(layout.device_blocks_of(part.layer) * part.nbytes for part in layout.segments) * 2
    locate(layout, arrays, [Region(i * longest, longest) for i in range(len(arrays))])
    found = {(item["plane"], item["layer"]): names[item.get("region", 0)] for item in arrays}
    return [found[part.plane.name, part.layer] for part in layout.segments]
