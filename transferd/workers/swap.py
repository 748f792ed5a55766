"""Swap: device blocks to host blocks and back, without staging.

The handler cuts the copy into pieces of bounded size and checks for a stop before each piece. So a cancel
or a deadline takes effect once the pieces in flight have ended, and no byte moves after that. Two pieces
are in flight at a time: while one is being copied, the handler plans and submits the next, so that a device
with queues of its own never runs dry between pieces.
"""

from __future__ import annotations

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
        share, begun, positions = Share(job, self._context), self._context.clock.monotonic(), range(job.blocks)
        starts = positions[:: self._piece_blocks]
        if len(starts) == 1:  # it overlaps with none, so it needs no asyncio task
            await self._piece(share, positions)
        else:
            pieces = (positions[start : start + self._piece_blocks] for start in starts)
            await share.overlapped((self._piece(share, piece) for piece in pieces), UNDER_WAY)
        share.copy_s = self._context.clock.monotonic() - begun
        return share.outcome()

    async def _piece(self, share: Share, piece: range) -> bool:
        """Copy a piece and add it to the share. Returns False after an error: then begin no more."""
        device, job, task = self._context.device, share.job, share.job.task
        assert isinstance(task, SwapOutTask | SwapInTask)
        if job.stop.reason is not None or share.error is not None:
            return False
        if piece.start:  # the first piece has the step "started"
            share.step("copy", len(piece))
        try:
            if task.after and not await share.computed():
                return True
            host, gpu = require(self._context.host), task.gpu_block_ids[piece.start : piece.stop]
            cpu = task.cpu_block_ids[piece.start : piece.stop]
            ours, theirs = device.arena.geometry, self._context.layout.host
            if isinstance(task, SwapOutTask):
                plan = job.copy_plan(ours, gpu, theirs, cpu)
                copying = device.copy_out(plan, host.memory)
            else:
                plan = job.copy_plan(theirs, cpu, ours, gpu)
                copying = device.copy_in(plan, host.memory)
            if await job.stop.copied(copying):
                share.done(piece, plan.nbytes)
        except TransferError as error:
            share.failed(error)
        return share.error is None
