"""Storage whose daemon knows every object: an LRU index in memory, effects in threads.

`FileStorage` and `MemoryStorage` differ only in what a write, a read or a removal does. *Decide, then do*: a decision
is one step on the event loop that changes the index. Its effect follows in an I/O thread, and the loop records the
outcome when the effect has ended.

A put decides for each object, in order:

* present with this length: EXISTS, and it counts as used;
* now being written or removed: wait for that, then decide again (so two effects on one name never overlap, and a
  late removal cannot remove a newer object);
* larger than the capacity: StorageFull;
* otherwise reserve room, which names the objects to evict. If running writes hold the room, wait for one of them and
  decide again. If this task or later ones hold it: StorageFull. So a chain that is longer than the store keeps its
  root (lru.py). If running writes of this task are deeper than the objects to evict, wait for them, too, but not for
  one that hangs.

All writes that can start do so together, in several threads. Each write first removes the objects that make
room for it, so the bytes held never exceed the capacity. A write that finds the medium full although the index had room
(other files on the disk, a quota) evicts its own size and tries once more; then it is StorageFull.

A get reads what is present. An object that turns out to be gone is MISSING and leaves the index. An object whose length
differs from the caller's buffer is damaged, because names are content keys and a layout has one object size: it is
MISSING, too, and quarantined, so that the next put can store it again.

Running I/O bounds every wait. A cancelled caller gets its cancellation when its I/O has ended (aio.py).
"""

from __future__ import annotations

import abc
import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from transferd.errors import Closed, StillRunning, StorageError, StorageFull
from transferd.runtime.aio import answered, at_once, uncancelled
from transferd.runtime.threads import Direction, Threads
from transferd.storage.base import EXISTS, FOUND, MISSING, STORED, Blob, Found, InPlace, Lent, Outcome, Place, Storage
from transferd.storage.batch import (
    Answer,
    Damaged,
    PutBatch,
    Read,
    StillStored,
    Wanted,
    Write,
    bare,
    leave_of,
    statistics_of,
    with_object,
)
from transferd.storage.effects import Effects
from transferd.storage.lru import LruIndex, NoRoom, Use, Victim
from transferd.storage.traffic import Traffic


