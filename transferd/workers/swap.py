"""Swap: device blocks to host blocks and back, without staging.

The copy is cut into pieces of a bounded number of bytes. Between two pieces the handler looks whether
it was told to stop, so a cancel or a deadline is answered within one piece, and no byte moves after.
"""

from __future__ import annotations

from transferd.copyplan import CopyPlan, plan_copy
from transferd.errors import TransferError
from transferd.layout.base import Geometry
from transferd.tasks import RankOutcome, SwapInTask, SwapOutTask
from transferd.workers.context import Account, RankContext, require
from transferd.workers.job import Job


class Swapper:
    """Runs SwapOutTask and SwapInTask on one rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        # As much as a rank's staging holds bounds how long a running copy keeps a stop waiting.
        self._piece_blocks = max(1, context.staging.nbytes // context.layout.block_bytes)

    async def run(self, job: Job) -> RankOutcome:
        task = job.task
        assert isinstance(task, SwapOutTask | SwapInTask)
        context, account = self._context, Account(job, self._context)
        host = require(context.host)
        out = isinstance(task, SwapOutTask)
        for start in range(0, task.blocks, self._piece_blocks):
            if account.stopped is not None:
                break
            piece = range(start, min(start + self._piece_blocks, task.blocks))
            plan = self._plan(job, piece, host.arena.geometry)
            if start:  # of the first piece, "started" says it
                context.recorder.step(task.task_id, "copy", context.rank, len(piece))
            before = context.clock.monotonic()
            try:
                if out:
                    await context.device.copy_out(plan, host.memory)
                else:
                    await context.device.copy_in(plan, host.memory)
            except TransferError as error:
                account.failed(error)
                break
            finally:
                account.copy_s += context.clock.monotonic() - before
            account.done(piece, plan.nbytes)
        return account.outcome()

    def _plan(self, job: Job, piece: range, host: Geometry) -> CopyPlan:
        task = job.task
        assert isinstance(task, SwapOutTask | SwapInTask)
        device = self._context.device.arena.geometry
        gpu = task.gpu_block_ids[piece.start : piece.stop]
        cpu = task.cpu_block_ids[piece.start : piece.stop]
        if isinstance(task, SwapOutTask):
            return job.plan((device, host, piece.start), lambda: plan_copy(device, gpu, host, cpu))
        return job.plan((device, host, piece.start), lambda: plan_copy(host, cpu, device, gpu))
