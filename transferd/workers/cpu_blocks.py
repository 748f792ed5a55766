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
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transferd.blocks.formats import FOOTER_BYTES, Damage, Inspection
from transferd.blocks.layout.base import Arena, Geometry
from transferd.errors import MemoryLost
from transferd.runtime.threads import Direction
from transferd.storage.base import Fill
from transferd.tasks import ReadStorageTask, WriteStorageTask
from transferd.tiers.staging import Lease
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
    tables: the parts of each piece for the extension, int64 [n, 3]; None without the extension, or if it does not
        accept the layout's parts.
    ends: where the sealed parts of a packed block end, in bytes; the last part ends where the block ends.
    """

    def __init__(self, arena: Arena, packed: Geometry, ends: Sequence[int]) -> None:
        """packed: the geometry of a block of the same layout without gaps."""
        self.arena = arena
        self.ends = tuple(ends)
        if any(end <= FEWEST_BYTES or end % STRIPE_BYTES for end in ends):
            self.ends = self.ends[-1:]
        self.pieces = pieces_of(packed, arena.geometry, self.ends)
        self.tables: list[npt.NDArray[np.int64]] | None = None
        self._nbytes = sum(piece.nbytes for piece in self.pieces)
        even = all(nbytes % STRIPE_BYTES == 0 for piece in self.pieces for _, _, nbytes in piece.parts)
        if NATIVE and even and self._nbytes > FEWEST_BYTES:
            self.tables = [np.array(piece.parts, dtype=np.int64) for piece in self.pieces]
        # The steps of a copy: where each piece begins in the object, and its table.
        self._steps = [(piece.offset, table) for piece, table in zip(self.pieces, self.tables or (), strict=False)]
        # The steps of each part.
        bounds = [0, *self.ends]
        self._parts = [
            [step for step in self._steps if begin <= step[0] < end] for begin, end in itertools.pairwise(bounds)
        ]

    def collect(self, block: int, data: memoryview, loan: Loan, *, near: bool) -> Sequence[int] | None:
        """Copy a block to `data`, packed. Returns its checksums up to the end of each part; None if the loan ended.

        Requires `tables`. Call it in a thread, unless the block is small. near: keep the bytes in the caches, because
        this thread reads them next. Raises MemoryLost.
        """
        state = _inplace.new_state(self.ends)
        for offset, table in self._steps:
            if not loan.take():
                return None
            try:
                _inplace.collect(data, offset, self.arena.origin, table, block, state, near)
            finally:
                loan.give_back()
        return _inplace.checksums(state)

    def scatter(self, data: memoryview, block: int, loan: Loan) -> int | None:
        """Copy a packed block from `data` to a block. Returns its checksum; otherwise like `collect`."""
        state = _inplace.new_state(self.ends[-1:])
        return self._scatter(self._steps, data, block, loan, state)

    def new_state(self) -> bytearray:
        """The checksum's state for one block, for its calls of `scatter_part`, in order."""
        return _inplace.new_state(self.ends)

    def scatter_part(self, part: int, data: memoryview, block: int, loan: Loan, state: bytearray) -> int | None:
        """Copy the next part of a packed block. Returns the block's checksum up to the end of this part."""
        return self._scatter(self._parts[part], data, block, loan, state)

    def _scatter(
        self,
        steps: Sequence[tuple[int, npt.NDArray[np.int64]]],
        data: memoryview,
        block: int,
        loan: Loan,
        state: bytearray,
    ) -> int | None:
        for offset, table in steps:
            if not loan.take():
                return None
            try:
                _inplace.copy_memory(data, offset, self.arena.origin, table, block, state)
            finally:
                loan.give_back()
        return _inplace.checksums(state)[-1]


