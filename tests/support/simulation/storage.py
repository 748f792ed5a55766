"""SimStorage: a storage backend on a dict, with virtual latency and faults on demand."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import CoroutineType
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tests.support.simulation.faults import Dice, Gate, StorageFaults, note, take
from tests.support.simulation.memory import Claim, MemoryWatch
from transferd.blocks.formats import FOOTER_BYTES
from transferd.errors import Closed, InvariantError, StillRunning, StorageError, StorageFull, StorageUnavailable
from transferd.runtime.aio import answered, uncancelled
from transferd.storage.base import (
    EXISTS,
    FOUND,
    LEFT,
    MISSING,
    STORED,
    Blob,
    Drainer,
    Fill,
    Found,
    Index,
    Item,
    Outcome,
    Storage,
    blobs_of,
)
from transferd.storage.lru import Use
from transferd.tiers.base import HostMemory
from transferd.workers.cpu_blocks import BlockDrain

T = TypeVar("T")

WATCHES: list[Callable[[npt.NDArray[np.int64]], None]] = []
"""Told of the address and length of each piece that a load in place is about to write, int64 [n, 2]."""


class SimStorage(Storage, Index):
    """A Storage as a test wants it. Its objects live as long as it does, across close and open.

    A call touches the first half of each buffer at some moment on the way and the second half at its
    end, and ends only then, also when it is cancelled meanwhile. What a caller guarantees is checked:
    buffers lie in registered memory, and nobody else is at work on them meanwhile.

    capacity: bytes; the least recently used objects go beyond it. faults: the plan, may be replaced
    at any time. dice: for scripts; operations "exists", "put", "get" and "quarantine" with fault "unavailable" of
    the next call, "object put" and "object get" with the fault of the next object. gate: holds
    calls that would start now. at_once: the share of loads in place of one object that are answered at once.
    """

    backend = "simulated"
    slots_at_once: int | None = 2

    def __init__(
        self,
        *,
        capacity: int | None = None,
        faults: StorageFaults | None = None,
        rng: random.Random | None = None,
        watch: MemoryWatch | None = None,
    ) -> None:
        self.faults = faults or StorageFaults()
        self.dice = Dice(rng, "storage")
        self.watch = watch or MemoryWatch()
        self.gate = Gate()
        self.at_once = 0.0
        self.objects: OrderedDict[str, bytes] = OrderedDict()  # least recently used first
        self.quarantined: dict[str, bytes] = {}
        self.gone: set[str] = set()  # names that were stored once and are not any more
        self.counts: Counter[str] = Counter()
        self._capacity = capacity
        self._bytes = 0
        self._left: Callable[[str], None] | None = None
        self._registered: list[HostMemory] = []
        self._under_way: Counter[str] = Counter()  # calls, by operation
        self._open = False

    # --- the contract -------------------------------------------------------------------------------

    async def open(self) -> None:
        self._open = True

    def register(self, memory: HostMemory) -> None:
        self._registered.append(memory)

    def unregister(self, memory: HostMemory) -> None:
        self._registered.remove(memory)

    @property
    def index(self) -> Index:
        return self

    def tell_departures(self, left: Callable[[str], None]) -> bool:
        self._left = left
        return True

    def find(self, names: Sequence[str], use: Use | None) -> list[bool] | None:
        return [name in self.objects for name in names] if use is None else None

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return await self._call(self._exists(names))

    async def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        if fill is None:
            return await self._call(self._put(blobs_of(items, slots)))
        return await self._call(self._put_made(items, fill, slots))

    def load(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> Awaitable[list[Outcome]]:
        if drain is None:
            return self._fetch(items, slots)
        assert not self.slots_at_once or 1 <= len(slots) <= min(self.slots_at_once, len(items))
        if len(items) == 1 and self._open and self.gate.is_open and self.dice.rng.random() < self.at_once:
            return answered([self._load_one(0, items[0], drain)])
        return self._call(self._load(items, drain))

    async def _fetch(self, items: Sequence[Item], slots: Sequence[memoryview]) -> list[Outcome]:
        return await self._call(self._get(blobs_of(items, slots)))

    async def quarantine(self, name: str) -> None:
        await self._call(self._quarantine(name))

    async def close(self) -> None:
        self._open = False
        if self._under_way.total():
            raise StillRunning(f"simulated storage: {', '.join(self.abandon())}")

    def abandon(self) -> list[str]:
        return sorted(self._under_way.elements())

    def statistics(self) -> dict[str, Any]:
        return {
            "objects": len(self.objects),
            "bytes": self._bytes,
            "capacity": self._capacity,
            "hits": self.counts["hits"],
            "misses": self.counts["misses"],
            "errors": self.counts["errors"],
            "quarantined": self.counts["quarantined"],
        }

    # --- for tests ----------------------------------------------------------------------------------

    def damage(self, name: str, bit: int) -> None:
        """Flip one bit of a stored object, for good."""
        data = bytearray(self.objects[name])
        data[bit // 8 % len(data)] ^= 1 << bit % 8
        self.objects[name] = bytes(data)

    # --- inside -------------------------------------------------------------------------------------

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._open:
            work.close()
            raise Closed("the simulated storage is closed")
        operation = cast("CoroutineType[Any, Any, T]", work).__name__.removeprefix("_")
        self._under_way[operation] += 1
        try:
            return await uncancelled(work)
        finally:
            self._under_way[operation] -= 1

    async def _begin(self, operation: str) -> tuple[float, float]:
        """Pass the gate; then seconds until the middle of the call, and from there to its end."""
        await self.gate.passed()
        seconds = self.faults.latency.draw(self.dice.rng)
        middle = seconds * self.dice.rng.random() if seconds else 0.0
        if self.dice.draw(operation, self.faults.of_call()) is not None:
            await take(seconds)
            self.counts["errors"] += 1
            raise StorageUnavailable(f"storage does not answer ({operation}, simulated)")
        return middle, seconds - middle

    async def _exists(self, names: Sequence[str]) -> list[bool]:
        middle, rest = await self._begin("exists")
        await take(middle + rest)
        return [name in self.objects for name in names]

    async def _put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        claim = self._claim(blobs, writes=False, operation="put")
        try:
            middle, rest = await self._begin("put")
            await take(middle)
            halves = [bytes(blob.data[: blob.data.nbytes // 2]) for blob in blobs]
            await take(rest)
            return [self._keep(blob, half) for blob, half in zip(blobs, halves, strict=True)]
        finally:
            self.watch.leave(claim)

    async def _put_made(self, items: Sequence[Item], fill: Fill, slots: Sequence[memoryview]) -> list[Outcome]:
        """A few objects at a time: they are made at some moment, and stored at a later one."""
        middle, rest = await self._begin("put")
        outcomes: list[Outcome] = []
        each = len(slots) or len(items)
        for start in range(0, len(items), each):
            group = range(start, min(start + each, len(items)))
            await take(middle * len(group) / len(items))
            outcomes += await self._put_group(group, items, fill, slots, rest * len(group) / len(items))
        return outcomes

    async def _put_group(
        self, group: range, items: Sequence[Item], fill: Fill, slots: Sequence[memoryview], seconds: float
    ) -> list[Outcome]:
        made: dict[int, Blob] = {}
        for i in group:
            item = items[i]
            data = slots[i - group.start][: item.nbytes] if slots else memoryview(bytearray(item.nbytes))
            if fill(i, data, True):
                made[i] = Blob(item.name, data)
        self.counts["lent"] += len(made)
        self.counts["withdrawn"] += len(group) - len(made)
        blobs = list(made.values())
        claim = self._claim(blobs if slots else [], writes=False, operation="put of made objects")
        try:
            halves = [bytes(blob.data[: blob.data.nbytes // 2]) for blob in blobs]
            await take(seconds)
            kept = dict(
                zip(made, [self._keep(blob, half) for blob, half in zip(blobs, halves, strict=True)], strict=True)
            )
        finally:
            self.watch.leave(claim)
        return [kept.get(i, LEFT) for i in group]

    def _keep(self, blob: Blob, first_half: bytes) -> Outcome:
        fault = self.dice.draw("object put", self.faults.of_put())
        if fault is not None:
            self.counts["errors"] += 1
            kind = StorageFull if fault == "full" else StorageError
            return Outcome(Found.FAILED, kind(f"{blob.name} could not be stored ({fault}, simulated)"))
        stored = self.objects.get(blob.name)
        if stored is not None and len(stored) == blob.data.nbytes:
            self.objects.move_to_end(blob.name)
            return EXISTS
        self._remove(blob.name)  # of another length: nobody could load it
        data = first_half + bytes(blob.data[len(first_half) :])
        if self._capacity is not None and len(data) > self._capacity:
            self.counts["errors"] += 1
            return Outcome(Found.FAILED, StorageFull(f"{blob.name} is larger than the whole storage"))
        self.objects[blob.name] = data
        self.gone.discard(blob.name)
        self._bytes += len(data)
        while self._capacity is not None and self._bytes > self._capacity:
            self._remove(next(iter(self.objects)))
            self.counts["evicted"] += 1
        return STORED

    async def _get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        claim = self._claim(blobs, writes=True, operation="get")
        try:
            middle, rest = await self._begin("get")
            await take(middle)
            found = [self._look_up(blob.name, blob.data.nbytes) for blob in blobs]
            for blob, data in zip(blobs, found, strict=True):
                half = blob.data.nbytes // 2
                # Also where nothing is found: such a buffer holds anything.
                blob.data[:half] = bytes(half) if data is None else data[:half]
            await take(rest)
            return [self._deliver(blob, data) for blob, data in zip(blobs, found, strict=True)]
        finally:
            self.watch.leave(claim)

    async def _load(self, items: Sequence[Item], drain: Drainer) -> list[Outcome]:
        middle, rest = await self._begin("get")
        await take(middle)
        outcomes = [self._load_one(i, item, drain) for i, item in enumerate(items)]
        await take(rest)
        return outcomes

    def _load_one(self, i: int, item: Item, drain: Drainer) -> Outcome:
        """As a thread would: whether the block is still there for it is the drain's own business."""
        fault = self.dice.draw("object get", self.faults.of_get())
        if fault in ("error", "spoilt"):
            self.counts["errors"] += 1
            if fault == "spoilt":
                self._set_aside(item.name)
            return Outcome(Found.FAILED, StorageError(f"{item.name} could not be read (simulated)"))
        data = self._look_up(item.name, item.nbytes)
        if data is None or fault == "missing":
            self.counts["misses"] += 1
            return MISSING
        if not drain.wanted:
            self.counts["left"] += 1
            return LEFT
        delivered = bytearray(data)
        if fault == "short":  # says that it read it
            delivered[len(data) // 4 : -FOOTER_BYTES] = bytes(len(data) - len(data) // 4 - FOOTER_BYTES)
        if fault == "flip":
            bit = self.dice.rng.randrange(8 * (len(data) - FOOTER_BYTES))
            delivered[bit // 8] ^= 1 << bit % 8
        self.counts["flipped" if fault == "flip" else "short"] += delivered != data
        if not drain(i, memoryview(delivered)):
            self.counts["left"] += 1
            return LEFT
        self.counts["hits"] += 1
        self.counts["in place"] += 1
        return FOUND

    def _look_up(self, name: str, nbytes: int) -> bytes | None:
        data = self.objects.get(name)
        if data is None:
            return None
        if len(data) != nbytes:
            self.counts["wrong length"] += 1
            self._remove(name)
            return None
        self.objects.move_to_end(name)
        return data

    def _deliver(self, blob: Blob, data: bytes | None) -> Outcome:
        fault = self.dice.draw("object get", self.faults.of_get())
        if fault in ("error", "spoilt"):
            self.counts["errors"] += 1
            if fault == "spoilt":
                self._set_aside(blob.name)
            return Outcome(Found.FAILED, StorageError(f"{blob.name} could not be read (simulated)"))
        if data is None or fault == "missing":
            self.counts["misses"] += 1
            return MISSING
        half = len(data) // 2
        if fault == "short":
            self.counts["short"] += bytes(blob.data[half:]) != data[half:]  # else it got the whole object after all
            note(f"short read of {blob.name}")
        else:
            blob.data[half:] = data[half:]
        if fault == "flip":
            bit = self.dice.rng.randrange(8 * len(data))
            blob.data[bit // 8] ^= 1 << bit % 8
            self.counts["flipped"] += 1
            note(f"flipped bit {bit} of {blob.name}")
        self.counts["hits"] += 1
        return FOUND

    async def _quarantine(self, name: str) -> None:
        middle, rest = await self._begin("quarantine")
        await take(middle + rest)
        self._set_aside(name)

    def _set_aside(self, name: str) -> None:
        data = self._remove(name)
        if data is not None:
            self.quarantined[name] = data
            self.counts["quarantined"] += 1

    def _claim(self, blobs: Sequence[Blob], *, writes: bool, operation: str) -> Claim:
        addresses = [int(np.frombuffer(blob.data, np.uint8).ctypes.data) for blob in blobs]
        for blob, address in zip(blobs, addresses, strict=True):
            end = address + blob.data.nbytes
            if not any(m.address <= address and end <= m.address + m.nbytes for m in self._registered):
                raise InvariantError(f"the buffer of {blob.name} lies outside of all registered memory")
        sizes = [blob.data.nbytes for blob in blobs]
        return self.watch.enter(addresses, sizes, writes=writes, who=f"storage {operation} of {_names(blobs)}")

    def _remove(self, name: str) -> bytes | None:
        data = self.objects.pop(name, None)
        if data is not None:
            self._bytes -= len(data)
            self.gone.add(name)
            if self._left is not None:
                self._left(name)
        return data


def _watched(drain: BlockDrain, i: int, data: memoryview) -> bool:
    """BlockDrain's call, in front of which each watch hears what it is about to write."""
    position = drain.positions[i]
    blocks, inspection = drain._blocks, drain._blocks.inspection(position)
    memory, block = blocks._memory, blocks._blocks[position]
    pieces = [
        (memory.arena.origin + first + stride * block, nbytes)
        for piece in memory.pieces
        for first, stride, nbytes in piece.parts
    ]
    if drain.wanted and inspection.footer(bytes(data[-FOOTER_BYTES:])) is None:  # else it writes nothing
        for watch in WATCHES:
            watch(np.array(pieces, dtype=np.int64))
    return _take(drain, i, data)


_take = BlockDrain.__call__
BlockDrain.__call__ = _watched  # type: ignore[method-assign]


def _names(blobs: Sequence[Blob]) -> str:
    return ", ".join(blob.name for blob in blobs[:2]) + (f" and {len(blobs) - 2} more" if len(blobs) > 2 else "")
