"""The load of a task's blocks part by part: the first layers of all blocks first, so that the engine can use them.

    for each part:  storage's threads copy this part of each object to its block, and check it
                    when all blocks of the task have it, and it was right in each: report it

A part counts only if its seal is right (formats.py), and nothing is reported after the first block that failed. Such
blocks, and objects without seals of parts, are left to the caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from transferd.blocks.formats import Damage
from transferd.storage.base import Found, Source, slots_for
from transferd.storage.lru import Use
from transferd.workers.cpu_blocks import CpuBlocks
from transferd.workers.job import Share

CONSUMER = "read"  # of staging

Bad = Callable[[str, str, Damage, int], None]


class PartLoad:
    """One rank's load of a task by parts.

    size: the most blocks of a call to storage.
    most: the most calls at a time.
    bad: called for each damaged object, with the task's id, the object's name, the damage and its level.
    reported: whether the engine may use some of the bytes already.
    """

    def __init__(self, share: Share, source: Source, blocks: CpuBlocks, size: int, most: int, bad: Bad) -> None:
        self.reported = False
        self._bad = bad
        self._share, self._source, self._blocks = share, source, blocks
        self._size, self._most = size, most
        self._states: dict[int, bytearray] = {}
        self._left: list[int] = []
        self._again = Use(counts=False)  # of the parts behind the first: a load is one use of an object

    async def load(self, positions: Sequence[int]) -> Sequence[int]:
        """Load these blocks. Returns the positions that are left to be loaded as a whole. Raises TransferError."""
        share, layout = self._share, self._share.context.layout
        whole = len(positions) == share.job.blocks
        self._states = {position: self._blocks.new_state() for position in positions}
        for part, (layers, _) in enumerate(layout.part_ends):
            share.step("load a part in place", len(positions))
            before = len(positions)
            positions = await self._load_part(part, positions)
            if share.stopped is not None or not positions:
                break
            whole = whole and len(positions) == before
            if whole and part < self._blocks.parts - 1:
                self.reported = True
                share.job.part_there(share.job, share.context.rank, layers)
        else:
            share.done(positions, len(positions) * layout.block_bytes)
        return sorted(self._left)

    async def _load_part(self, part: int, positions: Sequence[int]) -> list[int]:
        """Load a part of these blocks. Returns the positions of the blocks that hold it now, in order."""
        good: list[int] = []
        under_way: deque[asyncio.Future[list[int]]] = deque()
        try:
            for start in range(0, len(positions), self._size):
                chunk = positions[start : start + self._size]
                under_way.append(self._share.context.background.begin(self._load_chunk(part, chunk)))
                if len(under_way) == self._most:
                    good += await under_way.popleft()
                if self._share.stopped is not None:
                    break
            while under_way:
                good += await under_way.popleft()
        finally:  # after an error
            if under_way:
                await asyncio.wait(under_way)
        return good

    async def _load_chunk(self, part: int, positions: Sequence[int]) -> list[int]:
        share = self._share
        names = [share.names[i] for i in positions]
        lease = None
        if needed := slots_for(self._source, names):
            staging = share.context.staging
            lease = await share.lease(CONSUMER, staging.slots_at_once(CONSUMER, min(len(positions), needed)))
        if share.stopped is not None:
            if lease is not None:
                lease.release()
            return []
        drain = self._blocks.drain(positions, part, [self._states[position] for position in positions])
        slots = () if lease is None else share.context.staging.views(lease)
        span = self._blocks.span(part)
        items = [item._replace(span=span, use=self._again if part else item.use) for item in share.items(positions)]
        loading = share.begin(self._source.load(items, drain, slots), lease)
        if not await share.answered(loading):
            return []
        good: list[int] = []
        for i, (position, outcome) in enumerate(zip(positions, loading.result(), strict=True)):
            if i in drain.damages:
                self._bad(share.job.task.task_id, share.names[position], drain.damages[i], outcome.level)
                self._left.append(position)  # another level may have it
            elif outcome.found is Found.FOUND:
                good.append(position)
            elif outcome.found is Found.LEFT:
                self._left.append(position)
            elif outcome.error is not None:
                share.failed(outcome.error)
        if self._blocks.lost is not None:
            raise self._blocks.lost
        errors = [outcome.error for outcome in loading.result() if outcome.error is not None]
        if len(errors) == len(positions):  # then more loads are useless
            raise errors[-1]
        return good
