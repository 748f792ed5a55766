"""A block that loads its object itself, piece by piece, and checks it on the way. See in_place.py and base.InPlace."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from transferd.blocks.footer import FOOTER_BYTES, Damage, Inspection
from transferd.errors import MemoryLost
from transferd.storage.base import Backing, ReadNow
from transferd.tiers.hostcopy import copy_runs
from transferd.workers.block_memory import NATIVE, BlockMemory
from transferd.workers.loan import Loan

if NATIVE:
    from transferd.workers import _inplace

Parts = npt.NDArray[np.int64]
# Copies one piece of an object: offset in the object, origin of the arena, parts of the piece, block, state of the
# checksum. Returns how many bytes it copied.
CopyPiece = Callable[[int, int, Any, int, Any], int]


class BlockInPlace:
    """Loads one block in place and checks the object. See `storage.base.InPlace`.

    damage: after a load, what is wrong with the object's footer; None for a good one. A wrong payload does not prove
    that the object is damaged: an engine that was killed and restarted may write to blocks that a task of its
    predecessor still loads. Only staging can tell, because no one else touches it.
    lost: why the block's memory cannot be accessed any more; None if it can. Such a block says that it did not load.
    """

    __slots__ = ("_block", "_inspection", "_loan", "_memory", "_slots", "damage", "lost", "nbytes")

    def __init__(
        self, memory: BlockMemory, block: int, inspection: Inspection, loan: Loan, slots: list[memoryview] | None = None
    ) -> None:
        """slots: of staging, those of the task's chunk that no thread uses now; only `bounce` needs them."""
        self.nbytes = inspection.payload_bytes + FOOTER_BYTES
        self.damage: Damage | None = None
        self.lost: MemoryLost | None = None
        self._memory = memory
        self._block = block
        self._inspection = inspection
        self._loan = loan
        self._slots = slots

    @property
    def wanted(self) -> bool:
        return not self._loan.over and self.lost is None

    def load(self, read: ReadNow, backing: Backing | None = None) -> bool:
        tables, payload_bytes = self._memory.tables, self._inspection.payload_bytes
        if isinstance(backing, memoryview) and tables is not None:
            return self._load_from(backing, tables)
        footer = bytearray(FOOTER_BYTES)
        if read([memoryview(footer)], payload_bytes) < FOOTER_BYTES:
            return False
        self.damage = self._inspection.footer(bytes(footer))
        if self.damage is not None:
            return True
        if tables is None or not isinstance(backing, int):
            return self._load_in_python(read)
        return self._load_natively(tables, functools.partial(_inplace.read_file, backing, False))

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

    def bounce(self, fill: Callable[[memoryview], float | None]) -> float | None:
        tables, slots = self._memory.tables, self._slots
        assert tables is not None
        assert slots is not None
        if self._loan.over:
            return None
        slot = slots.pop()
        try:
            data = slot[: self.nbytes]
            modified = fill(data)
            return modified if modified is not None and self._load_from(data, tables) else None
        finally:
            slots.append(slot)

    def leave(self) -> None:
        if self._memory.tables is not None:
            _inplace.forget_files()

    def _load_from(self, data: memoryview, tables: Sequence[Parts]) -> bool:
        """Load the object that is in this memory. True for a wrong footer, too: see `damage`."""
        self.damage = self._inspection.footer(bytes(data[-FOOTER_BYTES:]))
        copy = functools.partial(_inplace.copy_memory, data)
        return self.damage is not None or self._load_natively(tables, copy)

    def _load_natively(self, tables: Sequence[Parts], copy: CopyPiece) -> bool:
        """copy: a call of the extension, which has its source."""
        state = _inplace.new_state(self._inspection.payload_bytes)
        return self._load_pieces(tables, copy, state) and self._inspection.damage(_inplace.checksum(state)) is None

    def _load_in_python(self, read: ReadNow) -> bool:
        inspection = self._inspection

        def copy(offset: int, origin: int, parts: list[tuple[int, int, int]], block: int, _state: None) -> int:
            lengths = [length for _, _, length in parts]
            ends = list(itertools.accumulate(lengths))
            piece = np.empty(ends[-1], dtype=np.uint8)  # between: Python must not touch a block
            loaded = read([piece.data], offset)
            if loaded == piece.nbytes:
                inspection.payload(piece.data)
                runs = [
                    (end - length, first + stride * block, length)
                    for end, (first, stride, length) in zip(ends, parts, strict=True)
                ]
                copy_runs(piece.ctypes.data, origin, np.array(runs, dtype=np.int64))
            return loaded

        parts = [piece.parts for piece in self._memory.pieces]
        return self._load_pieces(parts, copy, None) and inspection.damage() is None

    def _load_pieces(self, tables: Sequence[Any], copy: CopyPiece, state: bytearray | None) -> bool:
        """Load every piece. False: some bytes are not in memory, the loan has ended, or the block's memory is lost."""
        memory, loan, block = self._memory, self._loan, self._block
        origin = memory.arena.origin
        for piece, table in zip(memory.pieces, tables, strict=True):
            if self.lost is not None or not loan.take():
                return False
            try:
                if copy(piece.offset, origin, table, block, state) < piece.nbytes:
                    return False
            except MemoryLost as error:
                self.lost = error
                return False
            finally:
                loan.give_back()
        return True
