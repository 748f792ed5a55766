"""A task's blocks in memory that the CPU can address: one pass copies a block and takes its checksum.

A port of read.py and write.py, as is device_blocks.py. Storage's own threads copy each block, from and to wherever
the object lies: storage's memory, a mapped file, a slot of staging. Compared with a copy by the device this saves a
copy and a handover to another thread, and the bytes of a write are still in the caches of the core that writes them.

A thread touches a block only while it copies a piece of it, and never waits for a disk meanwhile: when a task ends, its
blocks belong to the engine again. The footer is checked first, so a wrong object never touches a block. A payload that
fails its check in a block proves no damage: an engine that was killed and restarted may write to blocks that a task of
its predecessor still loads. So the payload is then checked in a slot, which only this task writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from transferd.blocks.formats import FOOTER_BYTES, Damage, Inspection
from transferd.blocks.layout.base import Arena, Geometry
from transferd.errors import MemoryLost
from transferd.runtime.threads import Direction
from transferd.storage.lent import Lent
from transferd.workers.context import RankContext
from transferd.workers.device_blocks import check
from transferd.workers.job import Share

try:
    from transferd.workers import _inplace
except ImportError:  # the installation had no compiler
    NATIVE = False
else:
    NATIVE = True

PIECE_BYTES = 2 * 1024**2  # for which a thread takes the loan: the end of a task waits for this much
MOST_PARTS = 1024  # of a piece, in the extension
STRIPE_BYTES = 64  # the extension accepts parts that are multiples of this, as in nearly all layouts
FEWEST_BYTES = 240  # and payloads longer than this


class Piece(NamedTuple):
    """A range of an object that is copied and checked in one step; the same for every block."""

    offset: int  # in the object
    nbytes: int
    # where the bytes go: (offset in block 0, bytes from block to block, bytes) of each
    parts: list[tuple[int, int, int]]


def pieces_of(packed: Geometry, memory: Geometry, ends: Sequence[int] = ()) -> list[Piece]:
    """Cut a block of this memory into pieces, in the order of a packed block.

    ends: bytes of a packed block where a piece ends; segments begin there.
    """
    pieces: list[Piece] = []
    parts: list[tuple[int, int, int]] = []
    begin = end = 0
    rows = zip(
        *(array.tolist() for array in (packed.offsets, memory.offsets, memory.strides, packed.nbytes)), strict=True
    )
    for source, target, stride, nbytes in sorted(rows):
        if parts and source in ends:
            pieces.append(Piece(begin, end - begin, parts))
            parts, begin = [], end
        for start in range(0, nbytes, PIECE_BYTES):
            length = min(PIECE_BYTES, nbytes - start)
            if parts and (end - begin + length > PIECE_BYTES or len(parts) == MOST_PARTS):
                pieces.append(Piece(begin, end - begin, parts))
                parts, begin = [], end
            assert end == source + start
            if parts and parts[-1][:2] == (target + start - parts[-1][2], stride):  # they touch in memory as well
                parts[-1] = (parts[-1][0], stride, parts[-1][2] + length)
            else:
                parts.append((target + start, stride, length))
            end += length
    return [*pieces, Piece(begin, end - begin, parts)]


class BlockMemory:
    """The memory that contains a rank's blocks. Other processes can take it away: see hostcopy.py.

    pieces: how each block is cut.
    native: the same for the extension; None without the extension, or if it does not accept the layout's parts.
    ends: where the sealed parts of a packed block end, in bytes; the last part ends where the block ends.
    """

    def __init__(self, arena: Arena, packed: Geometry, ends: Sequence[int]) -> None:
        """packed: the geometry of a block of the same layout without gaps."""
        self.arena = arena
        self.ends = tuple(ends)
        if any(end <= FEWEST_BYTES or end % STRIPE_BYTES for end in ends):
            self.ends = self.ends[-1:]
        self.pieces = pieces_of(packed, arena.geometry, self.ends)
        even = all(nbytes % STRIPE_BYTES == 0 for piece in self.pieces for _, _, nbytes in piece.parts)
        self.native: Any = None
        if NATIVE and even and sum(piece.nbytes for piece in self.pieces) > FEWEST_BYTES:
            tables = tuple((piece.offset, np.array(piece.parts, dtype=np.int64)) for piece in self.pieces)
            self.native = _inplace.new_memory(arena.origin, self.ends, tables)


class Loan:
    """The right of I/O threads to touch a task's blocks. After `end`, no thread touches them.

    A thread takes it for each piece that it copies (_inplace.c), never during I/O.

    shared: who has it now, for the extension.
    """

    __slots__ = ("_returned", "over", "shared")

    def __init__(self) -> None:
        self.over = False
        self.shared = bytearray(8)
        self._returned: asyncio.Future[None] | None = None  # set if `end` waits

    def returned(self) -> None:
        """Called in the last thread that touched a block when the loan ended."""
        if self._returned is not None:
            self._returned.get_loop().call_soon_threadsafe(self._returned.set_result, None)

    def end(self) -> asyncio.Future[None] | None:
        """End the loan. Returns None if no thread touches a block now, else a future: done as soon as none does."""
        if not self.over:
            self.over = True
            self._returned = asyncio.get_running_loop().create_future()
            if not _inplace.end_loan(self.shared):
                self._returned = None
        return self._returned


class CpuMemory:
    """Finds the memory of a rank's blocks, which changes when a cache is cleared and restored."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._memory: dict[bool, BlockMemory] = {}  # of host blocks (True), of device blocks (False)

    def blocks(self, share: Share) -> CpuBlocks | None:
        """A task's blocks, or None if the CPU cannot address them, or the extension cannot copy and check them."""
        context, on_host = self._context, share.on_host
        if not ((on_host or context.device.addressable) and context.format.checked_bytes):
            return None
        memory, arena = self._memory.get(on_host), share.arena
        if memory is None or memory.arena != arena:
            layout = context.layout
            ends = [nbytes for _, nbytes in layout.part_ends]
            memory = BlockMemory(arena, layout.packed(1, context.format.slot_bytes), ends)
            self._memory[on_host] = memory
        return None if memory.native is None else CpuBlocks(share, memory)


