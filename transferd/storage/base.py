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
import itertools
import operator
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from transferd.config import Config, FileStorageSection, StorageSection
from transferd.errors import RequestError, TransferError
from transferd.runtime.clock import Clock
from transferd.runtime.compat import Self
from transferd.storage.keeping import Keeper
from transferd.storage.levels.base import Levels
from transferd.storage.lru import LruIndex, Use
from transferd.storage.queues import UNSAVED, Noted, departures, nobody, space_of
from transferd.storage.selection import Selection
from transferd.tasks import CopiesMade
from transferd.tiers.base import HostMemory
from transferd.tiers.staging import CHUNK_BYTES
from transferd.wire.answers import Purged, StoreDirectory


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

    level: which of several levels has answered, 0 for the first. The constants below are the answers of level 0.
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

    use: the task's use, by which backends order evictions; None if the call's items are one chain and a use of its own.
    depth: the block's depth in the use's chain.
    span: the bytes of the object that `drain` takes besides the footer: its `data` may lack the rest. None for all. A
        storage that does not pass it on loads whole objects.
    """

    name: str
    nbytes: int
    use: Use | None = None
    depth: int = 0
    span: tuple[int, int] | None = None

    @property
    def counted(self) -> bool:
        """Whether a load of it counts hits and misses. All items of a call say the same."""
        return self.use is None or self.use.counts


NAME, NBYTES = map(operator.attrgetter, ("name", "nbytes"))  # of an Item, or of what else has them

Fill = Callable[[int, memoryview, bool], bool]
"""fill(i, data, near): makes the whole object of item i in `data`. near: this thread reads `data` next, so its bytes
should stay in the caches. Returns False if the task has ended; then store nothing."""


Take = Callable[[memoryview], bool]
"""take(data): takes one complete object, wherever it lies. `data` is borrowed for the call. Returns whether it did."""


class Drainer(Protocol):
    """Takes the bytes of objects wherever they lie: in the backend's memory, in a mapped file, in a slot."""

    @property
    def wanted(self) -> bool:
        """Whether the task still needs its objects. Any thread may ask, before it waits for a medium."""

    def __call__(self, i: int, data: memoryview, /) -> bool:
        """Take the complete object of item i. `data` is borrowed for this call. Returns whether it was taken."""


def as_chain(items: Sequence[Item]) -> Sequence[Item]:
    """The items, each with a use and a depth. If they have none, they are one chain, also if they are stored apart."""
    if items and items[0].use is None:
        alone = Use()
        return [Item(item.name, item.nbytes, alone, i) for i, item in enumerate(items)]
    return items


class Outcomes(list[Outcome]):
    """The outcomes of a call whose slots return later than its answer: a storage was too slow, and still uses them.

    returned: done when the caller has its slots back.
    """

    def __init__(self, outcomes: Iterable[Outcome], returned: asyncio.Future[Any]) -> None:
        super().__init__(outcomes)
        self.returned = returned

    @staticmethod
    def after(outcomes: list[Outcome], late: Collection[asyncio.Future[Any]]) -> list[Outcome]:
        """The outcomes of a call whose slots return when all of these have ended."""
        return Outcomes(outcomes, asyncio.ensure_future(asyncio.wait(late))) if late else outcomes


async def with_slots_back(call: Awaitable[list[Outcome]]) -> list[Outcome]:
    """The outcomes of a call, once the caller has its slots back."""
    outcomes = await call
    if isinstance(outcomes, Outcomes):
        await asyncio.wait([outcomes.returned])
    return outcomes


