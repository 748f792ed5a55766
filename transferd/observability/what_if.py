"""What the hit rate would be with another size of storage: a sampled reuse-distance curve, always on.

    look-up ─ how many bytes were used since each block's last use? ─▶ histogram ─▶ share of hits by size

A store that evicts the least recently used block has a block if fewer bytes than its capacity were used since the
block's last use: its *reuse distance*. So one pass over the keys gives the hit rate of every size. Only a sample of the
keys is followed, those with a hash below a threshold (SHARDS, FAST '15). At most MOST keys are: beyond, the threshold
falls. Distances and counts are scaled up by the sampled share, and the error of the sample's share of popular blocks is
taken back (SHARDS-adj). docs/sizing.md says how far it can be trusted.

As in the store (lru.py), a use puts the root of its chain last in line, and a chain ends at the first block that is not
there. All engines share the order. It takes less than a MiB, and about a tenth of a microsecond for each key.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

MOST = 4096  # keys that are followed
SPACE, LAST = 1 << 24, (1 << 24) - 1  # of hashes
NUMBER_BITS, NUMBER = 16, (1 << 16) - 1  # of an engine
HALVES_S = 3600.0  # after so long, what came before counts half as much


class _Seen:
    """What one engine has looked up, in blocks. Counts are estimates for all keys.

    reused: how many were used before, by their reuse distance in bytes, rounded.
    """

    __slots__ = ("asked", "block", "number", "order", "reused", "sampled")

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked = self.sampled = 0.0
        self.reused: defaultdict[int, float] = defaultdict(float)
        self.order: list[int] = []  # the times of the last uses of its followed keys, ascending
        self.block = 0  # bytes


class WhatIf:
    """See the module. Used on the event loop.

    now: monotonic seconds. hashed: of a key; tests choose one that is the same in each process.
    """

    def __init__(self, now: Callable[[], float], hashed: Callable[[str], int] = hash, most: int = MOST) -> None:
        self._now, self._hash, self._most = now, hashed, most
        self._threshold = SPACE
        self._time = 0
        self._engines: dict[str, _Seen] = {}
        self._numbers = itertools.count()  # of engines
        self._last: dict[int, int] = {}  # the time of each followed key's last use, by hash and engine (_place)
        self._largest: list[int] = []  # the places of followed keys, negative, so that the largest hash comes first
        self._halved_at = now()

    # --- what engines do ----------------------------------------------------------------------------

    def looked_up(self, engine: str, keys: Sequence[str], block: int) -> None:
        """Note a look-up of a chain, root to leaf. block: bytes of a stored block, all ranks together."""
        self._age()
        seen, followed, farthest = self._of(engine, block), self._followed(keys), 0.0
        seen.asked += len(keys)
        seen.sampled += self._scale * len(followed)
        for key in followed:
            time = self._last.get(_place(key, seen))
            if time is None:
                break  # what comes behind it is of no use
            farthest = max(farthest, self._since(time))
            seen.reused[_rounded(farthest)] += self._scale
        self._use(seen, [key for key in followed if _place(key, seen) in self._last])

    def stored(self, engine: str, keys: Sequence[str], block: int) -> None:
        """Note that these blocks of a chain were stored, or were there."""
        seen = self._of(engine, block)
        self._use(seen, self._followed(keys))

    def left(self, engine: str) -> None:
        """Forget an engine."""
        if (seen := self._engines.pop(engine, None)) is not None:
            self._last = {place: time for place, time in self._last.items() if place & NUMBER != seen.number}
            self._largest = sorted(-place for place in self._last)  # a sorted list is a heap

    # --- what would be ------------------------------------------------------------------------------

    def shares(self, capacities: Sequence[int], engine: str | None = None) -> list[float]:
        """The shares of looked-up blocks that stores of so many bytes would have; empty if nothing was looked up.

        capacities: ascending. engine: only its look-ups; the others' blocks take room all the same.
        """
        each = [seen for name, seen in self._engines.items() if engine in (None, name)]
        asked = sum(seen.asked for seen in each)
        if not asked:
            return []
        found = [0.0] * (len(capacities) + 1)
        found[0] = asked - sum(seen.sampled for seen in each)
        for seen in each:
            for distance, number in seen.reused.items():
                found[bisect_left(capacities, distance)] += number
        return [min(1.0, max(0.0, near / asked)) for near in itertools.accumulate(found[:-1])]

    # --- inside -------------------------------------------------------------------------------------

    @property
    def _scale(self) -> float:
        return SPACE / self._threshold

    def _of(self, engine: str, block: int) -> _Seen:
        seen = self._engines.get(engine)
        if seen is None:
            seen = self._engines[engine] = _Seen(next(self._numbers) & NUMBER)
        seen.block = block
        return seen

    def _followed(self, keys: Sequence[str]) -> list[int]:
        hashed, most = self._hash, self._threshold
        return [place for key in keys if (place := hashed(key) & LAST) < most]

    def _since(self, time: int) -> float:
        """Bytes that were used since then, by all engines."""
        each = self._engines.values()
        return self._scale * sum((len(one.order) - bisect_left(one.order, time)) * one.block for one in each)

    def _use(self, seen: _Seen, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            place = _place(key, seen)
            before = self._last.get(place)
            self._time += 1
            self._last[place] = self._time
            if before is None:
                heappush(self._largest, -place)
            else:
                del seen.order[bisect_left(seen.order, before)]
            seen.order.append(self._time)
        while len(self._last) > self._most:
            self._forget_largest()

    def _forget_largest(self) -> None:
        place = -heappop(self._largest)
        self._threshold = place >> NUMBER_BITS
        order = next(seen.order for seen in self._engines.values() if seen.number == place & NUMBER)
        del order[bisect_left(order, self._last.pop(place))]

    def _age(self) -> None:
        if self._now() - self._halved_at >= HALVES_S:
            self._halved_at = self._now()
            for seen in self._engines.values():
                seen.asked, seen.sampled = seen.asked / 2, seen.sampled / 2
                for distance in seen.reused:
                    seen.reused[distance] /= 2


def _place(key: int, seen: _Seen) -> int:
    return key << NUMBER_BITS | seen.number


def _rounded(distance: float) -> int:
    """A distance in bytes, rounded down by less than a sixteenth, so that a histogram stays small."""
    shift = max(0, int(distance).bit_length() - 5)
    return int(distance) >> shift << shift
