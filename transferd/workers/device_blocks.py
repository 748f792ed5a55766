"""A task's blocks on a device, which its tier copies to slots of staging and back, many in one plan.

A port of read.py and write.py, as is cpu_blocks.py. It also serves blocks that the CPU can address if the C extension
is missing or does not accept their layout, and objects without a checksum. Among these may be host blocks, which a
thread of ours copies.
"""

from __future__ import annotations

import functools
from collections.abc import Coroutine, Sequence
from typing import Any

from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.formats import Damage
from transferd.runtime.threads import Direction
from transferd.tasks import ReadStorageTask, WriteStorageTask
from transferd.tiers.base import INLINE_BYTES
from transferd.tiers.hostcopy import copy_runs
from transferd.tiers.staging import Lease
from transferd.workers.job import Share


async def check(share: Share, slots: Sequence[memoryview], positions: Sequence[int]) -> list[Damage | None]:
    """Verify the objects in these slots, which hold the blocks at `positions`. For each, None or the damage."""
    context = share.context
    work = functools.partial(
        context.format.check, slots, share.job.generation, share.ids(positions), context.object_rank
    )
    if len(slots) <= context.cheap_slots:
        return work()
    return await context.threads.run(Direction.IN, work, "checksums")


class DeviceBlocks:
    """The blocks of one job on one rank. See the module."""

    def __init__(self, share: Share) -> None:
        task = share.job.task
        assert isinstance(task, ReadStorageTask | WriteStorageTask)
        self._blocks = task.block_ids
        self._share = share

    async def gather(self, positions: Sequence[int], lease: Lease) -> bool:
        """Make the objects of these blocks in slots. Returns False if the task was stopped. Raises TransferError."""
        share, context = self._share, self._share.context
        staging = context.staging
        blocks = [self._blocks[i] for i in positions]
        plan = share.job.copy_plan(share.arena.geometry, blocks, staging.packed, lease.slots)
        before = context.clock.monotonic()
        share.step("copy", len(positions))
        try:
            if not await share.job.stop.copied(self._out(plan)):
                return False
            slots, job = staging.views(lease), share.job
            seal = functools.partial(
                context.format.seal, slots, job.generation, share.ids(positions), context.object_rank
            )
            if len(slots) <= context.cheap_slots:
                seal()
            else:
                await context.threads.run(Direction.OUT, seal, "checksums")
        finally:
            share.copy_s += context.clock.monotonic() - before
        return True

    async def scatter(self, positions: Sequence[int], lease: Lease, at: Sequence[int]) -> dict[int, Damage | None]:
        """Check objects in slots, and copy those that are right to these blocks. See CpuBlocks.scatter."""
        share, staging = self._share, self._share.context.staging
        slots = staging.views(lease)
        reasons = await check(share, [slots[index] for index in at], positions)
        results = {index: reason for index, reason in zip(at, reasons, strict=True) if reason is not None}
        good = [i for i, reason in enumerate(reasons) if reason is None]
        if good and await self._copied([self._blocks[positions[i]] for i in good], [lease.slots[at[i]] for i in good]):
            return results | {at[i]: None for i in good}
        return dict(results)

    async def _copied(self, blocks: Sequence[int], slots: Sequence[int]) -> bool:
        share, context = self._share, self._share.context
        plan = share.job.copy_plan(context.staging.packed, slots, share.arena.geometry, blocks)
        before = context.clock.monotonic()
        share.step("copy", len(blocks))
        try:
            return await share.job.stop.copied(self._in(plan))
        finally:
            share.copy_s += context.clock.monotonic() - before

    def _out(self, plan: CopyPlan) -> Coroutine[Any, Any, None]:
        share, staging = self._share, self._share.context.staging
        if share.on_host:
            return self._by_thread(Direction.OUT, share.arena.origin, staging.memory.address, plan)
        return share.context.device.copy_out(plan, staging.memory)

    def _in(self, plan: CopyPlan) -> Coroutine[Any, Any, None]:
        share, staging = self._share, self._share.context.staging
        if share.on_host:
            return self._by_thread(Direction.IN, staging.memory.address, share.arena.origin, plan)
        return share.context.device.copy_in(plan, staging.memory)

    async def _by_thread(self, direction: Direction, source: int, target: int, plan: CopyPlan) -> None:
        copy = functools.partial(copy_runs, source, target, plan.runs)
        if plan.nbytes <= INLINE_BYTES:
            copy()
        else:
            await self._share.context.threads.run(direction, copy, "copy of host blocks")
