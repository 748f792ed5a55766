"""Which objects there are, how large they are together, and which ones go next. Decides; moves no byte.

An object is *reserved* while it is being written and *present* from its commit on. Reserved bytes
count, so that the objects under way never overfill the store; they cannot be evicted, so the bytes
in `used` may stay above a capacity that was lowered until the writes under way have ended.

    (absent) --reserve--> reserved --commit--> present --evict, forget--> (absent)
                          reserved --release--> (absent)

Properties, which the stateful test checks: `used` is the sum of all sizes, reserved and present;
`reserve` never lets it pass the capacity; what leaves is always the least recently used of what is
present, and no more of it than needed.

One owner mutates an index, on the event loop, between awaits: every method is one step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Victim(NamedTuple):
    """An object that has left the index; its owner removes the bytes."""

    name: str
    nbytes: int


class Entry:
    """One present object. A name that leaves and comes back is a new Entry, so identity tells them apart."""

    __slots__ = ("nbytes", "touched")

    def __init__(self, nbytes: int, *, touched: bool) -> None:
        self.nbytes = nbytes
        self.touched = touched  # used since the index was made, so its place in the order is news

    def __repr__(self) -> str:
        return f"Entry({self.nbytes} bytes)"


class LruIndex:
    """Names with sizes, least recently used first, within `capacity` bytes.

    left: called with every name that was present and is not any more, in the same step.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.left: Callable[[str], None] | None = None
        self.used = 0  # bytes, reserved and present
        self.bytes = 0  # bytes, present
        self._present: OrderedDict[str, Entry] = OrderedDict()
        self._reserved: dict[str, int] = {}

    # --- what there is ------------------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        return name in self._present

    def __len__(self) -> int:
        return len(self._present)

    def get(self, name: str) -> Entry | None:
        """The present object of this name. Does not count as a use."""
        return self._present.get(name)

    def hottest_first(self) -> Iterator[tuple[str, Entry]]:
        return reversed(self._present.items())

    # --- coming -------------------------------------------------------------------------------------

    def reserve(self, name: str, nbytes: int) -> list[Victim] | None:
        """Make room for an object that will be written. Returns what goes for it.

        None: writes under way hold the room; nothing has changed, ask again when one has ended. The
        caller has checked that the name is absent and that nbytes fits the capacity at all.
        """
        assert name not in self._present, name
        assert name not in self._reserved, name
        assert nbytes <= self.capacity, (nbytes, self.capacity)
        if self.used - self.bytes + nbytes > self.capacity:
            return None
        victims = self._evict(self.used + nbytes - self.capacity)
        self._reserved[name] = nbytes
        self.used += nbytes
        return victims

    def commit(self, name: str) -> list[Victim]:
        """The reserved object is there now, as the most recent one. Returns what goes if the capacity shrank."""
        nbytes = self._reserved.pop(name)
        self._present[name] = Entry(nbytes, touched=True)
        self.bytes += nbytes
        return self._evict(self.used - self.capacity)

    def release(self, name: str) -> None:
        """The reserved object will not come."""
        self.used -= self._reserved.pop(name)

    def adopt(self, objects: Sequence[tuple[str, int]]) -> list[Victim]:
        """Objects found at start, least recently used first. Returns what is too much."""
        for name, nbytes in objects:
            assert name not in self._present, name
            self._present[name] = Entry(nbytes, touched=False)
            self.bytes += nbytes
            self.used += nbytes
        return self._evict(self.used - self.capacity)

    # --- use and leaving ----------------------------------------------------------------------------

    def touch(self, names: Sequence[str]) -> None:
        """Used just now, as one chain from root to leaf: the root stays longest. Absent names are skipped.

        An engine can use a block only with all blocks before it, so a chain must be eaten from its leaf.
        """
        for name in reversed(names):
            entry = self._present.get(name)
            if entry is not None:
                entry.touched = True
                self._present.move_to_end(name)

    def forget(self, name: str, entry: Entry | None = None) -> bool:
        """Drop a present object; with `entry`, only if it is still that one. False: nothing to drop."""
        present = self._present.get(name)
        if present is None or (entry is not None and present is not entry):
            return False
        self._drop(name)
        return True

    def restore(self, name: str, nbytes: int) -> None:
        """An evicted object could not be removed: it is present again, as the next to go."""
        assert name not in self._present, name
        assert name not in self._reserved, name
        self._present[name] = Entry(nbytes, touched=False)
        self._present.move_to_end(name, last=False)
        self.bytes += nbytes
        self.used += nbytes

    def evict(self, nbytes: int) -> list[Victim]:
        """Drop the least recently used objects until at least nbytes are free, or nothing is left to drop."""
        return self._evict(nbytes)

    def set_capacity(self, capacity: int) -> list[Victim]:
        """Take over a new bound. Returns what goes."""
        self.capacity = capacity
        return self._evict(self.used - capacity)

    def _evict(self, nbytes: int) -> list[Victim]:
        victims: list[Victim] = []
        while nbytes > 0 and self._present:
            name = next(iter(self._present))
            victims.append(Victim(name, self._drop(name)))
            nbytes -= victims[-1].nbytes
        return victims

    def _drop(self, name: str) -> int:
        nbytes = self._present.pop(name).nbytes
        self.bytes -= nbytes
        self.used -= nbytes
        if self.left is not None:
            self.left(name)
        return nbytes

    def __repr__(self) -> str:
        return f"LruIndex({len(self)} objects, {self.used} of {self.capacity} bytes, {len(self._reserved)} reserved)"
