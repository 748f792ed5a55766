"""Write: device → a sink, in chunks. The sink of a WriteStorageTask is storage; a peer is another (peer.py).

    until the sink wants no more:  in place: storage's threads make each object, right before they write it
                                   otherwise: lease slots → copy device → slots → seal (formats.py) → store

In place goes what the CPU can address, if the sink has threads (cpu_blocks.py).

While chunk k is being stored, chunk k+1 is gathered: staging has room for two chunks, and k+1 gets its lease as soon as
slots are free. A store that has begun is never aborted. A stopped task no longer waits for it, and the slots are
released when the store has ended. If a level of storage hangs, it leaves its blocks, and they are sent again. What a
task owes to lower levels of storage (a hand-over) is waited for at the end, without slots.

Steps that finish at once cost no asyncio task: taking a free slot, a lookup in memory, a store of few bytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from transferd.errors import StorageError, StorageUnavailable, TransferError
from transferd.storage.admission import SecondUse
from transferd.storage.base import Fill, Found, Item, Outcome, Outcomes, Storage
from transferd.storage.levels.base import Proof
from transferd.tasks import RankOutcome
from transferd.workers.context import RankContext
from transferd.workers.cpu_blocks import BlockFill, CpuBlocks, CpuMemory
from transferd.workers.device_blocks import DeviceBlocks
from transferd.workers.job import Job, Share, require
from transferd.workers.read import CHUNK_BLOCKS, CHUNK_BYTES

CONSUMER = "write"  # of staging
MOST_TRIES = 4  # for a block that a level of storage has left: the next level takes it
IN_PLACE_UNDER_WAY = 2  # chunks at a time that storage's threads make, so that no thread waits for the event loop

_STORED = frozenset({Found.STORED, Found.EXISTS})


class Sink(Protocol):
    """Where the objects of one job on one rank go. slots_at_once: see Storage."""

    slots_at_once: int | None

    async def wanted(self, share: Share, limit: int) -> Sequence[int]:
        """Positions in the task of the blocks to send next, at most `limit`; empty at the end, and after a stop.

        Raises TransferError.
        """
        ...

    def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> Awaitable[list[Outcome]]:
        """Like Storage.store."""
        ...

    def stored(self, share: Share, positions: Sequence[int], nbytes: int) -> None:
        """Note that the blocks at these positions are there. nbytes: that were copied for them."""
        ...


@dataclass(frozen=True, slots=True)
class Promised:
    """Positions of the task that the first level of storage has. nbytes: that were copied for them."""

    positions: Sequence[int]
    nbytes: int
    proofs: asyncio.Future[list[Proof | StorageError]]


class StorageSink:
    """Storage as a sink: it takes the blocks that it does not have. All others count as written at once.

    admission: chooses which of them are stored; if None, all are.
    """

    def __init__(self, storage: Storage, admission: SecondUse | None = None) -> None:
        self.slots_at_once = storage.slots_at_once
        self.store = storage.store
        self._storage = storage
        self._admission = admission
        self.promised: list[Promised] = []
        self._missing: Sequence[int] | None = None
        self._next = 0

    async def wanted(self, share: Share, limit: int) -> Sequence[int]:
        if self._missing is None:
            self._missing = await self._look_up(share)
        start, self._next = self._next, self._next + limit
        return self._missing[start : self._next]

    async def _look_up(self, share: Share) -> Sequence[int]:
        names = share.names
        stored = share.job.by_run(names, self._storage.index.stored)
        if stored is None:  # without an index, `exists` asks the medium itself
            asked = share.context.background.begin(self._storage.exists(names))
            if not await share.answered(asked):
                return ()
            stored = asked.result()
        elif any(stored):  # the index may be wrong about the medium
            stored = await self._looked_at(share, stored)
            if stored is None:
                return ()
        missing: Sequence[int] = [i for i, there in enumerate(stored) if not there]
        if len(missing) < len(stored):
            self.stored(share, [i for i, there in enumerate(stored) if there], 0)
        if self._admission is not None:
            missing = self._admitted(share, self._admission, missing)
        share.step("to store", len(missing))
        return missing

    def stored(self, share: Share, positions: Sequence[int], nbytes: int) -> None:
        """If the task owes the blocks to lower levels of storage, their proof decides, and waits without slots."""
        levels, job = self._storage.levels, share.job
        if levels is None or not positions or not levels.owes(job.use):
            share.done(positions, nbytes)
            return
        objects = [(item.name, item.nbytes, item.depth) for item in share.items(positions)]
        proving = share.context.background.begin(levels.prove(objects, job.use, job.started_at))
        self.promised.append(Promised(positions, nbytes, proving))

    async def proven(self, share: Share) -> None:
        """Wait for all proofs, and account for the blocks."""
        for one in self.promised:
            if not await share.answered(one.proofs):
                one.proofs.cancel()
                continue
            try:
                proofs = one.proofs.result()
            except TransferError as error:
                share.failed(error)
                continue
            good = [i for i, proof in zip(one.positions, proofs, strict=True) if isinstance(proof, Proof)]
            share.done(good, one.nbytes * len(good) // len(proofs))
            for proof in proofs:
                if isinstance(proof, StorageError):
                    share.failed(proof)

    def _admitted(self, share: Share, admission: SecondUse, missing: Sequence[int]) -> Sequence[int]:
        ids, use, space = share.ids(missing), share.job.use, share.context.format.space
        blocks = [(space, share.job.generation, block) for block in ids]
        admitted = [i for i, good in zip(missing, admission.admits(blocks, use), strict=True) if good]
        if refused := len(missing) - len(admitted):
            share.not_admitted += refused
            share.step("not admitted", refused)
        return admitted

    async def _looked_at(self, share: Share, stored: list[bool]) -> list[bool] | None:
        """`stored`, but False for objects that the medium has lost: the answer `ok` promises that all are stored.

        None if the task was stopped before the medium has answered: then nothing is known to be there.
        """
        there = [i for i, found in enumerate(stored) if found]
        look = self._storage.index.look([share.names[i] for i in there])
        if look is None:
            return stored
        asked = share.context.background.begin(look)
        if not await share.answered(asked):
            return None
        held = dict(zip(there, asked.result(), strict=True))
        return [held.get(i, False) for i in range(len(stored))]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Positions of the task that are sent together. stored: done when the chunk's store has ended."""

    positions: Sequence[int]
    stored: asyncio.Future[list[Outcome]]


