"""What the hit rate would be with another size of storage: a sampled reuse-distance curve, always on.

    look-up ─ how many bytes were used since each block's last use? ─▶ histogram ─▶ share of hits by size

A store that evicts the least recently used block has a block if fewer bytes than its capacity were used since the
block's last use: its *reuse distance*. So one pass over the keys gives the hit rate of every size. Only a sample of the
keys is followed, those with a hash below a threshold (SHARDS, FAST '15). At most MOST keys are: beyond, the threshold
falls. Distances and counts are scaled up by the sampled share, and the error of the sample's share of popular blocks is
taken back (SHARDS-adj). docs/sizing.md says how far it can be trusted.

As in the store (lru.py), a use puts the root of its chain last in line, and a chain ends at the first block that is not
there. All engines share the order. It takes less than a MiB, and about a tenth of a microsecond for each key. A chain
is noted in pieces, so that the event loop may do other things meanwhile.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

MOST = 4096  # keys that are followed
SPACE, LAST = 1 << 24, (1 << 24) - 1  # of hashes
NUMBER_BITS, NUMBER = 16, (1 << 16) - 1  # of an engine
PIECE = 1024  # keys: a tenth of a millisecond, or a few where all of them are followed
HALVES_S = 3600.0  # after so long, what came before counts half as much


@dataclass(slots=True)
class _Seen:
    """What one engine has looked up, in blocks. Counts are estimates for all keys.

    reused: how many were used before, by their reuse distance in bytes, rounded.
    """

    number: int
    block: int  # bytes
    asked: float = 0.0
    sampled: float = 0.0
    reused: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))


class WhatIf:
    """See the module. Used on the event loop.

    now: monotonic seconds. hashed: of a key; tests choose one that is the same in each process.
    """

    def __init__(self, now: Callable[[], float], hashed: Callable[[str], int] = hash, most: int = MOST) -> None:
        self._now, self._hash, self._most = now, hashed, most
        self._threshold = SPACE
        self._time = 0
        self._engines: dict[str, _Seen] = {}
        self._orders: dict[int, list[int]] = {}  # the times of the last uses of followed keys, ascending, by block size
        self._sizes: dict[int, int] = {}  # the block size of each engine, by its number
        self._numbers = itertools.count()  # of engines
        self._last: dict[int, int] = {}  # the time of each followed key's last use, by hash and engine
        self._largest: list[int] = []  # the places of followed keys, negative, so that the largest hash comes first
        self._halved_at = now()

    # --- what engines do ----------------------------------------------------------------------------

    def looked_up(self, engine: str, keys: Sequence[str], block: int) -> Generator[None, None, None]:
        """Note a look-up of a chain, root to leaf, in pieces. block: bytes of a stored block, all ranks together."""
        self._age()
        seen, followed, farthest = self._of(engine, block), list[int](), 0.0
        seen.asked += len(keys)
        there = True  # what comes behind the first one that is not there is of no use
        for start in range(0, len(keys), PIECE):
            if start:
                yield
            some = self._followed(keys[start : start + PIECE])
            seen.sampled += self._scale * len(some)
            for key in some if there else ():
                time = self._last.get(key << NUMBER_BITS | seen.number)
                if time is None:
                    there = False
                    break
                farthest = max(farthest, self._since(time))
                seen.reused[_rounded(farthest)] += self._scale
            followed += some
        yield from self._use(seen, followed, known=True)

    def stored(self, engine: str, keys: Sequence[str], block: int) -> Generator[None, None, None]:
        """Note in pieces that these blocks of a chain were stored, or were there."""
        seen, followed = self._of(engine, block), list[int]()
        for start in range(0, len(keys), PIECE):
            if start:
                yield
            followed += self._followed(keys[start : start + PIECE])
        yield from self._use(seen, followed)

    def left(self, engine: str) -> Generator[None, None, None]:
        """Forget an engine: one piece."""
        self._forget(engine)
        yield

    def _forget(self, engine: str) -> None:
        if (seen := self._engines.pop(engine, None)) is not None:
            gone = {time for place, time in self._last.items() if place & NUMBER == seen.number}
            self._last = {place: time for place, time in self._last.items() if time not in gone}
            self._largest = sorted(-place for place in self._last)  # a sorted list is a heap
            if (order := self._orders.pop(seen.block, None)) and (left := [time for time in order if time not in gone]):
                self._orders[seen.block] = left
            del self._sizes[seen.number]

    # --- what would be ------------------------------------------------------------------------------

    def shares(self, capacities: Sequence[int], engine: str | None = None) -> list[float]:
        """The shares of looked-up blocks that stores of so many bytes would have; empty if nothing was looked up.

        capacities: ascending. engine: only its look-ups; the others' blocks take room all the same.
        """
        seen = None if engine is None else self._engines.get(engine)
        each = list(self._engines.values()) if engine is None else [] if seen is None else [seen]
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
        if (seen := self._engines.get(engine)) is None or seen.block != block:
            self._forget(engine)
            seen = self._engines[engine] = _Seen(next(self._numbers) & NUMBER, block)
            self._sizes[seen.number] = block
        return seen

    def _followed(self, keys: Sequence[str]) -> list[int]:
        hashed, most = self._hash, self._threshold
        return [place for key in keys if (place := hashed(key) & LAST) < most]

    def _since(self, time: int) -> float:
        """Bytes that were used since then, by all engines."""
        each = self._orders.items()
        return self._scale * sum((len(order) - bisect_left(order, time)) * block for block, order in each)

    def _use(self, seen: _Seen, keys: Sequence[int], *, known: bool = False) -> Generator[None, None, None]:
        """known: only of keys that are followed already."""
        order = self._orders.setdefault(seen.block, [])
        for number, key in enumerate(reversed(keys), 1):
            place = key << NUMBER_BITS | seen.number
            before = self._last.get(place)
            if before is not None or not known:
                self._time += 1
                self._last[place] = self._time
                if before is None:
                    heappush(self._largest, -place)
                else:
                    del order[bisect_left(order, before)]
                order.append(self._time)
            if number % PIECE == 0:
                self._forget_most()
                yield
        self._forget_most()

    def _forget_most(self) -> None:
        while len(self._last) > self._most:
            place = -heappop(self._largest)
            self._threshold = place >> NUMBER_BITS
            order = self._orders[self._sizes[place & NUMBER]]
            del order[bisect_left(order, self._last.pop(place))]

    def _age(self) -> None:
        if self._now() - self._halved_at >= HALVES_S:
            self._halved_at = self._now()
            for seen in self._engines.values():
                seen.asked, seen.sampled = seen.asked / 2, seen.sampled / 2
                for distance in seen.reused:
                    seen.reused[distance] /= 2


def _rounded(distance: float) -> int:
    """A distance in bytes, rounded down by less than a sixteenth, so that a histogram stays small."""
    shift = max(0, int(distance).bit_length() - 5)
    return int(distance) >> shift << shift
