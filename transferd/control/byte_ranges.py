"""Orders tasks on windows: blocks that share bytes with other blocks of their engine, and of other engines.

A window cannot be ordered by its number alone: two numbers may mean the same bytes, even in two engines. So the claims
of all engines on windows are kept in one table, as ranges of bytes of their memory. A claim waits for each earlier
claim, of any engine, if they share a byte and at least one of the two writes it.

The table has a row for each range, and nothing for a window that no task names. To enter k ranges among n takes
(n + k) log k steps in numpy, however they overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=Hashable)

_START, _END, _NUMBER, _WRITES = range(4)  # columns
_Table = npt.NDArray[np.int64]


class WindowGrid(NamedTuple):
    """Where a rank's windows lie: window b is the `nbytes` bytes of `memory` that begin at start + b * stride.

    memory: equal for the same memory, however it was mapped (tiers/extents.py).
    """

    memory: Hashable
    start: int
    stride: int
    nbytes: int

    def ranges(self, ids: Iterable[int]) -> list[list[int]]:
        """[start, end] of the bytes of these windows, ascending and apart."""
        apart: list[list[int]] = []
        for window in sorted(ids):
            start = self.start + window * self.stride
            if apart and start <= apart[-1][1]:
                apart[-1][1] = start + self.nbytes
            else:
                apart.append([start, start + self.nbytes])
        return apart

    def overlapping(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """Two of these different windows that share a byte, if there are any."""
        pairs = itertools.pairwise(sorted(ids))
        return next(((a, b) for a, b in pairs if (b - a) * self.stride < self.nbytes), None)


class ByteRanges(Generic[T]):
    """The bytes of all claims that have not left. Shared by the hazard tables of a daemon's engines."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, _Table] = {}  # by memory: int64 [n, 4]
        self._claims: dict[int, T] = {}
        self._numbers: dict[T, int] = {}
        self._last = 0

    def enter(self, claim: T, grids: Sequence[WindowGrid], ids: Sequence[int], *, writes: bool) -> list[T]:
        """Note the bytes of these windows as the claim's. Returns the claims that it has to wait for, in their order.

        A claim may enter more than once. It is never among the claims returned for it.
        """
        if claim not in self._numbers:
            self._last += 1
            self._numbers[claim] = self._last
            self._claims[self._last] = claim
        number = self._numbers[claim]
        found: set[int] = set()
        for grid in grids:
            rows = np.array([(*span, number, writes) for span in grid.ranges(ids)], dtype=np.int64)
            table = self._tables.get(grid.memory)
            if table is not None:
                found.update(_touching(table if writes else table[table[:, _WRITES] == 1], rows))
                rows = np.concatenate((table, rows))
            self._tables[grid.memory] = rows
        found.discard(number)
        return [self._claims[one] for one in sorted(found)]

    def leave(self, claim: T, grids: Sequence[WindowGrid]) -> None:
        """Remove a claim that entered with these grids."""
        number = self._numbers.pop(claim, None)
        if number is None:
            return
        del self._claims[number]
        for memory in {grid.memory for grid in grids}:
            table = self._tables[memory]
            kept = table[table[:, _NUMBER] != number]
            if len(kept):
                self._tables[memory] = kept
            else:
                del self._tables[memory]


def _touching(table: _Table, ours: _Table) -> list[int]:
    """The numbers of the claims with a row that shares a byte with one of ours. Ours are ascending and apart."""
    # For each row, the first of ours that ends behind the row's start, if there is one.
    first = np.searchsorted(ours[:, _END], table[:, _START], side="right")
    starts = np.append(ours[:, _START], np.iinfo(np.int64).max)
    numbers: list[int] = table[starts[first] < table[:, _END], _NUMBER].tolist()
    return numbers
