"""Storage in a directory tree, one file per object, which survives a restart, a kill and other people's mistakes.

indexed.py decides (LRU within `storage.file.capacity`, and which call waits for which), directory.py touches the disk,
and this file joins them with the parts that keep a store useful without an operator:

* journal.py keeps the order of use on the disk, so that a killed daemon's successor evicts the right objects;
* room.py keeps `storage.file.reserve` of the file system free, by eviction. Bytes count as the disk counts them;
* orders.py keeps purges and pins, on the disk itself;
* presence.py notices files that something else has removed;
* home.py says where the store lives. A store whose lock, directory or disk is gone forgets its objects and fails every
  call. It returns with what is there, once its disk is there and no other daemon uses it.

The file system is looked at (`_look`) when objects were stored or a report is made, once a second at most.
So an idle store has no timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import structlog

from transferd.config import Config, FileStorageSection, StorageSection
from transferd.errors import ConfigError, StorageError, StorageUnavailable
from transferd.runtime import heap
from transferd.runtime.aio import Paced, in_turns
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import Self, wait_for
from transferd.runtime.threads import STANDS_BACK, Direction, ThreadPools, Threads, whose
from transferd.storage import file_io
from transferd.storage.base import Drainer, Item, Take
from transferd.storage.batch import Answer, NativeBatch, Read, StoreBatch, Write, run_length
from transferd.storage.directory import ObjectDirectory
from transferd.storage.effects import TURNS
from transferd.storage.file_io import FULL
from transferd.storage.files_keeper import FilesKeeper
from transferd.storage.found import UseOrder
from transferd.storage.indexed import IndexedStorage
from transferd.storage.journal import UseJournal
from transferd.storage.keeping import AT_ONCE
from transferd.storage.ledger import Ledger
from transferd.storage.lru import Entry
from transferd.storage.orders import EVERYTHING, NOBODY, Overdue, PurgeRecord
from transferd.storage.presence import PresenceCheck
from transferd.storage.room import DiskState, bounds, misfit, reserved
from transferd.storage.scrub import Scrub
from transferd.storage.selection import Selection
from transferd.wire.answers import StoreDirectory

T = TypeVar("T")

log = structlog.get_logger(__name__)

# Threads for each direction. A hot page cache needs one or two; a disk needs a queue, while other threads copy.
MIN_THREADS, MAX_THREADS, DIRECT_THREADS = 2, 8, 12
LOOK_S = 1.0  # how often the file system is looked at, at most
NEARLY = 256  # objects: with so few inodes left, the disk has too little room
OLDEST = 8  # how many of the next objects to evict a look checks
JOURNAL_S = 0.005  # how long the journal may be behind
ANEW = "it is being read anew"
ANEW_S = 60.0  # how long a level that is put back is waited for
RETRY_S = 1.0  # how often a store that was lost is tried again
SLICE = 4096  # objects that one step of the event loop adds
LOST = (
    "the store {path} is lost: {problem}. It is opened anew as soon as its disk and directory are there and no other "
    "daemon uses them; until then nothing is stored or loaded"
)


class FileStorage(IndexedStorage):
    """Objects as files under `section.path`, which is one directory (disks.py has several).

    scrub_rate: bytes per second at which stored objects are checked; 0 = off.
    threads: where system calls run. Default: threads of its own, as many as cores, within MIN_THREADS and MAX_THREADS;
        DIRECT_THREADS with direct I/O, whose threads mostly wait.
    unit: sizes count in multiples of it. Default: what the file system allocates at a time.
    """

    backend = "file"
    promotes_at = 2  # the page cache has what was used once
    answers_s = 20.0  # a medium that has not taken an order for so long hangs
    lists = scrubs = True

    def __init__(
        self,
        section: FileStorageSection,
        *,
        scrub_rate: int = 0,
        clock: Clock = SYSTEM_CLOCK,
        threads: Threads | None = None,
        unit: int | None = None,
    ) -> None:
        size = DIRECT_THREADS if section.direct_io else max(MIN_THREADS, min(os.cpu_count() or 1, MAX_THREADS))
        threads = threads or ThreadPools(size, name="transferd-file", native=STANDS_BACK)
        super().__init__(section.capacity, threads, shares=size, now=clock.monotonic)
        self._unit = unit
        self.ranges = file_io.NATIVE and not section.direct_io
        self._near = not section.direct_io  # whether the CPU reads the bytes of a write; else a device does
        self.path = section.paths[0]
        self._clock = clock
        self.section = section
        self._directory = ObjectDirectory(
            Path(self.path), fsync=section.fsync, direct_io=section.direct_io, clock=clock
        )
        lost = self._directory.home.lost
        self._journal = UseJournal(os.path.join(self.path, "order"), syncs=section.fsync, lost=lost)
        self.ledger = Ledger(os.path.join(self.path, "orders"), lost)
        self._writing = asyncio.Lock()  # held while the list of orders is written
        self._asked_to_write = self._written = 0  # how often; and which of these the latest write has served
        self._unmended = ""  # why it may hold what earlier orders have purged, so that the next start empties it again
        self.share(FilesKeeper([self], clock.wall))
        self._index.noted = self._note
        self._index.chains.renumbered = self._journal.note_continued
        self._journaling = Paced(self._write_journal, JOURNAL_S)
        self._disk = DiskState()
        self._looking = Paced(self._look, LOOK_S)
        self.rest_s = 0.0  # how long it is left alone before it is tried, once it is lost
        self._recovering: asyncio.Task[None] | None = None
        self._closing = False
        self._try_now = asyncio.Event()
        self.lost_objects = 0  # that it had whenever it was lost
        self.unread: Sequence[str] = ()
        self.tried: set[str] = set()
        self.emptied: asyncio.Task[int] | None = None  # done once its objects have left: how many there were
        self._possible: Callable[[str, int], bool] = lambda _name, _nbytes: True
        self._presence = PresenceCheck(
            self._directory, self._index, self._threads, self._traffic, self._effects.busy, self._dropped
        )
        self._scrub_rate = scrub_rate
        self._scrub = Scrub(
            self._directory, self._threads, clock.monotonic, self._traffic, self.quarantine, self._walked
        )

    @classmethod
    def from_config(cls, config: Config, *, clock: Clock) -> Self:
        return cls(config.storage.file, scrub_rate=config.storage.scrub_rate, clock=clock)

    @classmethod
    def directories(cls, storage: StorageSection) -> list[FileStorageSection]:
        return list(storage.file.disks)

    def expect(self, possible: Callable[[str, int], bool]) -> None:
        """Set the test for plausible objects. `open` sets other files aside."""
        self._possible = possible

    def wall(self) -> float:
        return self._clock.wall()

    @property
    def keeper(self) -> FilesKeeper:
        return self._files_keeper

    def share(self, keeper: FilesKeeper) -> None:
        """Take orders from this keeper's book. Call it before `open`."""
        self._files_keeper, self._book = keeper, keeper.book
        self.index_keeper.pinned_by = keeper.book.pinned

    async def open(self) -> None:
        """Create and lock the directory and find its objects; evicts down to the capacity in the background.

        Raises ConfigError, naming the path, if it cannot be used or another daemon uses it.
        """
        await self.enter()
        self._book.begin([self.ledger.listed], [True])
        await self.take_up()

    async def enter(self) -> None:
        """Open the directory, or make it, and read its orders. Raises ConfigError, StorageError."""
        self._threads.open()
        await self._in_thread(self._directory.open, "open of the store")
        try:
            await self._in_thread(self.ledger.read, "orders of the store")
        except OSError as error:
            self._directory.close()
            raise self._directory.unusable(error) from error

    async def take_up(self) -> None:
        """Apply the orders, and find the objects. Raises ConfigError, StorageError; then it holds no lock."""
        try:
            await self._find_objects()
        except BaseException:
            self._directory.close()
            raise
        await self._in_thread(heap.trim, "memory of the scan")
        if problem := misfit(self._capacity, self.section.reserve, self._disk, self._index.bytes):
            log.warning("storage.file.capacity does not fit", path=self.path, problem=problem)
        self._scrub.set_rate(self._scrub_rate)

    async def has_objects(self) -> bool:
        return await self._in_thread(
            lambda: next(self._directory.objects(lambda _: None), None) is not None, "look at the store"
        )

    async def _find_objects(self, *, returns: bool = False) -> None:
        """Apply the orders and fill the index. returns: the daemon runs, and may have given orders since."""
        self.index_keeper.close()  # an earlier life's pins: its sizes may have counted in other units
        self._index.unit = self._unit or self._directory.unit
        if point := self._directory.home.mount_point:
            self._book.mounts[self.path] = point
        else:  # it was moved to the file system that was beneath
            self._book.mounts.pop(self.path, None)
        while True:
            orders = await self._take_up(returns=returns)
            if all(order in orders for order in self._book.left_for(self.ledger.listed)):
                return  # in the step of the look: from here on purges reach this store
            await self._effects.end()
            await self._forget_all()

    async def _take_up(self, *, returns: bool) -> list[PurgeRecord]:
        """Returns the purges that were applied, as far as their objects could be removed."""
        began = self._clock.monotonic()
        strange, orders = self._strange(returns=returns), self._book.left_for(self.ledger.listed)
        overdue = Overdue([*orders, EVERYTHING] if strange else orders)
        self.tried = {order.id for order in orders}
        found, pins, stuck = await self._in_thread(lambda: self._find(overdue), "scan of the store")
        await self._adopt(found)
        if strange and overdue.removed:
            log.warning("a store was emptied", path=self.path, objects=overdue.removed, why=strange)
        elif overdue.removed:
            log.info("purged objects were removed", path=self.path, objects=overdue.removed, left=len(stuck))
        for start in range(0, len(pins), SLICE):
            self.index_keeper.pins.restore(pins[start : start + SLICE])
            await asyncio.sleep(0)
        try:
            whole = [] if self.unread else orders  # what was not looked at goes at a later start, with all that fits
            applied = [order.id for order in whole if not stuck or order.fits.names is None]
            if stuck and (strange or applied):
                # These alone go at the next start, and nothing that is stored until then.
                orders.append(self._book.purge(Selection(frozenset(stuck)), NOBODY, None))
            self._unmended = "it was not emptied as a whole" if strange and self.unread else ""
            async with self._writing:
                await self._in_thread(lambda: self._write_orders(applied), "orders of the store")
        except OSError as error:
            if error.errno not in FULL:
                raise self._directory.unusable(error) from error
        await self._look()
        took, index = round(self._clock.monotonic() - began, 3), self._index
        log.info("file storage is open", path=self.path, objects=len(index), bytes=index.bytes, seconds=took)
        return orders

    def _strange(self, *, returns: bool) -> str:
        """Why this store may have missed orders that nobody lists any more; "" if it has not."""
        listed = self.ledger.listed
        assert self._book.epoch is not None
        new = listed.epoch is None and not listed.problem
        if new and not (returns and self._book.has_given):
            return ""  # of an earlier release, or new
        return listed.follows(self._book.epoch)

    def _find(self, overdue: Overdue) -> tuple[UseOrder, list[tuple[str, Hashable, float]], list[str]]:
        """In a thread: what is there, in its order, and its pins; starts the journal with it.

        Also returns the names of objects that should go, and could not be removed.
        """
        found, stuck = self._directory.scan(), list[str]()
        if overdue:
            found, stuck = found.without(overdue.fits, self._directory.remove)
            try:
                self._directory.empty_quarantine(overdue.aside_until)
            except StorageError as error:  # the order is applied at each start until that works
                found.refused.append(str(error))
        order = UseOrder.of(found, self._journal.read())
        self._journal.start(order.records)
        pinned = found.names if self._book.has_pins else []
        return order, [(name, *pin) for name in pinned for pin in self._book.pinned(name)], stuck

    async def _adopt(self, found: UseOrder) -> None:
        self._index.begin_anew()
        self.unread = found.found.refused
        self._stuck.opened(self.unread)
        impossible = []
        for start in range(0, len(found.order), SLICE):
            objects = list(found.adopted(start, start + SLICE))
            good = [one for one in objects if self._possible(one.name, one.nbytes)]
            if len(good) < len(objects):
                impossible += sorted({one.name for one in objects} - {one.name for one in good})
            self._index.adopt(good)
            await asyncio.sleep(0)
        self._index.begin_at(found.last_use)
        if impossible:  # for example after a power failure, which leaves files without their bytes
            log.warning("objects of impossible length were set aside", path=self.path, objects=len(impossible))
            self._put_aside(impossible)
        for queue in self._index.queues():
            if queue.present:  # not at the first start
                self._index.claim(queue.owner, queue.space, queue.share)

    def reconfigure(self, storage: StorageSection) -> None:
        """Apply `storage.scrub_rate`, `storage.file.capacity` and `reserve`. Excess objects are evicted in steps."""
        own = {section.paths[0]: section for section in storage.file.disks}
        # Other paths need a restart, and their capacities are not this one's.
        self.section = own.get(self.path, self.section)
        self._capacity = self.section.capacity
        self._apply_bounds()
        self._looking.soon(at_once=True)
        self._scrub_rate = storage.scrub_rate
        self._scrub.set_rate(storage.scrub_rate)
        self.rest_s = 0.0
        self._try_now.set()

    async def ages(self, entries: Sequence[Entry]) -> list[float]:
        """Objects found at start were last used at their modification time."""
        ages = await super().ages(entries)
        old = [i for i, entry in enumerate(entries) if not entry.touched]
        if old:
            look = functools.partial(self._directory.unused_for, [entries[i].name for i in old])
            seconds = await self._threads.run(Direction.OUT, look, "ages of objects")
            for i, unused_s in zip(old, seconds, strict=True):
                ages[i] = unused_s
        return ages

    async def close(self) -> None:
        self._closing = True  # a store that is lost from here on is not tried again
        await self._scrub.close()
        await self._presence.close()
        await self._looking.close()
        await self._journaling.close()
        if self._recovering is not None and self.emptied is not None:
            await self.emptied
            self._recovering.cancel()
            await asyncio.wait({self._recovering})
        await super().close()

    def abandon(self) -> list[str]:
        self._directory.close()
        return super().abandon()

    def unusable(self) -> str:
        return LOST.format(path=self.path, problem=self.lost) if self.lost else ""

    def look(self, names: Sequence[str]) -> Coroutine[Any, Any, list[bool]]:
        self._check_open()
        return self._presence.look(names)

    def place_of(self, name: str) -> StoreDirectory | None:
        there = self._near and not self.lost and name in self._index
        return self._directory.home.place if there else None

    def statistics(self) -> dict[str, Any]:
        if self._disk.total and not self._closed:
            self._looking.soon()
        disk, section, found = self._disk, self.section, super().statistics()
        row = {key: found[key] for key in ("objects", "bytes", "capacity", "errors")} | {
            "path": self.path,
            "total": disk.total,
            "free": disk.free,
            "reserve": reserved(section.reserve, disk.total, section.capacity),
            "room": int(self._bounds[0]),
            "files": disk.files,
            "files_free": disk.files_free,
            "read_only": disk.read_only,
            "problem": self.unusable(),
            "journal_problem": self._journal.problem,
            **self._stuck.statistics(),
        }
        return found | {"disks": [row], "scrub": self._scrub.statistics()}

    async def _release(self) -> None:
        try:
            await self._in_thread(self._finish, "end of the store")
        finally:
            self._directory.close()

    def _finish(self) -> None:
        self._directory.finish()
        self._journal.flush()

    def _in_thread(self, function: Callable[[], T], what: str) -> Awaitable[T]:
        return self._threads.run(Direction.OUT, function, what)

    # --- orders -------------------------------------------------------------------------------------

    async def record(self, applied: Collection[str] = ()) -> bool:
        """Write the list of orders. A medium that cannot take an order must neither serve nor be written."""
        self._asked_to_write += 1
        writing = self._effects.background(self._record(applied, self._asked_to_write))  # a close waits for it
        for _ in range(TURNS):
            if not writing.done():
                await asyncio.wait([writing], timeout=self.answers_s / TURNS)
        if not writing.done():
            self.fail(f"it has not taken its list of orders for {self.answers_s:g} s")
            return False
        return writing.result()

    async def _record(self, applied: Collection[str], mine: int) -> bool:
        whose.set("orders")  # they do not wait until a purge has removed all its files

        def write() -> None:
            if not self.lost:  # else its list would seem to know orders that it has yet to apply
                self._write_orders(applied)

        async with self._writing:
            if mine <= self._written and not applied:  # with those of others, who came first
                return not self.ledger.behind
            given = self._asked_to_write
            try:
                await self._in_thread(write, "orders of the store")
                self._effects.answered += 1
            except OSError as error:
                if error.errno not in FULL:
                    self.fail(f"its list of orders cannot be written: {error.strerror or error}")
            self._written = given
            return not self.ledger.behind

    def _write_orders(self, applied: Collection[str]) -> None:
        listed = self._book.listed(self.ledger.listed.applied.union(applied))
        listed.problem = self._unmended
        self.ledger.write(listed)

    async def empty_quarantine(self, selection: Selection) -> None:
        until = math.inf if selection.unused_s is None else self._clock.wall() - selection.unused_s
        await self._in_thread(lambda: self._directory.empty_quarantine(until), "purge of the quarantine")

    # --- the order of use ---------------------------------------------------------------------------

    def _note(self, name: str, use: int, depth: int) -> None:
        self._journal.note(name, use, depth)
        self._journaling.soon()

    async def _write_journal(self) -> None:
        await self._in_thread(self._journal.flush, "the order of use")
        if self._journal.grown:
            first = self._index.first_use
            await self._in_thread(lambda: self._journal.rewrite(first), "the order of use, anew")

    # --- the disk -----------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Look at the file system, and act on its state."""
        try:
            disk = await self._in_thread(self._directory.state, "look at the disk")
            self._disk = disk
            if disk.lost:
                self.fail(disk.lost)
            elif not self.lost:
                self._apply_bounds()
                self._stuck.try_again()
                await self._presence.look(self._index.coldest(OLDEST))
        except StorageError as error:
            log.warning("the disk cannot be looked at", path=self.path, problem=str(error))

    def _apply_bounds(self) -> None:
        now = len(self._index)
        nbytes, objects = bounds(self._capacity, self.section.reserve, self._disk, self._index.used, now)
        self._bound_to(nbytes, objects, "shrink" if nbytes == self._capacity and objects >= now else "reserve")

    @property
    def _bound(self) -> str:
        if self._bounds[0] >= self._capacity:
            return super()._bound
        keep = reserved(self.section.reserve, self._disk.total, self._capacity)
        return (
            f"the room on its disk, {max(0, int(self._index.capacity))} bytes: {self._disk.free} are free, and "
            f"storage.file.reserve keeps {keep} of them"
        )

    # --- what others did ----------------------------------------------------------------------------

    def _walked(self) -> None:
        self._presence.missed(0)

    def _dropped(self, gone: int, damaged: Sequence[str]) -> None:
        self._counts["gone"] += gone
        if damaged:
            self._put_aside(damaged)

    def _missed(self) -> None:
        self._presence.missed(1)

    async def _prepare(self) -> None:
        """Look again at a disk that has too little room: other programs may have made some."""
        if self._bounds[0] < self._capacity or self._bounds[1] - len(self._index) < NEARLY:
            await self._effects.ends(self._effects.background(self._look()))
            self._check_open()

    def _wrote(self) -> None:
        self._looking.soon()

    def _suspect(self, error: StorageError | None) -> None:
        if isinstance(error, StorageUnavailable) or (error is not None and error.refusal == "full"):
            self._looking.soon(at_once=True)

    # --- a store that is lost, and returns ----------------------------------------------------------

    def fail(self, problem: str, rest_s: float = 0.0) -> None:
        """Leave the store out of use until it is well. rest_s: for how long it is not tried."""
        if not self.lost and not self._closed:
            self.lost, self.rest_s = problem, rest_s
            self._try_now.clear()
            self._effects.refuse()
            self.emptied = asyncio.ensure_future(self._forget_all())
            self._recovering = asyncio.ensure_future(self._recover(self.emptied))
            self._recovering.add_done_callback(self._recovered)

    async def open_anew(self) -> None:
        """Forget all objects, and read the directory anew. Returns without it if that takes longer than ANEW_S."""
        self.fail(ANEW)
        if self._recovering is not None:
            await asyncio.wait([self._recovering], timeout=ANEW_S)

    async def _recover(self, emptied: asyncio.Task[int]) -> None:
        """Wait until it has no objects and nothing touches the directory, and open it anew; again until that works."""
        before = await emptied
        if self.lost != ANEW:
            self.lost_objects += before
            self._say_lost(before)
        while not await self._traffic.quiet(LOOK_S):
            pass
        await self._effects.end()
        while self.lost and not self._closing:
            with contextlib.suppress(TimeoutError):  # a reload of the configuration ends the rest
                await wait_for(self._try_now.wait(), self.rest_s)
            self._try_now.clear()
            await self._forget_all()  # what was still being stored
            if await self._returns():
                self._returned(before)
            else:
                await self._forget_all()  # what the try has found
            self.rest_s = self.rest_s or RETRY_S

    async def _returns(self) -> bool:
        """Try the store. If it is well, find its objects and return True."""
        home = self._directory.home
        if away := await self._in_thread(home.away, "look for the store"):
            self.lost = away
            return False
        try:
            await self.enter()
            await self._in_thread(self._directory.try_out, "trial of the store")
            if len(self._files_keeper.places) == 1 or self._book.fresh:
                self._book.follow(self.ledger.listed)
                await self._files_keeper.record()  # the other disks follow, too: no start takes two families
            self._book.learn(self.ledger.listed)
            await self._find_objects(returns=True)
        except (ConfigError, StorageError) as error:
            self.lost = str(error)
            return False
        self.lost = ""
        del self._effects.refused
        await self._files_keeper.catch_up()
        self._scrub.set_rate(self._scrub_rate)
        return True

    def _say_lost(self, objects: int) -> None:
        log.error(
            "the store is lost", problem=self.unusable(), objects=objects, action="look at its disk and directory"
        )

    def _returned(self, before: int) -> None:
        self._counts["gone"] += max(0, before - len(self._index))
        self._looking.soon(at_once=True)

    async def _forget_all(self) -> int:
        """Forget all objects, in steps of the loop. Returns how many there were."""
        names = self._index.names()
        async for name in in_turns(names, AT_ONCE):
            self._index.forget(name)
        return len(names)

    def _recovered(self, done: asyncio.Task[None]) -> None:
        self._recovering = None
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("a lost store could not be opened anew (bug)", exc_info=error)

    # --- effects ------------------------------------------------------------------------------------

    def _native_store(self, batch: StoreBatch, writes: Sequence[Write]) -> NativeBatch[Write] | None:
        """Those of one length that take no room, or that of one file which nobody reads."""
        nbytes, reads = writes[0].item.nbytes if file_io.NATIVE else -1, self._traffic.reads.has
        usual = [one for one in writes if one.item.nbytes == nbytes and (not one.victims or one.spare(reads))]
        if not usual:
            return None
        run, chore = run_length(usual, self._shares), self._effects.chore
        return self._directory.storing(usual, batch.fill, batch.slots, run, self._near, chore)

    def _native_load(
        self, drain: Drainer | None, slots: list[memoryview], reads: Sequence[Read]
    ) -> NativeBatch[Read] | None:
        nbytes = reads[0].item.nbytes if reads and file_io.NATIVE else -1
        usual = [read for read in reads if read.entry.nbytes == read.item.nbytes == nbytes]
        return self._directory.loading(usual, drain, slots, run_length(usual, self._shares)) if usual else None

    def _write(self, write: Write, data: memoryview) -> None:
        if self._freed(write):
            self._directory.write(write.item.name, data)

    def _read(self, item: Item, slot: memoryview, take: Take | None) -> Answer:
        return self._directory.read(item.name, slot, take)

    def _remove(self, name: str) -> None:
        self._directory.remove(name, keep=not self._traffic.reads.has(name))

    def _set_aside(self, name: str) -> None:
        self._directory.set_aside(name)
