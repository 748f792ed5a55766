"""Storage whose daemon knows every object: an LRU index in memory, effects in threads.

Subclasses say what a write, a read or a removal does. *Decide, then do*: a decision is one step on the event loop that
changes the index. Its effect follows in an I/O thread; the loop notes its outcome.

A store decides for each object, in order:

* present with this length: EXISTS, and it counts as used;
* now being written or removed: wait for that, then decide again, so that effects on one name never overlap;
* larger than the capacity: StorageFull;
* otherwise reserve room, which names the objects to evict. If running writes hold the room, wait for one of them and
  decide again. If this task or later ones hold it: StorageFull. So a chain longer than the store keeps its root
  (lru.py). If running writes of this task are deeper than the objects to evict, also wait for one, unless it hangs.

All writes that can start do so together, in several threads. Each first removes the objects that make room for it, so
the bytes held never exceed the capacity. A victim that cannot be removed is set aside (stuck.py); the next one goes,
and the write is done again. So is, once, a write that finds the medium full although the index had room (other files, a
quota): it evicts its own size; then it is StorageFull.

A load reads what is present. An object that is gone is MISSING and leaves the index. One of another length than the
item's is damaged, because names are content keys and a layout has one object size: it is MISSING, too, and is
quarantined, so that the next store can write it again. Running I/O bounds every wait, also of a cancelled caller.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from transferd.errors import Closed, StillRunning, StorageError, StorageFull, StorageUnavailable
from transferd.runtime.aio import Later, answered, at_once
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.runtime.threads import Direction, Threads, closed
from transferd.storage.base import (
    EXISTS,
    FOUND,
    LEFT,
    MISSING,
    NAME,
    NBYTES,
    STORED,
    Drainer,
    Fill,
    Found,
    Index,
    Item,
    Outcome,
    Storage,
    Take,
    as_chain,
)
from transferd.storage.batch import (
    PATIENCE_S,
    Answer,
    Damaged,
    NativeBatch,
    Read,
    StoreBatch,
    Write,
    bare,
    is_whole,
    runs_of,
    summary_of,
)
from transferd.storage.effects import Effects, Traffic
from transferd.storage.keeping import IndexKeeper, Keeper
from transferd.storage.lru import Entry, LruIndex, NoRoom, Use, Victim
from transferd.storage.queues import DAMAGED, GONE, PURGED
from transferd.storage.running import RunningCalls
from transferd.storage.stuck import FAILING, StuckObjects

NO_SLOT = memoryview(b"")
SHRINK_STEP = 256  # objects that are evicted in one step of the event loop after a bound came down


class IndexedStorage(Index, Storage):
    """See the module's docstring. All state is mutated on the event loop only.

    threads: runs the effects; owned, closed by `close`. shares: the most of them that work on a batch.
    inline_bytes: batches up to so many bytes run on the loop itself, as objects lie in memory; then none needs a slot.
    """

    def __init__(
        self,
        capacity: int,
        threads: Threads,
        *,
        shares: int,
        inline_bytes: int = 0,
        now: Callable[[], float] = SYSTEM_CLOCK.monotonic,
    ) -> None:
        self._now = now
        self._index = LruIndex(capacity, now=now)
        self.indexes = (self._index,)
        self.chains = self._index.chains
        self.index_keeper = IndexKeeper(self._index, self)
        self._capacity = capacity  # the configured one
        self._bounds: tuple[float, float, str] = (capacity, math.inf, "shrink")  # bytes, objects, why they came down
        self._shrinking: asyncio.Task[None] | None = None
        self._threads = threads
        self._shares = shares
        self._effects = Effects(threads, shares, self.unusable, quick=bool(inline_bytes))
        self.removed, self.leaving = self._effects.ended, self._effects.busy.keys()
        self._stuck = StuckObjects(self._index, self._effects, self._remove, now)
        self.drop_bad = self._stuck.remove_bad
        self._inline_bytes = inline_bytes
        self.slots_at_once = 0 if inline_bytes else shares
        self._counts: Counter[str] = Counter()
        self._traffic = Traffic()
        self.stores = RunningCalls()
        self._closed = False
        self._near = True  # whether the thread that writes an object reads the slot for it

    # --- effects, run in threads unless they are quick; raise StorageError --------------------------

    @abc.abstractmethod
    def _write(self, write: Write, data: memoryview) -> None:
        """Store the object, completely or not at all, once its victims are `_freed`. Raises StorageError."""

    @abc.abstractmethod
    def _read(self, item: Item, slot: memoryview, take: Take | None) -> Answer:
        """Fill `slot`; or pass the object to `take`, in `slot` unless it lies in other memory. LEFT if it is not taken.

        slot: of the object's length; empty with `take` if `slots_at_once` is 0. Returns False if the object is gone.
        Raises Damaged if its length differs.
        """

    @abc.abstractmethod
    def _remove(self, name: str) -> None:
        """Remove the object, if there is one."""

    def _set_aside(self, name: str) -> None:
        """Make a bad object unreachable; keep it for inspection if that is cheap."""
        self._remove(name)

    # --- on the event loop --------------------------------------------------------------------------

    def _native_store(self, batch: StoreBatch, writes: Sequence[Write]) -> NativeBatch[Write] | None:  # noqa: ARG002
        """Those of these writes that a native call does, victims included; all others are left to `_write`."""
        return None

    def _native_load(
        self,
        drain: Drainer | None,  # noqa: ARG002 - a default
        slots: list[memoryview],  # noqa: ARG002
        reads: Sequence[Read],  # noqa: ARG002
    ) -> NativeBatch[Read] | None:
        """Those of these reads that a native call does; all others are left to `_read`."""
        return None

    def _suspect(self, error: StorageError | None) -> None:
        """An object could not be stored or loaded, for this reason, or not yet."""

    def _missed(self) -> None:
        """An object that was to be loaded is gone, though nobody here has removed it."""

    async def _prepare(self) -> None:
        """Called before objects are stored."""

    def _wrote(self) -> None:
        """Some writes have ended, with success or not."""

    # --- the contract -------------------------------------------------------------------------------

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Look the names up in the index. This counts as a use: usually a load follows, or a store is skipped."""
        return self.find(names, Use())

    def find(self, names: Sequence[str], use: Use | None) -> list[bool]:
        if use is None:  # not a use: the order of eviction stays
            self._check_open(well=False)
            return [not self.lost and one is not None for one in map(self._index.get, names)]
        self._check_open()
        return self._index.find(names, use)

    def stored(self, names: Sequence[str], use: Use | None) -> list[bool]:
        if self._stuck.refused:
            self._stuck.stored(names)
        return self.find(names, use)

    def _check_open(self, *, well: bool = True) -> None:
        """Raise Closed; or, with `well`, StorageUnavailable while no call can succeed."""
        if self._closed:
            raise Closed(f"{self.backend} storage is closed")
        if well and (problem := self.unusable()):
            raise StorageUnavailable(problem)

    def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> Awaitable[list[Outcome]]:
        """Writes a small batch at once, and returns a done future, unless it must wait for another effect."""
        left, todo = [LEFT] * len(items), range(len(items))
        batch = StoreBatch(as_chain(items), fill, list(slots), left, todo, small=self._is_small(items))
        if batch.small and not self._closed:  # a closed store raises when the result is awaited
            while batch.todo and (wave := self._decide_all(batch)):
                at_once(self._write_wave(wave, batch))
            if not batch.todo:
                return answered(batch.outcomes)
        return Later(functools.partial(self._store_all, batch), now=True)

    def load(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> Awaitable[list[Outcome]]:
        """Reads a small batch at once, and returns a done future, unless an object is bad."""
        free = list(slots)
        if not self._closed and self._is_small(items):
            reads = self._present(items)
            outcomes, bad = self._judge(items, reads, self._read_run(drain, free, reads))
            return self._without(self._put_aside(bad), outcomes) if bad else answered(outcomes)
        return Later(functools.partial(self._load_all, items, drain, free), now=True)

    def quarantine(self, name: str) -> Awaitable[None]:
        """Forget the object at once. The future is done when its bytes have been put aside."""
        self._check_open(well=False)
        return asyncio.shield(self._put_aside([name])) if self._index.forget(name, why=DAMAGED) else answered(None)

    @property
    def keeper(self) -> Keeper:
        return self.index_keeper

    def set_capacity(self, nbytes: int) -> None:
        """Change the capacity now; excess objects are evicted in the background. Call on the event loop."""
        self._capacity = nbytes
        self._bound_to(nbytes)

    def _bound_to(self, nbytes: float, objects: float = math.inf, why: str = "shrink") -> None:
        """Change the bounds. Excess objects are evicted in steps, the first one now. No write waits for a step."""
        self._bounds = nbytes, objects, why
        step = self._shrink()
        if step is not None and self._shrinking is None:
            self._shrinking = asyncio.ensure_future(self._shrink_on(step))

    def _shrink(self) -> asyncio.Future[int] | None:
        nbytes, objects, why = self._bounds
        leaving = self._index.set_bounds(int(nbytes), objects, at_most=SHRINK_STEP)
        self._counts[f"evicted_{why}"] += len(leaving)
        return self._evict_in_background(leaving) if leaving else None

    async def _shrink_on(self, step: asyncio.Future[int] | None) -> None:
        """Take one step after another until the bounds are reached, or no object can be removed."""
        try:
            while step is not None:
                self._stuck.whole = False
                await asyncio.wait({step})
                index = self._index
                reached = (index.capacity, index.most) == self._bounds[:2] and index.used <= index.capacity
                step = None if self._closed or self._stuck.whole or reached else self._shrink()
        finally:
            self._shrinking = None

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.index_keeper.close()
        if self._shrinking is not None:
            await asyncio.wait({self._shrinking})
        await self._effects.end()
        try:
            await self._release()
        finally:
            still = await closed(self._threads)
        if still:
            raise StillRunning(f"{self.backend} storage: {'; '.join(still)}")

    def abandon(self) -> list[str]:
        return self._threads.under_way()

    async def _release(self) -> None:
        """Release what the implementation holds. Called at close, when no effect runs any more."""

    def statistics(self) -> dict[str, Any]:
        return summary_of(self._index, self._counts) | {"capacity": self._capacity} | self.index_keeper.statistics()

    # --- store --------------------------------------------------------------------------------------

    async def _store_all(self, batch: StoreBatch) -> list[Outcome]:
        self._check_open()
        with self.stores.of(list(map(NAME, batch.items))), self._traffic:
            await self._prepare()
            while batch.todo:
                wave = self._decide_all(batch)
                if wave:
                    await self._write_wave(wave, batch)
                elif batch.waits:
                    batch.waits.add(self._effects.refused)
                    await batch.wait()
                    self._check_open()
        return batch.outcomes

    def _decide_all(self, batch: StoreBatch) -> list[Write]:
        """Decide all that can be decided now. Returns the writes to do; `batch` records everything else."""
        wave: list[Write] = []
        waits: set[asyncio.Future[None]] = set()
        later = []
        batch.written = asyncio.get_running_loop().create_future()
        for position in batch.todo:
            decision = self._decide(position, batch)
            if isinstance(decision, Outcome):
                batch.outcomes[position] = decision
            elif isinstance(decision, Write):
                wave.append(decision)
                names = [decision.item.name, *map(NAME, decision.victims)]
                self._effects.occupy(names, batch.written)
            else:
                later.append(position)
                waits.update(decision)
        batch.todo, batch.waits = later, waits
        return wave

    def _decide(self, position: int, batch: StoreBatch) -> Outcome | Write | list[asyncio.Future[None]]:
        """The answer, or a write to do now, or what to wait for before deciding again."""
        item = batch.items[position]
        name, nbytes, use, depth, _ = item
        assert use is not None
        busy = self._effects.busy
        if name in busy:  # two effects on one name must not overlap
            return [busy[name]]
        present = self._index.get(name)
        if present is not None and present.nbytes == nbytes:
            # Touch it now, or another object of this batch could evict it.
            self._stuck.stored([name])
            self._index.touch_one(present, use, depth)
            return EXISTS
        if present is not None:  # of another length, so no load could ever use it
            self._counts["wrong_length"] += 1
            self._index.forget(name, why=DAMAGED)
            self._put_aside([name])
            return [busy[name]]
        victims = self._index.reserve(name, nbytes, use, depth, patient=batch.patient)
        if victims is NoRoom.LATER:  # running effects hold the room
            return list(busy.values())
        if isinstance(victims, NoRoom):
            what = f"an object of {nbytes} bytes is larger than {self._bound}"
            if victims is NoRoom.FULL:
                others = "this task, later ones, pins and other engines' shares"
                what = f"no room for {nbytes} bytes: {others} fill {self._bound}"
            return self._failed(StorageFull(what, refusal="object"))
        self._counts["evictions"] += len(victims)
        return Write(position, item, victims)

    async def _write_wave(self, wave: list[Write], batch: StoreBatch) -> None:
        """Write all, record each outcome, then release their names."""
        done = batch.written
        assert done is not None
        unsettled, leaving = wave[::-1], list[Victim]()
        writes = wave
        try:
            while writes:
                if batch.small:  # on the loop: a thread would cost more than the copy
                    self._write_run(batch, writes)
                else:
                    await self._write_all(batch, writes)
                writes = [write for write in writes if write.error is not None and self._makes_room(write)]
                for write in writes:
                    self._effects.occupy([victim.name for victim in write.victims], done)
            while unsettled:
                write = unsettled.pop()
                leaving += self._settle(write, batch)
        finally:
            for write in unsettled:  # the store is lost, or there is a bug in an effect
                self._index.release(write.item.name)
            self._effects.vacate(done)
            if leaving:
                self._evict_in_background(leaving)
        self._wrote()

    def _makes_room(self, write: Write) -> bool:
        """Evict more for a write if victims stay, or, once, if the medium is full. Returns whether to do it again."""
        write.failing += sum(error.reason == "storage_io" for _, error in write.refused)
        full = isinstance(write.error, StorageFull) and not write.full
        stay = write.refused and write.failing < FAILING and not any(is_whole(error) for _, error in write.refused)
        if not (full or stay):
            return False
        nbytes = sum(victim.nbytes for victim, _ in write.refused) or write.item.nbytes
        self._counts["evictions"] -= self._stuck.keep(write)
        write.victims = self._index.evict(self._index.size(nbytes), write.item.use, write.item.depth)
        self._counts["evictions"] += len(write.victims)
        if full:
            write.full = True
            self._counts["evicted_medium_full"] += len(write.victims)
            self._suspect(write.error)
        return bool(write.victims)

    async def _write_all(self, batch: StoreBatch, writes: Sequence[Write]) -> None:
        """Write these in threads: in a native call what that can, all others one by one, in their order."""
        most = 0 if batch.fill is None else len(batch.slots)
        done = await self._effects.run_native(Direction.OUT, self._native_store(batch, writes), at_once=most)
        for write in writes:
            if write.position in done:
                write.error = None
                write.victims.clear()
        if left := [write for write in writes if write.position not in done]:
            write_run = functools.partial(self._write_run, batch)
            await self._effects.run(Direction.OUT, runs_of(left, self._shares), write_run, at_once=most)

    def _write_run(self, batch: StoreBatch, run: Sequence[Write]) -> None:
        """In a thread, unless the batch is small."""
        for write in run:
            self._write_one(batch, write)

    def _write_one(self, batch: StoreBatch, write: Write) -> None:
        write.error = None
        try:
            if batch.fill is None:
                self._write(write, batch.slots[write.position])
            else:
                self._make(write, batch.fill, batch.slots)
        except StorageError as error:
            write.error = bare(error)

    def _make(self, write: Write, fill: Fill, slots: list[memoryview]) -> None:
        """In a thread: have the object made in a free slot, and write it."""
        slot = slots.pop()
        try:
            data = slot[: write.item.nbytes]
            write.withdrawn = not fill(write.position, data, self._near)
            if not write.withdrawn:
                self._write(write, data)
        finally:
            slots.append(slot)

    def _freed(self, write: Write) -> bool:
        """In a thread: remove the victims. Returns False, and the write has an error, if it has too little room now."""
        while write.victims:
            victim = write.victims.pop()
            try:
                self._remove(victim.name)
            except StorageError as error:
                write.refuse(victim, error)
                if is_whole(error):
                    break
        return write.error is None

    def _settle(self, write: Write, batch: StoreBatch) -> list[Victim]:
        """On the loop: record how the write ended. Returns the objects that left the index, perhaps this one."""
        leaving = list[Victim]()
        if write.error is None and not write.withdrawn:
            assert write.item.use is not None
            ended = write.item.depth >= write.item.use.ends_at(self._index.place)
            leaving = self._index.commit(write.item.name)
            self.index_keeper.stored(write.item.name)
            self._counts["evicted_shrink"] += 0 if ended else len(leaving)
            if leaving and write.item.name in {victim.name for victim in leaving}:
                what = f"it was evicted as soon as it was stored: other objects fill {self._bound}"
                write.error = StorageFull(what, refusal="object")
        else:
            self._index.release(write.item.name)
        if write.victims or write.refused:
            self._counts["evictions"] -= self._stuck.keep(write)
        if write.error is not None:
            batch.outcomes[write.position] = self._failed(write.error)
        elif not write.withdrawn:
            self._counts["stored"] += 1
            batch.outcomes[write.position] = STORED
        return leaving

    # --- load ---------------------------------------------------------------------------------------

    def _present(self, items: Sequence[Item]) -> list[Read]:
        """A Read for each of these objects that is present. They count as used."""
        reads: list[Read] = []
        for position, item in enumerate(as_chain(items)):
            entry = self._index.get(item.name)
            if entry is not None:
                reads.append(Read(position, item, entry))
                if item.use is not None and item.use.counts:
                    self._index.touch_one(entry, item.use, item.depth)
        return reads

    async def _load_all(self, items: Sequence[Item], drain: Drainer | None, slots: list[memoryview]) -> list[Outcome]:
        self._check_open()
        with self._traffic:
            reads = self._present(items)
            with self._traffic.reads.of(frozenset(read.item.name for read in reads)):
                answers = await self._read_all(drain, slots, reads)
            outcomes, bad = self._judge(items, reads, answers)
            if bad:
                await self._effects.ends(self._put_aside(bad))
        return outcomes

    async def _without(self, bad: asyncio.Future[None], outcomes: list[Outcome]) -> list[Outcome]:
        with self._traffic:
            await asyncio.shield(bad)
        return outcomes

    def _judge(
        self, items: Sequence[Item], reads: Sequence[Read], answers: Sequence[Answer]
    ) -> tuple[list[Outcome], list[str]]:
        """The outcome for each item, and the names of bad objects, which have just left the index."""
        outcomes = [MISSING] * len(items)
        bad = []
        for read, answer in zip(reads, answers, strict=True):
            if answer is True:
                outcomes[read.position] = FOUND
            elif isinstance(answer, Outcome):
                outcomes[read.position] = answer
            elif isinstance(answer, StorageError):
                outcomes[read.position] = self._failed(answer)
            else:  # gone or damaged; `left` unless another call has forgotten it meanwhile
                left = self._index.forget(read.item.name, read.entry, DAMAGED if isinstance(answer, Damaged) else GONE)
                if left and not isinstance(answer, Damaged):
                    self._counts["gone"] += 1
                    self._missed()
                if isinstance(answer, Damaged):
                    self._counts["wrong_length"] += answer.error is None
                    if answer.error is not None:
                        outcomes[read.position] = self._failed(answer.error)
                    if left:  # else the name may be a newer object's
                        bad.append(read.item.name)
        if items and items[0].counted:
            self._counts["hits"] += outcomes.count(FOUND)
            self._counts["misses"] += outcomes.count(MISSING)
        return outcomes, bad

    async def _read_all(
        self, drain: Drainer | None, slots: list[memoryview], reads: Sequence[Read]
    ) -> Sequence[Answer]:
        """Read these in threads, as `_write_all` writes. slots: with `drain`, each object needs one."""
        most = 0 if drain is None else len(slots)
        answers = await self._effects.run_native(Direction.IN, self._native_load(drain, slots, reads), at_once=most)
        if left := [read for read in reads if read.position not in answers]:
            read_run = functools.partial(self._read_run, drain, slots)
            runs = await self._effects.run(Direction.IN, runs_of(left, self._shares), read_run, at_once=most)
            answers.update(zip([read.position for read in left], itertools.chain.from_iterable(runs), strict=True))
        return [answers[read.position] for read in reads]

    def _read_run(self, drain: Drainer | None, slots: list[memoryview], run: Sequence[Read]) -> list[Answer]:
        """In a thread, unless the batch is small. slots: with `drain`, those that no thread uses now."""
        return list(map(functools.partial(self._read_one, drain, slots), run))

    def _read_one(self, drain: Drainer | None, slots: list[memoryview], read: Read) -> Answer:
        position, item = read.position, read.item
        try:
            if read.entry.nbytes != item.nbytes:  # names are content keys, so the object cannot be right
                return Damaged()
            if drain is None:
                return self._read(item, slots[position], None)
            if not drain.wanted:
                return LEFT
            slot = slots.pop() if self.slots_at_once else NO_SLOT
            try:
                return self._read(item, slot[: item.nbytes], functools.partial(drain, position))
            finally:
                slots.append(slot)
        except StorageError as error:
            return bare(error)
        except Damaged as damaged:
            return Damaged(None if damaged.error is None else bare(damaged.error))

    # --- leaving ------------------------------------------------------------------------------------

    def _put_aside(self, names: Sequence[str]) -> asyncio.Future[None]:
        """Make bad objects unreachable. Their names have just left the index.

        An object that cannot be put aside stays out of the index. The next start finds it; then its check fails again.
        """
        self._counts["corrupt"] += len(names)
        return self._effects.begin(names, self._set_aside, self._stuck.note)

    def _evict_in_background(self, victims: Sequence[Victim]) -> asyncio.Future[int]:
        """Remove objects that have just left the index. Those that cannot be removed return to it."""
        self._counts["evictions"] += len(victims)
        return self._stuck.remove(victims)

    async def ages(self, entries: Sequence[Entry]) -> list[float]:
        now = self._now()
        return [0.0 if entry.group is None or entry.kept else now - entry.group.at for entry in entries]

    def drop(self, entries: Sequence[Entry]) -> asyncio.Future[int]:
        gone = [Victim(one.name, one.nbytes) for one in entries if self._index.forget(one.name, one, PURGED)]
        unread = self._traffic.reads.without([victim.name for victim in gone])
        return self._stuck.remove(gone, after=unread)

    async def at_end(self) -> Collection[asyncio.Future[None]]:
        stores = set(self.stores.ends)
        await self._effects.ended()
        return (await asyncio.wait(stores, timeout=PATIENCE_S))[1] if stores else ()

    def _is_small(self, items: Sequence[Item]) -> bool:
        """Whether copying these on the loop itself is quicker than having a thread do it."""
        return bool(self._inline_bytes) and sum(map(NBYTES, items)) <= self._inline_bytes

    def _failed(self, error: StorageError) -> Outcome:
        self._counts["errors"] += 1
        self._suspect(error)
        return Outcome(Found.FAILED, error)

    @property
    def _bound(self) -> str:
        return f"storage.{self.backend}.capacity, {int(self._index.capacity)} bytes"