class Index:
    """Answers about a storage's objects without I/O.

    The defaults answer from `indexes`. Without any there is no answer, and callers must use `Storage.exists`.

    indexes: of its places that work now, each with an order of eviction of its own.
    ranges: whether a part of an object can be read for about a part of the cost (`Item.span`).
    lost: why nothing is there now, whatever the indexes say; "" while it works.
    """

    indexes: Sequence[LruIndex] = ()
    ranges = False
    lost = ""

    @property
    def capacity(self) -> int | None:
        """Bytes that may be stored; None without a bound that is known here."""
        return sum([one.capacity for one in self.indexes]) if self.indexes else None

    @property
    def free(self) -> int | None:
        """Bytes that can be stored without evicting any; None if that is not known here."""
        return sum([max(0, one.capacity - one.used) for one in self.indexes]) if self.indexes else None

    @property
    def count(self) -> int | None:
        """Objects stored; None if it is not known here."""
        return sum(map(len, self.indexes)) if self.indexes else None

    def be_level(self, number: int, *, holds: bool) -> None:
        """Note that this is a level of storage. holds: stored objects stay until `release`, for the levels below."""
        for one in self.indexes:
            one.place, one.holds = number, holds
            one.chains.place = None if holds else number

    def expect(self, possible: Callable[[str, int], bool]) -> None:
        """Set the test for plausible objects, by name and length. Call it before `open`, which may find objects."""

    def find(self, names: Sequence[str], use: Use | None) -> list[bool] | None:  # noqa: ARG002 - a default
        """`Storage.exists` for one chain of names, root to leaf. Returns None if the caller must use `exists`.

        use: the use that this look-up belongs to, in backends that evict by use; None if it does not count as a use.
        """
        return None

    def stored(self, names: Sequence[str], use: Use | None) -> list[bool] | None:
        """For each name, whether a task may skip its store. The arguments and None are those of `find`.

        With several levels it differs from `find`: an object that only a slow level has is stored again.
        """
        return self.find(names, use)

    def look(self, names: Sequence[str]) -> Coroutine[Any, Any, list[bool]] | None:  # noqa: ARG002 - a default
        """For each name that `find` reports as stored, whether the medium has it. None if `find` is always right.

        Raises StorageError if the medium cannot be read.
        """
        return None

    def tell_departures(self, left: Callable[[str], None]) -> bool:
        """Call `left(name)`, on the event loop, in the very step in which a load stops finding an object.

        KV events need it. Returns False, as without `indexes`, if the backend cannot notice every departure (a pool
        shared with other nodes evicts on its own). If it returns True, `find` never returns None.
        """
        return self.observe(departures(left))

    def observe(self, noted: Noted) -> bool:
        """Call this for each object that is stored or leaves, on the event loop, in that very step.

        Returns False, as without `indexes`, if the backend cannot notice all of them.
        """
        for one in self.indexes:
            one.watchers.append(noted)
        return bool(self.indexes)

    def trace(self, noted: Callable[[str], Noted], place: str) -> None:
        """`observe` with what `noted(place)` returns. For people. place: the name of the backend or level."""
        self.observe(noted(place))

    def touch(self, items: Sequence[Item]) -> None:
        """Note that these were used, each at its use and depth. Does nothing if it keeps no order."""
        for one in self.indexes:
            for item in items:
                if item.use is not None and (entry := one.get(item.name)) is not None:
                    one.touch_one(entry, item.use, item.depth)

    def hold(self, name: str, why: int = UNSAVED) -> int | None:
        """Do not evict this object until `release` for the same reason (queues.py).

        Returns its length, or None if it is not there, or cannot be held.
        """
        for one in self.indexes:
            if (entry := one.get(name)) is not None:
                one.pin(entry, why)
                return entry.nbytes
        return None

    def release(self, name: str, use: Use, why: int = UNSAVED) -> None:
        """End a hold (by `hold`, or by a store in a level that holds). The object then counts as last used by `use`."""
        for one in self.indexes:
            if (entry := one.get(name)) is not None:
                one.unpin(entry, use, why)

    def owner_of(self, name: str) -> Hashable | None:
        """Who has stored this object; queues.py's `nobody` if it was found and not used since; None if it is absent."""
        for one in self.indexes:
            if (entry := one.get(name)) is not None:
                return entry.owner if entry.touched else nobody(space_of(name))
        return None

    def place_of(self, name: str) -> StoreDirectory | None:  # noqa: ARG002 - a default
        """The directory that has this object in a file which other processes may read; None if there is none."""
        return None

    def hottest_first(self) -> Iterator[tuple[str, int]]:
        """Names and lengths of all objects, the last used first; empty if the backend has no index of them.

        Several places take turns: no order is known between them. An object that is used or removed during the
        iteration may come twice, or not at all.
        """
        for each in itertools.zip_longest(*(one.hottest_first() for one in self.indexes)):
            yield from ((one.name, one.nbytes) for one in each if one is not None)


