"""Follows the version of SGLang's weights, which an operator may update while the server runs.

SGLang empties its own caches on an update, but tells its storage nothing. It does note the version that the update's
request names, in each rank's process. So each call compares that version with the one that is served. Another one
becomes part of the generation, of which the daemon then knows before a page is found, stored or loaded.

Pages in host memory may still hold KV of the old weights, until SGLang empties its host pools. A pool that was emptied
has a new table of its slots; pages are stored again only once that is so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol

from transferd.adapters.common.link import Link


class Pooled(Protocol):
    """A pool at the daemon. host: SGLang's host pool."""

    host: Any
    link: Link


class WeightVersion:
    """Which generation SGLang serves.

    base: the operator's generation.
    version: asks SGLang which version it serves; "" = the first one.
    """

    def __init__(self, base: str, version: Callable[[], str]) -> None:
        self._base, self._version = base, version
        self._seen = version()
        self._lock = threading.Lock()
        self._slots: list[object] = []  # the pools' tables when last seen under the version served
        self._stale: list[object] = []  # those of the pools that still hold KV of older weights

    @property
    def generation(self) -> str:
        """What stored pages belong to now."""
        return "-".join(part for part in (self._base, self._seen) if part)

    def follow(self, pools: Collection[Pooled]) -> bool:
        """Have the daemon serve SGLang's weights. Returns whether SGLang's pools hold nothing of older ones."""
        with self._lock:
            now, slots = self._version(), [getattr(pool.host, "mem_state", None) for pool in pools]
            if now != self._seen:
                self._seen, self._stale = now, self._slots or slots
                for pool in pools:
                    pool.link.renew(self.generation)  # if no daemon knows yet, the link is unready until one does
            self._stale = [old for old in self._stale if any(old is slot for slot in slots)]
            self._slots = slots
            return not self._stale
