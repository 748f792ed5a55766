"""How a copy of whole blocks is cut to fit a staging slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transferd.blocks.layout.base import align
from transferd.tiers.cuda.kernel import MAX_BLOCKS, tiles_of

SLOT_ALIGNMENT = 16  # bytes: blocks begin where a 16-byte vector may


class Part(NamedTuple):
    """Some consecutive segments of a block that fit a slot together. offset, nbytes: of the packed block."""

    first_segment: int
    segments: int
    offset: int
    nbytes: int
    tiles: int  # of its longest segment, for the kernel


class Chunk(NamedTuple):
    """Positions start … stop-1 of the copy, and which part of each of these blocks."""

    start: int
    stop: int
    part: Part


class Cutter:
    """Cuts copies of blocks of one shape. nbytes: int64 [segments]; slot_bytes: at least the longest segment.

    stride: bytes from block to block in a slot. offsets: where each segment begins in a packed block.
    """

    def __init__(self, nbytes: npt.NDArray[np.int64], slot_bytes: int) -> None:
        self.stride = align(int(nbytes.sum()), SLOT_ALIGNMENT)
        ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(nbytes)))
        self.offsets: npt.NDArray[np.int64] = ends[:-1]
        self._parts = _parts(nbytes, ends, slot_bytes)
        self._blocks = max(1, min(MAX_BLOCKS, slot_bytes // self.stride))

    def cut(self, blocks: int) -> Iterator[Chunk]:
        """Chunks of a copy of so many blocks, in its order: several blocks at a time, or parts of one."""
        for start in range(0, blocks, self._blocks):
            for part in self._parts:
                yield Chunk(start, min(start + self._blocks, blocks), part)


def _parts(nbytes: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], slot_bytes: int) -> list[Part]:
    """The whole block where it fits, else as many segments at a time as fit. ends: 0, then where each one ends."""
    parts: list[Part] = []
    first = 0
    while first < len(nbytes):
        last = int(np.searchsorted(ends, ends[first] + slot_bytes, side="right")) - 1
        assert last > first, "a slot holds the longest segment"
        inside = nbytes[first:last]
        parts.append(Part(first, last - first, int(ends[first]), int(inside.sum()), tiles_of(inside)))
        first = last
    return parts
