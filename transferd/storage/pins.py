"""Pins: which objects must not be evicted, for whom, and until when.

An owner pins objects that are there, each for a time to live. An object may have several pins; it is evicted like any
other once the last one is over. An object that leaves for another reason (a purge, damage) takes its pins along.

Time comes from the loop: a timer for the pins of each request. orders.py keeps pins over a restart.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transferd.runtime.loop_turns import InPieces
from transferd.storage.lru import Entry, LruIndex, Use

MOST_PINNED = 0.5  # of the capacity, by all owners together


class AskedPins(NamedTuple):
    """The bytes that a request to pin would add to one store; of several stores, the sum of each."""

    objects: int = 0
    new: int = 0  # objects that the owner has not pinned yet
    taken: int = 0  # objects that it has pinned
    pinned: int = 0  # by all owners, with the new ones
    capacity: int = 0


@dataclass(slots=True, eq=False)
class _PinnedAtOnce:
    """The objects that an owner has pinned at once, as far as these pins were neither ended nor replaced since."""

    entries: dict[Entry, None]
    ends: asyncio.TimerHandle


class Pins:
    """The pins of one index. Changed on the event loop only."""

    def __init__(self, index: LruIndex) -> None:
        self._index = index
        self._pins: dict[Entry, dict[Hashable, _PinnedAtOnce]] = {}  # by owner
        self._taken = Counter[Hashable]()  # bytes by owner
        self._bytes = 0  # of `_pins`
        self._expiring = InPieces()
        self.expired = 0  # objects that lost their last pin because its time was over

    def __len__(self) -> int:
        """How many objects are pinned."""
        self._forget_gone()
        return len(self._pins)

    @property
    def pinned(self) -> int:
        """The bytes that all owners have pinned."""
        return sum(queue.pinned for queue in self._index.queues())

    def taken(self, owner: Hashable) -> int:
        """The bytes that this owner has pinned."""
        self._forget_gone()
        return self._taken[owner]

    def asked(self, owner: Hashable, entries: Sequence[Entry]) -> AskedPins:
        """The bytes that pinning these for this owner would add."""
        new = [entry for entry in entries if owner not in self._pins.get(entry, ())]
        return AskedPins(
            len(entries),
            sum(self._index.size(entry.nbytes) for entry in new),
            self.taken(owner),
            self.pinned + sum(self._index.size(entry.nbytes) for entry in new if not entry.pinned),
            self._index.capacity,
        )

    def restore(self, kept: Sequence[tuple[str, Hashable, float]]) -> None:
        """Restore the pins of an earlier life, for objects that are there and as far as pins may take room.

        kept: of each, the object's name, the owner, and for how many seconds; it lasts up to a second longer.
        """
        room = MOST_PINNED * self._index.capacity - self.pinned
        together = defaultdict[tuple[Hashable, int], list[Entry]](list)  # a timer for each object would take long
        for name, owner, left_s in kept:
            if (entry := self._index.get(name)) is None:
                continue
            room -= 0 if entry.pinned else self._index.size(entry.nbytes)
            if room >= 0:
                self._index.pin(entry)
                together[owner, math.ceil(left_s)].append(entry)
        for (owner, seconds), entries in together.items():
            self.pin(owner, entries, seconds)

    def pin(self, owner: Hashable, entries: Sequence[Entry], ttl_s: float) -> None:
        """Pin these for so many seconds from now; that replaces the owner's earlier pins of them."""
        if not entries:
            return
        pinned = dict.fromkeys(entries)
        together = _PinnedAtOnce(pinned, asyncio.get_running_loop().call_later(ttl_s, self._expire, owner, pinned))
        for entry in pinned:
            self._index.pin(entry)
            pins, size = self._pins.setdefault(entry, {}), self._index.size(entry.nbytes)
            self._bytes += 0 if pins else size
            if owner in pins:
                _drop(pins[owner], entry)
            else:
                self._taken[owner] += size
            pins[owner] = together

    def unpin(self, owner: Hashable, entries: Sequence[Entry]) -> int:
        """End this owner's pins of these. Returns how many objects it had pinned."""
        ended, use = 0, Use(owner=owner)
        for entry in entries:
            if owner in self._pins.get(entry, ()):
                ended += 1
                self._let_go(entry, owner, use)
        return ended

    def of(self, owner: Hashable) -> list[Entry]:
        """What this owner has pinned."""
        return [entry for entry, pins in self._pins.items() if owner in pins]

    def close(self) -> None:
        """Forget all pins."""
        for pins in self._pins.values():
            for together in pins.values():
                together.ends.cancel()
                together.entries.clear()
        self._pins.clear()
        self._taken.clear()
        self._bytes = 0

    # --- inside -------------------------------------------------------------------------------------

    def _let_go(self, entry: Entry, owner: Hashable, use: Use) -> bool:
        """End a pin. Returns whether that has unpinned the object."""
        pins, size = self._pins[entry], self._index.size(entry.nbytes)
        _drop(pins.pop(owner), entry)
        self._taken[owner] -= size
        if not self._taken[owner]:
            del self._taken[owner]
        if pins:
            return False
        self._bytes -= size
        del self._pins[entry]
        if here := entry.pinned:
            self._index.unpin(entry, use)
        return here

    def _forget_gone(self) -> None:
        """Drop the pins of objects that have left, or that the index has unpinned, if there are any."""
        if self.pinned != self._bytes:
            self.forget([entry for entry in self._pins if not entry.pinned])

    def forget(self, gone: Sequence[Entry]) -> None:
        """Drop the pins of objects that have left. Without this call, whoever asks next does that for all at once."""
        for entry in gone:
            for owner in list(self._pins.get(entry, ())):
                self._let_go(entry, owner, Use())

    def _expire(self, owner: Hashable, entries: dict[Entry, None]) -> None:
        self._expiring.run(self._expired(owner, entries))

    def _expired(self, owner: Hashable, entries: dict[Entry, None]) -> Generator[None, None, None]:
        use = Use()
        for entry in list(entries):
            if entry in entries:  # else it has got another pin meanwhile, or has left
                self.expired += self._let_go(entry, owner, use)
                yield


def _drop(together: _PinnedAtOnce, entry: Entry) -> None:
    del together.entries[entry]
    if not together.entries:
        together.ends.cancel()
