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
import functools
import itertools
import mmap
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import Any, TypeVar

import structlog

from transferd.blocks.layout.base import align
from transferd.errors import StorageError, StorageFull, StorageUnavailable
from transferd.runtime.aio import Background, Paced, begun, in_turns, resolve
from transferd.storage.base import NBYTES, Found, Item, Outcome, with_slots_back
from transferd.storage.levels.copying import CopyDown, Copying
from transferd.storage.levels.level import MIB, StoreLevel
from transferd.storage.lru import Use
from transferd.storage.queues import EVICTED, STORED
from transferd.tiers.staging import SLOT_ALIGNMENT

log = structlog.get_logger(__name__)

T = TypeVar("T")

BATCH = 64  # objects of one copy
MOST = 2**17  # names that are remembered for each level; beyond, the oldest are forgotten
LEISURE_S = 1.0  # how long a batch waits for a pause in the traffic while the queue has much room
MUCH = 0.75  # of the queue: more than this is little room
LEISURE = 0.25  # of the queue: less than this is much room
GIVE_WAY_S = 0.02  # how long a batch waits while the queue has little room
TRIES = 3  # refusals that pass, until a task that waits for a copy is told
RETRY_S = 1.0  # until a level that failed is tried again; each further refusal doubles it
LONGEST_RETRY_S = 60.0
JITTER = 0.25  # of a pause, so that the nodes of a fleet do not come back together
HANGS_S = 10.0  # a call of a copy that takes longer hangs; with a second more for each MiB that it stores
MOST_HANGING = 2  # calls that may keep the memory of their copy
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
    """The memory of one copy at a time. levels: where it is registered, until `close`.

    What a call that hangs may still use stays until it ends. The next copy has other memory.
    """

    def __init__(self, levels: Sequence[StoreLevel]) -> None:
        self._levels = levels
        self._memory: CarryMemory | None = None
        self._hanging: dict[asyncio.Future[Any], CarryMemory] = {}  # by the calls that use it

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def hanging_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._hanging.values())

    async def filled(
        self, sizes: Sequence[int], read: Callable[[list[memoryview]], Awaitable[list[Outcome]]], late: Background
    ) -> tuple[list[Outcome], list[memoryview]]:
        """Have objects of these sizes read to slots, which the next call reuses. Returns their outcomes and the slots.

        Raises StorageError, also if the read takes too long; it then goes on in `late`.
        """
        if len(self._hanging) == MOST_HANGING:
            raise StorageUnavailable(f"{MOST_HANGING} earlier reads have not ended: a level hangs")
        slots = self.slots(sizes)
        reading = late.begin(begun(with_slots_back(read(slots))))
        if not reading.done():
            await asyncio.wait([reading], timeout=HANGS_S)
        if not reading.done():
            self._hang(reading, "a read", HANGS_S)
        return reading.result(), slots

    async def stored(self, copy: Coroutine[Any, Any, T], nbytes: int, level: StoreLevel, late: Background) -> T:
        """The result of a copy of so many bytes from the slots to a level. Raises StorageError, as `filled` does.

        Nothing else is stored there until it has ended.
        """
        within_s = HANGS_S + nbytes / MIB
        storing = await level.stores.wait(copy, within_s, measured=False)
        if not storing.done():
            self._hang(late.begin(storing), "a store", within_s)
        return storing.result()

    def _hang(self, call: asyncio.Future[Any], what: str, seconds: float) -> None:
        """Leave the memory to a call that hangs. Raises StorageUnavailable."""
        if self._memory is not None:
            self._hanging[call], self._memory = self._memory, None
            call.add_done_callback(self._ended)
        raise StorageUnavailable(f"a level has not answered {what} for {seconds:.3g} s")

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self._free(self._hanging.pop(call))

    def slots(self, sizes: Sequence[int]) -> list[memoryview]:
        """A slot for each object. Call it when those of the last call are not in use any more. Raises StorageError."""
        steps = [align(nbytes, SLOT_ALIGNMENT) for nbytes in sizes]
        if self._memory is None or self._memory.nbytes < sum(steps):
            self.close()
            memory = CarryMemory(max(CARRY_BYTES, sum(steps)))
            for level in self._levels:
                level.storage.register(memory)
            self._memory = memory
        starts = itertools.accumulate(steps, initial=0)
        return [self._memory.view[at : at + nbytes] for at, nbytes in zip(starts, sizes, strict=False)]

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._free(memory)

    def _free(self, memory: CarryMemory) -> None:
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


