"""Segments of a block that a copy engine finds by itself, because they lie equally far apart.

If all layers of a cache are in one allocation (the daemon makes only such caches), a block's segments of one size are
the rows of a matrix with a pitch, both in the cache and in a packed block. One call copies them (cuMemcpy2DAsync). It
needs no kernel and no staging, and takes no turns with the engine's kernels. On an H100 a copy of 160 rows of 16 KiB
runs at 40 GB/s, of 61 rows of 72 KiB at 50, and of rows of 1 KiB at 13 (docs/adr/0100).

Where each layer is an allocation of its own, no copy may go from one to another. But any two blocks of a layer are two
rows there, whatever their ids, and in host memory, if the later block lies behind the other one in both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transferd.blocks.layout.base import Arena
from transferd.tiers.cuda.driver import MAX_PITCH

Rows = npt.NDArray[np.int64]  # [n, 6]: the first six fields of a RowCopy each
WIDTH, HEIGHT = 4, 5
PLANES = (1, 2)  # keys and values, or their scales, may take turns


class BlockRows(NamedTuple):
    """Some segments of every block."""

    offset: int  # of block 0's first row from the cache's origin
    stride: int  # from block to block
    pitch: int  # from row to row in the cache
    packed_offset: int  # of the first row in a packed block
    packed_pitch: int  # from row to row in a packed block
    width: int  # bytes of a row
    height: int  # how many rows

    def runs(self, block: int) -> npt.NDArray[np.int64]:
        """int64 [height, 3]: each row's offset in the cache, its offset in the packed block, and its bytes."""
        number = np.arange(self.height, dtype=np.int64)
        runs = np.empty((self.height, 3), dtype=np.int64)
        runs[:, 0] = self.offset + block * self.stride + number * self.pitch
        runs[:, 1] = self.packed_offset + number * self.packed_pitch
        runs[:, 2] = self.width
        return runs