class CpuBlocks:
    """The blocks of one job on one rank. See the module.

    lost: why the memory of a block cannot be accessed any more; then no further block is touched.
    """

    def __init__(self, share: Share, memory: BlockMemory) -> None:
        self.lost: MemoryLost | None = None
        self.loan = Loan()
        self._blocks = share.job.task.block_ids
        self._share = share
        self._memory = memory

    async def end(self) -> None:
        """End the loan. Returns when no thread touches a block any more."""
        if (returned := self.loan.end()) is not None:
            await returned

    def lend(self, positions: Sequence[int], part: int = -1, states: Sequence[bytearray] = ()) -> Lent:
        """These blocks, for the extension."""
        share = self._share
        context, ids = share.context, share.ids(positions)
        footers = context.format.footers(share.job.generation, ids, context.object_rank)
        numbers = [self._blocks[position] for position in positions]
        native = _inplace.lend_blocks(self._memory.native, self.loan, numbers, footers, part, list(states))
        return Lent(native, range(len(positions)))

    def inspection(self, position: int) -> Inspection:
        """Of the object of this block."""
        share = self._share
        return share.context.format.inspection(
            share.job.generation, share.ids([position])[0], share.context.object_rank
        )

    @property
    def parts(self) -> int:
        """How many parts of a block have seals of their own."""
        return len(self._memory.ends)

    def span(self, part: int) -> tuple[int, int]:
        """Where a part begins and ends in an object, in bytes."""
        ends = (0, *self._memory.ends)
        return ends[part], ends[part + 1]

    def new_state(self) -> bytearray:
        """The checksum's state of one block, from one part to the next."""
        return _inplace.new_state(self._memory.native)

    async def gather(self, positions: Sequence[int], slots: Sequence[int]) -> bool:
        """Make the objects of these blocks in slots. Returns False if the task was stopped. Raises TransferError."""
        share, fill = self._share, BlockFill(self, positions)
        views = share.context.staging.views(slots)

        def collect() -> None:
            for i, view in enumerate(views):
                fill(i, view, False)

        return await self._copied(Direction.OUT, collect, len(views))

    async def scatter(self, positions: Sequence[int], slots: Sequence[int]) -> dict[int, Damage | None]:
        """Copy objects from slots to these blocks.

        For each position: None if the block holds the object; otherwise why not. Positions that are absent were not
        copied: the task was stopped first, or another process wrote to the block meanwhile. Raises TransferError.
        """
        share, drain, views = self._share, BlockDrain(self, positions), self._share.context.staging.views(slots)
        taken = [False] * len(views)

        def copy() -> None:
            for i, view in enumerate(views):
                taken[i] = drain(i, view)

        if not await self._copied(Direction.IN, copy, len(views)):
            return {}
        results = {position: drain.damages.get(i) for i, position in enumerate(positions) if taken[i]}
        doubtful = {position: view for position, view in zip(positions, views, strict=True) if position not in results}
        if doubtful:
            reasons = await check(share, list(doubtful.values()), list(doubtful))
            results |= {i: reason for i, reason in zip(doubtful, reasons, strict=True) if reason is not None}
        return results

    async def _copied(self, direction: Direction, copy: Callable[[], None], count: int) -> bool:
        copied = await self._share.copied(
            self._share.context.on_slots(count, direction, copy, "copy and checksums"), count
        )
        if self.lost is not None:
            raise self.lost
        return copied


class BlockFill:
    """Makes the objects of some blocks. See storage.base.Fill."""

    __slots__ = ("_blocks", "lent", "positions")

    def __init__(self, blocks: CpuBlocks, positions: Sequence[int]) -> None:
        self.positions = positions
        self.lent = blocks.lend(positions)
        self._blocks = blocks

    def __call__(self, i: int, data: memoryview, near: bool, /) -> bool:
        try:
            return self._blocks.lost is None and _inplace.fill(self.lent.blocks, i, data, near)
        except MemoryLost as error:  # the block's memory is lost: storage must not take it for an error of its own
            self._blocks.lost = error
            return False


class BlockDrain:
    """Takes the objects of some blocks, or one part of each. See storage.base.Drainer.

    states: with a part, what `new_state` has returned for each block.
    damages: by item, the damage of each object that had a bad footer.
    """

    __slots__ = ("_blocks", "damages", "lent", "positions")

    def __init__(
        self, blocks: CpuBlocks, positions: Sequence[int], part: int = -1, states: Sequence[bytearray] = ()
    ) -> None:
        self.damages: dict[int, Damage] = {}
        self.positions = positions
        self.lent = blocks.lend(positions, part, states)
        self._blocks = blocks

    @property
    def wanted(self) -> bool:
        return not self._blocks.loan.over and self._blocks.lost is None

    def __call__(self, i: int, data: memoryview, /) -> bool:
        if not self.wanted:
            return False
        try:
            if _inplace.take(self.lent.blocks, i, data):
                return True
        except MemoryLost as error:
            self._blocks.lost = error
            return False
        damage = self._blocks.inspection(self.positions[i]).footer(bytes(data[-FOOTER_BYTES:]))
        if damage is not None:
            self.damages[i] = damage
        return damage is not None
