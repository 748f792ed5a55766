"""Fences: what began before a purge is never committed after it.

A load that promotes, a prefetch, a copy and a store read at one time and commit at another. Between the two a purge may
remove their object from every level. So each notes the number of the latest purge when it begins, and asks before it
commits whether a later one fits the object. Only a level knows owners and ages, so a purge by these forbids every copy
whose name fits otherwise: what is not copied now is copied later. A store knows its owner, and what it stores is new.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from transferd.storage.queues import Use
from transferd.storage.selection import Selection

MOST = 64  # purges that are remembered; what began before all of them may commit nothing


class Fences:
    """The purges of one stack, numbered from 1. Used on one loop."""

    def __init__(self) -> None:
        self.number = 0  # of the latest one
        self._latest: deque[tuple[int, Selection]] = deque(maxlen=MOST)
        self._running: list[Selection] = []

    @contextmanager
    def purge(self, selection: Selection) -> Iterator[None]:
        """Raise a fence; inside, the purge runs."""
        self.number += 1
        self._latest.append((self.number, selection))
        self._running.append(selection)
        try:
            yield
        finally:
            self._running.remove(selection)

    def forbid(self, name: str, born: int, store: Use | None = None) -> bool:
        """Whether an object must not be committed by what began when `born` was the number of the latest purge.

        store: the use of the store that it comes from; None for a copy of what was stored before.
        """
        if born == self.number:
            return False
        if self.number - born > len(self._latest):
            return True
        return any(number > born and _fits(selection, name, store) for number, selection in self._latest)

    def purging(self, name: str) -> bool:
        """Whether a purge that runs now may remove this object."""
        return any(selection.fits(name) for selection in self._running)


def _fits(selection: Selection, name: str, store: Use | None) -> bool:
    if store is not None and (selection.unused_s is not None or selection.owner not in (None, store.owner)):
        return False
    return selection.fits(name)