class RowCopies:
    """The copies of rows that move a block, as a table to add the places of blocks to.

    heights: rows of each copy. No copy is longer than `dma_most` bytes, if its rows are not; rows are divided evenly.
    """

    def __init__(self, rows: Sequence[BlockRows], dma_most: int) -> None:
        self.rows = rows
        parts = []
        for one in rows:
            pieces = -(-one.height // max(1, dma_most // one.width))
            for number in range(pieces):
                first, end = (one.height * at // pieces for at in (number, number + 1))
                device, host = one.offset + first * one.pitch, one.packed_offset + first * one.packed_pitch
                parts.append((device, one.pitch, host, one.packed_pitch, one.width, end - first, one.stride))
        table = np.array(parts, dtype=np.int64).reshape(-1, 7)
        self._table, self._strides = np.ascontiguousarray(table[:, :6]), table[:, 6]
        self.heights: list[int] = table[:, 5].tolist()
        self.widest = max((one.width for one in rows), default=0)

    def runs(self, block: int) -> npt.NDArray[np.int64]:
        """int64 [n, 3]: as BlockRows.runs, of all rows of a block."""
        return np.concatenate([part.runs(block) for part in self.rows])

    def table(
        self,
        origin: int,
        blocks: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        _cuts: npt.NDArray[np.int64],
    ) -> Rows:
        """The copies of these blocks. origin: of the cache. places: where each block begins in host memory."""
        table = np.empty((len(blocks), *self._table.shape), dtype=np.int64)
        table[:] = self._table
        table[:, :, 0] += origin + np.multiply.outer(blocks, self._strides)
        table[:, :, 2] += places[:, None]
        return table.reshape(-1, 6)


class PairCopies:
    """The copies of two rows each that move blocks two by two. packed_offsets: of each segment in a packed block."""

    def __init__(self, cache: Arena, packed_offsets: npt.NDArray[np.int64]) -> None:
        self._cache = cache.geometry
        self._packed = packed_offsets
        self.nbytes = cache.geometry.nbytes

    def runs(self, block: int) -> npt.NDArray[np.int64]:
        """int64 [n, 3]: as BlockRows.runs, of all segments of a block."""
        return np.stack((self._cache.offsets + block * self._cache.strides, self._packed, self._cache.nbytes), axis=1)

    def pieces(
        self, origin: int, blocks: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of each segment of these blocks: its address in the cache, its address in host memory, and its bytes."""
        cache = self._cache
        here = np.multiply.outer(blocks, cache.strides)
        here += cache.offsets + origin
        return here.ravel(), np.add.outer(places, self._packed).ravel(), np.tile(cache.nbytes, len(blocks))

    def table(
        self,
        origin: int,
        blocks: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        cuts: npt.NDArray[np.int64],
    ) -> Rows:
        """The copies of these blocks, as RowCopies.table. A block that has no partner is copies of one row.

        cuts: addresses in host memory that no copy may cross, ascending; no block crosses one by itself.
        """
        first, second = _partners(blocks, places)
        steps, pitches = blocks[second] - blocks[first], places[second] - places[first]
        longest = int(self._cache.strides.max())
        fits = (steps > 0) & (steps * longest <= MAX_PITCH) & (pitches > 0) & (pitches <= MAX_PITCH)
        fits &= np.searchsorted(cuts, places[first], side="right") == np.searchsorted(
            cuts, places[second], side="right"
        )
        first, steps, pitches = first[fits], steps[fits], pitches[fits]
        alone = np.ones(len(blocks), dtype=bool)
        alone[first] = alone[second[fits]] = False
        order = np.concatenate((first, np.flatnonzero(alone)))
        table = np.empty((len(order), len(self._packed), 6), dtype=np.int64)
        np.add(self._cache.offsets + origin, np.multiply.outer(blocks[order], self._cache.strides), out=table[:, :, 0])
        np.add.outer(places[order], self._packed, out=table[:, :, 2])
        table[:, :, 1] = table[:, :, 3] = table[:, :, 4] = self._cache.nbytes
        table[:, :, 5] = 1
        pairs = table[: len(first)]
        np.multiply.outer(steps, self._cache.strides, out=pairs[:, :, 1])
        pairs[:, :, 3], pairs[:, :, 5] = pitches[:, None], 2
        return table.reshape(-1, 6)


def _partners(
    blocks: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices of pairs of blocks, of which the second lies behind the first on both sides.

    The half with the smaller ids has the first ones. Both halves are in the order of their places, and the second half
    moves on until each partner lies behind: by about the root of their number, if they are in no order.
    """
    half = len(blocks) // 2
    order = np.argsort(blocks, kind="stable")
    first, second = (side[np.argsort(places[side], kind="stable")] for side in (order[:half], order[half:]))
    before = np.searchsorted(places[second], places[first]) - np.arange(half)
    late = max(0, int(before.max(initial=0)))
    count = min(half, len(second) - late)
    return first[:count], second[late : late + count]


def block_rows(
    cache: Arena, packed_offsets: npt.NDArray[np.int64], allocations: Sequence[tuple[int, int]]
) -> tuple[BlockRows, ...]:
    """All segments of a block as the rows of as few copies as possible; empty if their allocations are not known.

    packed_offsets: of each segment, in the layout's order.
    allocations: address and bytes of each one of the cache; no copy crosses from one to another.
    """
    geometry = cache.geometry
    starts = np.array(sorted(address for address, _ in allocations), dtype=np.int64)
    within = np.searchsorted(starts, geometry.offsets + cache.origin, side="right")
    if not within.all():  # the allocation of some segment is not known
        return ()
    # A copy engine's call costs as much as twenty rows, so the cut with the fewest copies is the best. Planes that take
    # turns in memory are equally far apart only each by itself.
    ways = ((order, planes) for order in (geometry.offsets, packed_offsets) for planes in PLANES)
    rows = min((_cut(cache, packed_offsets, within, *way) for way in ways), key=len)
    return tuple(sorted(rows, key=lambda one: one.packed_offset))


def _cut(
    cache: Arena,
    packed_offsets: npt.NDArray[np.int64],
    within: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64],
    planes: int,
) -> list[BlockRows]:
    """All segments as rows: taken in ascending `order`, each plane of `planes` that take turns by itself."""
    geometry = cache.geometry
    alike: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index in np.argsort(order, kind="stable").tolist():
        alike[int(geometry.nbytes[index]), int(geometry.strides[index]), int(within[index])].append(index)
    return [
        BlockRows(int(geometry.offsets[first]), stride, pitch, int(packed_offsets[first]), packed_pitch, width, count)
        for (width, stride, _), indices in alike.items()
        for plane in (indices[number::planes] for number in range(min(planes, len(indices))))
        for first, count, pitch, packed_pitch in _progressions(
            plane, geometry.offsets[plane], packed_offsets[plane], width
        )
    ]


def _progressions(
    indices: list[int], offsets: npt.NDArray[np.int64], packed: npt.NDArray[np.int64], width: int
) -> Iterator[tuple[int, int, int, int]]:
    """Cut segments into stretches that are equally far apart on both sides: first index, count, and both pitches."""
    steps = list(zip(np.diff(offsets).tolist(), np.diff(packed).tolist(), strict=True))
    at = 0
    while at < len(indices):
        count, pitch = 1, (width, width)
        if at < len(steps) and all(width <= step <= MAX_PITCH for step in steps[at]):
            pitch = steps[at]
            while at + count - 1 < len(steps) and steps[at + count - 1] == pitch:
                count += 1
        yield indices[at], count, *pitch
        at += count
