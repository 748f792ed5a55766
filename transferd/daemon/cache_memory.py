"""The memory of the whole cache: which rank has it, who created it, and how it is cleared and restored.

Theory of operation
-------------------
One side creates the device memory of every rank (ownership.py). If it is the daemon, `open` allocates, once. If it is
the engine, each rank waits for an *offer*: a handle to the engine's memory. The daemon checks the offer (is the owner
alive, do the arrays fit the layout) and maps it, or refuses it and keeps nothing. It announces readiness only when
every rank has memory; until then `missing` and `why` give the reason.

    create:  absent ──open──▶ present ──clear──▶ absent ──restore──▶ present
    attach:  absent ──offer─▶ present ──clear, or the loss of its client──▶ absent ──offer─▶ present

Memory is always removed in one order: admit nothing (the dispatcher then refuses), wait until no rank touches any
block, then free or unmap. So no copy ever uses memory that is being removed.

Memory that shares a byte with another rank, of this or any other engine, is refused (extents.py). A second offer for a
rank is refused as well, unless it comes from the client, or from the process, that made the first one. If it leads to
the same memory, the client has repeated its offer, perhaps because its connection broke; the offer then belongs to the
new connection. If the same handle leads to other memory, the engine has made its memory anew under the old name or
number: tasks of the old memory end, it is unmapped, and the new memory is mapped.

*Clear and restore.* `clear` frees device and host memory. Staging stays: its size is constant, and it holds no block.
The current generation is closed: `restore` requires one that was never closed, and `set_generation` refuses
to go back. So no earlier object or block can be read afterwards. Only an engine that serves the same weights again
(it slept) may reopen a closed generation, because its objects are still valid. The engine's clients remember closed
generations, and send them to the next daemon (docs/adr/0084). Each clear begins a new *epoch*. An offer
names its epoch, because an offer that was in flight during a clear names memory that its engine has freed.

*What others have mapped* (mappings.py). A task is refused while no client has a rank's memory mapped. A client that
attached may still access its arrays after a clear. If the memory outlives its creator's close (POSIX shared memory),
the client reads old bytes that no other process has. If it does not (CUDA IPC), clients must release it first:
`clear` is refused, and touches nothing, until every such client has detached.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from transferd.config.names import GENERATION
from transferd.config.ownership import Creator
from transferd.daemon.coordinator import Coordinator
from transferd.daemon.kv_events.feed import KvEventFeed
from transferd.daemon.mappings import Mappings
from transferd.daemon.memories import memories_of
from transferd.errors import DeviceLost, EngineGone, RequestError, TransferError
from transferd.observability.report import CacheReport
from transferd.observability.units import named_ranks
from transferd.runtime.aio import Background, every
from transferd.runtime.compat import wait_for
from transferd.runtime.threads import Direction
from transferd.storage.tokens import TokenStorage
from transferd.tasks import ErrorInfo
from transferd.tiers.base import DeviceHandle
from transferd.tiers.offered import PASSED, PEER, memory_named, said_of_memory
from transferd.tiers.owner import Owner, check_owner, check_user
from transferd.tiers.segment import remove_stale_segments
from transferd.wire.canary import CHECKED, Canary, taken_from
from transferd.workers.canary import check_canary
from transferd.workers.rank import RankWorker

log = structlog.get_logger(__name__)

T = TypeVar("T")

MOST_CLOSED = 16_384  # closed generations that are remembered, the newest
AGAIN_S = 10.0  # between tries to make lost memory anew
CLEARED = ErrorInfo("cleared", "the cache was cleared; call restore_cache to re-create it")


@dataclass(slots=True, eq=False)
class _MappedOffer:
    """Memory that is mapped from an engine, and the client that offered it last."""

    client: bytes
    handle: DeviceHandle  # without PEER and PASSED
    owner: Owner
    peer: Sequence[int | None]  # [uid, pid] of the client, read from its socket

    def is_from(self, other: _MappedOffer) -> bool:
        """Whether another offer came from the same client, or from the same process on another connection."""
        same_process = self.owner == other.owner and tuple(self.peer) == tuple(other.peer) and None not in self.peer
        return self.client == other.client or same_process


@dataclass(slots=True, eq=False)
class _RankMemory:
    """One rank's memory."""

    number: int
    worker: RankWorker
    present: bool = False
    offer: _MappedOffer | None = None