class IndexedStorage(Storage):
    """See the module's docstring. All state is mutated on the event loop only.

    threads: runs the effects; owned, closed by `close`. shares: how many threads work on a batch.
    inline_bytes: batches up to this many bytes run on the loop itself.
    """

    def __init__(self, capacity: int, threads: Threads, *, shares: int, inline_bytes: int = 0) -> None:
        self._index = LruIndex(capacity)
        self._threads = threads
        self._effects = Effects(threads, shares, quick=bool(inline_bytes))
        self._inline_bytes = inline_bytes
        # A subclass with a put, or a get, of its own gets every object there.
        self.collects = shares if type(self).put is IndexedStorage.put else 0
        self.loads_in_place = type(self).get is IndexedStorage.get
        self._counts: Counter[str] = Counter()
        self._traffic = Traffic()
        self._closed = False

    # --- effects, run in threads; raise StorageError ------------------------------------------------

    @abc.abstractmethod
    def _write(self, name: str, data: memoryview, spare: Any) -> None:
        """Store the object, completely or not at all. StorageFull: the medium has no room now.

        spare: what `_retire` returned, in the subclass's own terms. It is used up, even if the write fails, unless this
        raises StillStored.
        """

    def _retire(self, name: str, nbytes: int) -> Any:  # noqa: ARG002 - a default
        """Like `_remove`, but returns a spare that another object of this length can overwrite, or None.

        A subclass may leave the removal to the `_write` that gets the spare, and comes next.
        """
        self._remove(name)
        return None

    @abc.abstractmethod
    def _read(self, name: str, data: memoryview) -> bool:
        """Fill `data`. Returns False if the object is gone. Raises Damaged if its length differs."""

    def _load(self, name: str, block: InPlace) -> bool | Outcome:
        """Have the block load the object; COLD if some bytes are not in memory. Otherwise like `_read`."""
        raise NotImplementedError

    @abc.abstractmethod
    def _remove(self, name: str) -> None:
        """Remove the object, if there is one."""

    def _set_aside(self, name: str) -> None:
        """Make a bad object unreachable; keep it for inspection if that is cheap."""
        self._remove(name)

    # --- the contract -------------------------------------------------------------------------------

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Look the names up in the index. This counts as a use: usually a load follows, or a store is skipped."""
        return await self.look_up(names, Use())

    def look_up(self, names: Sequence[str], use: Use) -> asyncio.Future[list[bool]]:
        """Like `exists`, as part of a use. The future is done: the index is in memory."""
        self._check_open()
        return answered(self._index.find(names, use))

    def put(self, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
        """Copies a small batch at once, and returns a done future, unless it must wait for another effect."""
        batch = PutBatch(blobs, range(len(blobs)), small=self._is_small(blobs))
        if batch.small and not self._closed:
            while batch.todo and (wave := self._decide_all(batch)):
                at_once(self._write_wave(wave, batch))
            if not batch.todo:
                return answered([batch.outcomes[position] for position in range(len(batch.blobs))])
        return self._put(batch)

    def put_lent(self, blocks: Sequence[Lent], at_once: int) -> Awaitable[list[Outcome]]:
        return self._put(PutBatch(blocks, range(len(blocks)), at_once=at_once))

    def get(self, blobs: Sequence[Wanted]) -> Awaitable[list[Outcome]]:
        """Copies a small batch at once, and returns a done future, unless an object is bad."""
        if not self._closed and self._is_small(blobs):
            reads = self._present(blobs)
            outcomes, bad = self._judge(blobs, reads, [self._read_one(read) for read in reads])
            return self._without(bad, outcomes) if bad else answered(outcomes)
        return self._get(blobs)

    def get_in_place(self, places: Sequence[Place], at_once: int | None = None) -> Awaitable[list[Outcome]]:
        return self.get(places) if at_once is None else self._get(places, at_once)

    def quarantine(self, name: str) -> Awaitable[None]:
        """Forget the object at once. The future is done when its bytes have been put aside."""
        self._check_open()
        return asyncio.shield(self._put_aside([name])) if self._index.forget(name) else answered(None)

    def tell_departures(self, left: Callable[[str], None]) -> bool:
        self._index.left = left
        return True

    def holds(self, name: str) -> bool:
        """Whether the index has the object. Does not count as a use."""
        return name in self._index

    def set_capacity(self, nbytes: int) -> None:
        """Change the capacity now; excess objects are evicted in the background. Call on the event loop."""
        leaving = self._index.set_capacity(nbytes)
        self._counts["evicted_shrink"] += len(leaving)
        self._evict_in_background(leaving)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._effects.end()
        try:
            await self._release()
        finally:
            still = self._threads.close()
        if still:
            raise StillRunning(f"{self.backend} storage: {'; '.join(still)}")

    def abandon(self) -> list[str]:
        return self._threads.under_way()

    async def _release(self) -> None:
        """Release what the implementation holds. Called at close, when no effect runs any more."""

    def statistics(self) -> dict[str, Any]:
        return statistics_of(self._index, self._counts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._index!r})"

    # --- put ----------------------------------------------------------------------------------------

    async def _put(self, batch: PutBatch) -> list[Outcome]:
        self._check_open()
        with self._traffic:
            await uncancelled(self._write_all_waves(batch))
        return [batch.outcomes[position] for position in range(len(batch.blobs))]

    async def _write_all_waves(self, batch: PutBatch) -> None:
        while batch.todo:
            wave = self._decide_all(batch)
            if wave:
                await self._write_wave(wave, batch)
            elif batch.waits:
                await batch.wait()

    def _decide_all(self, batch: PutBatch) -> list[Write]:
        """Decide whatever can be decided now. Returns the writes to do; `batch` records everything else."""
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
                self._effects.occupy([decision.blob.name, *(victim.name for victim in decision.victims)], batch.written)
            else:
                later.append(position)
                waits.update(decision)
        batch.todo, batch.waits = later, waits
        return wave

    def _decide(self, position: int, batch: PutBatch) -> Outcome | Write | list[asyncio.Future[None]]:
        """The answer, or a write to do now, or what to wait for before deciding again."""
        blob = batch.blobs[position]
        use, name, nbytes = blob.use or batch.alone, blob.name, blob.data.nbytes
        depth = position if blob.use is None else blob.depth  # blobs that name no use are one chain
        busy = self._effects.busy
        if name in busy:
            return [busy[name]]
        present = self._index.get(name)
        if present is not None and present.nbytes == nbytes:
            # Touch it now, or another object of this batch could evict it.
            self._index.touch_one(present, use, depth)
            return EXISTS
        if present is not None:  # of another length, so no load could ever use it
            self._counts["wrong_length"] += 1
            self._index.forget(name)
            self._put_aside([name])
            return [busy[name]]
        if nbytes > self._index.capacity:
            return self._failed(StorageFull(f"an object of {nbytes} bytes is larger than {self._bound}"))
        victims = self._index.reserve(name, nbytes, use, depth, patient=batch.patient)
        if victims is NoRoom.LATER:
            return list(busy.values())
        if victims is NoRoom.FULL:
            return self._failed(StorageFull(f"no room for {nbytes} bytes: this task and later ones fill {self._bound}"))
        self._counts["evictions"] += len(victims)
        return Write(position, blob, use, depth, victims)

    async def _write_wave(self, wave: list[Write], batch: PutBatch) -> None:
        """Write all, record each outcome, then release their names."""
        done = batch.written
        assert done is not None
        occupied = {name for name, future in self._effects.busy.items() if future is done}
        unsettled = {write.blob.name for write in wave}
        leaving = []
        try:
            await self._write_all(wave, batch)
            full = [write for write in wave if isinstance(write.error, StorageFull) and self._make_room(write)]
            if full:
                again = [victim.name for write in full for victim in write.victims]
                self._effects.occupy(again, done)
                occupied.update(again)
                await self._write_all(full, batch)
            for write in wave:
                unsettled.remove(write.blob.name)
                leaving += self._settle(write)
        finally:
            for name in unsettled:  # only after a bug in an effect
                self._index.release(name)
            self._effects.vacate(occupied, done)
            self._evict_in_background(leaving)
        batch.outcomes.update((write.position, self._stored(write)) for write in wave)

    async def _write_all(self, writes: list[Write], batch: PutBatch) -> None:
        if batch.small:
            for write in writes:
                self._write_one(write)
        else:
            await self._effects.run(Direction.OUT, writes, self._write_one, at_once=batch.at_once)

    def _write_one(self, write: Write) -> None:
        data = write.blob.data
        if isinstance(data, memoryview):
            self._store(write, data)
        else:
            with_object(data, write, self._store)

    def _store(self, write: Write, data: memoryview) -> None:
        """In a thread: remove the victims, then write the object."""
        write.error = None
        last = write.victims[0] if write.victims else None
        try:
            spare = None
            while write.victims:
                name, nbytes = write.victims[-1]
                if len(write.victims) == 1 and nbytes == data.nbytes and not self._traffic.reads(name):
                    spare = self._retire(name, nbytes)
                else:
                    self._remove(name)
                write.victims.pop()
            self._write(write.blob.name, data, spare)
        except StillStored as kept:
            assert last is not None
            write.victims.append(last)
            write.error = bare(kept.error)
        except StorageError as error:
            write.error = bare(error)

    def _make_room(self, write: Write) -> bool:
        """Evict as many bytes as this object has, because the medium is full. False: nothing can be evicted."""
        more = self._index.evict(write.blob.data.nbytes, write.use, write.depth)
        self._counts["evictions"] += len(more)
        self._counts["evicted_medium_full"] += len(more)
        write.victims.extend(more)
        return bool(more)

    def _settle(self, write: Write) -> list[Victim]:
        """On the loop: record in the index how the write ended. Returns what left it, perhaps this very object."""
        leaving = []
        if write.error is None and not write.withdrawn:
            ended = write.depth >= write.use.ends_at
            leaving = self._index.commit(write.blob.name)
            self._counts["evicted_shrink"] += 0 if ended else len(leaving)
            if leaving and write.blob.name in {victim.name for victim in leaving}:
                write.error = StorageFull(f"it was evicted as soon as it was stored: other objects fill {self._bound}")
        else:
            self._index.release(write.blob.name)
        for victim in write.victims:
            self._index.restore(*victim)
            self._counts["evictions"] -= 1
        return leaving

    def _stored(self, write: Write) -> Outcome:
        if write.error is not None:
            return self._failed(write.error)
        if write.withdrawn:
            return MISSING
        self._counts["stored"] += 1
        return STORED

    # --- get ----------------------------------------------------------------------------------------

    def _present(self, blobs: Sequence[Wanted]) -> list[Read]:
        """A Read for each of these objects that is present. They count as used."""
        reads: list[Read] = []
        alone = Use()
        for position, blob in enumerate(blobs):
            entry = self._index.get(blob.name)
            if entry is not None:
                reads.append(Read(position, blob, entry))
                self._index.touch_one(entry, blob.use or alone, position if blob.use is None else blob.depth)
        return reads

    async def _get(self, blobs: Sequence[Wanted], at_once: int | None = None) -> list[Outcome]:
        self._check_open()
        with self._traffic:
            return await uncancelled(self._read_all(blobs, at_once))

    async def _read_all(self, blobs: Sequence[Wanted], at_once: int | None) -> list[Outcome]:
        reads = self._present(blobs)
        with self._traffic.reading([read.blob.name for read in reads]):
            left = leave_of(reads)
            answers = await self._effects.run(Direction.IN, reads, self._read_one, then=left, at_once=at_once)
        outcomes, bad = self._judge(blobs, reads, answers)
        if bad:
            await self._put_aside(bad)
        return outcomes

    async def _without(self, bad: Sequence[str], outcomes: list[Outcome]) -> list[Outcome]:
        with self._traffic:
            await asyncio.shield(self._put_aside(bad))
        return outcomes

    def _judge(
        self, blobs: Sequence[Wanted], reads: Sequence[Read], answers: Sequence[Answer]
    ) -> tuple[list[Outcome], list[str]]:
        """The outcome for each blob, and the names of bad objects, which have just left the index."""
        outcomes = [MISSING] * len(blobs)
        bad = []
        for read, answer in zip(reads, answers, strict=True):
            if answer is True:
                outcomes[read.position] = FOUND
            elif isinstance(answer, Outcome):
                outcomes[read.position] = answer
            elif isinstance(answer, StorageError):
                outcomes[read.position] = self._failed(answer)
            else:
                left = self._index.forget(read.blob.name, read.entry)
                if isinstance(answer, Damaged):
                    self._counts["wrong_length"] += answer.error is None
                    if answer.error is not None:
                        outcomes[read.position] = self._failed(answer.error)
                    if left:
                        bad.append(read.blob.name)
        self._counts["hits"] += outcomes.count(FOUND)
        self._counts["misses"] += outcomes.count(MISSING)
        return outcomes, bad

    def _read_one(self, read: Read) -> Answer:
        """Read one object, in a thread."""
        name, data = read.blob.name, read.blob.data
        try:
            if read.entry.nbytes != data.nbytes:
                return Damaged()
            return self._read(name, data) if isinstance(data, memoryview) else self._load(name, data)
        except StorageError as error:
            return bare(error)
        except Damaged as damaged:
            return Damaged(None if damaged.error is None else bare(damaged.error))

    # --- leaving ------------------------------------------------------------------------------------

    def _put_aside(self, names: Sequence[str]) -> asyncio.Task[None]:
        """Make bad objects, whose names have just left the index, unreachable.

        One that cannot be put aside stays out of the index. The next start finds it, and it fails its check again.
        """
        self._counts["corrupt"] += len(names)
        return self._effects.begin(names, self._set_aside, lambda failed: self._counts.update(errors=len(failed)))

    def _evict_in_background(self, victims: Sequence[Victim]) -> None:
        """Remove objects that have just left the index. One that cannot be removed is still stored, and returns."""
        if not victims:
            return
        self._counts["evictions"] += len(victims)

        def still_stored(failed: Sequence[int]) -> None:
            self._counts["errors"] += len(failed)
            for position in failed:
                self._index.restore(*victims[position])

        self._effects.begin([victim.name for victim in victims], self._remove, still_stored)

    # --- helpers ------------------------------------------------------------------------------------

    def _is_small(self, blobs: Sequence[Wanted]) -> bool:
        """Whether copying these on the loop itself is quicker than having a thread do it."""
        left = self._inline_bytes
        for blob in blobs:
            left -= blob.data.nbytes
            if left < 0:
                return False
        return bool(self._inline_bytes)

    def _failed(self, error: StorageError) -> Outcome:
        self._counts["errors"] += 1
        return Outcome(Found.FAILED, error)

    @property
    def _bound(self) -> str:
        return f"storage.{self.backend}.capacity, {int(self._index.capacity)} bytes"

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.backend} storage is closed")
