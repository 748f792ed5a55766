"""Read: storage → staging → device, for the leading keys that storage has.

    match ─ how many leading keys does storage have?
    for each chunk:  fetch (lease slots, get, verify)  →  copy slots → device

A few chunks are in flight at a time: while chunk k is copied to the device, chunk k+1 is being
fetched. Tasks share fetches (flights.py). A bad object is a miss: it is quarantined and counted, and
it ends the prefix. Its bytes never reach the device.

When the task is stopped, it ends after the copy that is running. Fetches that have begun run to their
end and touch only staging.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from transferd.blocks.copyplan import plan_copy
from transferd.errors import TransferError
from transferd.runtime.aio import every
from transferd.storage.base import MISSING, Blob, Found, Outcome
from transferd.storage.lru import Use
from transferd.tasks import RankOutcome, ReadStorageTask
from transferd.workers.context import Account, RankContext, require
from transferd.workers.flights import Flights, SharedFetch
from transferd.workers.job import Job

CHUNKS_UNDER_WAY = 3  # one being copied, one being verified, one being fetched; slots bound them, too


class Reader:
    """Runs ReadStorageTask on one rank."""

    consumer = "read"

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._chunk_blocks = context.staging.chunk_slots(self.consumer)
        self.flights = Flights()
        self.corrupt = 0  # objects that were found and failed their check
        self.missed = 0  # keys beyond the prefix that storage had when a task asked

    async def match(self, names: Sequence[str], use: Use) -> int:
        """How many leading objects of `names` storage has. Counts as part of `use`. Raises StorageError."""
        stored = await require(self._context.storage).look_up(names, use)
        return next((i for i, there in enumerate(stored) if not there), len(stored))

    async def run(self, job: Job) -> RankOutcome:
        account = Account(job, self._context)
        under_way: deque[asyncio.Task[bool]] = deque()
        whole = True
        try:
            available = await self._available(job, account)
            for start in range(0, available, self._chunk_blocks):
                positions = range(start, min(start + self._chunk_blocks, available))
                under_way.append(self._context.background.spawn(self._load(job, account, positions)))
                if len(under_way) == CHUNKS_UNDER_WAY:
                    whole = await under_way.popleft()
                if not whole or account.stopped is not None:
                    break
        except TransferError as error:
            account.failed(error)
        finally:
            # A chunk ends within one copy after a stop; until then its device blocks are in use.
            await every(under_way)
        return account.outcome()

    async def _available(self, job: Job, account: Account) -> int:
        before = self._context.clock.monotonic()
        matching = self._context.background.spawn(self.match(self._context.names(job), job.use))
        answered = await job.stop.race(matching)
        account.storage_s += self._context.clock.monotonic() - before
        if not answered:
            return 0
        available = matching.result()
        self.missed += job.task.blocks - available
        self._context.recorder.step(job.task.task_id, "found", self._context.rank, available)
        return available

    async def _load(self, job: Job, account: Account, positions: range) -> bool:
        """Load one chunk, joining fetches that are already in flight. True: every block arrived."""
        names = self._context.names(job, positions)
        parts, lead = self.flights.board(names)
        shared = len(names) - (0 if lead is None else len(lead.names))
        if shared:
            self._context.recorder.step(job.task.task_id, "shares fetch", self._context.rank, shared)
        if lead is not None:
            place_of = dict(zip(names, zip(self._context.ids(job, positions), positions, strict=True), strict=True))
            places = [place_of[name] for name in lead.names]
            lead.fetch = self._context.background.spawn(self._fetch(lead, job, places))
            lead.fetch.add_done_callback(lambda _: self.flights.fetched(lead))
        arrivals = [self._consume(job, account, batch, names, positions, mine) for batch, mine in parts]
        if len(arrivals) == 1:
            return await arrivals[0]
        return all(await every(arrivals))

    async def _consume(
        self, job: Job, account: Account, batch: SharedFetch, names: Sequence[str], positions: range, mine: list[int]
    ) -> bool:
        """Copy this task's share of a batch to the device as soon as it is fetched."""
        assert batch.fetch is not None
        clock = self._context.clock
        try:
            before = clock.monotonic()
            fetched = await job.stop.race(batch.fetch)
            account.storage_s += clock.monotonic() - before
            if not fetched or account.stopped is not None:
                return False
            outcomes = [batch.outcome(names[i]) for i in mine]
            good = [i for i, outcome in zip(mine, outcomes, strict=True) if outcome.found is Found.FOUND]
            if good:
                await self._scatter(job, account, batch, names, positions, good)
            for outcome in outcomes:
                if outcome.error is not None:
                    account.failed(outcome.error)
            return len(good) == len(mine)
        except TransferError as error:
            account.failed(error)
            return False
        finally:
            self.flights.leave(batch)

    async def _scatter(
        self, job: Job, account: Account, batch: SharedFetch, names: Sequence[str], positions: range, good: list[int]
    ) -> None:
        context, task = self._context, job.task
        assert isinstance(task, ReadStorageTask)
        slots = [batch.slot(names[i]) for i in good]
        blocks = [task.gpu_block_ids[positions[i]] for i in good]
        plan = plan_copy(context.staging.packed, slots, context.device.arena.geometry, blocks)
        context.recorder.step(task.task_id, "copy", context.rank, len(good))
        before = context.clock.monotonic()
        try:
            copied = await job.stop.copied(context.device.copy_in(plan, context.staging.memory))
        finally:
            account.copy_s += context.clock.monotonic() - before
        if copied:
            account.done([positions[i] for i in good], plan.nbytes)

    async def _fetch(self, batch: SharedFetch, job: Job, places: Sequence[tuple[str, int]]) -> list[Outcome]:
        """Storage → slots, verified. Belongs to the batch, not to the task that started it.

        places: for each object of the batch, its id and its position in the task.
        """
        context, generation, holder = self._context, job.generation, job.task.task_id
        ids = [place[0] for place in places]
        staging = context.staging
        context.recorder.step(holder, "fetch", context.rank, len(batch.names))
        batch.lease = await staging.acquire(self.consumer, len(batch.names), holder)
        if not batch.consumers:  # all consumers were stopped while this waited for slots
            return [MISSING] * len(batch.names)
        slots = batch.lease.slots
        views = (staging.slot_view(slot, staging.object_bytes) for slot in slots)
        wanted = zip(batch.names, views, places, strict=True)
        outcomes = await self._get([Blob(name, view, job.use, depth) for name, view, (_, depth) in wanted])
        found = [i for i, outcome in enumerate(outcomes) if outcome.found is Found.FOUND]
        reasons = await context.check([slots[i] for i in found], generation, [ids[i] for i in found])
        for i, reason in zip(found, reasons, strict=True):
            if reason is not None:
                outcomes[i] = MISSING
                self.corrupt += 1
                context.recorder.note(holder, "corrupt object", context.rank, batch.names[i], str(reason))
                context.background.spawn(self._quarantine(batch.names[i]))
        return outcomes

    def _get(self, blobs: Sequence[Blob]) -> Coroutine[Any, Any, list[Outcome]]:
        """Where objects come from."""
        return require(self._context.storage).get(blobs)

    def _quarantine(self, name: str) -> Coroutine[Any, Any, None]:
        return require(self._context.storage).quarantine(name)
