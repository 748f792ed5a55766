"""Fences: what began before a purge is never committed after it, and no copy of what was found damaged is.

A load that promotes, a prefetch, a copy and a store read at one time and commit at another. Between the two a purge may
remove their object from every level, or a load may find its bytes damaged where the copy has read them. So each notes
the number of the latest fence when it begins, and asks before it commits whether a later one fits the object. Only a
level knows owners and ages, so a purge by these forbids every copy whose name fits otherwise: what is not copied now
is copied later. A store knows its owner, and what it stores is new.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from transferd.storage.queues import Use
from transferd.storage.selection import Selection

MOST, MOST_DAMAGED = 64, 4096  # purges, and objects, that are remembered; what began before may commit nothing


class Fences:
    """The fences of one stack, numbered from 1. Used on one loop."""

    def __init__(self) -> None:
        self.number = 0  # of the latest one
        self._forgotten = 0  # the number of the latest one that is not remembered
        self._latest: deque[tuple[int, Selection]] = deque()
        self._damaged: OrderedDict[tuple[str, int], int] = OrderedDict()  # by name and the number of the level
        self._running: list[Selection] = []

    @contextmanager
    def purge(self, selection: Selection) -> Iterator[None]:
        """Raise a fence; inside, the purge runs."""
        self.number += 1
        self._latest.append((self.number, selection))
        if len(self._latest) > MOST:
            self._forgotten = max(self._forgotten, self._latest.popleft()[0])
        self._running.append(selection)
        try:
            yield
        finally:
            self._running.remove(selection)

    def damaged(self, name: str, level: int) -> None:
        """Raise a fence for copies that have read this object in this level."""
        self.number += 1
        self._damaged[name, level] = self.number
        self._damaged.move_to_end((name, level))
        if len(self._damaged) > MOST_DAMAGED:
            self._forgotten = max(self._forgotten, self._damaged.popitem(last=False)[1])

    def forbids(self, name: str, born: int, source: int | None, store: Use | None = None) -> str:
        """Why an object must not be committed by what began when `born` was the number of the latest fence; or "".

        source: the number of the level in which it was read; None for a store, which `store` is the use of.
        """
        if born == self.number:
            return ""
        if source is not None and self._damaged.get((name, source), 0) > born:
            return "quarantined"
        purges = (number > born and _fits(selection, name, store) for number, selection in self._latest)
        return "purged" if born < self._forgotten or any(purges) else ""

    def purging(self, name: str) -> bool:
        """Whether a purge that runs now may remove this object."""
        return any(selection.fits(name) for selection in self._running)


def _fits(selection: Selection, name: str, store: Use | None) -> bool:
    if store is not None and (selection.unused_s is not None or selection.owner not in (None, store.owner)):
        return False
    return selection.fits(name)
