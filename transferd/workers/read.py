"""Read: a source → device, for the leading blocks that the source has, or for all that it has (sparse).

The source of a ReadStorageTask is storage; a peer is another source (peer.py).

    find ─ which blocks does the source have?
    for each chunk:  in place: storage's threads copy each object to its block (cpu_blocks.py)
                     what is left: load to slots of staging, check, copy to the blocks (device_blocks.py)

In place goes what the CPU can address, if the source has threads. Few blocks are left then: those whose payload failed
its check, because only a slot can tell whether the object is damaged. Everything else goes through slots.

A few chunks are in flight at a time: while chunk k is copied to the device, chunk k+1 is being loaded. Storage joins
loads of one object (storage/joined.py). A bad object is a miss: it is quarantined and counted, and no task reports its
block as loaded. It ends the prefix; a sparse read continues after it.

A sparse read also continues after an object that storage failed to read. It ends after a whole chunk failed, because
storage or the device is then in trouble, and each further chunk would wait for the same error.

When the task is stopped, it ends after the running copy. Loads that have begun run to their end and touch only slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transferd.blocks.formats import Damage
from transferd.errors import TransferError
from transferd.storage.base import FOUND, LEFT, Found, Outcome, Source, slots_for
from transferd.storage.lru import Use
from transferd.tasks import RankOutcome
from transferd.workers.context import RankContext
from transferd.workers.cpu_blocks import BlockDrain, CpuBlocks, CpuMemory
from transferd.workers.device_blocks import DeviceBlocks, check
from transferd.workers.job import Job, Share, require
from transferd.workers.parts import PartLoad

CONSUMER = "read"  # of staging
CHUNKS_UNDER_WAY = 3  # one being copied, one being verified, one being loaded; the number of slots is another bound
# The size of one call whose blocks storage's threads copy: enough bytes to hide its fixed cost (waking two threads, and
# hearing from them), and few enough objects that the event loop prepares them within a millisecond or two.
CHUNK_BYTES, CHUNK_BLOCKS = 128 * 1024**2, 64
IN_PLACE_UNDER_WAY = 2  # such calls at a time, so that no thread waits for the event loop


def leading(stored: Sequence[bool]) -> int:
    """The number of leading items that are True."""
    return next((i for i, there in enumerate(stored) if not there), len(stored))


class Reader:
    """Moves the blocks of one rank's tasks from their source to the device.

    source: None without storage; admission then rejects all reads.
    corrupt: how many of the source's objects failed their check.
    missed: how many blocks tasks did not find; a read that ends at a missing block counts that one and all after it.
    chunk_blocks: how many blocks go through slots together.
    """

    def __init__(self, context: RankContext, source: Source | None) -> None:
        self.corrupt = 0
        self.missed = 0
        self._source = source
        self._context = context
        self._memory = CpuMemory(context)
        self.chunk_blocks = context.staging.chunk_slots(CONSUMER)
        self._in_place_blocks = max(1, min(CHUNK_BYTES // context.layout.block_bytes, CHUNK_BLOCKS))

    async def load(self, job: Job) -> RankOutcome:
        """Run a ReadStorageTask."""
        share, source = Share(job, self._context), require(self._source)
        blocks = self._memory.blocks(share)
        in_place = source.slots_at_once is not None and blocks is not None
        size, most = (self._in_place_blocks, IN_PLACE_UNDER_WAY) if in_place else (self.chunk_blocks, CHUNKS_UNDER_WAY)
        try:
            # Storage's threads touch device blocks as soon as the load begins.
            if in_place and not await share.computed():
                return share.outcome()
            # A single load costs no more than a lookup.
            asks = source.asks_first and not (in_place and job.blocks == 1)
            found = await self._found(share, source) if asks else range(job.blocks)
            only_check = False
            if in_place and blocks is not None and self._by_parts(share, source, blocks):
                parts = PartLoad(share, source, blocks, size, most, self.bad)
                found = await parts.load(found)
                only_check = parts.reported
                in_place = in_place and not only_check
            chunks = [found[start : start + size] for start in range(0, len(found), size)]
            loads = (_Load(self, share, source, blocks, chunk, only_check) for chunk in chunks)
            if len(chunks) == 1:  # there is nothing to overlap
                await next(loads).run(in_place)
            else:
                await share.overlapped((load.run(in_place) for load in loads), most)
        except TransferError as error:
            share.failed(error)
        finally:
            if blocks is not None:
                await blocks.end()
        if not source.asks_first and share.error is None and share.stopped is None:  # else `_found` has counted them
            self.missed += job.blocks - self._loaded(share)
        return share.outcome()

    def _by_parts(self, share: Share, source: Source, blocks: CpuBlocks) -> bool:
        """Whether to load by parts: the task asks for it, and it costs about as much as a load of whole blocks."""
        if not getattr(share.job.task, "by_parts", False) or blocks.parts == 1:
            return False
        return source.index.ranges or not slots_for(source, share.names)

    def _loaded(self, share: Share) -> int:
        """How many blocks of a task were found, if nothing looked them up. A prefix ends at its first missing block."""
        if not share.prefix or len(share.moved) == share.job.blocks:
            return len(share.moved)
        moved = set(share.moved)
        return leading([position in moved for position in range(share.job.blocks)])

    async def stored(self, names: Sequence[str], use: Use) -> Sequence[bool]:
        """For each name, whether the source has the object. Counts as part of `use`. Raises TransferError."""
        source = require(self._source)
        found = source.index.find(names, use)
        return await source.exists(names) if found is None else found

    async def _found(self, share: Share, source: Source) -> Sequence[int]:
        """Look up all objects of the task. Returns the positions of those to load, ascending."""
        stored = share.job.by_run(share.names, source.index.find)
        if stored is None:  # the source has no index: ask it
            levels = source.levels
            exists = source.exists if levels is None else levels.exists_now
            asked = self._context.background.begin(exists(share.names))
            if not await share.answered(asked):
                return ()
            stored = asked.result()
        prefix = leading(stored)
        found: Sequence[int] = range(prefix)
        if not share.prefix and prefix < len(stored):  # a sparse read continues after missing blocks
            found = [i for i, there in enumerate(stored) if there]
        self.missed += share.job.blocks - len(found)
        share.step("found", len(found))
        return found

    def bad(self, task_id: str, name: str, reason: Damage, level: int) -> None:
        """Count an object that failed its check, and quarantine this copy: no load finds it again."""
        context = self._context
        self.corrupt += 1
        context.recorder.note(task_id, "corrupt object", context.rank, name, str(reason))
        source = require(self._source)
        levels = source.levels
        context.background.begin(source.quarantine(name) if levels is None else levels.quarantine_at(name, level))


@dataclass(slots=True, eq=False)
class _Load:
    """The load of one chunk of a task.

    positions: of the chunk's blocks, ascending.
    only_check: touch no block, because the engine may be reading them; only find damaged objects.
    """

    reader: Reader
    share: Share
    source: Source
    blocks: CpuBlocks | None  # None if the CPU cannot copy and check them
    positions: Sequence[int]
    only_check: bool
    good: int = 0  # blocks that have arrived

    async def run(self, in_place: bool) -> bool:
        """Load the chunk. Returns whether to continue with the next one."""
        try:
            rest = self.positions
            if in_place:
                rest = await self._in_place()
            size = self.reader.chunk_blocks
            for start in range(0, len(rest), size):
                again: Sequence[int] = rest[start : start + size]
                # A copy may be damaged, and a level of storage too slow: then another level may have the block.
                for _ in range(2 * self.source.tries - 1):
                    if not again or self.share.stopped is not None:
                        break
                    again = await self._by_slots(again)
        except TransferError as error:
            self.share.failed(error)
            return False
        return self.good == len(self.positions) or not (self.share.prefix or self.share.stopped)

    async def _in_place(self) -> Sequence[int]:
        """Have storage's threads copy each object to its block. Returns the positions that are left for slots."""
        share, source, blocks, positions = self.share, self.source, self.blocks, self.positions
        assert blocks is not None
        items, drain = share.items(positions), BlockDrain(blocks, positions)
        needed = slots_for(source, [item.name for item in items]) if source.slots_at_once else 0
        loading = await share.called(source.load, items, drain, consumer=CONSUMER, step="load in place", needed=needed)
        if loading is None:
            return ()
        if not await share.answered(loading):
            # The stopped task no longer waits, but a damaged object must not be loaded again.
            loading.add_done_callback(lambda done: self._note_damage(drain, done))
            return ()
        self._note_damage(drain, loading)
        return self._sort(loading.result(), drain, blocks)

    def _sort(self, outcomes: Sequence[Outcome], drain: BlockDrain, blocks: CpuBlocks) -> Sequence[int]:
        """Account for the loaded blocks. Returns the positions that are left for slots. Raises TransferError."""
        positions = self.positions
        if not drain.damages and all(outcome is FOUND for outcome in outcomes):  # the usual case, without a loop below
            self._arrived(positions)
            return ()
        good: list[int] = []
        left: list[int] = []
        hole: int | None = None
        for i, (position, outcome) in enumerate(zip(positions, outcomes, strict=True)):
            if outcome.found is Found.FOUND and i not in drain.damages:
                good.append(position)
            elif outcome is LEFT or (i in drain.damages and self.source.tries > 1):  # another copy may be good
                left.append(position)
            else:
                hole = position if hole is None else hole
        self._arrived(good)
        if blocks.lost is not None:  # no further chunk can reach the block memory
            raise blocks.lost
        self.share.loaded(outcomes)
        return [i for i in left if hole is None or i < hole] if self.share.prefix else left

    def _arrived(self, positions: Sequence[int]) -> None:
        self.good += len(positions)
        self.share.done(positions, len(positions) * self.share.context.layout.block_bytes)

    def _note_damage(self, drain: BlockDrain, loaded: asyncio.Future[list[Outcome]]) -> None:
        if not drain.damages:
            return
        levels = [] if loaded.cancelled() or loaded.exception() else [one.level for one in loaded.result()]
        for i, damage in drain.damages.items():
            level = levels[i] if levels else 0
            self.reader.bad(self.share.job.task.task_id, self.share.names[self.positions[i]], damage, level)

    async def _by_slots(self, positions: Sequence[int]) -> Sequence[int]:
        """Load objects to slots, check them, and copy them to their blocks. Raises TransferError.

        Returns the positions to load again from another level: the copy was damaged, or its level is too slow.
        """
        share, staging = self.share, self.share.context.staging
        lease = await share.lease(CONSUMER, len(positions))
        if lease is None:
            return ()
        loading: asyncio.Future[list[Outcome]] | None = None
        try:
            share.step("fetch", len(positions))
            loading = share.begin(self.source.load, share.items(positions), None, staging.views(lease.slots))
            if not await share.answered(loading):
                return ()
            outcomes = loading.result()
            at = [i for i, outcome in enumerate(outcomes) if outcome.found is Found.FOUND]
            again = [positions[i] for i, outcome in enumerate(outcomes) if outcome.found is Found.LEFT]
            if at and share.stopped is None and await share.computed():
                levels = {positions[i]: outcomes[i].level for i in at}
                again += await self._scatter([lease.slots[i] for i in at], levels)
            for outcome in outcomes:
                if outcome.error is not None:
                    share.failed(outcome.error)
            return sorted(again) if self.source.tries > 1 else ()
        finally:
            if loading is None:
                lease.release()
            else:  # the load may still write to the slots
                share.release_after(loading, lease)

    async def _scatter(self, slots: Sequence[int], levels: Mapping[int, int]) -> list[int]:
        """Check the objects in these slots and copy the good ones to their blocks. Returns the damaged ones' positions.

        levels: by position, in the order of the slots, the level that its object came from.
        """
        share, positions = self.share, list(levels)
        results: dict[int, Damage | None]
        if self.only_check:
            reasons = await check(share, share.context.staging.views(slots), positions)
            results = {i: reason for i, reason in zip(positions, reasons, strict=True) if reason is not None}
        else:
            results = await (self.blocks or DeviceBlocks(share)).scatter(positions, slots)
        self._arrived([i for i, damage in results.items() if damage is None])
        damaged = {i: damage for i, damage in results.items() if damage is not None}
        for i, damage in damaged.items():
            self.reader.bad(share.job.task.task_id, share.names[i], damage, levels[i])
        return list(damaged)
