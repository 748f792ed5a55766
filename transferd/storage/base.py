"""The contract of a storage backend: named, immutable objects in and out of registered host memory.

An object is one block of one rank with its footer (footer.py); a backend sees only bytes. Names
come from keys.py: `<model>/<fingerprint>/<generation>/<key digest>/<rank>`. The parts before the
digest may hold any text, so a backend that maps names to paths must quote them.

Guaranteed by the caller (workers):

1. Every buffer lies inside memory that was passed to `register`. It stays valid and unchanged (put), or
   untouched by others (get), until the call on it has returned, even if the caller was cancelled.
2. Objects with the same name always hold the same payload: names are content keys.
3. `open` is called once, before everything else; `close` once, after every call has returned.

Duties of an implementation:

1. Answer per object. The failure of one object is that object's outcome. A call raises only if it fails as a
   whole (typically `StorageUnavailable`).
2. `put`: after outcome STORED or EXISTS, a `get` of the name finds the whole object (until it is evicted).
   A torn object is never visible under its name, not even after kill -9.
3. `get`: FOUND means that the object is complete and as long as the buffer. Any other length is MISSING (and
   counted); a short read never passes as good.
4. `exists`: True only if a `get` would find the object now. An error is an error, not True.
5. Nothing blocks the event loop; blocking work runs in the backend's own threads.
6. Every wait is bounded, even if the backend's server is gone.
7. If a capacity is configured, evict the least recently used object, and within a chain the deepest one first,
   but never an object that the same task stored or found. An object without room is FAILED, `storage_full`.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from transferd.config import Config, StorageSection
from transferd.errors import TransferError
from transferd.runtime.clock import Clock
from transferd.runtime.compat import Self
from transferd.storage.lru import Use
from transferd.tiers.base import HostMemory
from transferd.tiers.staging import CHUNK_BYTES


class Found(enum.Enum):
    """The result for one object of a batch."""

    STORED = "stored"  # put: written now
    EXISTS = "exists"  # put: it was already stored
    FOUND = "found"  # get: the buffer holds the object
    MISSING = "missing"  # get: not stored, or of another length; put_lent: the task took the block back first
    COLD = "cold"  # get_in_place: stored, but not loaded from memory; use `get`, which waits for the medium
    FAILED = "failed"  # see error


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The answer for one object. `error` is set if and only if `found` is FAILED; all others are constants below."""

    found: Found
    error: TransferError | None = None


STORED = Outcome(Found.STORED)
EXISTS = Outcome(Found.EXISTS)
FOUND = Outcome(Found.FOUND)
MISSING = Outcome(Found.MISSING)
COLD = Outcome(Found.COLD)


class Blob(NamedTuple):
    """An object's name, and the registered host memory to store it from or load it into. Borrows `data`.

    use, depth: the task's use, and the block's depth in its chain; backends that evict order by them. None: the
    batch is one chain and a use of its own.
    """

    name: str
    data: memoryview
    use: Use | None = None
    depth: int = 0


# read(buffers, offset): fills the buffers with the bytes of one object from `offset` on, as far as they are in memory
# now. It never waits for a medium. Returns how many bytes it filled.
ReadNow = Callable[[Sequence[memoryview], int], int]

# What a ReadNow reads from: the descriptor of a file that contains only the object, or the object in memory.
Backing = int | memoryview


class InPlace(Protocol):
    """A block that copies an object from storage's memory, piece by piece, and checks it while it copies.

    nbytes: the object's length, footer included. wanted: whether the task still needs the block; any thread may ask.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def wanted(self) -> bool: ...

    def load_file(self, path: str, flags: int) -> float | None:
        """In a thread: load the object from the file at this path, without `load`, which takes more steps.

        Returns the time at which the file was modified. None: open the file, and use `load`, which finds out why.

        flags: for `open`.
        """
        ...

    def bounce(self, fill: Callable[[memoryview], float | None]) -> float | None:
        """In a thread: have the object read to a slot of the task's staging, and copy it from there.

        fill: reads the whole object, and waits for the medium. Returns what it returns: when the object was modified.
        None: use `get` instead. Raises what it raises.
        """
        ...

    def leave(self) -> None:
        """In a thread, after its loads of a batch: give back what `load_file` kept for the next block of the batch."""
        ...

    def load(self, read: ReadNow, backing: Backing | None = None) -> bool:
        """In a thread: read the whole object. False: use `get` instead, or the task no longer needs the block.

        backing: the block may read from this directly, which is faster, but never wait for the medium (RWF_NOWAIT).
        """
        ...


class Place(msgspec.Struct, frozen=True):
    """An object's name, and the block to load it into. use, depth: as in Blob."""

    name: str
    data: InPlace
    use: Use
    depth: int


class LentBlock(Protocol):
    """A block of which storage makes the object itself, in the thread that writes it, right before.

    nbytes: the object's length, footer included.
    """

    @property
    def nbytes(self) -> int: ...

    def collect(self) -> memoryview | None:
        """In a thread: the object, in registered memory, until `give_back`. None: the task has ended; store nothing."""
        ...

    def give_back(self) -> None:
        """In a thread: what `collect` returned is not needed any more."""
        ...