@dataclass(eq=False, repr=False)
class CacheMemory:
    """Opens, maps, clears and restores every rank's memory. Changed on the loop only, one change at a time.

    tokens: token-indexed storage, if any, which must become ready once every rank has memory.
    next_generation: returns the generation to restore if the request names none.
    epochs: always rising; shared by all engines.
    feed: announces where blocks are.
    epoch_began: called when the cache was cleared.
    renamed: called with the generation that is no longer served (holdings.py).
    """

    core: Coordinator
    creator: Creator
    tokens: TokenStorage | None
    next_generation: Callable[[], str]
    epochs: Iterator[int]
    feed: KvEventFeed
    epoch_began: Callable[[], None]
    renamed: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.epoch = next(self.epochs)
        self.cleared: ErrorInfo | None = None  # why the cache has no memory, and waits for `restore`
        self.core.withdraws = self.lost
        self._ranks = [_RankMemory(number, worker) for number, worker in enumerate(self.core.workers)]
        self._offering: list[bytes] = []  # the clients whose offers are being mapped, but those that have gone
        self._change = asyncio.Lock()
        self._going: set[Callable[[_MappedOffer], bool]] = set()  # they find offers that will be unmapped
        self._changes = Background(awaited=False)
        core, changed = self.core, self.core.dispatcher.mappings_changed
        self._mappings = Mappings(len(self._ranks), lambda *now: core.hear(changed, *now), core.clock.monotonic)
        self._host_memory = asyncio.Event()  # set when the ranks have their host memory, or never will have it
        self._started = False
        self._closing = asyncio.Event()
        self._closed_generations: dict[str, None] = {}  # the oldest first

    # --- observers ----------------------------------------------------------------------------------

    @property
    def missing(self) -> list[int]:
        """Ranks that have no memory."""
        return [rank.number for rank in self._ranks if not rank.present]

    @property
    def owners(self) -> list[int | None]:
        """For each rank, the process that offered its memory."""
        return [None if rank.offer is None else rank.offer.owner.pid for rank in self._ranks]

    @property
    def unattached(self) -> tuple[list[int], float]:
        """Ranks without memory that a client has attached or offered, and since when (monotonic s)."""
        return sorted({*self.missing, *self._mappings.unmapped}), self._mappings.unmapped_since

    @property
    def why(self) -> str:
        """Why memory prevents readiness; "" when every rank has its memory."""
        if self.cleared:
            return self.cleared.message
        if not self._started:
            return "the daemon is starting"
        if not self.missing:
            return ""
        who = "no engine has offered" if self.creator is Creator.ENGINE else "the daemon has not created"
        return f"{who} the memory of {named_ranks(self.missing)}"

    def statistics(self) -> CacheReport:
        return CacheReport(
            creator=str(self.creator),
            epoch=self.epoch,
            cleared=self.cleared is not None,
            missing=self.missing,
            owners=self.owners,
            **self._mappings.statistics(),
        )

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Create the memory, if the daemon creates it, and announce readiness if no rank misses its memory.

        The ranks have their host memory. Raises TierError, StorageError.
        """
        self._host_memory.set()
        async with self._change:
            if self.creator is Creator.DAEMON:
                await every(rank.worker.open_device() for rank in self._ranks)
                for rank in self._ranks:
                    rank.present = True
            self._started = True
            await self._announce()

    async def close(self) -> None:
        """Allow no further change, and wait for the current one. The workers close the ranks' memory."""
        self._closing.set()
        self._host_memory.set()
        await self._changes.ended()

    async def _announce(self) -> None:
        """Announce readiness if no rank misses its memory. Raises StorageError of token-indexed storage."""
        if self._whole and self.tokens is not None:
            await self.tokens.ready()
        if self._whole:  # nothing has gone meanwhile
            self.core.announce_ready()

    @property
    def _whole(self) -> bool:
        """Whether every rank has memory that stays."""
        return self._started and not (self.missing or self._going or self.cleared or self._closing.is_set())

    # --- sharing ------------------------------------------------------------------------------------

    def handle(self, client: bytes, rank: int, epoch: int = 0) -> DeviceHandle:
        """A handle to map a rank's memory; from now on the client counts as having it mapped.

        epoch: that of the memory that the client has already mapped on an earlier connection; 0 for none.
        Raises RequestError, TierError.
        """
        held = self._rank(rank)
        if epoch not in (0, self.epoch):
            self._mappings.outdate(client, rank)
            what = f"the memory mapped for rank {rank} is from epoch {epoch}, it is now {self.epoch}; attach again"
            raise RequestError(what, code="stale_epoch")
        if not held.present:
            raise TransferError(f"rank {rank} has no memory now: {self.why}", code="not_ready")
        device = held.worker.context.device
        # The engine's own memory comes with the daemon's timelines.
        handle = device.handle() if held.offer is None else device.with_timelines(held.offer.handle)
        self._mappings.attach(client, rank)
        return handle

    def memories(self, rank: int | None = None) -> int:
        """How many memories of engines are mapped, of one rank or of all."""
        offers = [one.offer for one in self._ranks if rank in (None, one.number)]
        return sum(memories_of(offer.handle) for offer in offers if offer is not None)

    def detach(self, client: bytes, rank: int) -> None:
        """Note that this client has unmapped the rank's memory. Raises RequestError."""
        self._rank(rank)
        self._mappings.detach(client, rank)

    async def offer(self, client: bytes, rank: int, handle: DeviceHandle, epoch: int) -> str | None:
        """Map an engine's memory as a rank's. Raises RequestError, TierError; then nothing is kept.

        With a canary in the handle, only check it, keep nothing, and return CHECKED. The engine then restores its block
        and offers without a canary.
        """
        data, canary = taken_from(handle.data)
        offered, held = DeviceHandle(handle.kind, data), self._rank(rank)
        if self.creator is Creator.DAEMON:
            what = "the daemon creates the cache here (cache.ownership); attach to it"
            raise RequestError(what, code="not_attachable")
        self._offering.append(client)  # not in `_offer`: the client may leave before that begins
        return await self._finished(self._offer(client, held, offered, epoch, canary))

    async def _offer(
        self, client: bytes, rank: _RankMemory, handle: DeviceHandle, epoch: int, canary: Canary | None
    ) -> str | None:
        try:
            if canary is not None:
                await self._host_memory.wait()  # its block is read into staging
            async with self._change:
                self._check_change()
                if epoch != self.epoch or self.cleared:
                    what = "the offer was made before the cache was cleared" if not self.cleared else CLEARED.message
                    raise RequestError(what, code="stale_offer")
                peer = handle.data.get(PEER, (None, None))
                owner = check_owner(handle.data.get("owner"))
                check_user(owner, peer[0])
                handle = await self._resolved(rank, handle)
                kept = DeviceHandle(handle.kind, {k: v for k, v in handle.data.items() if k not in (PEER, PASSED)})
                offer = _MappedOffer(client, kept, owner, peer)
                if rank.offer is not None and await self._is_repeated(rank, rank.offer, offer):
                    return None
                await rank.worker.open_device(handle)
                if canary is not None:
                    try:
                        await check_canary(rank.worker.context, canary)
                    finally:
                        await self._given_up(rank, rank.worker.close_device())
                    return CHECKED
                rank.offer, rank.present = offer, True
                self._mappings.offer(rank.number, DeviceHandle(kept.kind, memory_named(kept.data)))
                log.info("memory attached", engine=self.core.engine, rank=rank.number, kind=kept.kind, pid=owner.pid)
                try:
                    await self._announce()
                except TransferError:
                    await self._withdraw([rank])
                    raise
                return None
        finally:
            if client in self._offering:
                self._offering.remove(client)
            else:  # the client was lost while its memory was being mapped
                self.client_gone(client)

    async def _resolved(self, rank: _RankMemory, handle: DeviceHandle) -> DeviceHandle:
        """The handle with fields that identify its memory, by which offers are compared."""
        context, what = rank.worker.context, f"opening the memory offered for rank {rank.number}"
        return await context.threads.run(Direction.SETUP, lambda: context.device.resolved(handle), what)

    async def _is_repeated(self, rank: _RankMemory, had: _MappedOffer, offer: _MappedOffer) -> bool:
        """Whether this rank is offered its own memory again. If the client replaces it, unmap the old; return False.

        Raises RequestError if another process has offered the rank's memory.
        """
        same_kind, before, now = had.handle.kind == offer.handle.kind, had.handle.data, offer.handle.data
        if same_kind and memory_named(before) == memory_named(now):
            had.client, had.peer = offer.client, offer.peer
            rank.worker.leaving(False)
            return True
        as_before = same_kind and said_of_memory(before) == said_of_memory(now)
        if not (as_before and had.is_from(offer)):
            what = f"rank {rank.number} has its memory from process {had.owner.pid} already, not from {offer.owner.pid}"
            raise RequestError(what, code="already_attached")
        what = f"the engine has replaced the memory of rank {rank.number}"
        log.warning("memory replaced", engine=self.core.engine, rank=rank.number, pid=offer.owner.pid)
        self.core.withdraw(ErrorInfo("not_attached", what), end=True)
        await self.core.empty()
        await self._withdraw([rank])
        return False

    def client_gone(self, client: bytes) -> None:
        """Drop the client's mappings, and unmap the memory that it offered as soon as no rank touches a block."""
        self._offering = [one for one in self._offering if one != client]
        lost = [rank for rank in self._ranks if rank.offer is not None and rank.offer.client == client]
        self._mappings.leave(client)
        if lost and not self._closing.is_set():
            numbers = [rank.number for rank in lost]
            log.warning("engine gone", engine=self.core.engine, ranks=numbers)
            for rank in lost:
                rank.worker.leaving()
            what = f"the engine that owned the memory of {named_ranks(numbers)} has gone"
            self.core.withdraw(ErrorInfo(EngineGone.code, what), end=True)
            self._let_go(lambda offer: offer.client == client)

    def lost(self, number: int, cause: str) -> bool:
        """Replace a rank's memory that was truncated. Returns False for a device that has no such memory.

        Memory that an engine has offered is unmapped, and the engine offers other memory. Our own is made anew, for all
        ranks and in a new epoch, and clients attach again.
        """
        rank = self._ranks[number]
        offer = rank.offer
        if not rank.worker.context.device.addressable:
            return False
        ours = self.creator is Creator.DAEMON
        if (ours or offer is not None) and not self._closing.is_set() and rank.present:
            pid = os.getpid() if offer is None else offer.owner.pid
            log.error("memory lost", engine=self.core.engine, rank=number, pid=pid, cause=cause)
            rank.present = False
            rank.worker.leaving()
            remedy = "it is made anew, attach again" if ours else "offer other memory"
            error = ErrorInfo(DeviceLost.code, f"{cause}; {remedy}")
            self.core.withdraw(error, end=True)
            if ours:
                self._changes.begin(self._made_anew(error))
            else:
                self._let_go(lambda held: held is offer)
        return True

    async def _made_anew(self, lost: ErrorInfo) -> None:
        """Free the daemon's own memory after a part of it was lost, and make it again for the same generation.

        Tries again until there is room, unless an engine clears or restores the cache meanwhile.
        """
        try:
            await self._clear(lost)
        except TransferError as error:  # the freed memory is no longer used, whatever still holds it
            log.warning("error while releasing memory", engine=self.core.engine, problem=str(error))
        said = ""
        while not self._closing.is_set():
            try:
                await self._restore(self.core.generation, same_weights=True, ours=True)
                return
            except TransferError as error:
                if error.reason in ("not_cleared", "shutdown"):  # a client has restored the cache, or we stop
                    return
                self.cleared = ErrorInfo(DeviceLost.code, f"lost memory cannot be made again: {error}")
                if str(error) != said:
                    said = str(error)
                    log.error("lost memory cannot be made again", engine=self.core.engine, problem=said)
            with contextlib.suppress(TimeoutError):
                await wait_for(self._closing.wait(), AGAIN_S)

    def _let_go(self, which: Callable[[_MappedOffer], bool]) -> None:
        """Unmap offered memory once no task uses it. Until then the cache is not ready, whatever is offered."""
        self._going.add(which)
        self._changes.begin(self._unmapped(which)).add_done_callback(lambda _: self._going.discard(which))

    async def _unmapped(self, which: Callable[[_MappedOffer], bool]) -> None:
        async with self._change:
            await self.core.empty()
            await self._withdraw([rank for rank in self._ranks if rank.offer is not None and which(rank.offer)])
            self._going.discard(which)
            with contextlib.suppress(TransferError):  # from token-indexed storage; the next offer tries again
                await self._announce()  # the same engine may have offered the same memory on another connection

    async def _withdraw(self, ranks: Sequence[_RankMemory]) -> None:
        """Unmap the memory that engines have offered for these ranks. No task may touch a block of them."""
        self.feed.memory_gone(stored=False)
        users = {offer.peer[0] for rank in self._ranks if (offer := rank.offer) is not None}
        for rank in ranks:
            rank.offer, rank.present = None, False
            self._mappings.withdraw(rank.number)
        await every(self._given_up(rank, rank.worker.close_device()) for rank in ranks)
        if ranks:
            removing = functools.partial(remove_stale_segments, {uid for uid in users if uid is not None})
            threads = ranks[0].worker.context.threads
            await self._given_up(ranks[0], threads.run(Direction.SETUP, removing, "removing what engines left"))

    # --- clearing -----------------------------------------------------------------------------------

    async def clear(self, *, keep_host: bool = False) -> int:
        """Free all device and host memory once every admitted task is answered; return the new epoch. Idempotent.

        keep_host: host memory stays allocated and pinned, without a block; a later clear without it frees that memory.
        Raises RequestError; TierError if freeing memory raised an error (the cache is cleared all the same).
        """
        return await self._finished(self._clear(keep_host=keep_host))

    async def _clear(self, lost: ErrorInfo | None = None, *, keep_host: bool = False) -> int:
        """lost: why the memory has vanished; then the generation goes on, and stored blocks stay valid."""
        async with self._change:
            self._check_change()
            if not self._started:
                raise TransferError("the daemon is starting", code="starting")
            if self.cleared:
                if lost is None and self.cleared is not CLEARED:  # a loss has cleared it, and now the engine has
                    self.cleared = CLEARED
                    self.core.withdraw(CLEARED, end=False)
                    self.close_generations([self.core.generation], current=True)
                    self.feed.memory_gone(stored=True)
                await every(rank.worker.free(keep_host=keep_host) for rank in self._ranks)
                return self.epoch
            if lost is None:
                self._check_unmapped()
                if self.tokens is not None:  # else nothing could be restored
                    self.tokens.check_generation(f"{self.core.generation}, and another")
            self.cleared = lost or CLEARED
            self.core.withdraw(self.cleared, end=False)
            await self.core.empty()
            if lost is None:
                self.close_generations([self.core.generation], current=True)
            self.feed.memory_gone(stored=lost is None)
            self.epoch = next(self.epochs)
            for rank in self._ranks:
                rank.offer, rank.present = None, False
            self._mappings.clear()
            self.core.hear(self.core.dispatcher.host_emptied)
            self.epoch_began()
            try:
                await every(rank.worker.free(keep_host=keep_host) for rank in self._ranks)
            finally:
                core = self.core
                log.info("cache cleared", engine=core.engine, epoch=self.epoch, generation=core.generation)
            return self.epoch

    async def restore(self, generation: str | None, *, same_weights: bool = False) -> int:
        """Re-create the memory, or wait for offers, under a generation that was never closed; return the epoch.

        generation: None for `next_generation`.
        same_weights: allow a closed one, and reopen it.

        Raises RequestError, ConfigError for a version file without a version, TierError if there is no room. After an
        error the cache stays cleared.
        """
        return await self._finished(self._restore(generation, same_weights=same_weights))

    async def _restore(self, named: str | None, *, same_weights: bool, ours: bool = False) -> int:
        """ours: restore lost memory of the daemon's; raises `not_cleared` if an engine has cleared the cache."""
        async with self._change:
            self._check_change()
            if not self.cleared or (ours and self.cleared is CLEARED):
                raise RequestError("the cache was not cleared", code="not_cleared")
            generation = self.next_generation() if named is None else named
            reopened = same_weights and generation in self._closed_generations
            if reopened:
                del self._closed_generations[generation]
            self.check_generation(generation)
            try:
                await every(self._recreate(rank.worker) for rank in self._ranks)
                if self.tokens is not None and self.creator is Creator.DAEMON:
                    await self.tokens.ready()
            except TransferError:
                if reopened:
                    self.close_generations([generation], current=True)
                await every(self._given_up(rank, rank.worker.free()) for rank in self._ranks)
                raise
            self._serve(generation)
            for rank in self._ranks:
                rank.present = self.creator is Creator.DAEMON
            self.cleared = None
            log.info("cache restored", engine=self.core.engine, epoch=self.epoch, generation=generation)
            if self._whole:
                self.core.announce_ready()
            return self.epoch

    async def _recreate(self, worker: RankWorker) -> None:
        await worker.allocate_host()
        if self.creator is Creator.DAEMON:
            await worker.open_device()

    def set_generation(self, generation: str) -> None:
        """Use this generation from now on; objects of older ones become unreachable. Raises RequestError."""
        self.check_generation(generation)
        self._serve(generation)

    def _serve(self, generation: str) -> None:
        before = self.core.generation
        self.core.set_generation(generation)
        if generation != before:
            self.feed.generation_changed(generation)
            self.renamed(before)

    def close_generations(self, generations: Sequence[str], *, current: bool = False) -> None:
        """Accept none of these generations again. current: close the served one as well, if it is among them."""
        for generation in generations:
            if current or generation != self.core.generation:
                self._closed_generations.pop(generation, None)
                self._closed_generations[generation] = None
        for oldest in list(self._closed_generations)[: max(0, len(self._closed_generations) - MOST_CLOSED)]:
            del self._closed_generations[oldest]

    def check_generation(self, generation: str) -> None:
        """Raise RequestError for an invalid generation, or one that a clear has closed."""
        if what := GENERATION.wrong(generation):
            raise RequestError(f"{what}, not {generation[:80]!r}", code="bad_value")
        if generation in self._closed_generations:
            what = f"the generation {generation[:80]!r} ended with a clear of the cache"
            raise RequestError(f"{what}; its blocks are never read again", code="closed_generation")
        if self.tokens is not None:
            self.tokens.check_generation(generation)

    def _check_unmapped(self) -> None:
        for rank in self._ranks:
            count = self._mappings.mapped_by(rank.number)
            if count and not rank.worker.context.device.outlives_close:
                what = f"the memory of rank {rank.number} is mapped by {count} clients; detach first"
                raise RequestError(what, code="still_mapped")

    # --- inside -------------------------------------------------------------------------------------

    def _rank(self, number: int) -> _RankMemory:
        if not 0 <= number < len(self._ranks):
            raise RequestError(f"rank must be 0 to {len(self._ranks) - 1}, not {number}", code="bad_value")
        return self._ranks[number]

    def _check_change(self) -> None:
        if self._closing.is_set():
            raise TransferError("the daemon is shutting down", code="shutdown")

    async def _finished(self, change: Coroutine[Any, Any, T]) -> T:
        """Wait for a change. It runs to its end even if the client that requested it leaves."""
        task = self._changes.begin(change)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._heard)
            raise

    def _heard(self, task: asyncio.Future[Any]) -> None:
        """Log a failed change that no caller waits for any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            what = "a change of the cache failed after its client had gone"
            log.warning(what, engine=self.core.engine, problem=str(error))

    async def _given_up(self, rank: _RankMemory, closing: Awaitable[object]) -> None:
        """Close memory that is no longer used, and only log an error."""
        try:
            await closing
        except TransferError as error:
            what = "error while releasing memory"
            log.warning(what, engine=self.core.engine, rank=rank.number, problem=str(error))
