"""Follows the version of SGLang's weights, which an operator may update while the server runs.

On an update SGLang empties its own caches, but does not notify its storage. In each rank's process it notes the version
that the request for the update names, and each update from disk. So each call compares these with the last ones. A new
version becomes part of the generation, and after an update without a new version the generation is a unique one, so
that this server shares with none. The daemon has the generation before a page is found, stored or loaded.

Pages in host memory may still hold KV of the old weights, until SGLang empties its host pools. Pages are stored again
only once it has emptied every pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from transferd.adapters.common.link import RESET
from transferd.runtime.clock import SYSTEM_CLOCK

UPDATED_FROM_DISK = "model_runner.update_model_fields"  # what SGLang calls it in its record of changed settings


class Pooled(Protocol):
    """Pools at the daemon, as one engine. clears: by pool, another object each time that SGLang empties it.

    renew: serve this generation from now on, and load nothing that was found in another one.
    """

    @property
    def clears(self) -> Mapping[str, object]: ...
    def renew(self, generation: str) -> None: ...


class WeightVersion:
    """Which generation SGLang serves.

    base: the operator's generation.
    version: returns the version that SGLang serves, "" for the first one, and the number of updates from disk.
    generation: what stored pages belong to now.
    """

    def __init__(self, base: str, version: Callable[[], tuple[str, int]]) -> None:
        self._base, self._version = base, version
        self._seen = version()
        self.generation = self._named()
        self._lock = threading.Lock()
        self._clears: dict[tuple[int, str], object] = {}  # of each pool, when last seen under the version served
        self._stale: dict[tuple[int, str], object] = {}  # of the pools that still hold KV of older weights

    def _named(self) -> str:
        return "-".join(part for part in (self._base, self._seen[0]) if part)

    def follow(self, pools: Collection[Pooled]) -> bool:
        """Have the daemon serve SGLang's weights. Returns whether SGLang's pools are free of KV of older weights."""
        with self._lock:
            now = self._version()
            clears = {(id(pool), name): seen for pool in pools for name, seen in pool.clears.items()}
            if now != self._seen:
                unnamed = now[0] == self._seen[0]
                self._seen, self._stale = now, self._clears or clears
                self.generation = f"{RESET}{SYSTEM_CLOCK.fresh_id()}" if unnamed else self._named()
                for pool in pools:
                    pool.renew(self.generation)  # if no daemon knows yet, the link is unready until one does
            self._stale = {
                one: old for one, old in self._stale.items() if clears.get(one, old) is old and one in clears
            }
            self._clears = clears
            return not self._stale


def of_sglang() -> tuple[str, int]:
    """The version that SGLang's last update of the weights has named, "" before the first; how many were from disk."""
    try:
        from sglang.srt.runtime_context import get_context, get_serving

        version = str(get_serving().weight_version or "")
        updates = sum(source == UPDATED_FROM_DISK for source, _ in get_context().overrides_log())
    except (ImportError, RuntimeError, ValueError, AttributeError):
        return "", 0
    return "" if version == "default" else version, updates