class WriteBack:
    """The copies to one level. Used on one loop.

    lacking: objects that the level lacks, of which no copy waits; sweep.py queues them again. sweep: its next run.
    running: the copies that run now, by name.
    """

    sweep: Paced

    def __init__(self, level: StoreLevel, copying: Copying) -> None:
        self.level = level
        self.pending_bytes = 0
        self.answered = 0  # calls to the level
        self.longest_s = 0.0  # that one took in which it took something
        self.carry = Carry(copying.levels)
        self.lacking: OrderedDict[str, None] = OrderedDict()
        self._copying = copying
        self._now = copying.now
        self._queue: OrderedDict[str, CopyDown] = OrderedDict()
        self._urgent: OrderedDict[str, CopyDown] = OrderedDict()
        self.running: dict[str, CopyDown] = {}
        self._coming = 0  # bytes of stores that have room and run now
        self._changed: asyncio.Future[None] | None = None  # what waits for a change of any of these waits for it
        self._task: asyncio.Task[None] | None = None
        self.refusal: StorageError | None = None  # why the level took no copy just now
        self._pace = Pauses(self._now)
        self.closing = False
        self._hurried = 0  # flushes that run

    @property
    def _most(self) -> int:
        """How many bytes may wait: the first level holds them."""
        capacity, most = self._copying.levels[0].index.capacity, int(self.level.section.write_back_bytes)
        return most if capacity is None else min(most, int(capacity) // 2)

    @property
    def has_leisure(self) -> bool:
        """Whether little waits, so that copies may be added that nobody waits for."""
        return not self.closing and self.pending_bytes + self._coming <= LEISURE * self._most

    # --- room ---------------------------------------------------------------------------------------

    async def room(self, nbytes: int, within_s: float) -> bool:
        """Wait until so many bytes may wait to be copied, or for so long. Returns whether they may.

        If so, call `came` when their store has ended. A store that is alone always has room: the first level bounds it.
        """
        if not self.fits(nbytes):
            await self._until(lambda: self.fits(nbytes) or self.refusal is not None or self.closing, within_s)
            if not self.fits(nbytes):
                return False
        self._coming += nbytes
        return True

    def came(self, nbytes: int) -> None:
        """Note the end of a store that had `room`."""
        self._coming -= nbytes
        self.wake()

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for so many bytes now."""
        taken = self.pending_bytes + self._coming
        return not taken or taken + nbytes <= self._most

    # --- the queue ----------------------------------------------------------------------------------

    def offer(
        self,
        name: str,
        use: Use,
        depth: int,
        source: StoreLevel | None = None,
        stored: int | None = None,
        *,
        has_room: bool = False,
    ) -> None:
        """Queue a copy of an object, unless one waits or runs, or the level seems to have the object.

        A level that is away gets it when it is back.
        source: the level above that has it, if that is known. stored: its length, if it has just been stored there.
        has_room: that store has waited for `room`.
        """
        copying, number = self._copying, self.level.number
        urgent = number in copying.urgent(use)
        if (one := copying.unsaved.get(name, {}).get(number)) is not None:
            if stored is not None and one.source is source:  # else perhaps the length of a damaged predecessor
                self.pending_bytes += stored - one.nbytes
                one.nbytes = stored
            if urgent:
                self._hurry(name)
            return
        if self.level.seems_to_have(name):
            return
        if self.level.away:
            self.remember(name)
            return
        if (source := source or copying.first_with(name, number)) is None:
            return
        nbytes = source.index.hold(name)  # also what was stored: the end of an older copy may have let it go
        if nbytes is None and (nbytes := stored) is None:  # it has just left, or that level cannot hold it
            return
        fits = has_room or not self.pending_bytes or self.pending_bytes + nbytes <= self._most
        if self.closing or not fits:
            self.level.lost["queue_full"] += 1
            self.remember(name)
            copying.let_go(source, name, use)
            return
        check = stored is None and not self.level.absent(name)
        one = CopyDown(name, nbytes, source, use, depth, self._now(), check)
        copying.unsaved.setdefault(name, {})[number] = one
        (self._urgent if urgent else self._queue)[name] = one
        self.pending_bytes += nbytes
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def noted(self, name: str, what: str, _: Hashable) -> None:
        """An object has come to, or left, the level, which knows its objects."""
        if what in (STORED, EVICTED) or self._copying.first_with(name, self.level.number) is None:
            return
        purging = self._copying.fences.purging(name)  # perhaps of the copies above, too
        if self.has_leisure and not self.level.out_for_stores and not purging:
            self.offer(name, Use(), 0)
        else:
            self.remember(name)

    def remember(self, name: str) -> None:
        """Note that the level lacks an object, and that no copy waits."""
        self.lacking[name] = None
        if len(self.lacking) > MOST:
            self.lacking.popitem(last=False)
        self.sweep.soon()

    async def withdraw(
        self, why: str, fits: Callable[[CopyDown], bool] = lambda _one: True, error: StorageError | None = None
    ) -> None:
        """Give up copies that fit, if they wait and are not running."""
        for queue in (self._queue, self._urgent):
            async for one in in_turns(list(queue.values())):
                if queue.get(one.name) is one and fits(one):
                    del queue[one.name]
                    self._end(one, why, error)
        self.wake()

    def _hurry(self, name: str) -> None:
        if name in self._queue:
            self._urgent[name] = self._queue.pop(name)

    def end_of(self, name: str) -> asyncio.Future[StorageError | None] | None:
        """The end of the copy of an object, which becomes urgent: None, or why it was given up, or has to wait.

        Returns None if no copy waits or runs. Others wait for the end, too: do not cancel it.
        """
        if (one := self._copying.unsaved.get(name, {}).get(self.level.number)) is None:
            return None
        if one.end is None or one.end.done():
            one.end = asyncio.get_running_loop().create_future()
        self._hurry(name)
        end = one.end
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
        while self._task is not None and not (self.refusal or self.level.out or self.closing):
            await self._change(RETRY_S)
        return self._task is None and not self.closing

    async def copied(self) -> None:
        """Wait for the end of the copy that runs now."""
        before = self.answered
        while self.running and self.answered == before:
            await self._change()

    async def flush(self, within_s: float) -> None:
        """Copy all that waits or is remembered, for at most so long, without giving way.

        Ends at once if nothing can come of it.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s

        def ends() -> bool:
            done = self._task is None and not self.sweep.running
            stands = done or self.takes_nothing is not None or self.level.out
            return bool(stands) or until - loop.time() <= self._pace.left_s

        self._hurried += 1
        try:
            if self.lacking:
                self.sweep.soon(at_once=True)
            await self._until(ends, within_s)
        finally:
            self._hurried -= 1

    async def close(self) -> None:
        """Give up waiting copies. Returns when no copy runs."""
        self.closing = True
        if left := len(self._queue) + len(self._urgent):
            log.warning("objects were not copied to a level", level=self.level.name, objects=left, reason="close")
        await self.withdraw("close")
        if self._task is not None:
            await asyncio.wait([self._task])

    # --- copying ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._queue or self._urgent:
                if self.refusal is not None or self.level.out:
                    if self.closing:
                        return
                    await self._expire()
                    seconds = max(self._pace.left_s, RETRY_S if self.level.out else 0.0)
                    await self._until(lambda: self.closing, seconds)
                traffic = self._copying.traffic
                if not (self.closing or self._hurried or self._urgent or traffic.is_quiet()):
                    await traffic.quiet(LEISURE_S if self.pending_bytes < MUCH * self._most else GIVE_WAY_S)
                batch = self._next()
                if batch:
                    await self._copy_batch(batch)
        finally:
            self._task = None
            self.wake()

    def _next(self) -> list[CopyDown]:
        """The next copies that wait, as many as one call takes, of one source."""
        queue, batch = self._urgent or self._queue, list[CopyDown]()
        room = max(CARRY_BYTES, self.carry.nbytes)
        for one in itertools.islice(queue.values(), self._pace.most):
            room -= align(one.nbytes, SLOT_ALIGNMENT)
            if batch and (room < 0 or one.source is not batch[0].source):
                break
            batch.append(one)
        for one in batch:
            del queue[one.name]
            self.running[one.name] = one
        return batch

    async def _expire(self) -> None:
        """Give up copies that have waited too long for a level that does not answer, or refuses."""
        oldest = self._now() - self.level.section.write_back_max_age
        error = self.refusal or StorageUnavailable(f"the level {self.level.name} does not answer")
        await self.withdraw(_why_lost(error), lambda one: one.since < oldest, error)

    async def _copy_batch(self, batch: list[CopyDown]) -> None:
        before, began = self.level.counts["copied"], self._now()
        try:
            refused = await self._copy(batch)
        except StorageError as error:
            refused = [(one, error) for one in reversed(batch) if one.name in self.running]
        finally:
            self.answered += 1
        if took := self.level.counts["copied"] - before:
            self.longest_s = max(self.longest_s, self._now() - began)
        waits = [(one, error) for one, error in refused if self._waits(one, error)]
        for one, _ in waits:
            del self.running[one.name]
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
        self.wake()

    def _waits(self, one: CopyDown, error: StorageError) -> bool:
        """The level has refused an object: tell the task that waits for it. Returns False if the copy has ended."""
        one.tries += error.refusal == "passing"
        lasts = self._now() - one.since > self.level.section.write_back_max_age
        if error.refusal == "object" or self.closing or lasts:
            self._end(one, "close" if self.closing and error.refusal != "object" else _why_lost(error), error)
            return False
        if error.refusal != "passing" or one.tries >= TRIES:
            self._answer(one, error)
        return True

    async def _copy(self, batch: list[CopyDown]) -> list[tuple[CopyDown, StorageError]]:
        """Read the objects above, and write them here. Returns what the level refuses, the last first.

        Raises StorageError.
        """
        if self.level.stores.hanging:
            raise StorageUnavailable(f"stores to the level {self.level.name} do not end")
        born, source = self._copying.fences.number, batch[0].source
        if names := [one.name for one in batch if one.check]:
            asked = self._now()
            there = self.level.said(names, await self.level.storage.exists(names), asked)
            for name in itertools.compress(names, there):
                self._end(self.running[name], "", None, found=True)
            batch = [one for one in batch if one.name in self.running]
        if not batch:
            return []
        items = [Item(one.name, one.nbytes, PEEK) for one in batch]
        read = functools.partial(source.storage.load, items, None)
        try:
            found, slots = await self.carry.filled(list(map(NBYTES, batch)), read, self._copying.late)
        except StorageError as failed:
            found, slots = [Outcome(Found.FAILED, failed)] * len(batch), [memoryview(b"")] * len(batch)
        rest, items, own = list[CopyDown](), list[Item](), list[memoryview]()
        for one, slot, outcome in zip(batch, slots, found, strict=True):
            if outcome.found is Found.FOUND:
                rest.append(one)
                items.append(Item(one.name, slot.nbytes, one.use, one.depth))
                own.append(slot)
            else:
                self._end(one, "gone", outcome.error if isinstance(outcome.error, StorageError) else None)
        copying = self._copying.copy(items, [source] * len(items), own, self.level, born)
        copies = await self.carry.stored(copying, sum(map(len, own)), self.level, self._copying.late)
        refused: list[tuple[CopyDown, StorageError]] = []
        for one, (_, outcome, why) in zip(reversed(rest), reversed(copies), strict=True):
            if not why and outcome.found not in (Found.STORED, Found.EXISTS):
                error = outcome.error
                refused.append((one, error if isinstance(error, StorageError) else StorageError(outcome.found.value)))
                continue
            self._end(one, why, None)
        return refused

    def _end(self, one: CopyDown, why: str, error: StorageError | None, *, found: bool = False) -> None:
        """End a copy that was made (why is ""), or given up. found: the level has said that it has the object."""
        self.running.pop(one.name, None)
        self.pending_bytes -= one.nbytes
        copies = self._copying.unsaved[one.name]
        del copies[self.level.number]
        if not copies:
            del self._copying.unsaved[one.name]
        if why:
            self.level.lost[why] += 1
            error = error or StorageError(f"{one.name} was not copied to the level {self.level.name}: {why}")
            self.remember(one.name)
        else:
            self.level.counts["copied"] += 1
            if not found:
                self.level.wrote(one.name)
        self._answer(one, error)
        self._copying.let_go(one.source, one.name, one.use)

    def _answer(self, one: CopyDown, error: StorageError | None) -> None:
        """Tell the tasks that wait for a copy: None if it was made."""
        if one.end is not None:
            resolve(one.end, error)

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

    def wake(self) -> None:
        """Note that something has changed for which somebody may wait: of the copies, or a sweep has ended."""
        if self._changed is not None:
            resolve(self._changed, None)


def _why_lost(error: StorageError) -> str:
    """The reason under which a copy is counted that was given up because of this error."""
    return {"silent": "down", "full": "full"}.get(error.refusal, "full" if isinstance(error, StorageFull) else "failed")
