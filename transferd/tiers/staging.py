"""Staging: the only memory that storage I/O touches. Bounded, leased, and empty at close.

A rank's staging is one region cut into slots. A slot holds one packed block and its footer. Each consumer has
its own slots, so a read never waits for a slot that a write holds. A chunk takes at most half of its consumer's
slots, so the next chunk can be filled while one is in I/O. A lease belongs to the operation that moves bytes in its
slots: it is released when the copy or transfer has really ended, perhaps long after the caller stopped waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from transferd.blocks.layout.base import BlockLayout, Geometry, align
from transferd.errors import ConfigError, InvariantError
from transferd.tiers.pinned import MEMORY_LOCK, HostRegion, Pinning

SLOT_ALIGNMENT = 4096  # bytes: direct I/O needs it, and RDMA registration prefers it
CONSUMERS = ("read", "write")
CHUNK_BYTES = 16 * 1024**2  # large enough to make the fixed cost of a chunk small, small enough to overlap


class Lease:
    """Slots that the holder owns until `release`. Releasing twice does nothing."""

    def __init__(self, share: _SlotShare, slots: tuple[int, ...], holder: str) -> None:
        self.slots = slots
        self.holder = holder
        self._share: _SlotShare | None = share

    def release(self) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.take_back(self)

    def __repr__(self) -> str:
        return f"<Lease {self.holder!r} slots={list(self.slots)}>"


@dataclass(slots=True, eq=False)
class _SlotShare:
    """One consumer's slots. Serves waiters in order; a small request does not overtake a large one."""

    total: int
    free: list[int]
    waiters: deque[tuple[int, str, asyncio.Future[Lease]]] = field(default_factory=deque)
    leases: set[Lease] = field(default_factory=set)
    peak: int = 0

    def grant(self, count: int, holder: str) -> Lease:
        slots = tuple(self.free[:count])
        del self.free[:count]
        lease = Lease(self, slots, holder)
        self.leases.add(lease)
        self.peak = max(self.peak, self.total - len(self.free))
        return lease

    def take_back(self, lease: Lease) -> None:
        self.leases.discard(lease)
        self.free.extend(lease.slots)
        self.serve()

    def serve(self) -> None:
        while self.waiters:
            count, holder, future = self.waiters[0]
            if future.done():  # its waiter was cancelled
                self.waiters.popleft()
            elif count <= len(self.free):
                self.waiters.popleft()
                future.set_result(self.grant(count, holder))
            else:
                return


def slots_in(nbytes: int, object_bytes: int, key: str = "host.staging") -> int:
    """How many objects fit into `nbytes`. Raises ConfigError that names `key` if that is less than one per consumer."""
    slot_bytes = align(object_bytes, SLOT_ALIGNMENT)
    slots = nbytes // slot_bytes
    if slots < len(CONSUMERS):
        what = f"must be at least {slot_bytes * len(CONSUMERS)} bytes: one block each for {', '.join(CONSUMERS)}"
        raise ConfigError(key, what, nbytes)
    return slots


class Staging:
    """One rank's staging memory. Owns the region.

    object_bytes: the bytes of a slot's content, block and footer.
    offsets: the start of each segment in the content; None for packed order.
    packed: the slots' geometry for copy plans, relative to memory.address.
    chunk_bytes: the most that a chunk should have.
    later: the caller calls `memory.allocate` later.

    Raises ConfigError that names `key` if there is not a slot for every consumer.
    """

    def __init__(
        self,
        layout: BlockLayout,
        nbytes: int,
        object_bytes: int,
        offsets: npt.NDArray[np.int64] | None = None,
        key: str = "host.staging",
        pinning: Pinning = MEMORY_LOCK,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        later: bool = False,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self.object_bytes = object_bytes
        self._slot_bytes = slot_bytes = align(object_bytes, SLOT_ALIGNMENT)
        slots = slots_in(nbytes, object_bytes, key)
        self.memory = HostRegion(slots * slot_bytes, pinning, grain=slot_bytes, later=later)
        self.nbytes = slots * slot_bytes
        self.packed: Geometry = layout.packed(slots, slot_bytes, offsets)
        half = slots - slots // 2
        halves = range(half), range(half, slots)
        self._shares = {one: _SlotShare(len(mine), list(mine)) for one, mine in zip(CONSUMERS, halves, strict=True)}

    def chunk_slots(self, consumer: str) -> int:
        """How many blocks a chunk of this consumer should have: at most `chunk_bytes`, and two chunks must fit."""
        return self.slots_at_once(consumer, self._chunk_bytes // self._slot_bytes)

    def slots_at_once(self, consumer: str, wanted: int) -> int:
        """How many of the `wanted` slots a chunk gets: at most half of the consumer's, at least one."""
        return max(1, min(self._shares[consumer].total // 2, wanted))

    def try_acquire(self, consumer: str, count: int, holder: str) -> Lease | None:
        """A lease, if one is available without waiting and without overtaking; otherwise None."""
        share = self._shares[consumer]
        if share.waiters or count > len(share.free):
            return None
        return share.grant(count, holder)

    async def acquire(self, consumer: str, count: int, holder: str) -> Lease:
        """Queue for `count` slots. If cancelled, releases slots that were granted meanwhile.

        Raises InvariantError if the consumer has fewer slots in total.
        """
        share = self._shares[consumer]
        if count > share.total:
            raise InvariantError(f"{holder!r} wants {count} slots of {consumer!r}, which has {share.total}")
        lease = self.try_acquire(consumer, count, holder)
        if lease is not None:
            return lease
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        share.waiters.append((count, holder, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result().release()
            else:
                share.serve()  # the next waiter may fit now
            raise

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """A writable view of each leased slot, one object long. Borrowed until the lease is released."""
        starts = [slot * self._slot_bytes for slot in slots]
        return [self.memory.view[start : start + self.object_bytes] for start in starts]

    def close(self) -> None:
        """Free the memory. Raises InvariantError that names the holders of open leases; then nothing is freed."""
        out = [lease for share in self._shares.values() for lease in share.leases]
        if out:
            raise InvariantError(f"staging cannot be closed while leases are held: {out}")
        self.memory.close()

    def statistics(self) -> dict[str, Any]:
        """capacity, used and peak, in bytes."""
        shares = self._shares.values()
        return {
            "capacity": self.nbytes,
            "used": sum(share.total - len(share.free) for share in shares) * self._slot_bytes,
            "peak": sum(share.peak for share in shares) * self._slot_bytes,
        }
