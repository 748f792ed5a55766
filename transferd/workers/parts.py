"""The load of a task's blocks part by part: the first layers of all blocks first, so that the engine can use them.

    for each part:  storage's threads copy this part of each object to its block, and check it
                    when all blocks of the task have it, and it was right in each: report it

A part counts only if its seal is right (formats.py), and nothing is reported after the first block that failed. Such
blocks, and objects without seals of parts, are left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transferd.blocks.formats import Damage
from transferd.storage.base import Found, Source, slots_for
from transferd.storage.lru import Use
from transferd.workers.cpu_blocks import BlockDrain, CpuBlocks
from transferd.workers.job import Share

CONSUMER = "read"  # of staging

Bad = Callable[[str, str, Damage, int], None]


@dataclass(slots=True, eq=False)
class PartLoad:
    """One rank's load of a task by parts.

    size: the most blocks of a call to storage.
    most: the most calls at a time.
    bad: called for each damaged object, with the task's id, the object's name, the damage and its level.
    reported: whether the engine may use some of the bytes already.
    """

    share: Share
    source: Source
    blocks: CpuBlocks
    size: int
    most: int
    bad: Bad
    reported: bool = False
    _states: dict[int, bytearray] = field(default_factory=dict)
    _left: list[int] = field(default_factory=list)
    _again: Use = field(default_factory=lambda: Use(counts=False))  # of later parts: a load is one use of an object

    async def load(self, positions: Sequence[int]) -> Sequence[int]:
        """Load these blocks. Returns the positions that are left to be loaded as a whole. Raises TransferError."""
        share, layout = self.share, self.share.context.layout
        whole = len(positions) == share.job.blocks
        self._states = {position: self.blocks.new_state() for position in positions}
        for part, (layers, _) in enumerate(layout.part_ends):
            before = len(positions)
            positions = await self._load_part(part, positions)
            if share.stopped is not None or not positions:
                break
            whole = whole and len(positions) == before
            if whole and part < self.blocks.parts - 1:
                self.reported = True
                share.job.part_there(share.job, share.context.rank, layers)
        else:
            share.done(positions, len(positions) * layout.block_bytes)
        return sorted(self._left)

    async def _load_part(self, part: int, positions: Sequence[int]) -> list[int]:
        """Load a part of these blocks. Returns the positions of the blocks that hold it now, in order."""
        good: list[int] = []
        chunks = [positions[start : start + self.size] for start in range(0, len(positions), self.size)]
        await self.share.overlapped((self._load_chunk(part, chunk, good) for chunk in chunks), self.most)
        return sorted(good)

    async def _load_chunk(self, part: int, positions: Sequence[int], good: list[int]) -> bool:
        """Load a part of these blocks, and add those that hold it now to `good`."""
        share, source = self.share, self.source
        items = share.items(positions)
        span = self.blocks.span(part)
        parts = [item._replace(span=span, use=self._again if part else item.use) for item in items]
        drain = BlockDrain(self.blocks, positions, part, [self._states[position] for position in positions])
        needed = slots_for(source, [item.name for item in items])
        loading = await share.called(
            source.load, parts, drain, consumer=CONSUMER, step="load a part in place", needed=needed
        )
        if loading is None or not await share.answered(loading):
            return False
        for i, (position, outcome) in enumerate(zip(positions, loading.result(), strict=True)):
            if i in drain.damages:
                self.bad(share.job.task.task_id, share.names[position], drain.damages[i], outcome.level)
                self._left.append(position)  # another level may have it
            elif outcome.found is Found.FOUND:
                good.append(position)
            elif outcome.found is Found.LEFT:
                self._left.append(position)
        if self.blocks.lost is not None:
            raise self.blocks.lost
        share.loaded(loading.result())
        return True
