"""Write-back: copies objects of an upper level to a lower one after their store was answered.

An object is written at store time, root first, never when it is evicted: a store under pressure would otherwise wait
for the lower level, or lose the object. Until it is below, its copy above is held (`LruIndex.holds`), and counts
against `write_back_bytes`. So a burst of stores is answered at the speed of the upper level first, and then at that
of the lower one (`room`).

A copy is given up, and counted by its reason, only if

    queue_full   there was no room until half of the task's time was left, or the level takes nothing now
    failed, full the level will never take this object, or has refused it for `write_back_max_age`
    down         the level did not answer for `write_back_max_age`
    gone         the copy above could not be read, or was removed there
    quarantined, purged   it was found damaged above, or purged
    drained      the level was taken out
    close        the daemon ended

A level that refuses is asked again after growing pauses, with fewer objects at once (`Pauses`); `StorageError.refusal`
says what kind of refusal it is. A task that waits for a copy is told at once, or after `TRIES` refusals that pass; the
copy goes on. What is given up is not forgotten: sweep.py queues it again when the level is well and little waits.

Write-back gives way: before each batch it waits for a pause between loads and stores. It waits for long while its queue
has much room, and only a moment once the queue is three quarters full: from then on it must keep up with the stores.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import mmap
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from transferd.blocks.layout.base import align
from transferd.errors import StorageError, StorageFull, StorageUnavailable, TransferError
from transferd.runtime.aio import resolve
from transferd.storage.base import Found, Item, Outcome, with_slots_back
from transferd.storage.levels.copying import Copying
from transferd.storage.levels.level import StoreLevel
from transferd.storage.lru import Use
from transferd.tiers.staging import SLOT_ALIGNMENT

log = structlog.get_logger(__name__)

BATCH = 64  # objects of one copy
LEISURE_S = 1.0  # how long a batch waits for a pause in the traffic while the queue has much room
MUCH = 0.75  # of the queue: more than this is little room
LEISURE = 0.25  # of the queue: less than this is much room
GIVE_WAY_S = 0.02  # how long a batch waits while the queue has little room
TRIES = 3  # refusals that pass, until a task that waits for a copy is told
RETRY_S = 1.0  # until a level that failed is tried again; each further refusal doubles it
LONGEST_RETRY_S = 60.0
JITTER = 0.25  # of a pause, so that the nodes of a fleet do not come back together
CARRY_BYTES = 32 * 1024**2  # memory through which the objects of one copy travel
PEEK = Use(counts=False)


class CarryMemory:
    """Page-aligned host memory of its own, as staging is; the system gives it when it is first touched."""

    pinned = urgent = False
    rank = 0
    lender = None

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class Carry:
    """The memory of one copy at a time. levels: where it is registered, until `close`."""

    def __init__(self, levels: Sequence[StoreLevel]) -> None:
        self._levels = levels
        self._memory: CarryMemory | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def fitting(self, sizes: Sequence[int]) -> int:
        """How many objects of these sizes one copy takes; at least one."""
        room = max(CARRY_BYTES, self.nbytes)
        for count, nbytes in enumerate(sizes):
            room -= align(nbytes, SLOT_ALIGNMENT)
            if room < 0:
                return max(1, count)
        return len(sizes)

    def slots(self, sizes: Sequence[int]) -> list[memoryview]:
        """A slot for each object. Call it when those of the last call are not in use any more. Raises StorageError."""
        steps = [align(nbytes, SLOT_ALIGNMENT) for nbytes in sizes]
        if self._memory is None or self._memory.nbytes < sum(steps):
            self.close()
            memory = CarryMemory(max(CARRY_BYTES, sum(steps)))
            for level in self._levels:
                level.storage.register(memory)
            self._memory = memory
        starts = [sum(steps[:i]) for i in range(len(steps))]
        return [self._memory.view[at : at + nbytes] for at, nbytes in zip(starts, sizes, strict=True)]

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            for level in self._levels:
                level.storage.unregister(memory)


class Pauses:
    """How a level that refuses is asked again. most: objects at once. now: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.most = BATCH
        self._now = now
        self._pause_s = self._until = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the level may be asked again."""
        return max(0.0, self._until - self._now())

    def refused(self, took: int) -> None:
        """Note that the level has refused some objects, and taken so many."""
        self.most = max(1, self.most // 2)
        self._pause_s = RETRY_S if took else min(LONGEST_RETRY_S, max(RETRY_S, 2 * self._pause_s))
        self._until = self._now() + self._pause_s * random.uniform(1 - JITTER, 1 + JITTER)

    def silent(self) -> None:
        """Note that the level did not answer: its breaker, not a growing pause, says when it is asked again."""
        self._until = self._now() + RETRY_S

    def took(self, count: int) -> None:
        """Note that the level has taken so many objects, and refused none."""
        self.most = min(BATCH, self.most + count)
        self._pause_s = self._until = 0.0


@dataclass(slots=True, eq=False)
class Unsaved:
    """An object that some lower levels do not have yet."""

    name: str
    nbytes: int
    source: StoreLevel  # the level that holds it
    use: Use  # the last one
    depth: int  # in that use
    since: float  # when the copy was queued
    waiting: set[int]  # the numbers of those lower levels
    check: bool = False  # those levels may have it, so look it up first
    tries: Counter[int] = field(default_factory=Counter)  # refusals of the copy, by level
    # for each level, a future of its copy, if a task waits for the copy: None, or why it was given up
    ends: dict[int, asyncio.Future[StorageError | None]] = field(default_factory=dict)


class WriteBack:
    """The copies to one level. Used on one loop.

    settled: called with an object, this level, and why it was given up, or "" when it is copied.
    """

    def __init__(
        self, level: StoreLevel, copying: Copying, settled: Callable[[Unsaved, StoreLevel, str], None]
    ) -> None:
        self.level = level
        self.pending_bytes = 0
        self.answered = 0  # calls to the level
        self.longest_s = 0.0  # that one took in which it took something
        self.carry = Carry(copying.levels)
        self._copying = copying
        self._now = copying.now
        self._settled = settled
        self._queue: OrderedDict[str, Unsaved] = OrderedDict()
        self._urgent: OrderedDict[str, Unsaved] = OrderedDict()
        self._running: dict[str, Unsaved] = {}
        self._coming = 0  # bytes of stores that have room and run now
        self._changed: asyncio.Future[None] | None = None  # what waits for a change of any of these waits for it
        self._task: asyncio.Task[None] | None = None
        self.refusal: StorageError | None = None  # why the level took no copy just now
        self._refused: list[tuple[Unsaved, StorageError]] = []  # of the copy that runs
        self._pace = Pauses(self._now)
        self._closing = False
        self._hurried = 0  # flushes that run

    def __len__(self) -> int:
        return len(self._queue) + len(self._urgent) + len(self._running)

    @property
    def _most(self) -> int:
        """How many bytes may wait: the first level holds them."""
        capacity, most = self._copying.levels[0].index.capacity, int(self.level.section.write_back_bytes)
        return most if capacity is None else min(most, int(capacity) // 2)

    @property
    def has_leisure(self) -> bool:
        """Whether little waits, so that copies may be added that nobody waits for."""
        return not self._closing and self.pending_bytes + self._coming <= LEISURE * self._most

    # --- room ---------------------------------------------------------------------------------------

    async def room(self, nbytes: int, within_s: float) -> bool:
        """Wait until so many bytes may wait to be copied, or for so long. Returns whether they may.

        If so, call `came` when their store has ended. A store that is alone always has room: the first level bounds it.
        """
        if not self.fits(nbytes):
            await self._until(lambda: self.fits(nbytes) or self.refusal is not None or self._closing, within_s)
            if not self.fits(nbytes):
                return False
        self._coming += nbytes
        return True

    def came(self, nbytes: int) -> None:
        """Note the end of a store that had `room`."""
        self._coming -= nbytes
        self._wake()

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for so many bytes now."""
        taken = self.pending_bytes + self._coming
        return not taken or taken + nbytes <= self._most

    # --- the queue ----------------------------------------------------------------------------------

    def add(self, one: Unsaved, *, urgent: bool = False, has_room: bool = False) -> bool:
        """Queue a copy. Returns False if there is no room. has_room: its store has waited for `room`."""
        if one.name in self._queue or one.name in self._urgent or one.name in self._running:
            if urgent and one.name in self._queue:
                self._urgent[one.name] = self._queue.pop(one.name)
            return True
        fits = has_room or not self.pending_bytes or self.pending_bytes + one.nbytes <= self._most
        if self._closing or not fits:
            self.level.lost["queue_full"] += 1
            return False
        (self._urgent if urgent else self._queue)[one.name] = one
        self.pending_bytes += one.nbytes
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return True

    def resized(self, one: Unsaved, nbytes: int) -> None:
        """Note that an object has another length now, which the caller sets next."""
        if one.name in self._queue or one.name in self._urgent or one.name in self._running:
            self.pending_bytes += nbytes - one.nbytes

    def withdraw(self, why: str, fits: Callable[[str], bool] = lambda _name: True) -> None:
        """Give up copies of objects that fit, if they wait and are not running."""
        for queue in (self._queue, self._urgent):
            for name in list(filter(fits, queue)):
                self._end(queue.pop(name), why, None)

    def end_of(self, one: Unsaved) -> asyncio.Future[StorageError | None]:
        """The end of this copy, which becomes urgent: None, or why it was given up, or has to wait."""
        end = one.ends.get(self.level.number)
        if end is None:
            end = one.ends[self.level.number] = asyncio.get_running_loop().create_future()
        self.add(one, urgent=True)
        if (error := self.takes_nothing) is not None and self._pace.left_s:
            self._answer(one, error)
        return end

    @property
    def takes_nothing(self) -> StorageError | None:
        """Why a task need not wait for its copy: the level is silent, full or closed to us. None if it may help."""
        return None if self.refusal is None or self.refusal.refusal == "passing" else self.refusal

    @property
    def refuses(self) -> str:
        """Why the level takes no copies now, though it answers."""
        return "" if self.refusal is None or self.refusal.refusal == "silent" else str(self.refusal)

    async def emptied(self) -> bool:
        """Wait until nothing waits to be copied. Returns False if the level takes nothing now, or this closes."""
        while self._task is not None and not (self.refusal or self.level.out or self._closing):
            await self._change(RETRY_S)
        return self._task is None and not self._closing

    def copies(self, name: str) -> bool:
        """Whether a copy of this object runs now."""
        return name in self._running

    async def copied(self) -> None:
        """Wait for the end of the copy that runs now."""
        before = self.answered
        while self._running and self.answered == before:
            await self._change()

    async def flush(self, within_s: float) -> None:
        """Copy all that waits, for at most so long, without giving way. Ends at once if nothing can come of it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s

        def ends() -> bool:
            stands = self._task is None or self.takes_nothing is not None or self.level.out
            return bool(stands) or until - loop.time() <= self._pace.left_s

        self._hurried += 1
        try:
            await self._until(ends, within_s)
        finally:
            self._hurried -= 1

    async def close(self) -> None:
        """Give up waiting copies. Returns when no copy runs."""
        self._closing = True
        left = [*self._queue.values(), *self._urgent.values()]
        self._queue.clear()
        self._urgent.clear()
        for one in left:
            self._end(one, "close", None)
        if left:
            log.warning("objects were not copied to a level", level=self.level.name, objects=len(left), reason="close")
        self._wake()
        if self._task is not None:
            await asyncio.wait([self._task])

    # --- copying ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._queue or self._urgent:
                if self.refusal is not None or self.level.out:
                    if self._closing:
                        return
                    self._expire()
                    seconds = max(self._pace.left_s, RETRY_S if self.level.out else 0.0)
                    await self._until(lambda: self._closing, seconds)
                if not (self._closing or self._hurried or self._urgent):
                    await self._copying.traffic.quiet(
                        LEISURE_S if self.pending_bytes < MUCH * self._most else GIVE_WAY_S
                    )
                batch = self._next()
                if batch:
                    await self._copy_batch(batch)
        except TransferError as error:
            log.error("write-back ended (bug)", level=self.level.name, problem=str(error))
            raise
        finally:
            self._task = None
            self._wake()

    def _next(self) -> list[Unsaved]:
        queue = self._urgent or self._queue
        first = list(itertools.islice(queue.values(), self._pace.most))
        batch = first[: self.carry.fitting([one.nbytes for one in first])]
        for one in batch:
            del queue[one.name]
            self._running[one.name] = one
        return batch

    def _expire(self) -> None:
        """Give up copies that have waited too long for a level that does not answer, or refuses."""
        oldest = self._now() - self.level.section.write_back_max_age
        error = self.refusal or StorageUnavailable(f"the level {self.level.name} does not answer")
        for queue in (self._queue, self._urgent):
            for one in [one for one in queue.values() if one.since < oldest]:
                del queue[one.name]
                self._end(one, _why_lost(error), error)

    async def _copy_batch(self, batch: list[Unsaved]) -> None:
        self._refused.clear()
        before, began = self.level.counts["copied"], self._now()
        try:
            await self._copy(batch)
        except StorageError as error:
            self._refused += [(one, error) for one in reversed(batch) if one.name in self._running]
        finally:
            self.answered += 1
        if took := self.level.counts["copied"] - before:
            self.longest_s = max(self.longest_s, self._now() - began)
        waits = [(one, error) for one, error in self._refused if self._waits(one, error)]
        for one, _ in waits:
            del self._running[one.name]
            self._queue[one.name] = one
            if not took and len(batch) > 1:  # else others first: perhaps it is only this one
                self._queue.move_to_end(one.name, last=False)
        self._note(waits[0][1] if waits else None, took)

    def _note(self, refusal: StorageError | None, took: int) -> None:
        """Note how the level has answered a copy, of which it took so many objects."""
        self.refusal = refusal
        if refusal is None:
            self._pace.took(took)
        elif refusal.refusal == "silent":
            self._pace.silent()
        else:
            self._pace.refused(took)
        if self._urgent and (error := self.takes_nothing) is not None:
            for one in self._urgent.values():
                self._answer(one, error)
        self._wake()

    def _waits(self, one: Unsaved, error: StorageError) -> bool:
        """The level has refused an object: tell the task that waits for it. Returns False if the copy has ended."""
        number = self.level.number
        one.tries[number] += error.refusal == "passing"
        if error.refusal == "object":
            self._end(one, _why_lost(error), error)
        elif self._closing:
            self._end(one, "close", error)
        elif self._now() - one.since > self.level.section.write_back_max_age:
            self._end(one, _why_lost(error), error)
        else:
            if error.refusal != "passing" or one.tries[number] >= TRIES:
                self._answer(one, error)
            return True
        return False

    async def _copy(self, batch: list[Unsaved]) -> None:
        """Read the objects above, and write them here. Raises StorageError."""
        born, fences = self._copying.fences.number, self._copying.fences
        if asking := [one for one in batch if one.check]:
            asked, names = self._now(), [one.name for one in asking]
            there = self.level.said(names, await self.level.storage.exists(names), asked)
            for one in itertools.compress(asking, there):
                self._end(one, "", None, found=True)
            batch = [one for one in batch if one.name in self._running]
        if not batch:
            return
        slots = self.carry.slots([one.nbytes for one in batch])
        found = await self._read(batch, slots)
        rest = []
        for one, slot, outcome in zip(batch, slots, found, strict=True):
            if outcome.found is not Found.FOUND:
                self._end(one, "gone", outcome.error if isinstance(outcome.error, StorageError) else None)
            elif why := fences.forbids(one.name, born, one.source):
                self._end(one, why, None)
            else:
                rest.append((one, slot))
        if not rest:
            return
        items = [Item(one.name, slot.nbytes, one.use, one.depth) for one, slot in rest]
        sources, own = [one.source for one, _ in rest], [slot for _, slot in rest]
        copies = await self._copying.copy(items, sources, own, self.level, born)
        for (one, _), (item, outcome, why) in zip(reversed(rest), reversed(copies), strict=True):
            if outcome.found not in (Found.STORED, Found.EXISTS):
                error = outcome.error if isinstance(outcome.error, StorageError) else StorageError(outcome.found.value)
                self._refused.append((one, error))
                continue
            if outcome.found is Found.STORED and not why:  # the level above holds it for those below
                assert item.use is not None
                self.level.index.release(one.name, item.use)
            self._end(one, why, None)

    async def _read(self, batch: Sequence[Unsaved], slots: Sequence[memoryview]) -> list[Outcome]:
        outcomes: dict[str, Outcome] = {}
        for source in dict.fromkeys([one.source for one in batch]):
            items = [Item(one.name, one.nbytes, PEEK) for one in batch if one.source is source]
            its = [slot for one, slot in zip(batch, slots, strict=True) if one.source is source]
            try:
                answers: Sequence[Outcome] = await with_slots_back(source.storage.load(items, None, its))
            except StorageError as error:
                answers = [Outcome(Found.FAILED, error)] * len(its)
            outcomes.update(zip([item.name for item in items], answers, strict=True))
        return [outcomes[one.name] for one in batch]

    def _end(self, one: Unsaved, why: str, error: StorageError | None, *, found: bool = False) -> None:
        """End a copy that was made (why is ""), or given up. found: the level has said that it has the object."""
        self._running.pop(one.name, None)
        self.pending_bytes -= one.nbytes
        if why:
            self.level.lost[why] += 1
            error = error or StorageError(f"{one.name} was not copied to the level {self.level.name}: {why}")
        else:
            self.level.counts["copied"] += 1
            if not found:
                self.level.wrote(one.name)
        self._answer(one, error if why else None)
        self._settled(one, self.level, why)
        self._wake()

    def _answer(self, one: Unsaved, error: StorageError | None) -> None:
        """Tell the tasks that wait for a copy: None if it was made."""
        if (end := one.ends.pop(self.level.number, None)) is not None:
            resolve(end, error)

    async def _until(self, ends: Callable[[], bool], within_s: float) -> None:
        """Wait until this is so, at most for so long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while not ends() and (left := until - loop.time()) > 0:
            await self._change(left)

    async def _change(self, within_s: float | None = None) -> None:
        """Wait until a copy or a store has ended, the level has answered, or this closes; at most for so long."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._changed], timeout=within_s)

    def _wake(self) -> None:
        if self._changed is not None:
            resolve(self._changed, None)


def _why_lost(error: StorageError) -> str:
    """The reason under which a copy is counted that was given up because of this error."""
    return {"silent": "down", "full": "full"}.get(error.refusal, "full" if isinstance(error, StorageFull) else "failed")
