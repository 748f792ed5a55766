"""Swap: device blocks to host blocks and back, without staging.

The handler cuts the copy into pieces of bounded size and checks for a stop before each piece. So a cancel
or a deadline takes effect once the pieces in flight have ended, and no byte moves after that. Two pieces
are in flight at a time: while one is being copied, the handler plans and submits the next, so that a device
with queues of its own never runs dry between pieces.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable

from transferd.blocks.copyplan import CopyPlan, plan_copy
from transferd.blocks.layout.base import Geometry
from transferd.errors import TransferError
from transferd.tasks import RankOutcome, SwapInTask, SwapOutTask
from transferd.workers.context import RankContext
from transferd.workers.job import Job, Share, require

UNDER_WAY = 2  # pieces in flight


class Swapper:
    """Runs SwapOutTask and SwapInTask on one rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        # The size of a rank's staging bounds how long a stop has to wait for running copies.
        self._piece_blocks = max(1, context.staging.nbytes // UNDER_WAY // context.layout.block_bytes)

    async def run(self, job: Job) -> RankOutcome:
        share, begun = Share(job, self._context), self._context.clock.monotonic()
        if 0 < job.task.blocks <= self._piece_blocks:  # one piece overlaps with none, so it needs no asyncio task
            if share.stopped is None:
                everything = range(job.task.blocks)
                await self._take(share, everything, self._copy(share, everything))
        else:
            await self._pieces(share)
        share.copy_s = self._context.clock.monotonic() - begun
        return share.outcome()

    async def _pieces(self, share: Share) -> None:
        """Copy pieces in order, two at a time. After an error or a stop, begin no more; wait for those in flight."""
        under_way: deque[tuple[range, asyncio.Task[int | None]]] = deque()
        loop = asyncio.get_running_loop()
        for start in range(0, share.job.task.blocks, self._piece_blocks):
            if len(under_way) == UNDER_WAY:  # bounds how long a stop has to wait
                await self._take(share, *under_way.popleft())
            if share.stopped is not None or share.error is not None:
                break
            piece = range(start, min(start + self._piece_blocks, share.job.task.blocks))
            if start:  # the first piece has the step "started"
                share.step("copy", len(piece))
            under_way.append((piece, loop.create_task(self._copy(share, piece))))
        while under_way:
            await self._take(share, *under_way.popleft())

    async def _copy(self, share: Share, piece: range) -> int | None:
        """Move a piece. Returns its bytes, or None if the task was stopped before every byte had moved."""
        context, job = self._context, share.job
        if not await share.computed():
            return None
        host = require(context.host)
        plan = self._plan(job, piece, host.arena.geometry)
        if isinstance(job.task, SwapOutTask):
            copying = context.device.copy_out(plan, host.memory)
        else:
            copying = context.device.copy_in(plan, host.memory)
        return plan.nbytes if await job.stop.copied(copying) else None

    async def _take(self, share: Share, piece: range, copying: Awaitable[int | None]) -> None:
        """Wait for a piece and add it to the share."""
        try:
            nbytes = await copying
            if nbytes is not None:
                share.done(piece, nbytes)
        except TransferError as error:
            share.failed(error)

    def _plan(self, job: Job, piece: range, host: Geometry) -> CopyPlan:
        task = job.task
        assert isinstance(task, SwapOutTask | SwapInTask)
        device = self._context.device.arena.geometry
        gpu = task.gpu_block_ids[piece.start : piece.stop]
        cpu = task.cpu_block_ids[piece.start : piece.stop]
        if isinstance(task, SwapOutTask):
            return job.plan((device, host, piece.start), lambda: plan_copy(device, gpu, host, cpu))
        return job.plan((device, host, piece.start), lambda: plan_copy(host, cpu, device, gpu))
