"""Loads in place: from storage's memory directly into a block, for blocks that the CPU can address.

A thread copies each object in pieces directly into the segments of its block, and checks them on the way. Compared
with staging this saves a copy, a handover to another thread, and the leases. With the C extension, a piece takes one
call, without the GIL, which reads and writes memory once; large files are mapped for it. The Python version does the
same in more steps.

Objects are only loaded from memory this way (`Storage.get_in_place`), because no thread may wait for a disk while it
may touch a block: when a task ends, its blocks belong to the engine again. The file backend brings a large object into
the page cache first (docs/adr/0061). All others go through staging.

The footer is read first, so a wrong object never touches a block. A payload that fails its check counts as cold:
staging loads it again, and decides whether the object is damaged or another process wrote to the block. Until then the
block holds undefined bytes, like any block that its task does not report (docs/adr/0051).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from transferd.blocks.footer import FOOTER_BYTES, Damage, Inspection
from transferd.storage.base import Backing, Found, Outcome, Place, ReadNow, Storage
from transferd.tasks import ReadStorageTask
from transferd.workers.block_memory import AddressableBlocks, BlockMemory
from transferd.workers.context import Account, RankContext
from transferd.workers.loan import Loan

with contextlib.suppress(ImportError):  # the installation had no compiler
    from transferd.workers import _inplace

# The size of one call: enough bytes to hide its fixed cost (waking two threads, and hearing from them), and few enough
# objects that the event loop prepares them within a millisecond or two. A stop waits only for a piece of one object.
CHUNK_BYTES, CHUNK_BLOCKS = 128 * 1024**2, 64
CHUNKS_UNDER_WAY = 2  # so that no thread waits for the event loop

Bad = Callable[[str, str, Damage], None]
Parts = npt.NDArray[np.int64]
# Copies one piece of an object: offset in the object, origin of the arena, parts of the piece, block, state of the
# checksum. Returns how many bytes it copied.
CopyPiece = Callable[[int, int, Any, int, Any], int]


class BlockInPlace:
    """Loads one block in place and checks the object. See `storage.base.InPlace`.

    damage: after a load, what is wrong with the object's footer; None for a good one. A wrong payload does not prove
    that the object is damaged: an engine that was killed and restarted may write to blocks that a task of its
    predecessor still loads. Only staging can tell, because no one else touches it.
    """

    __slots__ = ("_block", "_inspection", "_loan", "_memory", "damage", "nbytes")

    def __init__(self, memory: BlockMemory, block: int, inspection: Inspection, loan: Loan) -> None:
        self.nbytes = inspection.payload_bytes + FOOTER_BYTES
        self.damage: Damage | None = None
        self._memory = memory
        self._block = block
        self._inspection = inspection
        self._loan = loan

    @property
    def wanted(self) -> bool:
        return not self._loan.over

    def load(self, read: ReadNow, backing: Backing | None = None) -> bool:
        payload_bytes = self._inspection.payload_bytes
        if isinstance(backing, memoryview):
            footer = bytes(backing[-FOOTER_BYTES:])
        else:
            buffer = bytearray(FOOTER_BYTES)
            if read([memoryview(buffer)], payload_bytes) < FOOTER_BYTES:
                return False
            footer = bytes(buffer)
        self.damage = self._inspection.footer(footer)
        if self.damage is not None:
            return True
        if backing is None or self._memory.tables is None:
            return self._load_in_python(read)
        if isinstance(backing, int):
            return self._load_natively(self._memory.tables, functools.partial(_inplace.read_file, backing, False))
        return self._load_natively(self._memory.tables, functools.partial(_inplace.copy_memory, backing))

    def load_file(self, path: str, flags: int) -> float | None:
        tables = self._memory.tables
        if tables is None:
            return None
        mapping, fd, footer, modified = _inplace.open_file(path, flags, self.nbytes, FOOTER_BYTES)
        if not mapping and fd < 0:
            return None
        call, source = (_inplace.copy_mapped, mapping) if mapping else (_inplace.read_file, fd)
        is_open = True

        def copy(offset: int, origin: int, table: Parts, *rest: Any) -> int:
            nonlocal is_open
            last = table is tables[-1]
            is_open = not last
            return call(source, last, offset, origin, table, *rest)  # the last call unmaps or closes it

        try:
            self.damage = self._inspection.footer(footer)
            return modified if self.damage is not None or self._load_natively(tables, copy) else None
        except OSError:  # a disk that cannot read a page; whoever opens the file finds out
            return None
        finally:
            if is_open:
                if mapping:
                    _inplace.unmap(mapping)
                else:
                    os.close(fd)

    def leave(self) -> None:
        if self._memory.tables is not None:
            _inplace.forget_files()

    def _load_natively(self, tables: Sequence[Parts], copy: CopyPiece) -> bool:
        """copy: a call of the extension, which has its source."""
        state = _inplace.new_state(self._inspection.payload_bytes)
        return self._load_pieces(tables, copy, state) and self._inspection.damage(_inplace.checksum(state)) is None

    def _load_in_python(self, read: ReadNow) -> bool:
        view, inspection = self._memory.view, self._inspection

        def copy(offset: int, _origin: int, parts: list[tuple[int, int, int]], block: int, _state: None) -> int:
            buffers = [view[(at := first + stride * block) : at + length] for first, stride, length in parts]
            loaded = read(buffers, offset)
            if loaded == sum(buffer.nbytes for buffer in buffers):
                for buffer in buffers:
                    inspection.payload(buffer)
            return loaded

        parts = [piece.parts for piece in self._memory.pieces]
        return self._load_pieces(parts, copy, None) and inspection.damage() is None

    def _load_pieces(self, tables: Sequence[Any], copy: CopyPiece, state: bytearray | None) -> bool:
        """Load every piece. False: some bytes are not in memory, or the loan has ended."""
        memory, loan, block = self._memory, self._loan, self._block
        origin = memory.arena.origin
        for piece, table in zip(memory.pieces, tables, strict=True):
            if not loan.take():
                return False
            try:
                if copy(piece.offset, origin, table, block, state) < piece.nbytes:
                    return False
            finally:
                loan.give_back()
        return True


@dataclass(slots=True)
class Tries:
    """How far one task has come with loads in place.

    cold: positions for staging. ended: the first position that cannot be loaded. hopeless: try no further positions in
    place. troubled: nor through staging, because a whole chunk failed.
    """

    cold: list[int] = field(default_factory=list)
    ended: int | None = None
    hopeless: bool = False
    troubled: bool = False


class ChunkInPlace(msgspec.Struct, frozen=True):
    """One call to storage for some blocks of a task. asked: its answer. loan: that of the task's blocks."""

    places: list[Place]
    asked: asyncio.Future[list[Outcome]]
    loan: Loan