class Lent(NamedTuple):
    """An object's name, and the block to make it from. use, depth: as in Blob."""

    name: str
    data: LentBlock
    use: Use
    depth: int


class Storage(abc.ABC):
    """A storage backend. See the module's contract."""

    backend: str  # its name in the configuration and in reports
    # Whether joined.py should join simultaneous calls of several engines for one object. It pays if a get, or a put,
    # costs more than a copy in memory. A backend that joins puts itself leaves joins_puts False.
    joins_gets = joins_puts = False
    loads_in_place = False  # whether get_in_place works
    # How many blocks get_in_place loads at a time by way of staging; 0: it loads from memory, and needs no staging.
    bounces = 0
    collects = 0  # how many blocks put_lent makes objects of at a time; 0: it does not work
    direct_io = False  # whether a device reads the buffers of a put, not the CPU: then caches are of no use to them
    # The most bytes of a chunk. More than the default if a call has a high fixed cost.
    chunk_bytes = CHUNK_BYTES

    @classmethod
    def from_config(cls, config: Config, *, clock: Clock) -> Self:
        """The backend that this configuration describes, not yet open. Raises ConfigError.

        A backend of this package overrides this, and keeps only the parts of the configuration that it needs. The
        default, `cls(config, clock=clock)`, is for backends of other packages.
        """
        return cls(config, clock=clock)  # type: ignore[call-arg]

    @abc.abstractmethod
    async def open(self) -> None:
        """Connect, create directories, find existing objects. Raises StorageError or ConfigError."""

    def register(self, memory: HostMemory) -> None:
        """Register host memory that buffers will lie in, before the first put or get.

        Zero-copy backends register it with their transport, and raise StorageError if that fails. Otherwise calls on
        this memory would fail later, or silently make a copy.
        """

    def expect(self, possible: Callable[[str, int], bool]) -> None:
        """Set the test for plausible objects, by name and length. Call it before `open`, which may find objects."""

    def reconfigure(self, storage: StorageSection) -> None:
        """Apply settings that may change at run time (a capacity). Called on SIGHUP, on the event loop."""

    def tell_departures(self, left: Callable[[str], None]) -> bool:  # noqa: ARG002 - a default
        """Call `left(name)`, on the event loop, in the very step in which a get stops finding an object.

        KV events need it. The default returns False: the backend cannot know (a pool shared with other nodes
        evicts on its own), and never calls `left`. Call this at most once.
        """
        return False

    def holds(self, name: str) -> bool:
        """Whether a get would find the object, known without I/O. Only if `tell_departures` returned True."""
        raise NotImplementedError

    def unregister(self, memory: HostMemory) -> None:
        """The memory is about to be freed. Called after the last put and get, before `close`."""

    @abc.abstractmethod
    async def exists(self, names: Sequence[str]) -> list[bool]:
        """For each name, whether a get would find the object. Raises StorageError if the backend cannot tell."""

    def look_up(self, names: Sequence[str], use: Use) -> Awaitable[list[bool]]:  # noqa: ARG002 - a default
        """`exists` for one chain of names, root to leaf, counted as part of a use. For backends that evict by use.

        Returns a coroutine, or a future that is already done if there was nothing to wait for; so do `put` and `get`.
        """
        return self.exists(names)

    @abc.abstractmethod
    def put(self, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
        """Store each blob. The outcomes have the order of the blobs. If this returns a future, the work is done."""

    @abc.abstractmethod
    def get(self, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
        """Fill each buffer. The outcomes have the order of the blobs. If this returns a future, the work is done.

        If an outcome is not FOUND, the content of its buffer is undefined.
        """

    def put_lent(self, blocks: Sequence[Lent], at_once: int) -> Awaitable[list[Outcome]]:
        """Like `put`, but make each object when it is written. Only if `collects`.

        MISSING: the task took the block back first. at_once: at most so many blocks are collected and not given back.
        """
        raise NotImplementedError

    def get_in_place(self, places: Sequence[Place], at_once: int | None = None) -> Awaitable[list[Outcome]]:
        """Have each block load its object itself, in the thread that reads it; from memory only, unless `bounces`.

        A backend may first bring an object into memory, for a block that is `wanted`. FOUND: the block has read the
        object, and knows whether it is the right one. COLD: the object is not in memory, or the block could not load
        it. The outcomes have the order of `places`. Only if `loads_in_place`.

        at_once: at most so many blocks load at a time, because the task has staging for no more.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def quarantine(self, name: str) -> Awaitable[None]:
        """Make an object that failed its check unreachable, and keep it for inspection if that is cheap.

        A backend that knows its objects makes it unreachable before this returns, and so before the answer to the task
        that found it. Awaiting the result waits for the rest.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Release everything. Idempotent. Raises StillRunning that names the calls that do not end."""

    def abandon(self) -> list[str]:
        """Release locks, so that a successor can start although this process ends with calls running.

        Frees no memory. Returns the running calls, for the log.
        """
        return []

    @abc.abstractmethod
    def statistics(self) -> dict[str, Any]:
        """At least objects and bytes (None if the backend cannot know them cheaply)."""