NO_INDEX = Index()


class PoolNode(abc.ABC):
    """The storage's part in a pool of several nodes."""

    @abc.abstractmethod
    async def make_copies(self, *, leaves: bool) -> CopiesMade:
        """If this node `leaves`, copy the objects that only it has to other nodes. Otherwise make missing copies.

        Raises RequestError, StorageError.
        """

    @abc.abstractmethod
    async def losses(self) -> object:
        """Something else than the last time if objects may have left the pool meanwhile. Raises StorageError."""

    @abc.abstractmethod
    async def report_lost(self, names: Sequence[str]) -> None:
        """Report those that the pool lacks (`Index.tell_departures`), without a lease. Raises StorageError."""

    @abc.abstractmethod
    async def alone(self) -> dict[str, int]:
        """The lengths of objects of the pool that are in this process's memory alone, by name. Raises StorageError."""

    @abc.abstractmethod
    def overwrite(self, name: str) -> None:
        """Have the next store of this object replace what is there: a pool else keeps an object that it has."""

    @abc.abstractmethod
    async def leave(self, within_s: float) -> None:
        """Do the same before the daemon stops, within `within_s` seconds; `flush` and `close` have time after it."""


class Storage(abc.ABC):
    """A storage backend. See the module's contract."""

    backend: str  # its name in the configuration and in reports
    # How many slots a call with `fill` or `drain` uses at a time. 0 if the objects lie in the backend's own memory: it
    # uses none, and a load costs no more than a copy. None if the backend has no threads, and takes only whole slots.
    slots_at_once: int | None = None
    # Whether a load looks up its objects first. False if a look-up costs as much as a load: a round trip.
    asks_first = True
    # How often a load may try one object, if what comes is damaged or does not come: its copies, and ways to a copy.
    tries = 1
    # Whether other nodes load its objects, store some, and may lose them without a word.
    shared = False
    # After how many uses an object is copied up from it to the level of storage above.
    promotes_at = 1
    # Whether it knows all its objects without asking: then it can be the first level, and keep shares for engines.
    lists = False
    # Whether its objects can be checked in the background, and by `transferd verify`.
    scrubs = False
    # Python packages that it needs besides those of every installation.
    packages: tuple[str, ...] = ()
    # The most bytes of a chunk. More than the default if a call has a high fixed cost.
    chunk_bytes = CHUNK_BYTES

    @property
    def index(self) -> Index:
        """Its answers without I/O: itself, if it is an Index."""
        return self if isinstance(self, Index) else NO_INDEX

    @property
    def keeper(self) -> Keeper | None:
        """Purges and pins the objects, and divides the store into shares. None if this backend cannot do that."""
        return None

    @property
    def levels(self) -> Levels | None:
        """The levels that it is made of, or None if it has only one."""
        return None

    @property
    def pool(self) -> PoolNode | None:
        """Its part in a pool: itself, if it is a PoolNode. None if no other node keeps its objects."""
        return self if isinstance(self, PoolNode) else None

    async def only_here(self) -> tuple[int, int]:
        """Objects and bytes that are in this process's memory and nowhere else. Raises StorageError, RequestError."""
        alone = {} if self.pool is None else await self.pool.alone()
        return len(alone), sum(alone.values())

    @classmethod
    def from_config(cls, config: Config, *, clock: Clock) -> Self:
        """The backend that this configuration describes, not yet open. Raises ConfigError.

        A backend of this package overrides this, and keeps only the parts of the configuration that it needs. The
        default, `cls(config, clock=clock)`, is for backends of other packages.
        """
        return cls(config, clock=clock)  # type: ignore[call-arg]

    @classmethod
    def directories(cls, storage: StorageSection) -> list[FileStorageSection]:  # noqa: ARG003 - a default
        """The settings of each directory of this machine that it would keep objects in, one path each."""
        return []

    @classmethod
    def memory_of(cls, config: Config) -> int:  # noqa: ARG003 - a default
        """Bytes of this machine's memory that it would take: for objects, or for a pool of several nodes."""
        return 0

    @classmethod
    def try_out(cls, storage: StorageSection) -> str | None:  # noqa: ARG003 - a default
        """Store, load and remove one small object. Returns the problem, "" if there is none; None if it cannot try.

        Blocking; for `doctor`.
        """
        return None

    @property
    def memory_bytes(self) -> int:
        """Bytes of objects that lie in this process's own memory."""
        return int(self.statistics().get("bytes") or 0) if self.slots_at_once == 0 else 0

    @abc.abstractmethod
    async def open(self) -> None:
        """Connect, create directories, find existing objects. Raises StorageError or ConfigError."""

    def register(self, memory: HostMemory) -> None:
        """Register host memory that buffers will lie in, before the first put or get.

        Zero-copy backends register it with their transport, and raise StorageError if that fails. Otherwise calls on
        this memory would fail later, or silently make a copy.
        """

    async def open_anew(self) -> None:
        """Take in what the medium has now: it may be another one. Does nothing if each call asks the medium anyway."""

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
        """Why no call can succeed now, for people to read; the daemon is then not ready. Otherwise ""."""
        return ""

    @abc.abstractmethod
    def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> Awaitable[list[Outcome]]:
        """Store each object. The outcomes have the order of the items. If this returns a future, the work is done.

        fill: the thread that writes an object calls it just before, to make the object in one of `slots` or in the
        backend's own memory. If None, slots[i] holds the object of item i. Always None if `slots_at_once` is.
        """

    @abc.abstractmethod
    def load(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> Awaitable[list[Outcome]]:
        """Load each object. The outcomes have the order of the items. If this returns a future, the work is done.

        drain: the thread that has an object calls it, to take the object; `slots` are for objects that are not in
        memory. If None, fill slots[i] with the object of item i; unless the outcome is FOUND, its content is undefined.
        Always None if `slots_at_once` is.
        """

    @abc.abstractmethod
    def quarantine(self, name: str) -> Awaitable[object]:
        """Make an object that failed its check unreachable, and keep it for inspection if that is cheap.

        In a backend with an index, the object is unreachable once this returns, and so before its task is answered.
        Awaiting the result waits for the rest.
        """

    async def purge_shared(self, selection: Selection, *, dry_run: bool = False) -> Purged:  # noqa: ARG002 - a default
        """Remove what fits for all nodes, in a backend that others use too. Ignores owners.

        Objects with names of another form than ours stay, unless the selection names them. Returns what was, or would
        be, removed. Raises RequestError (`backend_cannot`), StorageError.
        """
        what = f"the {self.backend} backend shares no objects with other nodes"
        raise RequestError(f"{what}: a purge without `shared` reaches all of them", code="backend_cannot")

    @abc.abstractmethod
    async def close(self) -> None:
        """Release everything. Idempotent. Raises StillRunning, which names the calls that have not ended."""

    def abandon(self) -> list[str]:
        """Release locks, so that a successor can start although this process ends with calls running.

        Frees no memory. Returns the running calls, for the log.
        """
        return []

    @abc.abstractmethod
    def statistics(self) -> dict[str, Any]:
        """At least objects and bytes (None if the backend cannot know them cheaply)."""


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The sum of two reports of storages: numbers and lists are added, and the first text that is not empty stays."""
    total = dict(one)
    for key, value in other.items():
        before = total.get(key)
        if isinstance(value, dict):
            total[key] = added(before or {}, value)
        elif before in (None, ""):
            total[key] = value
        elif value is not None and not isinstance(value, str):
            total[key] = before + value
    return total


class Source(Protocol):
    """Where a rank's objects come from: a Storage, or another daemon. Its methods keep Storage's contracts."""

    slots_at_once: int | None
    asks_first: bool
    tries: int

    @property
    def index(self) -> Index: ...
    @property
    def levels(self) -> Levels | None: ...
    async def exists(self, names: Sequence[str]) -> list[bool]: ...
    def load(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> Awaitable[list[Outcome]]: ...
    def quarantine(self, name: str) -> Awaitable[object]: ...


def slots_for(source: Source, names: Sequence[str]) -> int:
    """How many slots at a time an in-place load of these objects uses."""
    return (source.slots_at_once or 0) if source.levels is None else source.levels.slots_for(names)


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
        self.slots_at_once, self.asks_first, self.tries = behind.slots_at_once, behind.asks_first, behind.tries
        self.shared, self.promotes_at = behind.shared, behind.promotes_at
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
