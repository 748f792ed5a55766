"""Read: a source → staging → device, for the leading blocks that the source has, or for all that it has (sparse).

The source of a ReadStorageTask is storage; a peer is another source (peer.py). If the CPU can address the blocks,
objects that storage has in memory are loaded in place first (in_place.py). All others go through staging:

    stored ─ which blocks does the source have?
    for each chunk:  fetch (lease slots, get, verify)  →  copy slots → device

For such blocks, one pass over memory copies a fetched chunk and verifies it, if the extension is there.

A few chunks are in flight at a time: while chunk k is copied to the device, chunk k+1 is being
fetched. Tasks share fetches (flights.py). A bad object is a miss: it is quarantined and counted, and no task reports
its block as loaded. It ends the prefix; a sparse read continues after it.

A sparse read also continues after an object that storage failed to read. It ends after a whole chunk failed, because
storage or the device is then in trouble, and each further chunk would wait for the same error.

When the task is stopped, it ends after the running copy. Fetches that have begun run to their end and
touch only staging.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import Protocol

from transferd.blocks.footer import FOOTER_BYTES, Damage
from transferd.errors import TransferError
from transferd.runtime.aio import answered, at_once, every
from transferd.runtime.threads import Direction
from transferd.storage.base import MISSING, Blob, Found, Outcome, Storage
from transferd.storage.lru import Use
from transferd.tasks import RankOutcome, ReadStorageTask
from transferd.workers.block_memory import AddressableBlocks
from transferd.workers.context import Account, RankContext, require
from transferd.workers.flights import Flights, SharedFetch
from transferd.workers.in_place import CONSUMER, InPlaceReader
from transferd.workers.job import Job

CHUNKS_UNDER_WAY = 3  # one being copied, one being verified, one being fetched; slots bound them, too


class Source(Protocol):
    """Where one rank's objects come from.

    flights: running fetches from this source, shared by tasks that need the same object.
    corrupt: the number of its objects that failed their check.
    storage: set if blocks can load its objects in place.
    """

    flights: Flights
    corrupt: int
    storage: Storage | None

    def stored(self, names: Sequence[str], use: Use) -> Awaitable[Sequence[bool]]:
        """For each name, whether the source has the object. Counts as part of `use`. Raises TransferError."""
        ...

    def get(self, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
        """Like Storage.get."""
        ...

    def quarantine(self, name: str) -> Awaitable[None]:
        """Like Storage.quarantine."""
        ...


class StorageSource:
    """Storage as a source, shared by all tasks of a rank."""

    def __init__(self, storage: Storage | None) -> None:
        """storage: None without a backend; admission then rejects all reads."""
        self.flights = Flights()
        self.corrupt = 0
        self.storage = storage if storage is not None and storage.loads_in_place else None
        self._storage = storage

    def stored(self, names: Sequence[str], use: Use) -> Awaitable[Sequence[bool]]:
        return require(self._storage).look_up(names, use)

    def get(self, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
        return require(self._storage).get(blobs)

    def quarantine(self, name: str) -> Awaitable[None]:
        return require(self._storage).quarantine(name)


def leading(stored: Sequence[bool]) -> int:
    """The number of leading items that are True."""
    return next((i for i, there in enumerate(stored) if not there), len(stored))


class Reader:
    """Moves the blocks of one rank's tasks from their source to the device.

    missed: the number of blocks that tasks did not find. A read that ends at a missing block counts all that follow.
    """

    consumer = CONSUMER

    def __init__(self, context: RankContext, source: Source) -> None:
        self.source = source
        self._context = context
        self._chunk_blocks = context.staging.chunk_slots(self.consumer)
        self._blocks = AddressableBlocks(context)
        self._in_place: InPlaceReader | None = None
        if source.storage is not None:
            self._in_place = InPlaceReader(context, source.storage, self._blocks, source.flights, self._bad)
        self.missed = 0

    async def load(self, job: Job) -> RankOutcome:
        """Run a ReadStorageTask."""
        account = Account(job, self._context)
        under_way: deque[asyncio.Task[bool]] = deque()
        useful, first = True, None
        try:
            names = self._context.names(job)
            # A device that is attached later decides whether the CPU can address its blocks.
            in_place = self._in_place if self._context.device.addressable else None
            if in_place is not None and in_place.bounces:
                in_place = in_place if in_place.possible else None
            elif in_place is not None and job.blocks == 1 and job.stop.reason is None and not job.task.after:
                first = in_place.load_at_once(account, names)
                if first is None:
                    return account.outcome()
            if in_place is None or len(names) > 1:
                found = await self._found(account, names)
            else:  # a single load costs no more than a lookup
                found = range(1)
            if found and in_place is not None:
                found = await in_place.load(account, names, found, first)
            if 0 < len(found) <= self._chunk_blocks:  # with a single chunk there is nothing to overlap
                await self._load(account, [names[i] for i in found], found)
                return account.outcome()
            for start in range(0, len(found), self._chunk_blocks):
                positions = found[start : start + self._chunk_blocks]
                loading = self._load(account, [names[i] for i in positions], positions)
                under_way.append(self._context.background.spawn(loading))
                if len(under_way) == CHUNKS_UNDER_WAY:
                    useful = await under_way.popleft()
                if not useful or account.stopped is not None:
                    break
        except TransferError as error:
            account.failed(error)
        finally:
            # After a stop, a chunk ends within one copy; until then its device blocks are in use.
            if under_way:
                await every(under_way)
        return account.outcome()

    async def _found(self, account: Account, names: Sequence[str]) -> Sequence[int]:
        """Look up all objects of the task. Returns the positions of those to load, ascending."""
        context, job = self._context, account.job
        task = job.task
        assert isinstance(task, ReadStorageTask)
        before = context.clock.monotonic()
        asked = context.background.begin(self.source.stored(names, job.use))
        answered = asked.done() or await job.stop.race(asked)
        account.storage_s += context.clock.monotonic() - before
        if not answered:
            return ()
        stored = asked.result()
        prefix = leading(stored)
        found: Sequence[int] = range(prefix)
        if not task.prefix and prefix < len(stored):
            found = [i for i, there in enumerate(stored) if there]
        self.missed += task.blocks - len(found)
        context.recorder.step(task.task_id, "found", context.rank, len(found))
        return found

    async def _load(self, account: Account, names: Sequence[str], positions: Sequence[int]) -> bool:
        """Load one chunk, joining fetches that are already in flight. True: continue with the next chunk."""
        job, flights = account.job, self.source.flights
        parts, lead = flights.board(names)
        shared = len(names) - (0 if lead is None else len(lead.names))
        if shared:
            self._context.recorder.step(job.task.task_id, "shares fetch", self._context.rank, shared)
        if lead is not None:
            place_of = dict(zip(names, positions, strict=True))
            places = [place_of[name] for name in lead.names]
            lead.fetch = self._begin_fetch(lead, job, places)
            if not lead.fetch.done():
                lead.fetch.add_done_callback(lambda _: flights.fetched(lead))
        arrivals = [self._consume(account, batch, names, positions, mine) for batch, mine in parts]
        if len(arrivals) == 1:
            return await arrivals[0]
        return all(await every(arrivals))

    async def _consume(
        self, account: Account, batch: SharedFetch, names: Sequence[str], positions: Sequence[int], mine: list[int]
    ) -> bool:
        """Copy this task's share of a batch to the device once it is fetched. True: continue with what follows."""
        assert batch.fetch is not None
        clock, task = self._context.clock, account.job.task
        assert isinstance(task, ReadStorageTask)
        try:
            before = clock.monotonic()
            fetched = await account.job.stop.race(batch.fetch)
            account.storage_s += clock.monotonic() - before
            if not fetched or account.stopped is not None:
                return False
            outcomes = [batch.outcome(names[i]) for i in mine]
            good = [i for i, outcome in zip(mine, outcomes, strict=True) if outcome.found is Found.FOUND]
            if good:
                good = await self._scatter(account, batch, names, positions, good)
            for outcome in outcomes:
                if outcome.error is not None:
                    account.failed(outcome.error)
            return len(good) == len(mine) or not task.prefix
        except TransferError as error:
            account.failed(error)
            return False
        finally:
            self.source.flights.leave(batch)

    async def _scatter(
        self, account: Account, batch: SharedFetch, names: Sequence[str], positions: Sequence[int], good: list[int]
    ) -> list[int]:
        """Copy the objects at `good` to the device. Returns those that arrived; none if the task was stopped first."""
        context, job = self._context, account.job
        task = job.task
        assert isinstance(task, ReadStorageTask)
        if task.after and not await context.computed(job):
            return []
        slots = [batch.slot(names[i]) for i in good]
        blocks = [task.gpu_block_ids[positions[i]] for i in good]
        context.recorder.step(task.task_id, "copy", context.rank, len(good))
        before = context.clock.monotonic()
        intact = [True] * len(good)
        try:
            if batch.verified:
                plan = job.copy_plan(context.staging.packed, slots, context.device.arena.geometry, blocks)
                copying = context.device.copy_in(plan, context.staging.memory)
            else:
                copying = self._copy_and_verify(job, slots, [positions[i] for i in good], blocks, intact)
            if not await job.stop.copied(copying):
                return []
        finally:
            account.copy_s += context.clock.monotonic() - before
        arrived = [i for i, whole in zip(good, intact, strict=True) if whole]
        account.done([positions[i] for i in arrived], len(arrived) * context.layout.block_bytes)
        if len(arrived) < len(good):
            doubtful = [i for i, whole in zip(good, intact, strict=True) if not whole]
            await self._judge(job, batch, [names[i] for i in doubtful], [positions[i] for i in doubtful])
        return arrived

    async def _copy_and_verify(
        self, job: Job, slots: Sequence[int], places: Sequence[int], blocks: Sequence[int], intact: list[bool]
    ) -> None:
        """Copy and verify in one pass over memory, for blocks that the CPU can address.

        places: for each slot, its position in the task. intact: set for each.
        """
        context, memory = self._context, self._blocks.memory()
        assert memory is not None
        views = [context.staging.slot_view(slot, context.staging.object_bytes) for slot in slots]
        inspections = context.format.inspections(job.generation, [job.ids[i] for i in places], context.object_rank)

        def copy() -> None:
            for i, (view, block, inspection) in enumerate(zip(views, blocks, inspections, strict=True)):
                ours = inspection.footer(bytes(view[-FOOTER_BYTES:])) is None  # or it does not touch the block
                intact[i] = ours and inspection.damage(memory.scatter(view, block)) is None

        await context.threads.run(Direction.IN, copy, "copy and checksums")

    async def _judge(self, job: Job, batch: SharedFetch, names: Sequence[str], places: Sequence[int]) -> None:
        """Find out whether objects are damaged, or their blocks were written by someone else during the copy."""
        context = self._context
        views = [context.staging.slot_view(batch.slot(name), context.staging.object_bytes) for name in names]
        for name, reason in zip(names, await context.check(views, job, places), strict=True):
            if reason is not None and batch.spoil(name):
                self._bad(job.task.task_id, name, reason)

    def _begin_fetch(self, batch: SharedFetch, job: Job, places: Sequence[int]) -> asyncio.Future[list[Outcome]]:
        """Fetch a batch into slots and verify it. The fetch belongs to the batch, not to the task that started it.

        The future is already done if slots were free, the source answered at once, and there were few bytes to check.

        places: for each object of the batch, its position in the task.
        """
        context, holder = self._context, job.task.task_id
        context.recorder.step(holder, "fetch", context.rank, len(batch.names))
        batch.lease = context.staging.try_acquire(self.consumer, len(batch.names), holder)
        if batch.lease is None:
            return context.background.spawn(self._fetch(batch, job, places))
        asked = context.background.begin(self._ask(batch, job, places))
        if asked.done() and asked.exception() is None and len(batch.names) <= context.cheap_slots:
            return answered(at_once(self._verify(batch, job, places, asked.result())))
        return context.background.spawn(self._fetch(batch, job, places, asked))

    def _ask(self, batch: SharedFetch, job: Job, places: Sequence[int]) -> Awaitable[list[Outcome]]:
        assert batch.lease is not None
        wanted = zip(batch.names, self._context.staging.views(batch.lease), places, strict=True)
        return self.source.get([Blob(name, slot, job.use, depth) for name, slot, depth in wanted])

    async def _fetch(
        self,
        batch: SharedFetch,
        job: Job,
        places: Sequence[int],
        asked: asyncio.Future[list[Outcome]] | None = None,
    ) -> list[Outcome]:
        """The part of a fetch that waits: for slots (asked: None), for the source, for checksums."""
        if asked is None:
            batch.lease = await self._context.staging.acquire(self.consumer, len(batch.names), job.task.task_id)
            if not batch.consumers:  # all consumers were stopped while this waited for slots
                return [MISSING] * len(batch.names)
            return await self._verify(batch, job, places, await self._ask(batch, job, places))
        return await self._verify(batch, job, places, await asked)

    async def _verify(
        self, batch: SharedFetch, job: Job, places: Sequence[int], outcomes: list[Outcome]
    ) -> list[Outcome]:
        """Turn objects that fail their check into misses, and quarantine them. Leave it to the copy if that can."""
        assert batch.lease is not None
        context, holder = self._context, job.task.task_id
        batch.verified = self._blocks.memory(one_pass=True) is None or len(outcomes) <= context.cheap_slots
        if not batch.verified:
            return outcomes
        slots = context.staging.views(batch.lease)
        found = [i for i, outcome in enumerate(outcomes) if outcome.found is Found.FOUND]
        reasons = await context.check([slots[i] for i in found], job, [places[i] for i in found])
        for i, reason in zip(found, reasons, strict=True):
            if reason is not None:
                outcomes[i] = MISSING
                self._bad(holder, batch.names[i], reason)
        return outcomes

    def _bad(self, task_id: str, name: str, reason: Damage) -> None:
        """Count an object that failed its check, and quarantine it so that no one loads it again."""
        context = self._context
        self.source.corrupt += 1
        context.recorder.note(task_id, "corrupt object", context.rank, name, str(reason))
        context.background.begin(self.source.quarantine(name))
