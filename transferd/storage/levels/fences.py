"""Fences: what began before a purge is never committed after it, and no copy of what was found damaged is.

A load that promotes, a prefetch, a copy and a store read at one time and commit at another. Between the two a purge may
remove their object from every level, or a load may find its bytes damaged where the copy has read them. So each notes
the number of the latest fence when it begins, and asks before it commits whether a later one fits the object.

A purge of many objects takes many steps, and a level may be done before another has begun. So while it runs no copy of
what fits is committed at all, and none afterwards that has read beside it: what is not copied now is copied later. What
is stored beside a purge is new, and stays in the level that took it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

from transferd.storage.queues import Use
from transferd.storage.selection import Selection

MOST, MOST_DAMAGED = 128, 4096  # fences of purges, and objects, that are remembered; what began before commits nothing


class CopySource(Protocol):
    """The level in which a copy has read its object."""

    number: int

    def owner_of(self, name: str) -> Hashable | None:
        """Whose object it is; None if it is not there any more, or nobody knows."""


class Fences:
    """The fences of one stack, numbered from 1. Used on one loop."""

    def __init__(self) -> None:
        self.number = 0  # of the latest one
        self._forgotten = 0  # the number of the latest one that is not remembered
        self._latest: deque[tuple[int, Selection, bool]] = deque()  # the last one: only for copies
        self._damaged: OrderedDict[tuple[str, int], int] = OrderedDict()  # by name and the number of the level
        self._running: list[Selection] = []

    @contextmanager
    def purge(self, selection: Selection) -> Iterator[None]:
        """Raise a fence; inside, the purge runs. At its end raise one for copies."""
        self._raise(selection, copies=False)
        self._running.append(selection)
        try:
            yield
        finally:
            self._running.remove(selection)
            self._raise(selection, copies=True)

    def _raise(self, selection: Selection, *, copies: bool) -> None:
        self.number += 1
        self._latest.append((self.number, selection, copies))
        if len(self._latest) > MOST:
            self._forgotten = max(self._forgotten, self._latest.popleft()[0])

    def damaged(self, name: str, level: int) -> None:
        """Raise a fence for copies that have read this object in this level."""
        self.number += 1
        self._damaged[name, level] = self.number
        self._damaged.move_to_end((name, level))
        if len(self._damaged) > MOST_DAMAGED:
            self._forgotten = max(self._forgotten, self._damaged.popitem(last=False)[1])

    def forbids(self, name: str, born: int, source: CopySource | None, store: Use | None = None) -> str:
        """Why an object must not be committed by what began when `born` was the number of the latest fence; or "".

        source: where it was read; None for a store, which `store` is the use of.
        """
        if born == self.number and not self._running:
            return ""
        if source is not None and self._damaged.get((name, source.number), 0) > born:
            return "quarantined"
        purges = [one for number, one, copies in self._latest if number > born and not (copies and source is None)]
        if source is not None:
            owner = source.owner_of(name)
            known, purges = owner is not None, purges + self._running
        else:
            known, owner = True, None if store is None else store.owner
        purged = any(_takes(one, name, owner, known=known) for one in purges)
        return "purged" if born < self._forgotten or purged else ""

    def purging(self, name: str) -> bool:
        """Whether a purge that runs now may remove this object."""
        return any(selection.fits(name) for selection in self._running)


def _takes(selection: Selection, name: str, owner: Hashable | None, *, known: bool) -> bool:
    """Whether a purge takes an object. known: it is there, so it is its owner's, and too young for a purge by age."""
    if known and (selection.unused_s is not None or selection.owner not in (None, owner)):
        return False
    return selection.fits(name)
