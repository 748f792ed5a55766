"""Host memory for fakes, and a watch over who touches it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transferd.errors import InvariantError

PAGE = 4096


class SimMemory:
    """HostMemory on plain, page-aligned memory of the process. `array` is all of it as uint8. Owns it."""

    def __init__(self, nbytes: int) -> None:
        raw = np.zeros(nbytes + PAGE, dtype=np.uint8)
        start = -raw.ctypes.data % PAGE
        self.array: npt.NDArray[np.uint8] = raw[start : start + nbytes]
        self.address = int(self.array.ctypes.data)
        self.nbytes = nbytes
        self.view = self.array.data
        self.pinned = True
        self.urgent = False
        self.rank = 0
        self.lender = None


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """Ranges of memory that somebody is at work on, none of them empty.

    starts: ascending. ends[i]: the furthest end up to range i. low, high: around all of them.
    """

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    low: int
    high: int
    writes: bool
    who: str


class MemoryWatch:
    """Knows every piece of I/O that is under way, and raises when two of them disturb each other.

    One of them writing where another reads or writes at the same time is how a lease returned too
    early, a slot given out twice or a block touched after its task's end shows; in a real process
    it would show as wrong bytes, sometimes. Shared by all fakes of a simulation.

    conflicts: what was found, also where whoever heard of it turned it into a failed task.
    """

    def __init__(self) -> None:
        self.conflicts: list[str] = []
        self._claims: dict[Claim, None] = {}

    def enter(self, addresses: npt.ArrayLike, sizes: npt.ArrayLike, *, writes: bool, who: str) -> Claim:
        """Work on these ranges begins. Raises InvariantError naming both sides of a conflict."""
        starts = np.asarray(addresses, dtype=np.int64).reshape(-1)
        ends = starts + np.asarray(sizes, dtype=np.int64).reshape(-1)
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        low, high = (int(starts[0]), int(ends[-1])) if len(starts) else (0, 0)
        claim = Claim(starts, ends, low, high, writes, who)
        for other in self._claims:
            apart = high <= other.low or other.high <= low
            if not apart and (writes or other.writes) and _overlap(claim, other):
                self.conflicts.append(f"{who} and {other.who} are at work on the same memory at the same time")
                raise InvariantError(self.conflicts[-1])
        self._claims[claim] = None
        return claim

    def leave(self, claim: Claim) -> None:
        """Work on these ranges has ended."""
        del self._claims[claim]

    def __len__(self) -> int:
        return len(self._claims)


def _overlap(one: Claim, other: Claim) -> bool:
    """Whether any range of `one` meets any range of `other`."""
    # The first range of `other` that ends after ours starts is the only candidate that matters:
    # earlier ones end before us, and later ones start no earlier.
    candidate = np.searchsorted(other.ends, one.starts, side="right")
    inside = candidate < len(other.ends)
    return bool(np.any(other.starts[candidate[inside]] < (one.ends[inside])))
