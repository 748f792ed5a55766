"""The contract of a storage backend: named, immutable objects in and out of registered host memory.

An object is one block of one rank with its footer (formats.py); a backend sees only bytes. Names
come from formats.py: `<model>/<fingerprint>/<generation>/<key digest>/<rank>`. The parts before the
digest may hold any text, so a backend that maps names to paths must quote them.

Guaranteed by the caller (workers):

1. Every slot lies inside memory that was passed to `register`. It stays valid, and unchanged (store) or untouched by
   others (load), until the call on it has returned, even if the caller was cancelled.
2. Objects with the same name always hold the same payload: names are content keys.
3. `open` is called once, before everything else; `close` once, after every call has returned.
4. `fill` and `drain` may run in any thread, and several at a time. They only copy memory, and raise nothing.

Duties of an implementation:

1. Answer per object. The failure of one object is that object's outcome. A call raises only if it fails as a
   whole (typically `StorageUnavailable`).
2. `store`: after outcome STORED or EXISTS, a `load` of the name finds the whole object (until it is evicted).
   A torn object is never visible under its name, not even after kill -9.
3. `load`: FOUND means that the object is complete and as long as the item says. Any other length is MISSING (and
   counted); a short read never passes as good.
4. `exists`: True only if a `load` would find the object now. An error is an error, not True.
5. Nothing blocks the event loop; blocking work runs in the backend's own threads.
6. Every wait is bounded, even if the backend's server is gone.
7. If a capacity is configured, evict the least recently used object, and within a chain the deepest one first,
   but never an object that the same task stored or found. An object without room is FAILED, `storage_full`.
8. `drain` is called only with bytes that are in memory, so no thread waits for a disk while it may touch a block.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import operator
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from transferd.config import Config, StorageSection
from transferd.errors import TransferError
from transferd.runtime.clock import Clock
from transferd.runtime.compat import Self
from transferd.storage.keeping import Keeper
from transferd.storage.levels.base import Levels
from transferd.storage.lru import Use
from transferd.storage.queues import UNSAVED
from transferd.tasks import CopiesMade
from transferd.tiers.base import HostMemory
from transferd.tiers.staging import CHUNK_BYTES


class Found(enum.Enum):
    """The result for one object of a batch."""

    STORED = "stored"  # store: written now
    EXISTS = "exists"  # store: it was already stored
    FOUND = "found"  # load: the slot holds the object, or `drain` has taken it
    MISSING = "missing"  # load: not stored, or of another length
    LEFT = "left"  # `fill` did not make the object, or `drain` did not take it
    FAILED = "failed"  # see error


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The answer for one object. `error` is set if and only if `found` is FAILED.

    level: which of several levels has given it, 0 for the first. Of level 0, all but FAILED are constants below.
    """

    found: Found
    error: TransferError | None = None
    level: int = 0


STORED = Outcome(Found.STORED)
EXISTS = Outcome(Found.EXISTS)
FOUND = Outcome(Found.FOUND)
MISSING = Outcome(Found.MISSING)
LEFT = Outcome(Found.LEFT)


class Item(NamedTuple):
    """One object of a call: its name and length.

    use, depth: the task's use, and the block's depth in its chain; backends that evict order by them. None: the
    call is one chain and a use of its own.
    """

    name: str
    nbytes: int
    use: Use | None = None
    depth: int = 0

    @property
    def counted(self) -> bool:
        """Whether a load of it counts hits and misses. All items of a call say the same."""
        return self.use is None or self.use.counts

    @property
    def span(self) -> tuple[int, int] | None:
        """What of the object `drain` takes besides the footer, in bytes: so its `data` need hold no more. None: all."""
        return None


class PartItem(Item):
    """An Item of which a load wants only a part. Whoever makes Items of it for another storage gets whole objects."""

    _span: tuple[int, int]

    @classmethod
    def of(cls, item: Item, span: tuple[int, int], use: Use | None) -> PartItem:
        made = cls(item.name, item.nbytes, use, item.depth)
        made._span = span
        return made

    @property
    def span(self) -> tuple[int, int]:
        return self._span


Fill = Callable[[int, memoryview, bool], bool]
"""fill(i, data, near): makes the object of item i in `data`, all of it. near: this thread reads `data` next, so its
bytes should stay in the caches. False: the task has ended; store nothing."""


class Drainer(Protocol):
    """Takes the bytes of objects wherever they lie: in the backend's memory, in a mapped file, in a slot."""

    @property
    def wanted(self) -> bool:
        """Whether the task still needs its objects. Any thread may ask, before it waits for a medium."""
        ...

    def __call__(self, i: int, data: memoryview, /) -> bool:
        """Take the object of item i, which is complete. `data` is borrowed for this call. False: it was not taken."""
        ...