class _Left:
    """Positions that a level of storage has left, to be sent again."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self._tries: Counter[int] = Counter()

    def add(self, positions: Sequence[int]) -> bool:
        """Note these for another try. Returns False if some have had MOST_TRIES; they are not noted."""
        self._tries.update(positions)
        again = [i for i in positions if self._tries[i] < MOST_TRIES]
        self.positions += again
        return len(again) == len(positions)

    def take(self, limit: int) -> Sequence[int]:
        taken, self.positions = self.positions[:limit], self.positions[limit:]
        return taken


class Writer:
    """Sends the blocks of one rank's tasks to their sinks."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._memory = CpuMemory(context)
        self._chunk_blocks = context.staging.chunk_slots(CONSUMER)
        self._in_place_blocks = max(1, min(CHUNK_BYTES // context.layout.block_bytes, CHUNK_BLOCKS))

    async def store(self, job: Job) -> RankOutcome:
        """Run a WriteStorageTask."""
        share = Share(job, self._context)
        sink = StorageSink(require(self._context.storage), self._context.admission)
        await self.send(share, sink)
        if sink.promised:
            await sink.proven(share)
        return share.outcome()

    async def send(self, share: Share, sink: Sink) -> None:
        """Send the blocks that the sink wants. Returns when the task no longer touches the device or awaits a store."""
        in_flight: list[_Chunk] = []
        left = _Left()
        blocks = self._memory.blocks(share)
        in_place = None if sink.slots_at_once is None else blocks
        limit = self._chunk_blocks if in_place is None else self._in_place_blocks
        try:
            # Storage's threads read device blocks as soon as a store begins. `_by_slots` waits by itself.
            ready = in_place is None or await share.computed()
            while ready and (positions := await self._next(share, sink, limit, in_flight, left)):
                if in_place is None:
                    chunk = await self._by_slots(share, sink, positions, blocks or DeviceBlocks(share))
                else:
                    chunk = await self._in_place(share, sink, positions, in_place)
                if chunk is None:
                    break
                in_flight.append(chunk)
                if chunk.stored.done() and len(positions) == limit:  # at once, and more may follow: others' turn first
                    await asyncio.sleep(0)
                if in_place is not None and len(in_flight) == IN_PLACE_UNDER_WAY:  # leases bound the other way
                    await share.job.stop.race(in_flight[0].stored)
                for chunk in [*in_flight]:
                    if chunk.stored.done():
                        in_flight.remove(chunk)
                        self._take(share, sink, chunk, left)
                if share.error is not None or (blocks is not None and blocks.lost is not None):
                    break
        except TransferError as error:
            share.failed(error)
        finally:
            try:
                await self._wait(share, sink, in_flight, left)
            finally:
                if blocks is not None:
                    await blocks.end()
                    if blocks.lost is not None and share.error is None:
                        share.failed(blocks.lost)

    async def _next(self, share: Share, sink: Sink, limit: int, in_flight: list[_Chunk], left: _Left) -> Sequence[int]:
        """Positions of the blocks to send next: first those that storage has left, then those that the sink wants."""
        if not left.positions:
            if positions := await sink.wanted(share, limit):
                return positions
            # At the end, running stores may still leave blocks to be sent again.
            await self._wait(share, sink, in_flight, left)
        return left.take(limit)

    async def _in_place(self, share: Share, sink: Sink, positions: Sequence[int], blocks: CpuBlocks) -> _Chunk | None:
        """Have the sink's threads make the objects. Returns None if the task was stopped first."""
        needed = sink.slots_at_once or 0  # 0: objects are made in the sink's own memory
        fill = BlockFill(blocks, positions)
        stored = await share.called(
            sink.store, share.items(positions), fill, consumer=CONSUMER, step="put", needed=needed
        )
        return None if stored is None else _Chunk(positions, stored)

    async def _by_slots(
        self, share: Share, sink: Sink, positions: Sequence[int], blocks: CpuBlocks | DeviceBlocks
    ) -> _Chunk | None:
        """Make the objects in slots, and have the sink store them. Returns None if the task was stopped first."""
        lease = await share.lease(CONSUMER, len(positions))
        if lease is None:
            return None
        try:
            if not (await share.computed() and await blocks.gather(positions, lease.slots)):
                lease.release()
                return None
        except BaseException:
            lease.release()
            raise
        share.step("put", len(positions))
        slots = self._context.staging.views(lease.slots)
        return _Chunk(positions, share.begin(sink.store, share.items(positions), None, slots, lease))

    def _take(self, share: Share, sink: Sink, chunk: _Chunk, left: _Left) -> None:
        """Account for a store that has ended."""
        try:
            outcomes = chunk.stored.result()
        except TransferError as error:
            share.failed(error)
            return
        stored = [i for i, outcome in zip(chunk.positions, outcomes, strict=True) if outcome.found in _STORED]
        sink.stored(share, stored, len(stored) * self._context.layout.block_bytes)
        share.step("stored", len(stored))
        for outcome in outcomes:
            if outcome.error is not None:
                share.failed(outcome.error)
        if isinstance(outcomes, Outcomes) and share.stopped is None:  # a level hung; a stopped task sends no more
            both = zip(chunk.positions, outcomes, strict=True)
            if not left.add([i for i, outcome in both if outcome.found is Found.LEFT]):
                share.failed(StorageUnavailable("every level of storage hangs that could take the blocks"))

    async def _wait(self, share: Share, sink: Sink, in_flight: list[_Chunk], left: _Left) -> None:
        while in_flight:
            chunk = in_flight.pop(0)
            if await share.answered(chunk.stored):
                self._take(share, sink, chunk, left)
