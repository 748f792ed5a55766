"""Cuts a copy of whole blocks into chunks that fit a staging slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transferd.blocks.layout.base import align
from transferd.tiers.cuda.kernel import MAX_BLOCKS, tiles_of

SLOT_ALIGNMENT = 16  # bytes: the kernel moves 16-byte vectors


class BlockPart(NamedTuple):
    """Consecutive segments of a block that fit a slot together. offset, nbytes: in the packed block."""

    first_segment: int
    segments: int
    offset: int
    nbytes: int
    tiles: int  # of its longest segment, for the kernel


class CopyChunk(NamedTuple):
    """One part of the blocks at positions start … stop-1 of the copy."""

    start: int
    stop: int
    part: BlockPart


class Cutter:
    """Cuts copies of blocks of one shape. nbytes: int64 [segments]; slot_bytes: at least the longest segment.

    stride: bytes from block to block in a slot. offsets: the start of each segment in a packed block. parts: those of
    one block. blocks: the most blocks in a chunk; a block of several parts has its chunks to itself.
    """

    def __init__(self, nbytes: npt.NDArray[np.int64], slot_bytes: int) -> None:
        self.stride = align(int(nbytes.sum()), SLOT_ALIGNMENT)
        ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(nbytes)))
        self.offsets: npt.NDArray[np.int64] = ends[:-1]
        self.parts = _parts(nbytes, ends, slot_bytes)
        self.blocks = max(1, min(MAX_BLOCKS, slot_bytes // self.stride))

    def cut(self, blocks: int) -> Iterator[CopyChunk]:
        """Chunks of a copy of `blocks` blocks, in its order: several blocks each, or parts of one block."""
        for start in range(0, blocks, self.blocks):
            for part in self.parts:
                yield CopyChunk(start, min(start + self.blocks, blocks), part)


def _parts(nbytes: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], slot_bytes: int) -> list[BlockPart]:
    """The whole block if it fits, otherwise parts of as many segments as fit. ends: 0, then each segment's end."""
    parts: list[BlockPart] = []
    first = 0
    while first < len(nbytes):
        last = int(np.searchsorted(ends, ends[first] + slot_bytes, side="right")) - 1
        assert last > first, "a slot holds the longest segment"
        inside = nbytes[first:last]
        parts.append(BlockPart(first, last - first, int(ends[first]), int(inside.sum()), tiles_of(inside)))
        first = last
    return parts
