"""File storage on several disks: one FileStorage each, behind one contract (docs/adr/0130).

An object's name determines its disk (rendezvous hashing, weighted by capacity, among the disks that work).
All ranks of a block have the same disk, so a disk that fails costs whole blocks, and only its own. Every disk has an
index, so a load finds an object wherever it lies: a disk that is added, or a changed capacity, moves no file.

A disk fails when it cannot be opened, is unmounted, cannot take an order, when a call and then a trial write fail, or
when it hangs: calls run, and it answers none of them, nor an order. Calls that none of its threads has begun end then.
Its objects leave the store at once. Objects that it failed to store go to another disk, and the other disks go on. A
failed disk is tried now and then. Once it works, it returns with the objects that it holds and no order has removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, TypeVar

import structlog

from transferd.blocks.keys import encode_text
from transferd.config import Config, StorageSection
from transferd.errors import ConfigError, StorageError, StorageUnavailable
from transferd.runtime.aio import Background, every, uncancelled
from transferd.runtime.clock import Clock
from transferd.runtime.compat import Self
from transferd.storage.base import MISSING, Drainer, Fill, Found, Index, Item, Outcome, Storage, added, as_chain
from transferd.storage.batch import RUN_BYTES
from transferd.storage.effects import TURNS
from transferd.storage.file import FileStorage
from transferd.storage.files_keeper import FilesKeeper
from transferd.storage.home import AWAY
from transferd.storage.keeping import Keeper
from transferd.storage.lent import chosen, chosen_call
from transferd.storage.lru import LruIndex, Use
from transferd.storage.orders import families
from transferd.storage.queues import STORED, Noted
from transferd.storage.running import RunningCalls
from transferd.wire.answers import StoreDirectory

log = structlog.get_logger(__name__)

# How long a failed disk is left alone before it is tried; twice as long after each further failure.
REST_S, MOST_REST_S = 30.0, 3600.0
MIB = 1024**2
LOOK_BYTES = 4096  # that a look at a file reads, at most
MOST_SLOTS = 16  # that a call uses at a time, on all disks together
DEAD = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN, errno.EUCLEAN)
SUSPECT = (
    "storage_io",
    "storage_read_only",
    "storage_gone",
    "storage_unavailable",
)  # codes after which a disk is tried


C = TypeVar("C", Fill, Drainer)
T = TypeVar("T")


class Disk(FileStorage):
    """One disk."""

    _next_rest_s = 0.0  # 0 for REST_S
    _came = 0.0  # when it came back the last time

    @functools.cached_property
    def _drawing(self) -> bytes:
        return hashlib.blake2b(encode_text(self.path)).digest()  # paths may begin alike, and be long

    def has(self, name: str) -> bool:
        return name in self._index

    async def works(self) -> bool:
        """Try to write, to read and to remove a file. If that fails, the disk is lost."""
        try:
            trial = await self.watched(self._in_thread(self._directory.try_out, "trial of a disk"))
            if trial.done():
                trial.result()
        except StorageError as error:
            self.fail(str(error), 0.0 if error.reason == "storage_gone" else self._next_rest_s or REST_S)
        return not self.lost

    async def outcomes(self, call: Awaitable[list[Outcome]], items: Sequence[Item]) -> list[Outcome]:
        """The outcomes of a call about these, also if the disk was lost in the step before it."""
        try:
            return await (await self.watched(call, max(item.nbytes for item in items)))
        except StorageUnavailable as error:
            return [Outcome(Found.FAILED, error)] * len(items)

    async def watched(self, call: Awaitable[T], nbytes: int = 0) -> asyncio.Future[T]:
        """Begin a call about objects of so many bytes, and wait for its end, or until the disk is lost as it hangs.

        It hangs if it answers nothing at all for `answers_s`, and a second for each MiB that its threads may have in
        hand.
        """
        calling, silent = self._files_keeper.works.begin(call), 0
        patience = self.answers_s + self._shares * max(nbytes, RUN_BYTES) / MIB
        while not calling.done() and not self.lost:
            before, both = self._effects.steps, (calling, self._effects.refused)
            await asyncio.wait(both, timeout=patience / TURNS, return_when=asyncio.FIRST_COMPLETED)
            silent = silent + 1 if self._effects.steps == before else 0
            if silent == TURNS and not calling.done():
                self.fail(f"it has not answered for {patience:.0f} s")
        return calling

    async def read_mounts(self) -> dict[str, str]:
        """Read what its list of orders says of mount points, before the disk is opened."""
        self._threads.open()
        with contextlib.suppress(OSError):  # `enter` says so
            await self._in_thread(self.ledger.read, "orders of the store")
        return self.ledger.listed.mounts

    async def enter(self) -> None:
        await self.read_mounts()  # what is there now: its file system may have gone since a try before
        point, home = self._book.mounts.get(self.path), self._directory.home
        if self.ledger.listed.epoch is not None:  # the store itself is there, perhaps with another mount point
            point = None
        try:
            beneath = point is not None and await self._in_thread(lambda: home.is_beneath(point), "look for it")
        except OSError as error:  # a dead mount refuses even the look
            raise self._directory.unusable(error) from error
        if beneath:
            what = f"nothing is mounted at {point}, where its file system was: mount it"
            raise ConfigError("storage.file.path", what, self.path) from OSError(errno.ENODEV, AWAY)
        await super().enter()

    def _say_lost(self, objects: int) -> None:
        what = "a disk of the store has failed: its objects are gone, and the others go on"
        log.error(what, path=self.path, objects=objects, problem=self.lost)

    def _returned(self, before: int) -> None:  # noqa: ARG002 - `Disks` counts them
        now = self._clock.monotonic()
        worked_s, self._came = now - self._came, now
        self._next_rest_s = min(2 * (self._next_rest_s or REST_S), MOST_REST_S) if worked_s < MOST_REST_S else 0.0
        self._looking.soon(at_once=True)
        log.info("a disk of the store is well again", path=self.path)

    def reconfigure(self, storage: StorageSection) -> None:
        self._next_rest_s = 0.0
        super().reconfigure(storage)

    def weight_of(self, block: bytes) -> float:
        """The disk with the largest number stores the block, so each disk gets blocks in proportion to its capacity."""
        drawn = hashlib.blake2b(block, digest_size=8, key=self._drawing).digest()
        return -self.section.capacity / math.log((int.from_bytes(drawn, "big") + 0.5) / 2**64)


class Disks(Storage, Index):
    """See the module. All state is mutated on the event loop only. Owns its disks."""

    backend = "file"
    promotes_at = FileStorage.promotes_at
    lists = scrubs = True
    directories = FileStorage.directories

    def __init__(self, disks: Sequence[Disk]) -> None:
        self._all = list(disks)
        self._keeper = FilesKeeper(disks, disks[0].wall)
        self._book = self._keeper.book
        self.ranges = all(disk.ranges for disk in disks)
        self.slots_at_once = min(MOST_SLOTS, sum(disk.slots_at_once or 1 for disk in disks))
        # one that fails on a disk goes on on another, so a purge of each disk waits for all
        self._stores = RunningCalls()
        self._starting = Background()  # reads of lists of orders, of disks that may hang
        chains = [disk.chains for disk in disks]
        for disk in disks:
            disk.share(self._keeper)
            disk.chains.together, disk.stores = chains, self._stores

    @classmethod
    def from_config(cls, config: Config, *, clock: Clock) -> Self:
        rate = config.storage.scrub_rate
        return cls([Disk(section, scrub_rate=rate, clock=clock) for section in config.storage.file.disks])

    @property
    def _live(self) -> list[Disk]:
        return [disk for disk in self._all if not disk.lost]

    @property
    def indexes(self) -> Sequence[LruIndex]:  # type: ignore[override] # Index has them set once
        return [index for disk in self._live for index in disk.indexes]

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open all disks. Raises ConfigError if none works, or if one is misconfigured or in use."""
        try:
            paths = {disk.path for disk in self._all}
            reading = [self._starting.begin(disk.read_mounts()) for disk in self._all]
            await asyncio.wait(reading, timeout=max(disk.answers_s for disk in self._all))
            for disk, ends in zip(self._all, reading, strict=True):
                if ends.done():
                    self._book.mounts |= {path: at for path, at in ends.result().items() if path in paths}
                else:  # it returns when it answers
                    disk.fail("it does not answer", REST_S)
            problems = [await self._try(disk, disk.enter) for disk in self._live]
            await self._begin(there := self._live)
            problems += [await self._try(disk, disk.take_up) for disk in there]
            if not self._live:
                silent = ConfigError("storage.file.path", "no disk answers", [disk.path for disk in self._all])
                raise next((problem for problem in problems if problem is not None), silent)
        except BaseException:
            for disk in self._all:
                await disk.close()
            raise

    async def _try(self, disk: Disk, step: Callable[[], Awaitable[None]]) -> ConfigError | None:
        """Take a step to open a disk. Returns the error if the disk is dead: the others go on. Raises other errors."""
        try:
            await step()
        except ConfigError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in DEAD:
                raise
            log.error("a disk of the store cannot be opened; the others go on", problem=str(error))
            disk.fail(str(error), REST_S)
            return error
        return None

    async def _begin(self, there: Sequence[Disk]) -> None:
        """Learn the orders of all disks that are there, before any applies them."""
        lists, holding = [disk.ledger.listed for disk in there], [await disk.has_objects() for disk in there]
        strangers = [there[i].path for i in families(lists, holding).values()]
        if len(strangers) > 1:
            what = f"{' and '.join(strangers)} hold objects of different stores"
            how = "give each store a daemon of its own, or remove the objects and the file `orders` of one of them"
            raise ConfigError("storage.file.path", f"{what}: {how}", strangers)
        self._book.begin(lists, holding)

    def expect(self, possible: Callable[[str, int], bool]) -> None:
        for disk in self._all:
            disk.expect(possible)

    def reconfigure(self, storage: StorageSection) -> None:
        for disk in self._all:
            disk.reconfigure(storage)

    async def open_anew(self) -> None:
        await every([disk.open_anew() for disk in self._live])

    async def close(self) -> None:
        await every([disk.close() for disk in self._all])

    def abandon(self) -> list[str]:
        return [call for disk in self._all for call in disk.abandon()]

    @property
    def keeper(self) -> Keeper:
        return self._keeper

    def observe(self, noted: Noted) -> bool:
        def of_all(name: str, what: str, whose: Hashable) -> None:
            if what == STORED or not any(disk.has(name) for disk in self._live):
                noted(name, what, whose)

        for disk in self._all:
            disk.observe(of_all)
        return True

    # --- the contract -------------------------------------------------------------------------------

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return self.find(names, Use())

    def find(self, names: Sequence[str], use: Use | None) -> list[bool]:
        return _any_of([disk.find(names, use) for disk in self._live], names)

    def stored(self, names: Sequence[str], use: Use | None) -> list[bool]:
        return _any_of([disk.stored(names, use) for disk in self._live], names)

    async def look(self, names: Sequence[str]) -> list[bool]:
        found = dict.fromkeys(names, False)
        for disk in self._live:
            found.update(await self._looked_at(disk, [name for name in names if disk.has(name)]))
        return [found[name] for name in names]

    async def _looked_at(self, disk: Disk, names: Sequence[str]) -> dict[str, bool]:
        """What a disk has of these; nothing if it fails. Raises StorageError if it works, and cannot be looked at."""
        for last in (False, True) if names else ():  # it may have been away for a moment
            try:
                looking = await disk.watched(disk.look(names), LOOK_BYTES * len(names))
                return dict(zip(names, looking.result(), strict=True)) if looking.done() else {}
            except StorageError as error:
                if error.reason not in SUSPECT or (await self._still_works(disk) and last):
                    raise
            if disk.lost:
                break
        return {}

    @property
    def capacity(self) -> int:
        return sum(index.capacity for disk in self._all for index in disk.indexes)

    def place_of(self, name: str) -> StoreDirectory | None:
        return next((place for disk in self._live if (place := disk.place_of(name)) is not None), None)

    def unusable(self) -> str:
        return "" if self._live else "every disk of the store has failed"

    async def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        with self._stores.of([item.name for item in items]):
            outcomes = await uncancelled(
                self._spread(as_chain(items), lambda disk, *call: disk.store(*call), fill, slots)
            )
        gone = Outcome(Found.FAILED, StorageUnavailable(f"{self.unusable()}: see the log, and repair them"))
        return [outcomes.get(i, gone) for i in range(len(items))]

    async def load(self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        outcomes = await uncancelled(self._spread(as_chain(items), lambda disk, *call: disk.load(*call), drain, slots))
        return [outcomes.get(i, MISSING) for i in range(len(items))]

    def _places(self, items: Sequence[Item], which: Sequence[int]) -> dict[Disk, list[int]]:
        """For each disk, the items that are there, or would be stored there."""
        live, places = self._live, defaultdict[Disk, list[int]](list)
        for i in which if live else ():
            name = items[i].name
            there = next((disk for disk in live if disk.has(name)), None)
            if there is None:
                block = encode_text(name.rpartition("/")[0] or name)
                there = max(live, key=lambda disk: disk.weight_of(block))
            places[there].append(i)
        return dict(places)

    async def _spread(
        self,
        items: Sequence[Item],
        method: Callable[[Disk, Sequence[Item], C | None, Sequence[memoryview]], Awaitable[list[Outcome]]],
        call: C | None,
        slots: Sequence[memoryview],
    ) -> dict[int, Outcome]:
        """Store or load on each disk, as many at a time as slots allow, and again on other disks if a disk fails.

        Returns outcomes by position; none if no disk works. call: with it, any slot serves any item; otherwise
        slots[i] is that of item i.
        """
        shared = call is not None
        outcomes: dict[int, Outcome] = {}
        todo = list(range(len(items)))
        while todo:
            places = self._places(items, todo)
            disks, todo = list(places), []
            at_once = max(1, min(len(disks), len(slots)) if shared else len(disks))
            for start in range(0, len(disks), at_once):
                some = disks[start : start + at_once]
                own = [slots[k :: len(some)] if shared else chosen(slots, places[one]) for k, one in enumerate(some)]
                works = [
                    disk.outcomes(method(disk, its, chosen_call(call, places[disk]), mine), its)
                    for disk, its, mine in zip(some, [chosen(items, places[disk]) for disk in some], own, strict=True)
                ]
                for disk, answers in zip(some, await every(works), strict=True):
                    outcomes.update(zip(places[disk], answers, strict=True))
                    errors = [(i, answer.error) for i, answer in zip(places[disk], answers, strict=True)]
                    bad = [i for i, error in errors if error is not None and error.reason in SUSPECT]
                    if bad and not await self._still_works(disk):
                        todo += bad
        return outcomes

    def quarantine(self, name: str) -> Awaitable[object]:
        return every([disk.quarantine(name) for disk in self._live if disk.has(name)])

    # --- disks that fail ----------------------------------------------------------------------------

    async def _still_works(self, disk: Disk) -> bool:
        """Try a disk. If it does not work, its objects leave the store."""
        if not disk.lost and await disk.works():
            return True
        if disk.emptied is not None:
            await asyncio.shield(disk.emptied)
        return False

    def statistics(self) -> dict[str, Any]:
        """The sums over all disks, and each disk's own figures."""
        total = functools.reduce(added, [disk.statistics() for disk in self._all])
        for disk, row in zip(self._all, total["disks"], strict=True):
            row |= {"problem": "", "failed": disk.lost, "lost": disk.lost_objects}
        failed = len(self._all) - len(self._live)
        return total | {"disks_failed": failed, "lost": sum(row["lost"] for row in total["disks"])}


def _any_of(each: Sequence[Sequence[bool]], names: Sequence[str]) -> list[bool]:
    """For each name, whether one of these answers about all of them is yes."""
    return [any(found) for found in zip(*each, strict=True)] if each else [False] * len(names)
