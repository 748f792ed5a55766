"""A task's blocks on a device, which its tier copies to slots of staging and back, many in one plan.

A port of read.py and write.py, as is cpu_blocks.py. It also serves blocks that the CPU can address if the C extension
is missing or does not accept their layout, and objects without a checksum. Among these may be host blocks, which a
thread of ours copies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from transferd.blocks.formats import Damage
from transferd.blocks.layout.base import Geometry
from transferd.runtime.threads import Direction
from transferd.tiers.base import INLINE_BYTES
from transferd.tiers.hostcopy import copy_runs
from transferd.workers.job import Share


async def check(share: Share, slots: Sequence[memoryview], positions: Sequence[int]) -> list[Damage | None]:
    """Verify the objects in these slots, which hold the blocks at `positions`. For each, None or the damage."""
    context, job = share.context, share.job
    work = functools.partial(context.format.check, slots, job.generation, share.ids(positions), context.object_rank)
    return await context.on_slots(len(slots), Direction.IN, work, "checksums")


class DeviceBlocks:
    """The blocks of one job on one rank. See the module."""

    def __init__(self, share: Share) -> None:
        self._blocks = share.job.task.block_ids
        self._share = share

    async def gather(self, positions: Sequence[int], slots: Sequence[int]) -> bool:
        """Make the objects of these blocks in slots. Returns False if the task was stopped. Raises TransferError."""
        share, context, job = self._share, self._share.context, self._share.job
        views, ids = context.staging.views(slots), share.ids(positions)
        seal = functools.partial(context.format.seal, views, job.generation, ids, context.object_rank)

        async def making() -> None:
            blocks = [self._blocks[i] for i in positions]
            await self._move(Direction.OUT, share.arena.geometry, blocks, context.staging.packed, slots)
            await context.on_slots(len(slots), Direction.OUT, seal, "checksums")

        return await share.copied(making(), len(positions))

    async def scatter(self, positions: Sequence[int], slots: Sequence[int]) -> dict[int, Damage | None]:
        """Check objects in slots, and copy those that are right to these blocks. See CpuBlocks.scatter."""
        share, staging = self._share, self._share.context.staging
        reasons = await check(share, staging.views(slots), positions)
        both = zip(positions, reasons, strict=True)
        results: dict[int, Damage | None] = {i: reason for i, reason in both if reason is not None}
        good = {i: slot for i, slot in zip(positions, slots, strict=True) if i not in results}
        if good:
            blocks = [self._blocks[i] for i in good]
            moving = self._move(Direction.IN, staging.packed, list(good.values()), share.arena.geometry, blocks)
            if await share.copied(moving, len(good)):
                results |= dict.fromkeys(good)
        return results

    async def _move(
        self, direction: Direction, source: Geometry, source_ids: Sequence[int], target: Geometry, ids: Sequence[int]
    ) -> None:
        """Copy blocks to slots (OUT), or slots to blocks."""
        share, device, memory = self._share, self._share.context.device, self._share.context.staging.memory
        plan = share.job.copy_plan(source, source_ids, target, ids)
        if not share.on_host:
            await (device.copy_out if direction is Direction.OUT else device.copy_in)(plan, memory)
            return
        ours, slots = share.arena.origin, memory.address
        ends = (ours, slots) if direction is Direction.OUT else (slots, ours)
        copy = functools.partial(copy_runs, *ends, plan.runs)
        if plan.nbytes <= INLINE_BYTES:
            copy()
        else:
            await share.context.threads.run(direction, copy, "copy of host blocks")
