"""Send and receive: blocks from this rank's device to the same rank of another daemon, without storage.

A Sender is a Writer whose objects go to a peer; a Receiver is a Reader whose objects come from one. The
difference is that the receiver sets the pace: a sender gathers only blocks for which the receiver has posted
memory, so it never holds staging while it waits for a peer (storage/peer/__init__.py says why that matters).

A sequence is useful only if it is complete, on both sides. So a sender's blocks count once the receiver has
confirmed all of them, and a receiver confirms only after its last block is on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from transferd.errors import TransferError
from transferd.storage.base import Blob, Outcome
from transferd.storage.lru import Use
from transferd.storage.peer.inbound import Inbound
from transferd.storage.peer.outbound import Outbound
from transferd.tasks import ErrorInfo, RankOutcome, ReceiveTask, SendTask
from transferd.workers.context import Account, RankContext, require
from transferd.workers.job import Job
from transferd.workers.read import Reader
from transferd.workers.write import Writer, _Chunk

_ABORTED = ErrorInfo("internal", "the task's handler ended without a result (bug)")


class Sender(Writer):
    """One SendTask on one rank. Used once."""

    def __init__(self, context: RankContext, outbound: Outbound) -> None:
        super().__init__(context)
        self._outbound = outbound

    async def run(self, job: Job) -> RankOutcome:
        account = Account(job, self._context)
        in_flight: list[_Chunk] = []
        try:
            position = {name: i for i, name in enumerate(self._context.names(job))}
            while names := await self._posted(job, account):
                chunk = await self._send(job, account, [position[name] for name in names])
                if chunk is None:
                    break
                in_flight.append(chunk)
                self._collect(account, in_flight)
                if account.error is not None:
                    break
        except TransferError as error:
            account.failed(error)
        finally:
            await self._wait(job, account, in_flight)
        return await self._confirmed(job, account)

    async def _posted(self, job: Job, account: Account) -> list[str]:
        """Names of objects that the receiver has posted memory for; [] at the end, or if the task is stopped."""
        before = self._context.clock.monotonic()
        asked = self._context.background.spawn(self._outbound.posted(self._chunk_blocks))
        answered = await job.stop.race(asked)
        account.storage_s += self._context.clock.monotonic() - before
        return asked.result() if answered else []

    async def _confirmed(self, job: Job, account: Account) -> RankOutcome:
        """The outcome, once the receiver has confirmed every object or failed."""
        if len(account.moved) == job.task.blocks:
            confirming = self._context.background.spawn(self._outbound.taken())
            try:
                if await job.stop.race(confirming):
                    confirming.result()
                    self._outbound.end(None)
                    return account.outcome()
            except TransferError as error:
                account.failed(error)
        account.moved.clear()
        self._outbound.end(account.error or _stopped(job))
        return account.outcome()

    def _put(self, blobs: Sequence[Blob]) -> Coroutine[Any, Any, list[Outcome]]:
        return self._outbound.put(blobs)


class Receiver(Reader):
    """One ReceiveTask on one rank. Used once."""

    def __init__(self, context: RankContext, inbound: Inbound) -> None:
        super().__init__(context)
        self._inbound = inbound

    async def match(self, names: Sequence[str], use: Use) -> int:  # noqa: ARG002 - no storage counts it
        await self._inbound.begun()
        return len(names)

    async def run(self, job: Job) -> RankOutcome:
        outcome = await super().run(job)
        complete = len(outcome.moved) == job.task.blocks
        damaged = ErrorInfo("damaged", f"{self.corrupt} objects arrived damaged")
        self._inbound.end(None if complete else outcome.error or _stopped(job) or damaged)
        if complete:
            return outcome
        cause = outcome.error if outcome.error or outcome.stop else damaged
        return msgspec.structs.replace(outcome, moved=(), error=cause)

    def _get(self, blobs: Sequence[Blob]) -> Coroutine[Any, Any, list[Outcome]]:
        return self._inbound.get(blobs)

    async def _quarantine(self, name: str) -> None:
        """Nothing to quarantine: the bytes are in our own staging."""


class PeerHandler:
    """Runs SendTask and ReceiveTask on one rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self.corrupt = 0

    async def send(self, job: Job) -> RankOutcome:
        task, peer = job.task, require(self._context.peer)
        assert isinstance(task, SendTask)
        context = dataclasses.replace(self._context, staging=peer.staging, format=peer.format)
        outbound = peer.transport.outbound(task.transfer_id, context.rank, context.names(job))
        try:
            return await Sender(context, outbound).run(job)
        finally:
            outbound.end(_ABORTED)  # does nothing if it has already ended

    async def receive(self, job: Job) -> RankOutcome:
        task, peer = job.task, require(self._context.peer)
        assert isinstance(task, ReceiveTask)
        context = dataclasses.replace(self._context, staging=peer.staging, format=peer.format)
        inbound = peer.transport.inbound(task.transfer_id, context.rank, context.names(job), task.peer)
        receiver = Receiver(context, inbound)
        try:
            return await receiver.run(job)
        finally:
            inbound.end(_ABORTED)  # does nothing if it has already ended
            self.corrupt += receiver.corrupt


def _stopped(job: Job) -> ErrorInfo | None:
    reason = job.stop.reason
    return None if reason is None else ErrorInfo(str(reason), f"the task was {reason}")
