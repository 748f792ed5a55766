"""Why a pool has no room for an object: it is too small, or full of leased or pinned objects, or others are faster.

The library answers NO_AVAILABLE_HANDLE in all cases. The pages of the master show which case it is: one look while a
put is tried again and again, and one after the last try.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from transferd.errors import StorageError, StorageFull, TransferError
from transferd.observability.units import size
from transferd.runtime.clock import Clock
from transferd.storage.base import Found, Outcome
from transferd.storage.mooncake import error_codes
from transferd.storage.mooncake.master_pages import LentMemory, read_page, read_segments

TIMEOUT_S = 1.0
BLIND_S = 60.0  # after a look that failed: no put waits for pages that do not answer
_COUNT = re.compile(r"^master_(evicted_)?key_count (\d+)", re.MULTILINE)


class PoolState(NamedTuple):
    """A pool's memory, how many objects it has evicted so far, and how many it has."""

    memory: Sequence[LentMemory]
    evicted: int
    objects: int = 0


class Looks:
    """Looks at the pages of a master. read: reads them, or raises TransferError."""

    def __init__(self, read: Callable[[], Awaitable[PoolState]], clock: Clock) -> None:
        self._read = read
        self._now = clock.monotonic
        self._blind_until = 0.0
        self._losses = 0
        self._before = PoolState((), 0)

    async def look(self) -> PoolState | None:
        """The pool as it is now; None if the pages do not answer, or did not answer in the last BLIND_S."""
        if self._now() < self._blind_until:
            return None
        try:
            return await self._read()
        except TransferError:
            self._blind_until = self._now() + BLIND_S
            return None

    async def losses(self) -> int:
        """Count how often the pool may have lost objects between two calls: a node went, some were evicted or removed.

        Objects that were removed while as many others were stored go unnoticed. Raises as `read` does.
        """
        before, self._before = self._before, await self._read()
        gone = {one.name for one in before.memory} - {one.name for one in self._before.memory}
        evicted = self._before.evicted != before.evicted
        self._losses += bool(gone) or evicted or self._before.objects < before.objects
        return self._losses


def why_full(nbytes: int, before: PoolState | None, after: PoolState | None) -> str:
    """Why an object of that length found no room in the time between two looks, in words; "" if that is not known."""
    if after is None:
        return ""
    if not after.memory:
        return "no node lends memory now"
    largest = max(one.capacity for one in after.memory)
    if nbytes > largest:
        return f"the largest segment has {size(largest)}"
    used, there = sum(one.used for one in after.memory), sum(one.capacity for one in after.memory)
    full = f"{size(used)} of {size(there)} are in use"
    if before is None:
        return full
    if after.evicted == before.evicted:
        return f"{full}, and nothing is evicted: what is there is leased by readers, or pinned"
    return f"{full}, and what is evicted makes room for others first"


def read_state(address: str) -> PoolState:
    """The pool as the pages of a master show it. Raises StorageUnavailable."""
    memory = read_segments(address, TIMEOUT_S)  # first, because only a master that leads answers
    counts = {name: int(count) for name, count in _COUNT.findall(read_page(address, "metrics", TIMEOUT_S))}
    return PoolState(memory, counts.get("evicted_", 0), counts.get("", 0))


def not_stored(key: str, code: int, nbytes: int, before: PoolState | None, after: PoolState | None) -> Outcome:
    if code == error_codes.UNSEEN:
        return Outcome(Found.FAILED, StorageError(f"another client is writing {key} and has not finished"))
    if code == error_codes.NO_AVAILABLE_HANDLE:
        why = why_full(nbytes, before, after) or error_codes.describe(code)
        what = f"no segment of the pool has room for an object of {nbytes} bytes ({why})"
        return Outcome(Found.FAILED, StorageFull(what, refusal="passing"))  # the pool evicts
    return failed("store", key, code)


def failed(verb: str, key: str, code: int) -> Outcome:
    return Outcome(Found.FAILED, error_codes.error(verb, key, code))