class Outcomes(list[Outcome]):
    """The outcomes of a load whose slots return later than its answer: a level was too slow, and is still reading.

    returned: done when the caller has its slots back.
    """

    def __init__(self, outcomes: Iterable[Outcome], returned: asyncio.Future[None]) -> None:
        super().__init__(outcomes)
        self.returned = returned


class Index:
    """What a storage knows of its objects without I/O. This one knows nothing: all must be asked for.

    ranges: whether a part of an object can be read for about a part of the cost (`Item.span`).
    """

    ranges = False

    def expect(self, possible: Callable[[str, int], bool]) -> None:
        """Set the test for plausible objects, by name and length. Call it before `open`, which may find objects."""

    def find(self, names: Sequence[str], use: Use | None) -> list[bool] | None:  # noqa: ARG002 - a default
        """`Storage.exists` for one chain of names, root to leaf. None: ask `exists`.

        use: the use of which this is part, in backends that evict by use; None: it does not count as one.
        """
        return None

    def stored(self, names: Sequence[str], use: Use | None) -> list[bool] | None:
        """For each name, whether a task need not store it. The arguments and None are those of `find`.

        With several levels that is not what `find` says: an object that only a slow level has is stored again.
        """
        return self.find(names, use)

    def look(self, names: Sequence[str]) -> Coroutine[Any, Any, list[bool]] | None:  # noqa: ARG002 - a default
        """For each name that `find` says is stored, whether the medium has it. None: `find` cannot be wrong.

        Raises StorageError if the medium cannot tell.
        """
        return None

    def tell_departures(self, left: Callable[[str], None]) -> bool:  # noqa: ARG002 - a default
        """Call `left(name)`, on the event loop, in the very step in which a load stops finding an object.

        KV events need it. The default returns False: the backend cannot know (a pool shared with other nodes
        evicts on its own), and never calls `left`. Call this at most once. If it returns True, `find` knows.
        """
        return False

    def touch(self, items: Sequence[Item]) -> None:
        """Note that these were used, each at its use and depth. Does nothing if it keeps no order."""

    def hold(self, name: str, why: int = UNSAVED) -> int | None:  # noqa: ARG002 - a default
        """Do not evict this object until `release` for the same reason (queues.py).

        Returns its length; None: it is not there, or cannot be held.
        """
        return None

    def release(self, name: str, use: Use, why: int = UNSAVED) -> None:
        """An object that is held, or was stored with `use.holds`, is like any other now, last used by `use`."""

    def hottest_first(self) -> Iterator[tuple[str, int]]:
        """Names and lengths of all objects, the last used first. Empty: it does not know them.

        What is used or removed while somebody reads it may come twice, or not at all.
        """
        return iter(())


NO_INDEX = Index()


class PoolNode(abc.ABC):
    """The storage's part in a pool of several nodes."""

    @abc.abstractmethod
    async def make_copies(self, *, leaves: bool) -> CopiesMade:
        """Copy to other nodes what only this one has, because it leaves. Or make copies that objects lack.

        Raises RequestError, StorageError.
        """

    @abc.abstractmethod
    async def leave(self, within_s: float) -> None:
        """The same for a daemon that stops, for at most so long: for `flush` and `close` there is time after it."""


