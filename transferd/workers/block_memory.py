"""A rank's blocks as memory that the CPU can address, in pieces that one call copies and checks.

in_place.py loads objects directly into it; write.py collects blocks from it, and read.py scatters them to it. The C
extension `_inplace` does each in one pass over memory. Without it, loads in place take more steps, and copies between
blocks and staging are those of the device tier.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transferd.blocks.layout.base import Arena, Geometry
from transferd.workers.context import RankContext
from transferd.workers.loan import Loan

try:
    from transferd.workers import _inplace
except ImportError:  # the installation had no compiler
    NATIVE = False
else:
    NATIVE = True

PIECE_BYTES = 2 * 1024**2  # for which a thread takes the loan: the end of a task waits for this much
PART_BYTES = 512 * 1024  # for the Python version, which reads and then checks: at most what a core's own cache holds
MOST_BUFFERS = 1024  # of one preadv: IOV_MAX
STRIPE_BYTES = 64  # the extension accepts parts that are multiples of this, as in nearly all layouts
FEWEST_BYTES = 240  # and payloads longer than this


def map_files() -> None:
    """Let loads map files, by handling SIGBUS in this process: the memory of a file that is truncated disappears.

    Call it in a process that is transferd's own.
    """
    if NATIVE:
        _inplace.catch_bus_errors()


class Piece(NamedTuple):
    """A range of an object that is read and then checked in one step; the same for every block.

    offset: in the object. parts: where the bytes go: (offset in block 0, bytes from block to block, bytes) of each.
    """

    offset: int
    nbytes: int
    parts: list[tuple[int, int, int]]


def pieces_of(packed: Geometry, memory: Geometry) -> list[Piece]:
    """Cut a block of this memory into pieces, in the order of a packed block."""
    pieces: list[Piece] = []
    parts: list[tuple[int, int, int]] = []
    begin = end = 0
    rows = zip(
        *(array.tolist() for array in (packed.offsets, memory.offsets, memory.strides, packed.nbytes)), strict=True
    )
    for source, target, stride, nbytes in sorted(rows):
        for start in range(0, nbytes, PART_BYTES):
            length = min(PART_BYTES, nbytes - start)
            if parts and (end - begin + length > PIECE_BYTES or len(parts) == MOST_BUFFERS):
                pieces.append(Piece(begin, end - begin, parts))
                parts, begin = [], end
            assert end == source + start
            parts.append((target + start, stride, length))
            end += length
    return [*pieces, Piece(begin, end - begin, parts)]


class BlockMemory:
    """The memory that contains a rank's blocks. Other processes can take it away: see hostcopy.py.

    pieces: those of every block. tables: the parts of each piece
    for the extension, int64 [n, 3]; None without the extension, or if it does not accept the layout's parts.
    """

    def __init__(self, arena: Arena, packed: Geometry) -> None:
        """packed: the geometry of a block of the same layout without gaps."""
        self.arena = arena
        self.pieces = pieces_of(packed, arena.geometry)
        self.tables: list[npt.NDArray[np.int64]] | None = None
        self._nbytes = sum(piece.nbytes for piece in self.pieces)
        even = all(nbytes % STRIPE_BYTES == 0 for piece in self.pieces for _, _, nbytes in piece.parts)
        if NATIVE and even and self._nbytes > FEWEST_BYTES:
            self.tables = [np.array(piece.parts, dtype=np.int64) for piece in self.pieces]

    def collect(self, block: int, slot: memoryview, loan: Loan | None = None, *, kept: bool = False) -> int | None:
        """Copy a block into a slot, packed; its checksum. In a thread, unless it is small. Only if there are tables.

        loan: None if the task waits for this call. Returns None if the loan ended first. kept: the slot's bytes stay in
        the caches, because this thread reads them next. Raises MemoryLost.
        """
        assert self.tables is not None
        state = _inplace.new_state(self._nbytes)
        for piece, table in zip(self.pieces, self.tables, strict=True):
            if loan is not None and not loan.take():
                return None
            try:
                _inplace.collect(slot, piece.offset, self.arena.origin, table, block, state, kept)
            finally:
                if loan is not None:
                    loan.give_back()
        return _inplace.checksum(state)

    def scatter(self, slot: memoryview, block: int) -> int:
        """Copy a packed block from a slot into a block; its checksum. Under the conditions of `collect`."""
        assert self.tables is not None
        state = _inplace.new_state(self._nbytes)
        for piece, table in zip(self.pieces, self.tables, strict=True):
            _inplace.copy_memory(slot, piece.offset, self.arena.origin, table, block, state)
        return _inplace.checksum(state)


class AddressableBlocks:
    """Finds the memory of a rank's blocks, which changes when a cache is cleared and restored."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._memory: BlockMemory | None = None

    def memory(self, *, one_pass: bool = False) -> BlockMemory | None:
        """None if the CPU cannot address the blocks. one_pass: also if the extension cannot copy and check them."""
        context = self._context
        if not context.device.addressable:
            return None
        arena = context.device.arena
        if self._memory is None or self._memory.arena is not arena:
            self._memory = BlockMemory(arena, context.layout.packed(1, context.format.slot_bytes))
        return None if one_pass and self._memory.tables is None else self._memory
