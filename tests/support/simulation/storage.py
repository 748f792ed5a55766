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
from transferd.errors import Closed, InvariantError, StillRunning, StorageError, StorageFull, StorageUnavailable
from transferd.runtime.aio import answered, uncancelled
from transferd.storage.base import COLD, EXISTS, FOUND, MISSING, STORED, Blob, Found, Lent, Outcome, Place, Storage
from transferd.tiers.base import HostMemory

T = TypeVar("T")


COLD_PART = 0.15  # of loads in place: some of the object is not in memory


class SimStorage(Storage):
    """A Storage as a test wants it. Its objects live as long as it does, across close and open.

    A call touches the first half of each buffer at some moment on the way and the second half at its
    end, and ends only then, also when it is cancelled meanwhile. What a caller guarantees is checked:
    buffers lie in registered memory, and nobody else is at work on them meanwhile.

    capacity: bytes; the least recently used objects go beyond it. faults: the plan, may be replaced
    at any time. dice: for scripts; operations "exists", "put", "get" and "quarantine" with fault "unavailable" of
    the next call, "object put" and "object get" with the fault of the next object. gate: holds
    calls that would start now. at_once: the share of loads in place of one object that are answered at once. begins:
    told of the address and length of each piece that a load in place is about to write, int64 [n, 2].
    """

    backend = "simulated"
    loads_in_place = True
    collects = 2

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
        self.begins: Callable[[npt.NDArray[np.int64]], None] = _nobody_asks
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

    def tell_departures(self, left: Callable[[str], None]) -> bool:
        self._left = left
        return True

    def holds(self, name: str) -> bool:
        return name in self.objects

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return await self._call(self._exists(names))

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        return await self._call(self._put(blobs))

    async def put_lent(self, blocks: Sequence[Lent], at_once: int) -> list[Outcome]:
        return await self._call(self._put_lent(blocks, at_once))

    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        return await self._call(self._get(blobs))

    def get_in_place(self, places: Sequence[Place], at_once: int | None = None) -> Awaitable[list[Outcome]]:
        assert at_once is None or 1 <= at_once <= min(self.bounces, len(places))
        if len(places) == 1 and self._open and self.gate.is_open and self.dice.rng.random() < self.at_once:
            return answered([self._load_one(places[0])])
        return self._call(self._load(places))

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

    async def _put_lent(self, blocks: Sequence[Lent], at_once: int) -> list[Outcome]:
        """`at_once` blocks at a time: they are collected at some moment, and stored at a later one."""
        middle, rest = await self._begin("put")
        outcomes: list[Outcome] = []
        for start in range(0, len(blocks), at_once):
            group = blocks[start : start + at_once]
            await take(middle * len(group) / len(blocks))
            outcomes += await self._put_group(group, rest * len(group) / len(blocks))
        return outcomes

    async def _put_group(self, group: Sequence[Lent], seconds: float) -> list[Outcome]:
        made = {lent.name: (lent, data) for lent in group if (data := lent.data.collect()) is not None}
        self.counts["lent"] += len(made)
        self.counts["withdrawn"] += len(group) - len(made)
        blobs = {name: Blob(name, data) for name, (_, data) in made.items()}
        try:
            claim = self._claim(list(blobs.values()), writes=False, operation="put of lent blocks")
            try:
                halves = {name: bytes(blob.data[: blob.data.nbytes // 2]) for name, blob in blobs.items()}
                await take(seconds)
                kept = {name: self._keep(blob, halves[name]) for name, blob in blobs.items()}
            finally:
                self.watch.leave(claim)
        finally:
            for lent, _ in made.values():
                lent.data.give_back()
        return [kept.get(lent.name, MISSING) for lent in group]

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
            found = [self._look_up(blob) for blob in blobs]
            for blob, data in zip(blobs, found, strict=True):
                half = blob.data.nbytes // 2
                # Also where nothing is found: such a buffer holds anything.
                blob.data[:half] = bytes(half) if data is None else data[:half]
            await take(rest)
            return [self._deliver(blob, data) for blob, data in zip(blobs, found, strict=True)]
        finally:
            self.watch.leave(claim)

    async def _load(self, places: Sequence[Place]) -> list[Outcome]:
        middle, rest = await self._begin("get")
        await take(middle)
        outcomes = [self._load_one(place) for place in places]
        await take(rest)
        return outcomes

    def _load_one(self, place: Place) -> Outcome:
        """As a thread would: whether the block is still there for it is the block's own business."""
        fault = self.dice.draw("object get", self.faults.of_get())
        if fault in ("error", "spoilt"):
            self.counts["errors"] += 1
            if fault == "spoilt":
                self._set_aside(place.name)
            return Outcome(Found.FAILED, StorageError(f"{place.name} could not be read (simulated)"))
        data = self._look_up(place)
        if data is None or fault == "missing":
            self.counts["misses"] += 1
            return MISSING
        warm = len(data) if self.dice.rng.random() >= COLD_PART else self.dice.rng.randrange(len(data))
        read = _Now(self, data, warm, fault)
        if not place.data.load(read):
            self.counts["cold"] += 1
            return COLD
        self.counts["flipped" if fault == "flip" else "short"] += read.wrong
        self.counts["hits"] += 1
        self.counts["in place"] += 1
        return FOUND

    def _look_up(self, blob: Blob | Place) -> bytes | None:
        data = self.objects.get(blob.name)
        if data is None:
            return None
        if len(data) != blob.data.nbytes:
            self.counts["wrong length"] += 1
            self._remove(blob.name)
            return None
        self.objects.move_to_end(blob.name)
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


def _nobody_asks(pieces: npt.NDArray[np.int64]) -> None:
    """Loads in place are watched by nobody but MemoryWatch."""


class _Now:
    """A ReadNow of one object, of which `warm` leading bytes are in memory; the footer is read first, and always is."""

    def __init__(self, storage: SimStorage, data: bytes, warm: int, fault: str | None) -> None:
        self._storage = storage
        self._data = data
        self._warm = warm
        self._fault = fault
        self.wrong = False  # whether it delivered other bytes than the object's

    def __call__(self, buffers: Sequence[memoryview], offset: int) -> int:
        addresses = [int(np.frombuffer(buffer, np.uint8).ctypes.data) for buffer in buffers]
        sizes = [buffer.nbytes for buffer in buffers]
        self._storage.begins(np.array([addresses, sizes], dtype=np.int64).T)
        watch = self._storage.watch
        claim = watch.enter(addresses, sizes, writes=True, who="storage load in place")
        try:
            return self._read(buffers, offset)
        finally:
            watch.leave(claim)

    def _read(self, buffers: Sequence[memoryview], offset: int) -> int:
        is_footer = offset + sum(buffer.nbytes for buffer in buffers) == len(self._data)
        end = len(self._data) if is_footer else self._warm
        done = 0
        for buffer in buffers:
            part = self._data[offset + done : min(offset + done + buffer.nbytes, end)]
            if self._fault == "short" and not is_footer:  # says that it read it
                self.wrong = self.wrong or bytes(buffer[: len(part)]) != part
                done += len(part)
                continue
            buffer[: len(part)] = part
            done += len(part)
        if self._fault == "flip" and not is_footer and done:
            bit = self._storage.dice.rng.randrange(8 * buffers[0].nbytes)
            buffers[0][bit // 8] ^= 1 << bit % 8
            self.wrong = True
        return done


def _names(blobs: Sequence[Blob]) -> str:
    return ", ".join(blob.name for blob in blobs[:2]) + (f" and {len(blobs) - 2} more" if len(blobs) > 2 else "")
