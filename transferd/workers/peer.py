"""Send and receive: blocks from this rank's device to the same rank of another daemon, without storage.

A peer is a sink for the Writer and a source for the Reader. Unlike with storage, the receiver sets the pace: a sender
gathers only blocks for which the receiver has posted memory, so it never holds staging while it waits for a peer
(storage/peer/__init__.py explains why that matters).

A sequence is useful only if it is complete, on both sides. So a sender's blocks count once the receiver has
confirmed all of them, and a receiver confirms only after its last block is on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Sequence

import msgspec

from transferd.errors import TransferError
from transferd.runtime.threads import Threads
from transferd.storage.base import NO_INDEX, Drainer, Fill, Item, Outcome, blobs_of
from transferd.storage.joined import SingleFlight
from transferd.storage.peer.outbound import Inbound, Outbound
from transferd.tasks import ErrorInfo, RankOutcome, ReceiveTask, SendTask
from transferd.workers.context import PeerPath, RankContext
from transferd.workers.job import Job, Share
from transferd.workers.read import Reader
from transferd.workers.write import Writer

_ABORTED = ErrorInfo("internal", "the task's handler ended without a result (bug)")


class PeerSink:
    """The receiver of one transfer as a sink: it takes the objects for which it has posted memory."""

    slots_at_once: int | None = None

    def __init__(self, outbound: Outbound, names: Sequence[str]) -> None:
        self._outbound = outbound
        self._position = {name: i for i, name in enumerate(names)}

    async def wanted(self, share: Share, limit: int) -> Sequence[int]:
        asked = share.context.background.begin(self._outbound.posted(limit))
        return [self._position[name] for name in asked.result()] if await share.answered(asked) else []

    def store(
        self,
        items: Sequence[Item],
        fill: Fill | None,  # noqa: ARG002 - always None
        slots: Sequence[memoryview],
    ) -> Awaitable[list[Outcome]]:
        return self._outbound.put(blobs_of(items, slots))

    def stored(self, share: Share, positions: Sequence[int], nbytes: int) -> None:
        share.done(positions, nbytes)


class PeerSource:
    """The sender of one transfer as a source: it has every object once the transfer has begun."""

    slots_at_once: int | None = None
    asks_first = True
    tries = 1
    index = NO_INDEX
    levels = None

    def __init__(self, inbound: Inbound, threads: Threads) -> None:
        self.load = SingleFlight(self._get, threads).run  # the sender sends each object once
        self._inbound = inbound

    def _get(self, items: Sequence[Item], _: Drainer | None, slots: Sequence[memoryview]) -> Awaitable[list[Outcome]]:
        return self._inbound.get(blobs_of(items, slots))

    async def exists(self, names: Sequence[str]) -> list[bool]:
        await self._inbound.begun()
        return [True] * len(names)

    async def quarantine(self, name: str) -> None:
        """Nothing to quarantine: the bytes are in our own staging."""


class PeerHandler:
    """Runs SendTask and ReceiveTask on one rank.

    corrupt: the number of objects that arrived damaged.
    """

    def __init__(self, context: RankContext, peer: PeerPath) -> None:
        self._transport = peer.transport
        self._context = dataclasses.replace(context, staging=peer.staging, format=peer.format)
        self._writer = Writer(self._context)
        self.corrupt = 0

    async def send(self, job: Job) -> RankOutcome:
        task = job.task
        assert isinstance(task, SendTask)
        share = Share(job, self._context)
        names = share.names
        outbound = self._transport.outbound(task.transfer_id, self._context.rank, names)
        try:
            await self._writer.send(share, PeerSink(outbound, names))
            return await self._confirmed(share, outbound)
        finally:
            outbound.end(_ABORTED)  # does nothing if it has already ended

    async def _confirmed(self, share: Share, outbound: Outbound) -> RankOutcome:
        """The outcome, once the receiver has confirmed every object or failed."""
        job = share.job
        if len(share.moved) == job.task.blocks:
            confirming = self._context.background.begin(outbound.taken())
            try:
                if await job.stop.race(confirming):
                    confirming.result()
                    outbound.end(None)
                    return share.outcome()
            except TransferError as error:
                share.failed(error)
        share.moved.clear()
        outbound.end(share.error or _stopped(job))
        return share.outcome()

    async def receive(self, job: Job) -> RankOutcome:
        task = job.task
        assert isinstance(task, ReceiveTask)
        inbound = self._transport.inbound(
            task.transfer_id, self._context.rank, Share(job, self._context).names, task.peer
        )
        reader = Reader(self._context, PeerSource(inbound, self._context.threads))
        try:
            outcome = await reader.load(job)
            return _taken(job, outcome, inbound, reader.corrupt)
        finally:
            inbound.end(_ABORTED)  # does nothing if it has already ended
            self.corrupt += reader.corrupt


def _taken(job: Job, outcome: RankOutcome, inbound: Inbound, corrupt: int) -> RankOutcome:
    """Confirm to the sender that every block arrived, or report why not: then no block counts."""
    complete = len(outcome.moved) == job.task.blocks
    damaged = ErrorInfo("damaged", f"{corrupt} objects arrived damaged")
    inbound.end(None if complete else outcome.error or _stopped(job) or damaged)
    if complete:
        return outcome
    cause = outcome.error if outcome.error or outcome.stop else damaged
    return msgspec.structs.replace(outcome, moved=(), error=cause)


def _stopped(job: Job) -> ErrorInfo | None:
    reason = job.stop.reason
    return None if reason is None else ErrorInfo(str(reason), f"the task was {reason}")
