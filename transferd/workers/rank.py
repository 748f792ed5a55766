"""One tensor-parallel rank: its memory, its device, and the handlers that run its share of each task.

A RankWorker starts each job at once and arrives at the barrier exactly once for it, through `arrive`.
An error becomes an outcome that carries it. Only a lost device ends the rank itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any

import msgspec
import structlog

from transferd.control.byte_ranges import WindowGrid
from transferd.errors import DeviceLost, InvariantError, StillRunning, StorageFull, TransferError
from transferd.observability.recorder import LONGEST_TEXT
from transferd.observability.report import LaneReport, RankReport
from transferd.runtime.aio import Rest
from transferd.runtime.threads import Direction, whose
from transferd.tasks import ErrorInfo, Lane, RankOutcome, WriteStorageTask
from transferd.tiers.base import DeviceHandle
from transferd.tiers.extents import MemoryClaim
from transferd.tiers.offered import PEER
from transferd.workers.context import RankContext
from transferd.workers.job import Job, Share
from transferd.workers.peer import PeerHandler
from transferd.workers.read import Reader
from transferd.workers.swap import Swapper
from transferd.workers.tokens import TokenHandler
from transferd.workers.write import Writer

log = structlog.get_logger(__name__)

QUICK_LANES = frozenset({Lane.SWAP_OUT, Lane.SWAP_IN, Lane.READ, Lane.WRITE})
HUNG_S = 5.0  # a call to a device that takes longer hangs: healthy calls take milliseconds

Arrive = Callable[[Job, RankOutcome], None]
Died = Callable[[int, str], None]


class RankWorker:
    """Runs jobs on one rank. Owns the rank's device tier, host pool and staging through its context."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.rank = context.rank
        self.lanes = {lane: LaneReport() for lane in Lane}
        self._reader = reader = Reader(context, context.storage)
        swap, writer = Swapper(context), Writer(context)
        self._handlers: dict[Lane, Callable[[Job], Awaitable[RankOutcome]]] = {
            Lane.SWAP_OUT: swap.run,
            Lane.SWAP_IN: swap.run,
            Lane.READ: reader.load,
            Lane.WRITE: writer.store,
        }
        self._tokens: TokenHandler | None = None
        self._peer: PeerHandler | None = None
        if context.tokens is not None:
            self._tokens = TokenHandler(context, context.tokens, reader, writer)
            self._handlers |= {Lane.READ: self._tokens.read, Lane.WRITE: self._tokens.write}
        if context.peer is not None:
            peer = self._peer = PeerHandler(context, context.peer)
            self._handlers |= {Lane.SEND: peer.send, Lane.RECEIVE: peer.receive}
        self._claim: MemoryClaim | None = None
        self._jobs: set[asyncio.Task[None]] = set()
        self._starting = 0  # tasks that begin in this turn of the loop

    async def open(self) -> None:
        """Allocate host memory, and register staging with storage and with the carrier to other daemons.

        `open_device` opens the device later. Raises TransferError.
        """
        await self._set_up(self._allocate, "allocating host memory")
        if self.context.storage is not None:
            self.context.storage.register(self.context.staging.memory)
        peer = self.context.peer
        if peer is not None:
            peer.transport.carrier.register(peer.staging.memory)

    @property
    def host_bytes(self) -> int:
        """Host memory that `open` allocates."""
        return sum(region.nbytes for region in self.context.regions.values())

    async def _set_up(self, work: Callable[[], None], what: str) -> None:
        """Allocate or free memory on a set-up thread: that takes minutes on a server and must not delay copies."""
        async with self.context.setting_up:
            await self.context.threads.run(Direction.SETUP, work, f"{what} of rank {self.rank}")

    def _allocate(self) -> None:
        for region in self.context.regions.values():
            region.allocate()

    async def open_device(self, handle: DeviceHandle | None = None) -> None:
        """Allocate the device memory, or map what `handle` names. Raises TransferError; then nothing is mapped."""
        context = self.context
        device, tokens = context.device, context.tokens
        await (device.open() if handle is None else device.attach(handle))
        user = handle.data.get(PEER, (None,))[0] if handle is not None and context.layout.windows else None
        try:
            self._claim = await context.claims.take(
                context.engine, self.rank, device.extents(), context.threads, windows_of=user
            )
            if tokens is not None and self._tokens is not None:
                await tokens.attach(self._tokens)
        except BaseException:
            await self._unmap()
            raise

    @property
    def windows(self) -> WindowGrid | None:
        """Where the blocks of the open device lie, if they are windows."""
        context = self.context
        if not context.layout.windows:
            return None
        geometry, (extent,) = context.device.arena.geometry, context.device.extents()
        return WindowGrid(extent.memory, extent.start, int(geometry.strides[0]), int(geometry.nbytes[0]))

    def leaving(self, leaving: bool = True) -> None:
        """Note that the device memory will be unmapped soon, or no longer will be: an engine may wait for its bytes."""
        if self._claim is not None:
            self._claim.leaving = leaving

    async def close_device(self) -> None:
        """Free or unmap the device memory, if there is any. Call it only while no job runs. Raises TierError."""
        if self.context.tokens is not None:
            self.context.tokens.detach(self.rank)
        await self._unmap()

    async def _unmap(self) -> None:
        claim, self._claim = self._claim, None
        try:
            async with self.context.setting_up:
                await self.context.device.close()
        finally:
            if claim is not None:
                self.context.claims.give_back(claim)

    async def free(self, *, keep_host: bool = False) -> None:
        """Free device and host memory; staging stays. Call it only while no job runs.

        keep_host: leave the host pool allocated and pinned. An error does not stop it: it frees the rest, then raises
        the first error.
        """
        errors: list[TransferError] = []
        with _kept(errors):
            await self.close_device()
        if self.context.host is not None and not keep_host:
            with _kept(errors):
                await self._set_up(self.context.host.close, "freeing host blocks")
        if errors:
            raise errors[0]

    async def allocate_host(self) -> None:
        """Allocate the host pool again, zeroed, if `free` has not kept it. Raises TierError."""
        if self.context.host is not None:
            await self._set_up(self.context.host.memory.allocate, "allocating host blocks")

    def watch(self, died: Died) -> None:
        """Have `died` called if the device is found lost while no task runs."""
        self.context.device.on_lost = lambda cause: died(self.rank, cause)

    @property
    def hung(self) -> str:
        """Why this rank cannot serve although nothing has failed; "" if it can."""
        seconds = self.context.device.waiting_s
        return f"the device of rank {self.rank} has not answered for {seconds:.0f} s" if seconds > HUNG_S else ""

    def confirmed(self, job: Job, outcome: RankOutcome) -> RankOutcome:
        """This rank's outcome of a write, without objects that were evicted since. Call it when all ranks are done.

        In a store that is too small for the chain, objects may be evicted for blocks of the same chain nearer the root,
        on any rank, or for blocks of later tasks.
        """
        storage = self.context.storage
        if storage is None or not job.shrunk or not isinstance(job.task, WriteStorageTask):
            return outcome
        names = Share(job, self.context).names
        held = storage.index.find([names[position] for position in outcome.moved], None)
        if held is None:
            return outcome
        moved = [position for position, there in zip(outcome.moved, held, strict=True) if there]
        if len(moved) == len(outcome.moved):
            return outcome
        what = f"{len(outcome.moved) - len(moved)} blocks were evicted to make room for others"
        return msgspec.structs.replace(outcome, moved=moved, error=outcome.error or ErrorInfo(StorageFull.code, what))

    def start(self, job: Job, arrive: Arrive, died: Died) -> None:
        """Begin this rank's share of a task. Returns at once.

        arrive: called once with the outcome.
        died: called after it if the device is lost.
        """
        loop = asyncio.get_running_loop()
        # A task of these lanes may end in its first step, and does not use its asyncio task in that step.
        quick = job.task.lane in QUICK_LANES and self._tokens is None
        if quick and self.context.device.addressable:
            self._starting += 1
            loop.call_soon(self._begin, self._run(job, arrive, died), context=contextvars.copy_context())
        else:
            self._keep(loop.create_task(self._run(job, arrive, died)))

    def _begin(self, run: Coroutine[Any, Any, None]) -> None:
        """Run the first step in the turn of the loop in which an asyncio task would. If it waits, it gets one."""
        self._starting -= 1
        try:
            waits_for = run.send(None)
        except StopIteration:
            return
        self._keep(asyncio.ensure_future(Rest(run, waits_for)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _run(self, job: Job, arrive: Arrive, died: Died) -> None:
        lane = self.lanes[job.task.lane]
        lane.running += 1
        whose.set(self.context.engine)  # in this asyncio task, and in those that it creates
        try:
            outcome = await self._handlers[job.task.lane](job)
        except TransferError as error:
            outcome = self._failure(error.reason, str(error), job, lost=isinstance(error, DeviceLost))
            if isinstance(error, InvariantError):
                self.context.recorder.failure(job.task.task_id, f"rank {self.rank}: {error}")
        except Exception as error:
            log.exception("handler failed", engine=self.context.engine, task_id=job.task.task_id, rank=self.rank)
            self.context.recorder.failure(job.task.task_id, f"rank {self.rank}: {type(error).__name__}: {error}")
            outcome = self._failure(InvariantError.code, f"{type(error).__name__}: {error}", job)
        lane.running -= 1
        lane.bytes += outcome.bytes
        if outcome.error is None:
            lane.done += 1
        else:
            lane.failed += 1
        self.context.recorder.step(job.task.task_id, "arrived", self.rank, len(outcome.moved))
        arrive(job, outcome)
        if outcome.lost and outcome.error is not None:
            died(self.rank, outcome.error.message)

    def _failure(self, code: str, message: str, job: Job, *, lost: bool = False) -> RankOutcome:
        self.context.recorder.note(job.task.task_id, "error", self.rank, code, message[:LONGEST_TEXT])
        return RankOutcome(rank=self.rank, error=ErrorInfo(code, message), lost=lost, queue_s=job.queue_s)

    async def settled(self) -> None:
        """Wait for every copy and transfer. This rank's memory must not be freed before."""
        if self._starting:
            await asyncio.sleep(0)  # the loop keeps the order, so after this they have begun
        if self._jobs:
            await asyncio.wait(self._jobs)
        await self.context.background.settled()

    async def close(self) -> None:
        """Wait until `settled`, then free this rank's memory.

        An error does not stop it: it finishes, then raises StillRunning if that occurred, otherwise the first error.
        """
        await self.settled()
        errors: list[TransferError] = []
        storage, peer = self.context.storage, self.context.peer
        if storage is not None and self.context.staging.memory.allocated:
            with _kept(errors):
                storage.unregister(self.context.staging.memory)
        if peer is not None and peer.staging.memory.allocated:
            with _kept(errors):
                peer.transport.carrier.unregister(peer.staging.memory)
        with _kept(errors):
            await self.close_device()
        if any(region.allocated for region in self.context.regions.values()):
            with _kept(errors):
                await self._set_up(functools.partial(self._free_host, errors), "freeing host memory")
        if errors:
            raise next((error for error in errors if isinstance(error, StillRunning)), errors[0])

    def _free_host(self, errors: list[TransferError]) -> None:
        context = self.context
        for part in (context.staging, None if context.peer is None else context.peer.staging, context.host):
            if part is not None:
                with _kept(errors):
                    part.close()

    @property
    def corrupt(self) -> int:
        """The number of objects that were found and failed their check."""
        return self._reader.corrupt + (0 if self._peer is None else self._peer.corrupt)

    @property
    def missed(self) -> int:
        """The number of keys that reads named and storage did not have."""
        return self._reader.missed

    def statistics(self, queued: Mapping[Lane, int], late_s: float = 0.0) -> RankReport:
        """queued: the tasks of each lane that wait; all ranks share the dispatcher's queue. late_s: see RankReport."""
        device = self.context.device
        return RankReport(
            rank=self.rank,
            device=device.device,
            tier=device.statistics(),
            lanes={str(one): msgspec.structs.replace(lane, queued=queued[one]) for one, lane in self.lanes.items()},
            background=len(self.context.background),
            engine=self.context.engine,
            late_s=late_s,
        )


@contextlib.contextmanager
def _kept(errors: list[TransferError]) -> Iterator[None]:
    """Run one step of a close, and keep its error, so that the next step still runs."""
    try:
        yield
    except TransferError as error:
        errors.append(error)
