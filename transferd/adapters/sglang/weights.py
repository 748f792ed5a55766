"""Follows the version of SGLang's weights, which an operator may update while the server runs.

On an update SGLang empties its own caches, but does not notify its storage. In each rank's process it notes the version
that the request for the update names. So each call compares that version with the served one. A new version becomes
part of the generation, and the daemon has that generation before a page is found, stored or loaded.

Pages in host memory may still hold KV of the old weights, until SGLang empties its host pools. Pages are stored again
only once it has emptied every pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Protocol

from transferd.adapters.common.link import Link


class Pooled(Protocol):
    """A pool at the daemon. cleared: another object each time that SGLang empties it."""

    cleared: object
    link: Link


class WeightVersion:
    """Which generation SGLang serves.

    base: the operator's generation.
    version: returns the version that SGLang serves; "" for the first one.
    """

    def __init__(self, base: str, version: Callable[[], str]) -> None:
        self._base, self._version = base, version
        self._seen = version()
        self._lock = threading.Lock()
        self._clears: dict[int, object] = {}  # of each pool, when last seen under the version served
        self._stale: dict[int, object] = {}  # of the pools that still hold KV of older weights

    @property
    def generation(self) -> str:
        """What stored pages belong to now."""
        return "-".join(part for part in (self._base, self._seen) if part)

    def follow(self, pools: Collection[Pooled]) -> bool:
        """Have the daemon serve SGLang's weights. Returns whether SGLang's pools are free of KV of older weights."""
        with self._lock:
            now, clears = self._version(), {id(pool): pool.cleared for pool in pools}
            if now != self._seen:
                self._seen, self._stale = now, self._clears or clears
                for pool in pools:
                    pool.link.renew(self.generation)  # if no daemon knows yet, the link is unready until one does
            self._stale = {
                one: old for one, old in self._stale.items() if clears.get(one, old) is old and one in clears
            }
            self._clears = clears
            return not self._stale