class Storage(abc.ABC):
    """A storage backend. See the module's contract."""

    backend: str  # its name in the configuration and in reports
    # How many slots a call with `fill` or `drain` uses at a time. 0: none, the objects lie in the backend's own memory,
    # and loads cost no more than a copy. None: without threads of its own, it only takes and returns whole slots.
    slots_at_once: int | None = None
    # Whether a load looks up its objects first. False where a look-up costs as much as a load: a round trip.
    asks_first = True
    # The most bytes of a chunk. More than the default if a call has a high fixed cost.
    chunk_bytes = CHUNK_BYTES

    @property
    def index(self) -> Index:
        """What it knows without I/O."""
        return NO_INDEX

    @property
    def keeper(self) -> Keeper | None:
        """What purges and pins its objects, and keeps shares of it. None: this backend cannot do that."""
        return None

    @property
    def levels(self) -> Levels | None:
        """None: it has only one."""
        return None

    @property
    def pool(self) -> PoolNode | None:
        """None: no other node keeps its objects."""
        return None

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

    def reconfigure(self, storage: StorageSection) -> None:
        """Apply settings that may change at run time (a capacity). Called on SIGHUP, on the event loop."""

    def join(self, wrap: Callable[[Storage], Storage]) -> Storage:
        """This storage with simultaneous calls joined by `wrap` (joined.py)."""
        return wrap(self)

    def unregister(self, memory: HostMemory) -> None:
        """The memory is about to be freed. Called after the last put and get, before `close`."""

    @abc.abstractmethod
    async def exists(self, names: Sequence[str]) -> list[bool]:
        """For each name, whether a load would find the object. Raises StorageError if the backend cannot tell."""

    def unusable(self) -> str:
        """Why no call can succeed now, in words for people; "" if calls can. Then the daemon is not ready."""
        return ""

    @abc.abstractmethod
    def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> Awaitable[list[Outcome]]:
        """Store each object. The outcomes have the order of the items. If this returns a future, the work is done.

        fill: makes each object right before it is written, in the thread that writes it, in one of `slots` or in the
        backend's own memory. None: slots[i] holds the object of item i. Only if `slots_at_once` is not None.
        """

    @abc.abstractmethod
    def load(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> Awaitable[list[Outcome]]:
        """Load each object. The outcomes have the order of the items. If this returns a future, the work is done.

        drain: takes each object, in the thread that has it; `slots` are for objects that are not in memory.
        None: fill slots[i] with the object of item i; if the outcome is not FOUND, its content is undefined.
        Only if `slots_at_once` is not None.
        """

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


class Source(Protocol):
    """Where a rank's objects come from: a Storage, or another daemon. The methods' contracts are Storage's."""

    slots_at_once: int | None
    asks_first: bool

    @property
    def index(self) -> Index: ...
    @property
    def levels(self) -> Levels | None: ...
    async def exists(self, names: Sequence[str]) -> list[bool]: ...
    def load(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> Awaitable[list[Outcome]]: ...
    def quarantine(self, name: str) -> Awaitable[None]: ...


def slots_for(source: Source, names: Sequence[str]) -> int:
    """How many slots a load of these in place uses at a time."""
    return (source.slots_at_once or 0) if source.levels is None else source.levels.slots_for(names)


def copies_in(source: Source) -> int:
    """How many copies of an object it may have."""
    return 1 if source.levels is None else len(source.levels.names)


class Blob(NamedTuple):
    """An object's name, and the slot to store it from or load it into. Borrows `data`. use, depth: as in Item."""

    name: str
    data: memoryview
    use: Use | None = None
    depth: int = 0


def blobs_of(items: Sequence[Item], slots: Sequence[memoryview]) -> list[Blob]:
    """Each item with its slot."""
    return [Blob(item.name, slot, item.use, item.depth) for item, slot in zip(items, slots, strict=True)]


class SlotStorage(Storage):
    """A backend that only takes and returns whole slots: `put` and `get` instead of `store` and `load`.

    A class of another package may subclass Storage itself and define `put` and `get`; the registry adds this class.
    """

    @abc.abstractmethod
    def put(self, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
        """Store each blob. The outcomes have the order of the blobs. If this returns a future, the work is done."""

    @abc.abstractmethod
    def get(self, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
        """Fill each slot. The outcomes have the order of the blobs. If this returns a future, the work is done."""

    def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> Awaitable[list[Outcome]]:
        assert fill is None, self.backend
        return self.put(blobs_of(items, slots))

    def load(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> Awaitable[list[Outcome]]:
        assert drain is None, self.backend
        return self.get(blobs_of(items, slots))


class FrontStorage(Storage):
    """A Storage in front of another one. What a subclass does not define goes to the storage behind it."""

    def __init__(self, behind: Storage) -> None:
        self.backend, self.chunk_bytes = behind.backend, behind.chunk_bytes
        self.slots_at_once, self.asks_first = behind.slots_at_once, behind.asks_first
        self._behind = behind


def _pass_on(method: str) -> Callable[..., Any]:
    def passed_on(self: FrontStorage, *arguments: Any, **named: Any) -> Any:
        return getattr(self._behind, method)(*arguments, **named)

    return passed_on


METHODS = tuple(name for name, part in vars(Storage).items() if callable(part) and not name.startswith("_"))
PARTS = tuple(name for name, part in vars(Storage).items() if isinstance(part, property))
for _method in set(METHODS) - {"join"}:  # who joins calls wraps the front, not what is behind it
    setattr(FrontStorage, _method, _pass_on(_method))
for _part in PARTS:
    setattr(FrontStorage, _part, property(operator.attrgetter(f"_behind.{_part}")))
abc.update_abstractmethods(FrontStorage)  # type: ignore[type-abstract]
