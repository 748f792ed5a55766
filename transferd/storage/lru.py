"""Which objects there are, how large they are together, and which one goes next. Decides; moves no byte."""

from __future__ import annotations

from collections import OrderedDict


class LruIndex:
    """Names with sizes, least recently used first, within a capacity in bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def add(self, name: str, nbytes: int) -> list[str]:
        """Record an object as the most recent one. Returns the names that must go to keep the capacity."""
        self.discard(name)
        self._sizes[name] = nbytes
        self.bytes += nbytes
        return self.evict_to(self.capacity, keep=name)

    def touch(self, name: str) -> bool:
        """Mark as used just now. False: it is not there."""
        if name not in self._sizes:
            return False
        self._sizes.move_to_end(name)
        return True

    def discard(self, name: str) -> None:
        self.bytes -= self._sizes.pop(name, 0)

    def evict_to(self, nbytes: int, *, keep: str | None = None) -> list[str]:
        """Forget least recently used objects until at most nbytes are left. Returns their names."""
        evicted: list[str] = []
        while self.bytes > nbytes and self._sizes:
            name = next(iter(self._sizes))
            if name == keep:
                break
            self.discard(name)
            evicted.append(name)
        return evicted

    def __contains__(self, name: object) -> bool:
        return name in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)