class Loan:
    """The right of I/O threads to touch a task's blocks. After `end`, no thread touches them."""

    __slots__ = ("_holders", "_lock", "_returned", "over")

    def __init__(self) -> None:
        self.over = False
        self._holders = 0
        self._lock = threading.Lock()
        self._returned: asyncio.Future[None] | None = None  # set if `end` waits

    def take(self) -> bool:
        """Call in a thread before it touches a block. Returns whether it may; if so, call `give_back` afterwards."""
        with self._lock:
            self._holders += not self.over
            return not self.over

    def give_back(self) -> None:
        with self._lock:
            self._holders -= 1
            returned = None if self._holders else self._returned
        if returned is not None:
            returned.get_loop().call_soon_threadsafe(returned.set_result, None)

    def end(self) -> asyncio.Future[None] | None:
        """End the loan. Returns None if no thread touches a block now, else a future that is done as soon as none does.

        A thread touches a block only while it copies memory, never during I/O.
        """
        with self._lock:
            self.over = True
            if self._holders:
                self._returned = asyncio.get_running_loop().create_future()
        return self._returned


class CpuMemory:
    """Finds the memory of a rank's blocks, which changes when a cache is cleared and restored."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._memory: dict[bool, BlockMemory] = {}  # of host blocks (True), of device blocks (False)

    def blocks(self, share: Share) -> CpuBlocks | None:
        """A task's blocks, or None if the CPU cannot address them, or the extension cannot copy and check them."""
        context = self._context
        if not ((share.on_host or context.device.addressable) and context.format.checked_bytes):
            return None
        memory = self._memory.get(share.on_host)
        if memory is None or memory.arena is not share.arena:
            layout = context.layout
            ends = [nbytes for _, nbytes in layout.part_ends]
            memory = BlockMemory(share.arena, layout.packed(1, context.format.slot_bytes), ends)
            self._memory[share.on_host] = memory
        return None if memory.tables is None else CpuBlocks(share, memory)


