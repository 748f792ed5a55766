"""The bytes that a rank's arrays occupy, so that two ranks never get the same ones.

Addresses do not show this, because a process may map the same memory at two addresses. So an extent identifies the
memory itself, in a way that depends on its kind, and bytes in it: one run per block, at equal distances. Runs of two
extents may interleave without touching, like the pages of two ranks or two layers in one piece of memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from transferd.blocks.layout.base import Arena, BlockLayout


class Extent(NamedTuple):
    """`runs` runs of `nbytes` bytes in one piece of memory, `stride` apart, the first at `start`.

    memory: equal for the same piece, however it was mapped. stride: at least nbytes; ignored if there is one run.
    """

    memory: Hashable
    start: int
    nbytes: int
    stride: int = 0
    runs: int = 1

    @property
    def end(self) -> int:
        """The offset just past the last run."""
        return self.start + (self.runs - 1) * self.stride + self.nbytes


def extent(memory: Hashable, start: int, nbytes: int, stride: int, blocks: int) -> Extent:
    """The extent of `blocks` blocks. Blocks without gaps between them are one run."""
    if stride == nbytes or blocks == 1:
        return Extent(memory, start, nbytes * blocks)
    return Extent(memory, start, nbytes, stride, blocks)


def extents_of(layout: BlockLayout, arena: Arena, memory: Hashable, base: int = 0) -> list[Extent]:
    """One extent per array. base: the address of byte 0 of `memory`."""
    geometry = arena.geometry
    places = zip(layout.segments, geometry.offsets.tolist(), geometry.strides.tolist(), strict=True)
    return [
        extent(memory, arena.origin + offset - base, part.nbytes, stride, layout.device_blocks_of(part.layer))
        for part, offset, stride in places
    ]


def overlap(one: Iterable[Extent], other: Iterable[Extent]) -> bool:
    """Whether any byte is in both. Extents within `one`, or within `other`, may overlap each other."""
    by_memory: dict[Hashable, list[Extent]] = {}
    for theirs in other:
        by_memory.setdefault(theirs.memory, []).append(theirs)
    return any(touch(mine, theirs) for mine in one for theirs in by_memory.get(mine.memory, ()))


def overlapping(extents: Iterable[Extent]) -> tuple[int, int] | None:
    """The positions of two extents that share a byte, if there are any."""
    ordered = sorted(enumerate(extents), key=lambda item: item[1].start)
    for (before, one), (after, other) in _near(ordered):
        if touch(one, other):
            return before, after
    return None


def _near(ordered: list[tuple[int, Extent]]) -> Iterator[tuple[tuple[int, Extent], tuple[int, Extent]]]:
    """Pairs of which the second begins before the first ends. Usually arrays follow one another, and there are none."""
    if all(one.end <= other.start for (_, one), (_, other) in pairwise(ordered)):
        return
    for number, item in enumerate(ordered):
        for later in ordered[number + 1 :]:
            if later[1].start >= item[1].end:
                break
            yield item, later


def touch(one: Extent, other: Extent) -> bool:
    """Whether two extents of the same memory share a byte."""
    if one.start >= other.end or other.start >= one.end:
        return False
    few, many = sorted((one, other), key=lambda extent: extent.runs)
    if few.stride == many.stride and few.runs > 1:
        # Only the distance of the first runs matters, and how many strides one may be shifted against the other.
        nearest = (many.start - few.start) // few.stride
        possible = range(max(nearest - 1, 1 - many.runs), min(nearest + 1, few.runs - 1) + 1)
        return any(-many.nbytes < many.start - few.start - shift * few.stride < few.nbytes for shift in possible)
    # For each run of the one, the runs of the other that end behind its start and begin before its end.
    starts = few.start + np.arange(few.runs, dtype=np.int64) * few.stride - many.start
    step = max(many.stride, 1)
    first = np.maximum(-((many.nbytes - 1 - starts) // step), 0)
    last = np.minimum((starts + few.nbytes - 1) // step, many.runs - 1)
    return bool((first <= last).any())
