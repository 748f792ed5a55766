"""The memory of the paddle tier's tensors: shared memory on the CPU place, or a device's own memory.

Device memory has one tensor [blocks, elements] per segment, in the layout's order. `close` frees everything.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Protocol

import numpy as np

from transferd.blocks.layout.base import Arena, BlockLayout
from transferd.errors import ConfigError, TierError
from transferd.runtime.compat import Self
from transferd.tiers.base import DeviceHandle
from transferd.tiers.extents import Extent, Extents, extents_of
from transferd.tiers.paddle_ops import KIND, Operators, handle_of, names_of
from transferd.tiers.segment import SharedSegment
from transferd.tiers.shm import created_handle, map_offered

ELEMENTS = (("int64", 8), ("int32", 4), ("int16", 2), ("uint8", 1))  # widest first


class TensorMemory(Protocol):
    """What the tier needs from either kind. `close` empties `tensors` and frees or unmaps their memory."""

    tensors: list[Any]
    arena: Arena
    outlives_close: bool

    def handle(self) -> DeviceHandle: ...
    def extents(self) -> Extents: ...
    def close(self) -> None: ...


class SharedMemory:
    """A POSIX shared memory segment, our own or mapped, without tensors. Owns the segment or the mapping."""

    outlives_close = True  # a mapping stays valid after the name and the creator are gone

    def __init__(self, layout: BlockLayout, segment: SharedSegment, arena: Arena) -> None:
        self.arena = arena
        self.tensors: list[Any] = []
        self._layout = layout
        self._segment = segment

    @classmethod
    def create(cls, layout: BlockLayout, name: str) -> Self:
        """Create a segment. Raises TierError."""
        segment = SharedSegment(name, layout.device.extent, create=True)
        return cls(layout, segment, Arena(layout.device, segment.address))

    @classmethod
    def attach(cls, layout: BlockLayout, handle: DeviceHandle) -> Self:
        """Map another process's segment. Raises RequestError, TierError."""
        return cls(layout, *map_offered(layout, handle))

    def handle(self) -> DeviceHandle:
        return created_handle(self._layout, self._segment)

    def extents(self) -> Extents:
        return extents_of(self._layout, self.arena, self._segment.identity, self._segment.address)

    def close(self) -> None:
        self._segment.close()


class DeviceMemory:
    """Tensors in device memory: allocated by Paddle and published by operators, or adopted from another process.

    arena: each array is a tensor of its own, so offsets only identify arrays. Without operators, the memory cannot
    be shared with other processes.
    """

    outlives_close = False  # device drivers differ in this

    def __init__(self, paddle: Any, layout: BlockLayout, place: str, operators: Operators | None) -> None:
        self.arena = Arena(layout.device, 0)
        self.tensors: list[Any] = []
        self._paddle = paddle
        self._layout = layout
        self._place = place
        self._operators = operators
        self._published: tuple[int, int] | None = None  # rank, device
        self._held: list[tuple[Any, str]] = []  # tensors that the operators know, and their names
        self._adopted = False

    @classmethod
    def create(
        cls, paddle: Any, layout: BlockLayout, place: str, operators: Operators | None, rank: int, device: int
    ) -> Self:
        """Allocate zeroed tensors and publish them. Raises Paddle's own errors; then nothing is left behind."""
        made = cls(paddle, layout, place, operators)
        try:
            for part in layout.segments:
                zeros = np.zeros((layout.device_blocks_of(part.layer), part.nbytes), dtype=np.uint8)
                made._take(paddle.to_tensor(zeros, place=place))
            if operators is not None:
                made._publish(operators, rank, device)
        except BaseException:
            made.close()
            raise
        return made

    def _publish(self, operators: Operators, rank: int, device: int) -> None:
        names = handle_of(self._layout, rank, device, self._place).data["names"]
        for number, name in enumerate(names):
            tensor, _ = self._held[number]
            operators.publish(tensor, name)
            self._held[number] = (tensor, name)
        self._published = (rank, device)

    @classmethod
    def attach(
        cls, paddle: Any, layout: BlockLayout, place: str, operators: Operators | None, handle: DeviceHandle
    ) -> Self:
        """Adopt the tensors that a handle names. Raises RequestError, TierError, and Paddle's own errors."""
        if handle.kind != KIND or operators is None:
            what = f"attaching memory of {place} needs FastDeploy's operators and a handle of kind {KIND!r}"
            raise TierError(f"{what}; this one is of kind {handle.kind[:40]!r}")
        made = cls(paddle, layout, place, operators)
        made._adopted = True
        try:
            for part, name in zip(layout.segments, names_of(layout, handle), strict=True):
                shape = [layout.device_blocks_of(part.layer), part.nbytes]
                made._take(operators.adopt(name, shape, "uint8"), name)
        except BaseException:
            made.close()
            raise
        return made

    def _take(self, tensor: Any, name: str = "") -> None:
        """Hold a tensor of bytes, and use it as the widest type."""
        self._held.append((tensor, name))
        wide = tensor.view(_element(self._layout, self.arena))
        shares = wide.data_ptr() == tensor.data_ptr()  # False on a device whose views are copies
        self.tensors.append(wide if shares else tensor)

    def handle(self) -> DeviceHandle:
        if self._published is None:
            raise TierError(f"memory of {self._place} cannot be shared with another process without operators for it")
        return handle_of(self._layout, *self._published, self._place)

    def extents(self) -> Extents:
        """Each tensor's extent twice: by address, and by name for drivers that map one allocation at two addresses."""
        made: list[Extent] = []
        for tensor, name in self._held:
            start = int(tensor.data_ptr())
            made += [Extent(self._place, start, int(tensor.size)), Extent(("published", name), 0, 1)]
        return Extents(made)

    def close(self) -> None:
        self.tensors.clear()
        held, self._held = self._held, []
        for tensor, name in held:
            if self._operators is not None and name:
                self._operators.withdraw(tensor, name, adopted=self._adopted)


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


def default_place(paddle: Any, device: int) -> str:
    """The name of the device with this index, of the kind that this Paddle was built for."""
    kind = str(paddle.device.get_device()).partition(":")[0]
    return kind if kind == "cpu" else f"{kind}:{device}"


def _element(layout: BlockLayout, arena: Arena) -> str:
    """The widest integer type whose size divides every row and its offset."""
    common = math.gcd(*(part.nbytes for part in layout.segments), *(arena.geometry.offsets + arena.origin).tolist())
    return next(name for name, size in ELEMENTS if common % size == 0)
