"""Cuts a copy of whole blocks into chunks that fit a staging slot, and a copy into as few DMAs as possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


Runs = npt.NDArray[np.int64]


class SlotDmas:
    """The DMAs between slots and host memory for a whole copy, computed once; each chunk uses some of them.

    hosts: uint64, host addresses. offsets: uint64, where in its slot each DMA begins. sizes: uint64. calls: the same as
    tuples of ints. first: the index of each chunk's first DMA, in the order of `Cutter.cut`, then the number of DMAs.
    """

    def __init__(self, cutter: Cutter, places: Runs, stride: int, cuts: Sequence[int], most: int) -> None:
        """places: int64, where each block of the copy begins in host memory. most: the most bytes of one DMA.

        stride: bytes from host block to host block. cuts: addresses that no DMA may cross.
        """
        rows = _rows(cutter, places)
        if stride == cutter.stride == int(rows[0, 2]):  # dense on both sides: blocks with consecutive ids are one run
            rows = _joined(rows, cuts)
        rows = shortened(rows, most)
        self.hosts, self.offsets, self.sizes = (np.ascontiguousarray(rows[:, i]).view(np.uint64) for i in range(3))
        self.calls: list[tuple[int, int, int]] = list(
            zip(self.hosts.tolist(), self.offsets.tolist(), self.sizes.tolist(), strict=True)
        )
        chunks = int(rows[-1, 3]) + 1
        self.first: list[int] = np.searchsorted(rows[:, 3], np.arange(chunks + 1)).tolist()


def _rows(cutter: Cutter, places: Runs) -> Runs:
    """[host address, offset in the slot, bytes, chunk] of each part of each block."""
    parts = cutter.parts
    count = len(places) * len(parts)
    rows = np.zeros((count, 4), dtype=np.int64)
    rows[:, 0] = (places[:, None] + np.array([part.offset for part in parts])).ravel()
    rows[:, 2] = np.tile([part.nbytes for part in parts], len(places))
    number = np.arange(count)
    rows[:, 1] = number % cutter.blocks * cutter.stride
    rows[:, 3] = number // cutter.blocks
    return rows


def _joined(rows: Runs, cuts: Sequence[int]) -> Runs:
    """Join each row with the row before it if it continues that one within the same chunk."""
    continues = (rows[1:, 0] == rows[:-1, 0] + rows[:-1, 2]) & (rows[1:, 3] == rows[:-1, 3])
    if not continues.any():
        return rows
    if len(cuts):
        continues &= ~np.isin(rows[1:, 0], np.array(cuts, dtype=np.int64))
    starts = np.flatnonzero(np.concatenate((np.ones(1, dtype=bool), ~continues)))
    joined = rows[starts]
    joined[:, 2] = np.add.reduceat(rows[:, 2], starts)
    return joined


def cut(runs: Runs, column: int, addresses: Sequence[int], origin: int) -> Runs:
    """Split runs at these addresses. column: the one with offsets from `origin`."""
    for address in addresses:
        start, end = runs[:, column], runs[:, column] + runs[:, 2]
        crosses = (start < address - origin) & (address - origin < end)
        if not crosses.any():
            continue
        second = runs[crosses].copy()
        length = address - origin - second[:, column]
        runs = runs.copy()
        runs[crosses, 2] = length
        second[:, :2] += length[:, None]
        second[:, 2] -= length
        runs = np.concatenate((runs, second))
    return np.ascontiguousarray(runs)


def shortened(runs: Runs, most: int) -> Runs:
    """Split runs into pieces of at most `most` bytes, in order. Further columns stay as they are."""
    if not len(runs) or int(runs[:, 2].max()) <= most:
        return runs
    counts = -(-runs[:, 2] // most)
    pieces = np.repeat(runs, counts, axis=0)
    number = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces[:, :2] += (number * most)[:, None]
    pieces[:, 2] = np.minimum(most, pieces[:, 2] - number * most)
    return np.ascontiguousarray(pieces)
