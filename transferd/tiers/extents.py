"""The bytes that a rank's arrays occupy, so that two ranks never get the same ones.

Addresses cannot tell, because a process may map the same memory at two addresses. So an extent identifies the
memory itself, in the way of its kind, and a range of bytes in it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from transferd.blocks.layout.base import Arena, BlockLayout


class Extent(NamedTuple):
    """Bytes start … end-1 of one piece of memory. memory: equal for the same piece, however it was mapped."""

    memory: Hashable
    start: int
    end: int


def extents_of(layout: BlockLayout, arena: Arena, memory: Hashable, base: int = 0) -> list[Extent]:
    """One extent per array. base: the address of byte 0 of `memory`."""
    made: list[Extent] = []
    for part, offset in zip(layout.segments, arena.geometry.offsets, strict=True):
        start = arena.origin + int(offset) - base
        made.append(Extent(memory, start, start + layout.device_blocks_of(part.layer) * part.nbytes))
    return made


def overlap(one: Iterable[Extent], other: Iterable[Extent]) -> bool:
    """Whether any byte is in both. Extents of the same side may overlap each other."""
    by_memory: dict[Hashable, list[Extent]] = {}
    for extent in other:
        by_memory.setdefault(extent.memory, []).append(extent)
    return any(
        extent.start < theirs.end and theirs.start < extent.end
        for extent in one
        for theirs in by_memory.get(extent.memory, ())
    )
