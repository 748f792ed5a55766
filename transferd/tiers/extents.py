"""The bytes that a rank's arrays occupy, so that two ranks never get the same ones.

Addresses do not show this, because a process may map the same memory at two addresses. So an extent identifies the
memory itself, in a way that depends on its kind, and bytes in it: one run per block, at equal distances. Runs of two
extents may interleave without sharing a byte, like the pages of two ranks or two layers in one piece of memory.

An engine chooses how many extents it offers and how they interleave. So the search for a shared byte takes n log n
steps for n extents of one stride that are apart, however many blocks they have. What is left, and extents of different
strides, are compared in pairs, at most MOST_PAIRS of them (docs/adr/0073).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transferd.blocks.layout.base import Arena, BlockLayout
from transferd.errors import RequestError
from transferd.runtime.threads import Direction, Threads

MOST_PAIRS = 2**22  # of extents that interleave: 2,048 with as many others
PIECE = 2**16  # pairs compared by one numpy call

_Table = npt.NDArray[np.int64]  # [n, 4]: start, nbytes, stride, runs


class Extent(NamedTuple):
    """`runs` runs of `nbytes` bytes in one piece of memory, `stride` apart, the first at `start`."""

    memory: Hashable  # equal for the same piece, however it was mapped
    start: int
    nbytes: int
    stride: int = 0  # at least nbytes; ignored if there is one run
    runs: int = 1

    @property
    def end(self) -> int:
        """The offset just past the last run."""
        return self.start + (self.runs - 1) * self.stride + self.nbytes


def extent(memory: Hashable, start: int, nbytes: int, stride: int, blocks: int) -> Extent:
    """The extent of `blocks` blocks. Blocks without gaps between them are one run, also if they overlap."""
    if stride <= nbytes or blocks == 1:
        return Extent(memory, start, (blocks - 1) * stride + nbytes)
    return Extent(memory, start, nbytes, stride, blocks)


def extents_of(layout: BlockLayout, arena: Arena, memory: Hashable) -> Extents:
    """One extent per array, at addresses."""
    geometry = arena.geometry
    places = zip(layout.segments, geometry.offsets.tolist(), geometry.strides.tolist(), strict=True)
    return Extents(
        extent(memory, arena.origin + offset, part.nbytes, stride, layout.device_blocks_of(part.layer))
        for part, offset, stride in places
    )


class Extents(tuple[Extent, ...]):
    """Extents that are compared more than once. tables: those of each piece of memory, made once."""

    @functools.cached_property
    def tables(self) -> dict[Hashable, _Table]:
        by_memory: dict[Hashable, list[Extent]] = {}
        for one in self:
            by_memory.setdefault(one.memory, []).append(one)
        return {memory: _table(extents) for memory, extents in by_memory.items()}


def overlap(one: Iterable[Extent], other: Iterable[Extent]) -> bool:
    """Whether any byte is in both. Extents within `one`, or within `other`, may overlap each other.

    Raises RequestError (bad_value) if more than MOST_PAIRS pairs interleave that are not apart by one stride.
    """
    mine, theirs = (each if isinstance(each, Extents) else Extents(each) for each in (one, other))
    return any(
        _found(np.concatenate((table, theirs.tables[memory])), len(table)) is not None
        for memory, table in mine.tables.items()
        if memory in theirs.tables
    )


def overlapping(extents: Iterable[Extent]) -> tuple[int, int] | None:
    """The positions of two extents of one piece of memory that share a byte, if any. Raises as `overlap` does."""
    return _found(_table(extents), None)


def _table(extents: Iterable[Extent]) -> _Table:
    table = np.array([one[1:] for one in extents], dtype=np.int64).reshape(-1, 4)
    table[table[:, 3] == 1, 2] = 0  # a single run has no stride
    return table


def _found(table: _Table, mine: int | None) -> tuple[int, int] | None:
    """The positions of two extents that share a byte. mine: one must be among so many first ones, one must not."""
    starts, nbytes, strides, _ = table.T
    (near,) = np.nonzero(_near(starts, _ends(table)))
    stride = strides[near[0]] if len(near) else 0
    if stride and (strides[near] == stride).all():
        # In memory cut into rows of this stride, each is in the same columns of all its rows. Usually no two share one.
        left = (starts[near] - starts[near].min()) % stride
        right = left + nbytes[near]
        if (right <= stride).all():
            near = near[_near(left, right)]
    ones, others = (near, near) if mine is None else (near[near < mine], near[near >= mine])
    pairs = 0
    for some, theirs in _pairs(table, ones, others):
        pairs += len(some)
        if pairs > MOST_PAIRS:
            what = f"more than {MOST_PAIRS} pairs of arrays or pages interleave: give all of them one stride"
            raise RequestError(what, code="bad_value")
        (touching,) = np.nonzero(_touch(table[some], table[theirs]))
        if len(touching):
            return int(some[touching[0]]), int(theirs[touching[0]])
    return None


def _ends(table: _Table) -> npt.NDArray[np.int64]:
    starts, nbytes, strides, runs = table.T
    ends: npt.NDArray[np.int64] = starts + (runs - 1) * strides + nbytes
    return ends


def _near(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which ranges may overlap another one. Usually arrays follow one another, and none does."""
    order = np.argsort(starts, kind="stable")
    joined = np.maximum.accumulate(ends[order])[:-1] > starts[order][1:]
    near = np.zeros(len(starts), dtype=np.bool_)
    near[order[:-1][joined]] = near[order[1:][joined]] = True
    return near


