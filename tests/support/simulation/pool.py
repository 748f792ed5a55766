"""SimPool: a Mooncake pool in this process, behind the same client interface, that misbehaves on demand.

    pool = SimPool()
    storage = MooncakeStorage(section, set_up=pool.set_up)   # master_server_addr = SIM_MASTER

What it answers is what mooncake 0.3.13 was seen to answer (storage/mooncake/client.py, error_codes.py), odd
things included: a put over a write that was begun and never finished says 0 and stores nothing.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Sequence

from transferd.config import MooncakeStorageSection
from transferd.storage.mooncake import error_codes
from transferd.storage.mooncake.client import Batch, Buffer, PoolClient

SIM_MASTER = "sim://pool"  # a scheme: nobody dials it


class SimPool:
    """What the master and the segments of a pool hold. Thread-safe, as calls come from many threads.

    objects: finished ones, least recently stored first. begun: keys of writes that have not finished.
    capacity: bytes; older objects that are not pinned make room. largest: bytes of an object at most.
    """

    def __init__(self, *, capacity: int = 1 << 40, largest: int = 1 << 40) -> None:
        self.objects: dict[str, bytes] = {}
        self.begun: set[str] = set()
        self.pinned: set[str] = set()
        self.capacity = capacity
        self.largest = largest
        self.calls: list[tuple[str, list[str]]] = []  # operation and keys of every call
        self.lent: list[int] = []  # sizes of segments that clients lent later than at their start
        self.registering = error_codes.OK  # what register answers
        self.placed: dict[str, list[str]] = {}  # who has which object; others are on this node
        self.before: Callable[[str, Sequence[str]], None] = _nothing  # runs in the calling thread, may block
        self._scripted: dict[str, list[int]] = {}
        self._lock = threading.RLock()

    def answer(self, operation: str, code: int, times: int = 1) -> None:
        """Let the next calls of an operation answer this code for each key, and do nothing else."""
        self._scripted.setdefault(operation, []).extend([code] * times)

    def finish(self, key: str, data: bytes) -> None:
        """The other writer has come to its end."""
        with self._lock:
            self.begun.discard(key)
            self.objects[key] = data

    def set_up(self, section: MooncakeStorageSection) -> SimPoolClient:
        """A client, as PoolClient(section) is one."""
        return SimPoolClient(self, hard_pin=section.hard_pin)

    def call(self, operation: str, keys: Collection[str], each: Callable[[str], int]) -> dict[str, int]:
        """One native call."""
        with self._lock:
            self.calls.append((operation, list(keys)))
            scripted = self._scripted.get(operation)
            code = scripted.pop(0) if scripted else None
        self.before(operation, list(keys))
        with self._lock:
            return {key: each(key) if code is None else code for key in keys}

    def store(self, key: str, data: bytes, *, pin: bool, over: bool = False) -> int:
        if not over and (key in self.objects or key in self.begun):
            return error_codes.OK
        if len(data) > self.largest or not self._make_room(len(data)):
            return error_codes.NO_AVAILABLE_HANDLE
        self.finish(key, data)
        if pin:
            self.pinned.add(key)
        return error_codes.OK

    def remove(self, key: str) -> int:
        self.pinned.discard(key)
        return error_codes.OBJECT_NOT_FOUND if self.objects.pop(key, None) is None else error_codes.OK

    def _make_room(self, nbytes: int) -> bool:
        loose = [key for key in self.objects if key not in self.pinned]
        while sum(map(len, self.objects.values())) + nbytes > self.capacity:
            if not loose:
                return False
            del self.objects[loose.pop(0)]
        return True


class SimPoolClient(PoolClient):
    """A client of a SimPool. Reads and writes only memory that was registered, as a segment's owner would."""

    def __init__(self, pool: SimPool, *, hard_pin: bool) -> None:
        self.pool = pool
        self.own = frozenset()
        self.registered: dict[int, int] = {}
        self.closed = False
        self._pin = hard_pin

    def register(self, address: int, nbytes: int, rank: int = 0) -> int:
        if self.pool.registering == error_codes.OK:
            self.registered[address] = nbytes
        return self.pool.registering

    def unregister(self, address: int, rank: int = 0) -> None:
        self.registered.pop(address, None)

    def exists(self, keys: Collection[str]) -> dict[str, int]:
        return self.pool.call("exists", keys, lambda key: int(key in self.pool.objects))

    def put(self, batch: Batch, *, alone: bool = False) -> dict[str, int]:
        return self.pool.call("put", batch, lambda key: self._kept(key, batch[key], over=False))

    def replace(self, batch: Batch) -> dict[str, int]:
        return self.pool.call("replace", batch, lambda key: self._kept(key, batch[key], over=True))

    def holders(self, keys: Collection[str]) -> dict[str, list[str]]:
        self.pool.call("holders", keys, lambda _: 0)
        return {key: self.pool.placed.get(key, [""]) if key in self.pool.objects else [] for key in keys}

    def lend(self, nbytes: int, rank: int = 0) -> int:
        self.pool.lent.append(nbytes)
        return error_codes.OK

    def get(self, batch: Batch) -> dict[str, int]:
        def load(key: str) -> int:
            data = self.pool.objects.get(key)
            if data is None:
                return error_codes.REPLICA_IS_NOT_READY if key in self.pool.begun else error_codes.OBJECT_NOT_FOUND
            address, size, _ = batch[key]
            if len(data) > size or not self._is_registered(address, size):
                return error_codes.INVALID_PARAMS
            ctypes.memmove(address, data, len(data))
            return len(data)

        return self.pool.call("get", batch, load)

    def lengths(self, keys: Collection[str]) -> dict[str, int]:
        objects = self.pool.objects
        return self.pool.call(
            "lengths", keys, lambda key: len(objects[key]) if key in objects else error_codes.OBJECT_NOT_FOUND
        )

    def remove(self, keys: Collection[str]) -> dict[str, int]:
        return self.pool.call("remove", keys, self.pool.remove)

    def close(self) -> None:
        self.closed = True

    def _is_registered(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + n for start, n in self.registered.items())

    def _kept(self, key: str, place: Buffer, *, over: bool) -> int:
        if not self._is_registered(place.address, place.nbytes):
            return error_codes.INVALID_PARAMS
        return self.pool.store(key, ctypes.string_at(place.address, place.nbytes), pin=self._pin, over=over)


def _nothing(operation: str, keys: Sequence[str]) -> None:
    """Calls are not held up."""