class InPlaceReader:
    """Loads blocks of one rank in place, as far as storage has their objects in memory.

    bad: called for each object that failed its check, with task id, name and damage.
    """

    def __init__(self, context: RankContext, storage: Storage, blocks: AddressableBlocks, bad: Bad) -> None:
        self._context = context
        self._storage = storage
        self._bad = bad
        self._blocks = blocks
        self._chunk_blocks = max(1, min(CHUNK_BYTES // context.layout.block_bytes, CHUNK_BLOCKS))

    def load_at_once(self, account: Account, names: Sequence[str]) -> ChunkInPlace | None:
        """Load the first block of a task that names no timeline. None: done. Otherwise pass the chunk on to `load`.

        Raises TransferError.
        """
        chunk = self._ask(account, names, (0,), Loan())
        if not chunk.asked.done():
            return chunk
        outcomes = chunk.asked.result()
        found, block = outcomes[0].found, chunk.places[0].data
        if found is Found.COLD:
            return chunk
        if found is Found.FOUND and isinstance(block, BlockInPlace) and block.damage is None:
            account.done((0,), self._context.layout.block_bytes)  # the usual case, without `_take`'s lists
        else:
            self._take(account, Tries(), chunk.places, outcomes)
        return None

    async def load(
        self, account: Account, names: Sequence[str], positions: Sequence[int], first: ChunkInPlace | None = None
    ) -> Sequence[int]:
        """Load blocks of a ReadStorageTask. Returns the positions that remain for staging, ascending.

        first: a chunk that `load_at_once` has begun. No positions remain if the task was stopped or its prefix ended.
        Raises TransferError.
        """
        task = account.job.task
        assert isinstance(task, ReadStorageTask)
        if task.after and not await self._context.computed(account.job):
            return ()
        stop, prefix = account.job.stop, task.prefix
        loan, tries, begun = Loan() if first is None else first.loan, Tries(), 0
        under_way: deque[ChunkInPlace] = deque()
        if first is not None:
            under_way.append(first)
            begun = len(first.places)
        try:
            while True:
                useful = stop.reason is None and not tries.hopeless and (tries.ended is None or not prefix)
                while useful and begun < len(positions) and len(under_way) < CHUNKS_UNDER_WAY:
                    chunk = self._ask(account, names, positions[begun : begun + self._chunk_blocks], loan)
                    begun += len(chunk.places)
                    under_way.append(chunk)
                if not under_way:
                    break
                chunk = under_way[0]
                if not chunk.asked.done() and not await self._answered(account, chunk.asked):
                    return ()
                under_way.popleft()
                self._take(account, tries, chunk.places, chunk.asked.result())
        finally:
            for chunk in under_way:  # the task has stopped, but no one should load a damaged object again
                chunk.asked.add_done_callback(functools.partial(self._note_damage, task.task_id, chunk.places))
            if (returned := loan.end()) is not None:
                await returned
        if tries.troubled or stop.reason is not None:
            return ()
        if prefix and tries.ended is not None:
            return [position for position in tries.cold if position < tries.ended]
        return [*tries.cold, *positions[begun:]]

    def _ask(self, account: Account, names: Sequence[str], chunk: Sequence[int], loan: Loan) -> ChunkInPlace:
        """Have storage load the blocks at these positions."""
        context, job = self._context, account.job
        task = job.task
        assert isinstance(task, ReadStorageTask)
        context.recorder.step(task.task_id, "load in place", context.rank, len(chunk))
        memory = self._blocks.memory()
        assert memory is not None, "the caller looks"
        inspections = context.format.inspections(job.generation, [job.ids[i] for i in chunk], context.object_rank)
        blocks, use = task.gpu_block_ids, job.use
        places = [
            Place(names[i], BlockInPlace(memory, blocks[i], inspection, loan), use, i)
            for i, inspection in zip(chunk, inspections, strict=True)
        ]
        return ChunkInPlace(places, context.background.begin(self._storage.get_in_place(places)), loan)

    def _note_damage(self, task_id: str, places: Sequence[Place], asked: asyncio.Future[list[Outcome]]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            for place, outcome in zip(places, asked.result(), strict=True):
                if outcome.found is Found.FOUND:
                    self._damage(task_id, place)

    def _damage(self, task_id: str, place: Place) -> Damage | None:
        """What is wrong with an object that was found; tells it."""
        assert isinstance(place.data, BlockInPlace)
        damage = place.data.damage
        if damage is not None:
            self._bad(task_id, place.name, damage)
        return damage

    async def _answered(self, account: Account, asked: asyncio.Future[list[Outcome]]) -> bool:
        """Wait for the answer. False: the task was stopped first."""
        clock = self._context.clock
        before = clock.monotonic()
        answered = await account.job.stop.race(asked)
        account.storage_s += clock.monotonic() - before
        return answered

    def _take(self, account: Account, tries: Tries, places: Sequence[Place], outcomes: Sequence[Outcome]) -> None:
        """Add one chunk's outcomes to the account."""
        good, cold, failed = [], [], 0
        for place, outcome in zip(places, outcomes, strict=True):
            if outcome.found is Found.FOUND and self._damage(account.job.task.task_id, place) is None:
                good.append(place.depth)
                continue
            if outcome.found is Found.COLD:
                cold.append(place.depth)
            elif tries.ended is None:
                tries.ended = place.depth
            if outcome.error is not None:
                account.failed(outcome.error)
                failed += 1
        account.done(good, len(good) * self._context.layout.block_bytes)
        tries.cold += cold
        tries.troubled = tries.troubled or failed == len(places)
        tries.hopeless = tries.troubled or tries.hopeless or len(cold) == len(places)
