"""The contract of a storage backend: named, immutable objects in and out of registered host memory.

An object is one block of one rank with its footer (footer.py); a backend sees bytes only. Names
come from keys.py: `<model>/<fingerprint>/<generation>/<key digest>/<rank>`; the parts before the
digest may hold any text, so a backend that maps names to paths must quote them.

Guaranteed by the caller (workers):

1. Buffers lie inside memory given to `register` before; a buffer stays valid and unchanged (put)
   or untouched by others (get) until the call on it has returned, also when the caller has lost
   interest meanwhile.
2. Objects under one name always hold the same payload: names are content keys.
3. `open` once before, `close` once after every call has returned.

Duties of an implementation:

1. Answer per object. One object's failure is that object's outcome; only a failure of the whole
   call raises (`StorageUnavailable`, typically).
2. `put`: after outcome STORED or EXISTS a `get` of the name finds the whole object (until evicted);
   a torn object is never visible under its name, also after kill -9.
3. `get`: FOUND with the object's whole length, which must equal the buffer's; any other length is
   MISSING (and counted), never a short read passed off as good.
4. `exists`: True only for what a `get` would find now. An error is an error, not True.
5. Nothing blocks the event loop; blocking work runs in the backend's own threads.
6. Every wait inside is bounded, also with the backend's server gone.
7. Capacity, where configured, is kept by evicting the least recently used, of one chain the deepest
   first; never for the task that stored or found the object. What has no room is FAILED, `storage_full`.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transferd.config import Config
from transferd.errors import TransferError
from transferd.storage.lru import Use
from transferd.tiers.base import HostMemory


class Found(enum.Enum):
    """What became of one object of a batch."""

    STORED = "stored"  # put: written now
    EXISTS = "exists"  # put: was there already
    FOUND = "found"  # get: the buffer holds it
    MISSING = "missing"  # get: not there, or not of this length
    FAILED = "failed"  # see error


@dataclass(frozen=True, slots=True)
class Outcome:
    """One object's answer. `error` exactly when `found` is FAILED."""

    found: Found
    error: TransferError | None = None


STORED = Outcome(Found.STORED)
EXISTS = Outcome(Found.EXISTS)
FOUND = Outcome(Found.FOUND)
MISSING = Outcome(Found.MISSING)


@dataclass(frozen=True, slots=True)
class Blob:
    """A name and the registered host memory its object is read from or written to. Borrows `data`.

    use, depth: for which task, and how deep in its chain of blocks; the order of eviction follows them
    where the backend keeps one. None: the batch is one chain, and a use of its own.
    """

    name: str
    data: memoryview
    use: Use | None = None
    depth: int = 0


class Storage(abc.ABC):
    """A storage backend. See the module's contract."""

    backend: str  # its name in the configuration and in reports

    @abc.abstractmethod
    async def open(self) -> None:
        """Make ready: connect, create directories, find existing objects. Raises StorageError or ConfigError."""

    def register(self, memory: HostMemory) -> None:
        """Announce host memory that buffers will come from, before the first put or get.

        Zero-copy backends register it with their transport. Raises StorageError when that fails:
        unregistered memory would fail later, or silently be copied.
        """

    def expect(self, possible: Callable[[str, int], bool]) -> None:
        """Say what objects can be, by name and length; before `open`. For backends that find objects then."""

    def reconfigure(self, config: Config) -> None:
        """Take over what may change while running (a capacity); called on SIGHUP, on the event loop."""

    def tell_departures(self, left: Callable[[str], None]) -> bool:  # noqa: ARG002 - a default
        """Call `left(name)`, on the event loop, in the very step in which a get stops finding an object.

        For those who tell others what is stored. False, the default: this backend cannot say (a pool
        that other nodes share evicts on its own), and `left` is never called. At most once.
        """
        return False

    def holds(self, name: str) -> bool:
        """Whether a get would find the object, as is known without asking. Only where departures are told."""
        raise NotImplementedError

    def unregister(self, memory: HostMemory) -> None:
        """The memory is about to be freed; called after the last put and get, before close."""

    @abc.abstractmethod
    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Which of these a get would find. Raises StorageError when the backend cannot say."""

    async def look_up(self, names: Sequence[str], use: Use) -> list[bool]:  # noqa: ARG002 - a default
        """`exists` of one chain of names, root to leaf, as part of a use. For backends that evict by use."""
        return await self.exists(names)

    @abc.abstractmethod
    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        """Store each; same order, same length."""

    @abc.abstractmethod
    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        """Fill each buffer; same order, same length. A buffer whose outcome is not FOUND holds anything."""

    @abc.abstractmethod
    async def quarantine(self, name: str) -> None:
        """A loaded object failed its check: make it unreachable (and keep it aside where that is cheap)."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Release everything. Idempotent. Raises StillRunning, naming them, for calls that do not end."""

    def abandon(self) -> list[str]:
        """The process is about to end with calls under way: give back locks, so that a successor can start.

        Frees no memory. Returns what is under way, for the log.
        """
        return []

    @abc.abstractmethod
    def statistics(self) -> dict[str, Any]:
        """At least objects, bytes (None where the backend cannot know cheaply)."""