def _pairs(
    table: _Table, ones: npt.NDArray[np.int64], others: npt.NDArray[np.int64]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Positions of pairs to compare, in pieces. From the first run to the last, they lie in each other's way.

    Those of one stride also share a column of memory cut into rows of this stride.
    """
    starts, nbytes, strides, _ = table.T
    ends = _ends(table)
    rows = max(1, PIECE // max(1, len(others)))
    for at in range(0, len(ones), rows):
        some = ones[at : at + rows, None]
        chosen = (starts[some] < ends[others]) & (starts[others] < ends[some]) & (some < others)
        stride = np.maximum(strides[some], 1)
        behind = (starts[others] - starts[some]) % stride
        chosen &= (strides[some] != strides[others]) | (behind < nbytes[some]) | (behind + nbytes[others] > stride)
        mine, theirs = np.nonzero(chosen)
        yield some[mine, 0], others[theirs]


def _touch(ones: _Table, others: _Table) -> npt.NDArray[np.bool_]:
    """Whether the extents of each pair share a byte. The pairs lie in each other's way (`_pairs`).

    Run i of the one touches the runs j of the other with

        (x - nbytes of the other) // stride of the other  <  j  <=  (x + nbytes of the one - 1) // stride of the other

    where x is how far run i starts behind run 0 of the other. Only those i count that begin before the other's last
    run ends and end behind its start; for these, some j in the range exists if and only if a real run is in it. So the
    number of j is summed over these i, and it is 0 if they do not touch.
    """
    start, nbytes, stride, runs = ones.T
    to_start, to_nbytes, to_stride, to_runs = others.T
    stride, to_stride = np.maximum(stride, 1), np.maximum(to_stride, 1)
    x = start - to_start
    first = np.maximum(-((x + nbytes - 1) // stride), 0)
    last = np.minimum(-((x - (to_runs - 1) * to_stride - to_nbytes) // stride), runs)
    count = np.maximum(last - first, 0)
    x += first * stride
    sums = [_floor_sum(count, to_stride, stride, x + part) for part in (nbytes - 1, -to_nbytes)]
    touching: npt.NDArray[np.bool_] = sums[0] != sums[1]
    return touching


def _floor_sum(
    n: npt.NDArray[np.int64], m: npt.NDArray[np.int64], a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The sum of (a * i + b) // m over i in range(n), for each element, modulo 2**64.

    Euclid's algorithm: the points below a line are counted with its axes exchanged. It takes log(m) steps.
    """
    total = np.zeros_like(n)
    while n.any():
        even = np.where(n % 2 == 0, n // 2, n) * np.where(n % 2 == 0, n - 1, (n - 1) // 2)
        total += even * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        n, b = top // m, top % m
        a, m = m, np.where(n > 0, a, 1)
    return total


@dataclass(slots=True, eq=False)
class MemoryClaim:
    """One rank's bytes."""

    engine: str
    rank: int
    extents: Extents
    memories: frozenset[Hashable]
    windows_of: int | None = None  # if they are windows, their user; his other engines' windows may have the same bytes
    leaving: bool = False  # the bytes will be unmapped soon, so another rank may wait for them
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def may_share(self, other: MemoryClaim) -> bool:
        """Whether both may have one byte: their tasks are ordered by bytes then (control/byte_ranges.py)."""
        return self.windows_of is not None and self.windows_of == other.windows_of and self.engine != other.engine


class Claims:
    """The bytes of each rank of each engine of a daemon. No two ranks share a byte.

    The exception are windows of one user's engines. Bytes count until they are unmapped, so a leaving engine keeps
    them. Changed on the loop only.
    """

    def __init__(self) -> None:
        self._claims: list[MemoryClaim] = []
        self._comparing = asyncio.Lock()  # held from a comparison to its claim

    async def take(
        self, engine: str, rank: int, extents: Extents, threads: Threads, *, windows_of: int | None = None
    ) -> MemoryClaim:
        """Claim these bytes until `give_back`. Waits for another engine that is leaving.

        They are compared in one of `threads`. windows_of: see MemoryClaim. Raises RequestError with code
        `already_attached` if another rank has one of the bytes.
        """
        claim = MemoryClaim(engine, rank, extents, frozenset(extent.memory for extent in extents), windows_of)
        while (other := await self._claimed(claim, threads)) is not None:
            if other.ended.is_set():  # while they were compared
                continue
            if not other.leaving or other.engine == engine:  # an engine changes its own ranks one after the other
                whose = f"rank {other.rank}" + ("" if other.engine == engine else f" of the engine {other.engine!r}")
                what = f"the memory offered for rank {rank} overlaps that of {whose}; each rank needs its own"
                raise RequestError(what, code="already_attached")
            await other.ended.wait()
        return claim

    def give_back(self, claim: MemoryClaim) -> None:
        """Call it once the bytes are unmapped."""
        self._claims.remove(claim)
        claim.ended.set()

    async def _claimed(self, claim: MemoryClaim, threads: Threads) -> MemoryClaim | None:
        """Enter the claim, or return one that is in the way."""
        async with self._comparing:
            there = [other for other in self._claims if not claim.memories.isdisjoint(other.memories)]
            others = [other for other in there if not claim.may_share(other)]

            def compared() -> MemoryClaim | None:
                return next((other for other in others if overlap(claim.extents, other.extents)), None)

            what = f"comparing the memory of rank {claim.rank}"
            found = await threads.run(Direction.SETUP, compared, what) if others else None
            if found is None:
                self._claims.append(claim)
        return found