class CpuBlocks:
    """The blocks of one job on one rank. See the module.

    lost: why the memory of a block cannot be accessed any more; then no further block is touched.
    """

    def __init__(self, share: Share, memory: BlockMemory) -> None:
        task = share.job.task
        assert isinstance(task, ReadStorageTask | WriteStorageTask)
        self.lost: MemoryLost | None = None
        self.loan = Loan()
        self._blocks = task.block_ids
        self._share = share
        self._memory = memory

    async def end(self) -> None:
        """End the loan. Returns when no thread touches a block any more."""
        if (returned := self.loan.end()) is not None:
            await returned

    def fill(self, positions: Sequence[int]) -> Fill:
        """Return a Fill (storage/base.py) that makes the objects of these blocks."""
        context, job = self._share.context, self._share.job
        seal, generation, rank = context.format.seal, job.generation, context.object_rank
        ids = self._share.ids(positions)

        def fill(i: int, data: memoryview, near: bool) -> bool:
            position = positions[i]
            if self.lost is not None:
                return False
            try:
                checksums = self._memory.collect(self._blocks[position], data, self.loan, near=near)
            except MemoryLost as error:  # the block's memory is lost: storage must not take it for an error of its own
                self.lost = error
                return False
            if checksums is not None:
                seal([data], generation, [ids[i]], rank, [checksums])
            return checksums is not None

        return fill

    def drain(self, positions: Sequence[int]) -> BlockDrain:
        """Return a Drainer that takes the objects of these blocks."""
        return BlockDrain(self, positions, self.inspections(positions))

    def inspections(self, positions: Sequence[int]) -> list[Inspection]:
        """An Inspection for the object of each of these blocks."""
        share = self._share
        return share.context.format.inspections(share.job.generation, share.ids(positions), share.context.object_rank)

    def take(self, position: int, data: memoryview, inspection: Inspection) -> bool:
        """Copy an object with a good footer to its block, in a thread. Returns whether the block now holds it."""
        if self.lost is not None:
            return False
        try:
            checksum = self._memory.scatter(data, self._blocks[position], self.loan)
        except MemoryLost as error:
            self.lost = error
            return False
        return checksum is not None and inspection.damage(checksum) is None

    @property
    def parts(self) -> int:
        """How many parts of a block have seals of their own."""
        return len(self._memory.ends)

    def span(self, part: int) -> tuple[int, int]:
        """Where a part begins and ends in an object, in bytes."""
        ends = (0, *self._memory.ends)
        return ends[part], ends[part + 1]

    def new_state(self) -> bytearray:
        """The state that `take_part` keeps from one part of a block to the next."""
        return self._memory.new_state()

    def take_part(self, part: int, position: int, data: memoryview, inspection: Inspection, state: bytearray) -> bool:
        """Copy the next part of an object with a good footer to its block, in a thread.

        Returns whether the block now holds the part. Always False if the object has no seals of parts.
        """
        if self.lost is not None or len(inspection.seals) != self.parts:
            return False
        try:
            checksum = self._memory.scatter_part(part, data, self._blocks[position], self.loan, state)
        except MemoryLost as error:
            self.lost = error
            return False
        return checksum == inspection.seals[part]

    async def gather(self, positions: Sequence[int], lease: Lease) -> bool:
        """Make the objects of these blocks in slots. Returns False if the task was stopped. Raises TransferError."""
        share, fill = self._share, self.fill(positions)
        slots = share.context.staging.views(lease)

        def collect() -> None:
            for i, slot in enumerate(slots):
                fill(i, slot, False)

        return await self._copied(Direction.OUT, collect, len(slots))

    async def scatter(self, positions: Sequence[int], lease: Lease, at: Sequence[int]) -> dict[int, Damage | None]:
        """Copy objects from slots to these blocks. at: the indices of their slots in the lease.

        For each index: None if the block holds the object; otherwise why not. Indices that are absent were not copied:
        the task was stopped first, or another process wrote to the block meanwhile. Raises TransferError.
        """
        share, drain, slots = self._share, self.drain(positions), self._share.context.staging.views(lease)
        taken = [False] * len(at)

        def copy() -> None:
            for i, index in enumerate(at):
                taken[i] = drain(i, slots[index])

        if not await self._copied(Direction.IN, copy, len(at)):
            return {}
        results: dict[int, Damage | None] = {index: drain.damages.get(i) for i, index in enumerate(at) if taken[i]}
        doubtful = [i for i in range(len(at)) if not taken[i]]
        if doubtful:
            views = [slots[at[i]] for i in doubtful]
            reasons = await check(share, views, [positions[i] for i in doubtful])
            results |= {at[i]: reason for i, reason in zip(doubtful, reasons, strict=True) if reason is not None}
        return results

    async def _copied(self, direction: Direction, copy: Callable[[], None], count: int) -> bool:
        share = self._share
        share.step("copy", count)
        before = share.context.clock.monotonic()

        async def copying() -> None:
            if count <= share.context.cheap_slots:
                copy()
            else:
                await share.context.threads.run(direction, copy, "copy and checksums")

        try:
            copied = await share.job.stop.copied(copying())
        finally:
            share.copy_s += share.context.clock.monotonic() - before
        if self.lost is not None:
            raise self.lost
        return copied


class BlockDrain:
    """Takes the objects of some blocks. See storage.base.Drainer.

    damages: by item, the damage of each object that had a bad footer.
    """

    __slots__ = ("_blocks", "_inspections", "_positions", "damages")

    def __init__(self, blocks: CpuBlocks, positions: Sequence[int], inspections: Sequence[Inspection]) -> None:
        self.damages: dict[int, Damage] = {}
        self._blocks = blocks
        self._positions = positions
        self._inspections = inspections

    @property
    def wanted(self) -> bool:
        return not self._blocks.loan.over and self._blocks.lost is None

    def __call__(self, i: int, data: memoryview, /) -> bool:
        inspection = self._inspections[i]
        damage = inspection.footer(bytes(data[-FOOTER_BYTES:]))
        if damage is not None:
            self.damages[i] = damage
            return True
        return self._blocks.take(self._positions[i], data, inspection)
