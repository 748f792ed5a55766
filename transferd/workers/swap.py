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
        share, begun, size = Share(job, self._context), self._context.clock.monotonic(), self._piece_blocks
        pieces = [range(start, min(start + size, job.blocks)) for start in range(0, job.blocks, size)]
        if len(pieces) == 1:  # it overlaps with none, so it needs no asyncio task
            await self._piece(share, pieces[0])
        else:
            await share.overlapped((self._piece(share, piece) for piece in pieces), UNDER_WAY)
        share.copy_s = self._context.clock.monotonic() - begun
        return share.outcome()

    async def _piece(self, share: Share, piece: range) -> bool:
        """Copy a piece and add it to the share. Returns False after an error: then begin no more."""
        if share.stopped is not None or share.error is not None:
            return False
        if piece.start:  # the first piece has the step "started"
            share.step("copy", len(piece))
        try:
            if (nbytes := await self._copy(share, piece)) is not None:
                share.done(piece, nbytes)
        except TransferError as error:
            share.failed(error)
        return share.error is None

    async def _copy(self, share: Share, piece: range) -> int | None:
        """Move a piece. Returns its bytes, or None if the task was stopped before every byte had moved."""
        device, task = self._context.device, share.job.task
        assert isinstance(task, SwapOutTask | SwapInTask)
        if not await share.computed():
            return None
        host, gpu = require(self._context.host), task.gpu_block_ids[piece.start : piece.stop]
        cpu = task.cpu_block_ids[piece.start : piece.stop]
        ours, theirs = device.arena.geometry, host.arena.geometry
        if isinstance(task, SwapOutTask):
            plan = share.job.copy_plan(ours, gpu, theirs, cpu)
            copying = device.copy_out(plan, host.memory)
        else:
            plan = share.job.copy_plan(theirs, cpu, ours, gpu)
            copying = device.copy_in(plan, host.memory)
        return plan.nbytes if await share.job.stop.copied(copying) else None
