"""Pins: which objects must not be evicted, for whom, and until when.

An owner pins objects that are there, each for a time to live. An object may have several pins; it is evicted like any
other once the last one is over. An object that leaves for another reason (a purge, damage) takes its pins along.

Time comes from the loop: one timer, for the pin that ends next. orders.py keeps pins over a restart.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from transferd.storage.lru import Entry, LruIndex, Use

FEW = 1024  # ends of pins that may wait beside those that last
MOST_PINNED = 0.5  # of the capacity, by all owners together


class AskedPins(NamedTuple):
    """The bytes that a request to pin would add to one store; of several stores, the sum of each."""

    objects: int = 0
    new: int = 0  # objects that the owner has not pinned yet
    taken: int = 0  # objects that it has pinned
    pinned: int = 0  # by all owners, with the new ones
    capacity: int = 0


class KeptPin(NamedTuple):
    """A pin without its index. left_s: for so many seconds."""

    name: str
    owner: Hashable
    left_s: float


class Pins:
    """The pins of one index. Changed on the event loop only."""

    def __init__(self, index: LruIndex) -> None:
        self._index = index
        self._until: dict[Entry, dict[Hashable, float]] = {}  # loop time, by owner
        self._taken = Counter[Hashable]()  # bytes by owner
        self._bytes = 0  # of `_until`
        self._ends: list[tuple[float, int, Entry]] = []  # a heap; the number only orders. Ended pins stay in it
        self._most_ends = FEW  # when it is longer, it is made anew without the ended pins
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self.expired = 0  # objects that lost their last pin because its time was over

    def __len__(self) -> int:
        """How many objects are pinned."""
        self._forget_gone()
        return len(self._until)

    def taken(self, owner: Hashable) -> int:
        """The bytes that this owner has pinned."""
        self._forget_gone()
        return self._taken[owner]

    def asked(self, owner: Hashable, entries: Sequence[Entry]) -> AskedPins:
        """The bytes that pinning these for this owner would add."""
        new = [entry for entry in entries if owner not in self._until.get(entry, ())]
        pinned = sum(queue.pinned for queue in self._index.queues())
        return AskedPins(
            len(entries),
            sum(self._index.size(entry.nbytes) for entry in new),
            self.taken(owner),
            pinned + sum(self._index.size(entry.nbytes) for entry in new if not entry.pinned),
            self._index.capacity,
        )

    def restore(self, kept: Sequence[KeptPin]) -> None:
        """Restore the pins of an earlier life, for objects that are there and as far as pins may take room."""
        room = MOST_PINNED * self._index.capacity - sum(queue.pinned for queue in self._index.queues())
        for pin in kept:
            if (entry := self._index.get(pin.name)) is None:
                continue
            room -= 0 if entry.pinned else self._index.size(entry.nbytes)
            if room >= 0:
                self.pin(pin.owner, [entry], pin.left_s)

    def pin(self, owner: Hashable, entries: Sequence[Entry], ttl_s: float) -> None:
        """Pin these for so many seconds from now; that replaces the owner's earlier pins of them."""
        until = asyncio.get_running_loop().time() + ttl_s
        for entry in entries:
            self._index.pin(entry)
            pins, size = self._until.setdefault(entry, {}), self._index.size(entry.nbytes)
            self._bytes += 0 if pins else size
            self._taken[owner] += 0 if owner in pins else size
            pins[owner] = until
            self._number += 1
            heapq.heappush(self._ends, (until, self._number, entry))
        if len(self._ends) > self._most_ends:
            self._ends = [end for end in self._ends if self._lasts(*end)]
            heapq.heapify(self._ends)
            self._most_ends = FEW + 2 * len(self._ends)
        self._wake()

    def unpin(self, owner: Hashable, entries: Sequence[Entry]) -> int:
        """End this owner's pins of these. Returns how many objects it had pinned."""
        ended, use = 0, Use(owner=owner)
        for entry in entries:
            if owner in self._until.get(entry, ()):
                ended += 1
                self._let_go(entry, owner, use)
        return ended

    def end(self, owner: Hashable) -> int:
        """End all pins of this owner. Returns how many objects it had pinned."""
        return self.unpin(owner, [entry for entry, pins in self._until.items() if owner in pins])

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- inside -------------------------------------------------------------------------------------

    def _let_go(self, entry: Entry, owner: Hashable, use: Use) -> bool:
        """End a pin. Returns whether that has unpinned the object."""
        pins, size = self._until[entry], self._index.size(entry.nbytes)
        del pins[owner]
        self._taken[owner] -= size
        if not self._taken[owner]:
            del self._taken[owner]
        if pins:
            return False
        self._bytes -= size
        del self._until[entry]
        if here := entry.pinned:
            self._index.unpin(entry, use)
        return here

    def _forget_gone(self) -> None:
        """Drop the pins of objects that have left, or that the index has unpinned, if there are any."""
        if sum(queue.pinned for queue in self._index.queues()) != self._bytes:
            for entry in [entry for entry in self._until if not entry.pinned]:
                for owner in list(self._until[entry]):
                    self._let_go(entry, owner, Use())

    def _wake(self) -> None:
        self.close()
        while self._ends and not self._lasts(*self._ends[0]):
            heapq.heappop(self._ends)
        if self._ends:
            self._timer = asyncio.get_running_loop().call_at(self._ends[0][0], self._expire)

    def _lasts(self, until: float, _: int, entry: Entry) -> bool:
        """Whether this is still the end of a pin: it was not ended or renewed."""
        return until in self._until.get(entry, {}).values()

    def _expire(self) -> None:
        now, use = asyncio.get_running_loop().time(), Use()
        while self._ends and self._ends[0][0] <= now:
            entry = heapq.heappop(self._ends)[2]
            for owner in [owner for owner, until in self._until.get(entry, {}).items() if until <= now]:
                self.expired += self._let_go(entry, owner, use)
        self._wake()
