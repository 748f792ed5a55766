"""Read: a source → staging → device, for the leading blocks that the source has, or for all that it has (sparse).

Blocks that the CPU can address take in what storage has in memory without staging, first (in_place.py). The rest goes
this way:

The source of a ReadStorageTask is storage; a peer is one more (peer.py).

    stored ─ which blocks does it have?
    for each chunk:  fetch (lease slots, get, verify)  →  copy slots → device

A few chunks are in flight at a time: while chunk k is copied to the device, chunk k+1 is being
fetched. Tasks share fetches (flights.py). A bad object is a miss: it is quarantined and counted, and
it ends the prefix; a sparse read goes on behind it. Its bytes never reach the device.

A sparse read also goes on behind an object that storage failed to read. It ends where a whole chunk failed, since
storage or the device is then in trouble and each further chunk would wait for the same error.

When the task is stopped, it ends after the copy that is running. Fetches that have begun run to their
end and touch only staging.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import Protocol

from transferd.blocks.footer import Damage
from transferd.errors import TransferError
from transferd.runtime.aio import answered, at_once, every
from transferd.storage.base import MISSING, Blob, Found, Outcome, Storage
from transferd.storage.lru import Use
from transferd.tasks import RankOutcome, ReadStorageTask
from transferd.workers.context import Account, RankContext, require
from transferd.workers.flights import Flights, SharedFetch
from transferd.workers.in_place import InPlaceReader
from transferd.workers.job import Job

CHUNKS_UNDER_WAY = 3  # one being copied, one being verified, one being fetched; slots bound them, too


class Source(Protocol):
    """Where objects of one rank come from.

    flights: its running fetches, which tasks that need the same object share.
    corrupt: objects that it gave and that failed their check.
    storage: set if blocks can load its objects in place.
    """

    flights: Flights
    corrupt: int
    storage: Storage | None

    def stored(self, names: Sequence[str], use: Use) -> Awaitable[Sequence[bool]]:
        """Which objects it has. Counts as part of `use`. Raises TransferError."""
        ...

    def get(self, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
        """As Storage.get."""
        ...

    def quarantine(self, name: str) -> Awaitable[None]:
        """As Storage.quarantine."""
        ...


class StorageSource:
    """Storage as a source, shared by all tasks of a rank."""

    def __init__(self, storage: Storage | None) -> None:
        """storage: None where no task reads, as admission has made sure."""
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
    """How many leading ones are True."""
    return next((i for i, there in enumerate(stored) if not there), len(stored))


class Reader:
    """Brings the blocks of one rank's tasks from their source to the device.

    missed: blocks that tasks asked for and did not find: of a read up to the first missing one, those behind it too.
    """

    consumer = "read"

    def __init__(self, context: RankContext, source: Source) -> None:
        self.source = source
        self._context = context
        self._chunk_blocks = context.staging.chunk_slots(self.consumer)
        self._in_place: InPlaceReader | None = None
        if source.storage is not None:
            self._in_place = InPlaceReader(context, source.storage, self._bad)
        self.missed = 0

    async def load(self, job: Job) -> RankOutcome:
        """Run a ReadStorageTask."""
        account = Account(job, self._context)
        under_way: deque[asyncio.Task[bool]] = deque()
        useful = True
        try:
            names = self._context.names(job)
            in_place = self._in_place if getattr(self._context.device, "addressable", False) else None
            if in_place is None or len(names) > 1:
                found = await self._found(account, names)
            else:  # one load finds out as much as a look-up does
                found = range(1)
            if found and in_place is not None:
                found = await in_place.load(account, names, found)
            if 0 < len(found) <= self._chunk_blocks:  # one chunk has no next one to overlap with
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
            # A chunk ends within one copy after a stop; until then its device blocks are in use.
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
        """Load one chunk, joining fetches that are already in flight. True: the next one is of use."""
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
        """Copy this task's share of a batch to the device as soon as it is fetched. True: what follows is of use."""
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
                await self._scatter(account, batch, names, positions, good)
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
    ) -> None:
        context, job = self._context, account.job
        task = job.task
        assert isinstance(task, ReadStorageTask)
        if task.after and not await context.computed(job):
            return
        slots = [batch.slot(names[i]) for i in good]
        blocks = [task.gpu_block_ids[positions[i]] for i in good]
        plan = job.copy_plan(context.staging.packed, slots, context.device.arena.geometry, blocks)
        context.recorder.step(task.task_id, "copy", context.rank, len(good))
        before = context.clock.monotonic()
        try:
            copied = await job.stop.copied(context.device.copy_in(plan, context.staging.memory))
        finally:
            account.copy_s += context.clock.monotonic() - before
        if copied:
            account.done([positions[i] for i in good], plan.nbytes)

    def _begin_fetch(self, batch: SharedFetch, job: Job, places: Sequence[int]) -> asyncio.Future[list[Outcome]]:
        """Source → slots, verified. Belongs to the batch, not to the task that started it.

        Done at once if slots are free, the source answers at once, and the bytes to check are few.

        places: for each object of the batch, its position in the task.
        """
        context, holder = self._context, job.task.task_id
        context.recorder.step(holder, "fetch", context.rank, len(batch.names))
        batch.lease = context.staging.try_acquire(self.consumer, len(batch.names), holder)
        if batch.lease is None:
            return context.background.spawn(self._fetch(batch, job, places))
        asked = context.background.begin(self._ask(batch, job, places))
        if asked.done() and asked.exception() is None and context.is_cheap(len(batch.names)):
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
        """Turn what fails its check into misses, and quarantine it."""
        assert batch.lease is not None
        context, holder = self._context, job.task.task_id
        slots = context.staging.views(batch.lease)
        found = [i for i, outcome in enumerate(outcomes) if outcome.found is Found.FOUND]
        reasons = await context.check([slots[i] for i in found], job, [places[i] for i in found])
        for i, reason in zip(found, reasons, strict=True):
            if reason is not None:
                outcomes[i] = MISSING
                self._bad(holder, batch.names[i], reason)
        return outcomes

    def _bad(self, task_id: str, name: str, reason: Damage) -> None:
        """This object failed its check: count it, and have nobody load it again."""
        context = self._context
        self.source.corrupt += 1
        context.recorder.note(task_id, "corrupt object", context.rank, name, str(reason))
        context.background.begin(self.source.quarantine(name))
