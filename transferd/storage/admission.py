"""Chooses the blocks to store: all, or those that a second task has tried to store (`storage.admit`, docs/adr/0130).

Most blocks are never loaded again, and each one wears an SSD. With "second use", the first task that would store a
block is answered *not admitted*; a second task within `storage.admit_window` stores it. All ranks of a task count
as one.

Keys are remembered in two sets of hashes, each for half of the window or MOST_KEYS keys, whichever ends first:
at most 25 MB. If more keys than that come within the window, the oldest ones are dropped sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from weakref import WeakKeyDictionary

from transferd.config import StorageSection
from transferd.storage.lru import Use

MOST_KEYS = 131_072  # in each of the two sets


class SecondUse:
    """Decides which blocks to store. Used on the event loop.

    window_s: how long a first task counts.
    now: monotonic seconds.
    """

    def __init__(self, window_s: float, now: Callable[[], float], most: int = MOST_KEYS) -> None:
        self._half = window_s / 2
        self._now = now
        self._most = most
        self._newer: set[int] = set()
        self._older: set[int] = set()
        self._turned_at = now()
        self._firsts: WeakKeyDictionary[Use, set[int]] = WeakKeyDictionary()  # keys that a use was the first to name
        self.refused = 0  # objects that were not admitted

    def admits(self, blocks: Sequence[Hashable], use: Use) -> list[bool]:
        """For each block, whether to store it. The same use gets the same answer on every rank."""
        self._turn()
        firsts = self._firsts.get(use)
        if firsts is None:
            firsts = self._firsts[use] = set()
        admitted = []
        for block in blocks:
            key = hash(block)
            known = key not in firsts and (key in self._newer or key in self._older)
            if not known:
                firsts.add(key)
                self.refused += 1
            self._newer.add(key)  # also a known one, so that the task's next rank finds it here
            admitted.append(known)
        return admitted

    def named(self, block: Hashable) -> bool:
        """Whether a task has tried to store this block within the window."""
        return hash(block) in self._newer or hash(block) in self._older

    def statistics(self) -> dict[str, int]:
        """Counts for the storage's report.

        not_admitted: objects that were not stored.
        remembered: keys, in both sets together.
        """
        return {"not_admitted": self.refused, "remembered": len(self._newer) + len(self._older)}

    def _turn(self) -> None:
        now = self._now()
        if now - self._turned_at < self._half and len(self._newer) < self._most:
            return
        self._older = self._newer if now - self._turned_at < 2 * self._half else set()
        self._newer = set()
        self._turned_at = now


def second_use(storage: StorageSection, now: Callable[[], float]) -> SecondUse | None:
    """The configured choice of the blocks to store, or None if all are stored."""
    return SecondUse(storage.admit_window, now) if storage.admit == "second use" else None
