"""The daemon: the one place where the parts are put together, and the one function that takes them apart.

build   configuration → layout, storage, barrier, dispatcher, ranks (what needs no memory: preflight.py)
open    listen → open storage and every rank → announce readiness
stop    numbered, within one time budget (`Daemon.stop`)

process.py runs one from its start to its end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from transferd.barrier import RankBarrier
from transferd.blocks.formats import SealedBlocks
from transferd.blocks.layout import BlockLayout
from transferd.config import Config
from transferd.config.generation import generation_of
from transferd.config.ownership import creator
from transferd.control.admission import Limits
from transferd.control.dispatcher import Dispatcher
from transferd.daemon import stats as report
from transferd.daemon.cache_memory import CacheMemory
from transferd.daemon.clients import Clients
from transferd.daemon.coordinator import Coordinator, Listeners
from transferd.daemon.kv_events.feed import EventFeed, create_feed
from transferd.daemon.listing import Listing
from transferd.daemon.lookup import Lookup
from transferd.daemon.preflight import build
from transferd.daemon.server import Greeting, Server
from transferd.daemon.shutdown import Shutdown
from transferd.observability.history import TaskHistory
from transferd.observability.metrics import StatusServer
from transferd.observability.recorder import Recorder
from transferd.observability.story import task_story
from transferd.runtime.aio import every
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.threads import ThreadPools, Threads
from transferd.storage.attention_store.settings import settings
from transferd.storage.base import Storage
from transferd.storage.divided import divided
from transferd.storage.peer.transfer_engine import TransferEngineCarrier
from transferd.storage.peer.transport import PeerTransport
from transferd.storage.tokens import TokenStorage
from transferd.tasks import Task, TaskResult
from transferd.tiers.pinned import HostPool
from transferd.tiers.registry import create_device_tier, create_pinning
from transferd.tiers.staging import Staging
from transferd.wire.transport import ServerTransport, ZmqServerTransport
from transferd.workers.context import INLINE_CHECK_BYTES, Background, PeerPath, RankContext
from transferd.workers.rank import RankWorker

log = structlog.get_logger(__name__)

COPY_THREADS = 2  # per direction: two ranks' copies overlap; more only share the same memory bandwidth
RUNNING_SHARE = 0.5  # of the shutdown budget is for tasks that run; of the rest, for those told to end
STUCK_AFTER_S = 5.0  # a deadline unnoticed for this long: the watchdog is not fed


class Daemon:
    """All parts of one daemon. Owns every one of them, from `open` to `stop`."""

    def __init__(
        self,
        config: Config,
        *,
        transport: ServerTransport | None = None,
        threads: Threads | None = None,
        storage: Storage | None = None,
        clock: Clock = SYSTEM_CLOCK,
        inline_check_bytes: int = INLINE_CHECK_BYTES,
    ) -> None:
        """Build, and allocate host memory. The keyword parts replace the real ones (simulation). Raises ConfigError."""
        self.config = config
        self._inline_check_bytes = inline_check_bytes
        self.clock = clock
        self.recorder = Recorder(config.recorder.tasks, clock)
        self.history = TaskHistory()
        plan = build(config, clock, storage)
        self.layout, self.tokens, self.storage = plan.layout, plan.tokens, plan.storage
        self.only_flush = self.tokens is not None and settings(config).only_flush
        self.threads = threads if threads is not None else ThreadPools(COPY_THREADS)
        self.objects = plan.objects
        self.blocks = None if self.storage is None else divided(self.storage, self.objects.parts)
        if self.storage is not None:
            self.storage.expect(self.objects.possible)
        self.dispatcher = self._build_dispatcher(plan.generation)
        self.barrier = RankBarrier(config.cache.ranks)
        self.peers = _build_peers(config)
        self.workers = [self._build_rank(rank, self.peers) for rank in range(config.cache.ranks)]
        self.transport = transport if transport is not None else ZmqServerTransport(config.server)
        self.clients = Clients(self.transport, self.dispatcher.boot_id, recorder=self.recorder)
        self.listing = Listing(self)
        self.reports = StatusServer(
            config.metrics.listen,
            self.stats,
            lambda: self.alive,
            lambda: self.not_ready,
            tasks=self.listing.timeline,
            explain=self.explain,
        )
        self.events = self._build_events()
        listeners = _listeners(self.clients, self.reports, self.history, self.events, clock)
        self.coordinator = Coordinator(
            self.dispatcher, self.barrier, self.workers, listeners, clock=clock, recorder=self.recorder
        )
        self.cache = _build_cache(config, self.workers, self.coordinator, self.tokens)
        self.lookup = self._build_lookup(self.workers, self.cache, self.events)
        self.server = self._build_server(self.clients, self.coordinator, self.cache, self.lookup)
        self.started_at = clock.monotonic()

    def _build_dispatcher(self, generation: str) -> Dispatcher:
        config = self.config
        limits = limits_of(
            config,
            self.layout,
            storage=self.storage is not None or self.tokens is not None,
            token_block=0 if self.tokens is None else config.cache.block_size,
            only_flush=self.only_flush,
            direct=config.pd.mode == "direct",
        )
        return Dispatcher(
            limits,
            boot_id=self.clock.fresh_id(),
            generation=generation,
            recorder=self.recorder,
            admitting=False,
        )

    def _build_rank(self, rank: int, peers: PeerTransport | None) -> RankWorker:
        config, layout = self.config, self.layout
        device = create_device_tier(config, layout, rank, self.threads)
        pinning = create_pinning(config, rank)
        context = RankContext(
            rank=rank,
            layout=layout,
            device=device,
            host=HostPool(layout, rank, pinning) if layout.host_blocks else None,
            staging=Staging(
                layout, config.host.staging, self.objects.slot_bytes, self.objects.offsets, pinning=pinning
            ),
            storage=self.blocks,
            format=self.objects,
            threads=self.threads,
            clock=self.clock,
            recorder=self.recorder,
            background=Background(),
            peer=None if peers is None else _peer_path(config, layout, peers),
            inline_check_bytes=self._inline_check_bytes,
            tokens=self.tokens,
            block_size=config.cache.block_size,
            only_flush=self.only_flush,
        )
        return RankWorker(context)

    def _build_events(self) -> EventFeed | None:
        return create_feed(
            self.config,
            self.objects,
            self.blocks,
            generation=self.dispatcher.generation,
            tokens=self.tokens,
            only_flush=self.only_flush,
            clock=self.clock,
        )

    def _build_lookup(self, workers: Sequence[RankWorker], cache: CacheMemory, events: EventFeed | None) -> Lookup:
        return Lookup(
            workers,
            self.dispatcher,
            cache,
            self.objects,
            storage=self.storage is not None,
            tokens=self.tokens,
            index=(lambda: None) if events is None else events.up_to_date,
        )

    def _build_server(self, clients: Clients, coordinator: Coordinator, cache: CacheMemory, lookup: Lookup) -> Server:
        config, peers = self.config, self.peers
        return Server(
            clients,
            coordinator,
            cache,
            lookup,
            greeting=Greeting(
                max_message=config.server.max_message,
                block_size=config.cache.block_size,
                pd_mode=config.pd.mode,
                pd_address=str if peers is None else lambda: peers.address,
            ),
            stats=self.stats,
            explain=self.explain,
            listing=self.listing,
            client_timeout=config.server.client_timeout,
            observer_rate=config.server.observer_rate,
            clock=self.clock,
            recorder=self.recorder,
        )

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Listen, open storage and every rank; ready last (if it is the engine that creates the cache, once it has
        offered every rank's memory, which may be after this returns). Raises TransferError; then `stop` cleans up.

        Listening first means that a second daemon on the socket is refused before it allocates anything,
        and that a client that comes early is told "not ready" instead of nothing.
        """
        self.threads.open()
        await self.reports.start()
        await self.server.start()
        if self.events is not None:
            self.events.start()
        if self.tokens is not None:
            await self.tokens.open()
        elif self.storage is not None:
            await self.storage.open()
        if self.peers is not None:
            await self.peers.open()
        for worker in self.workers:
            await worker.open()
        await self.cache.open()

    async def stop(self, budget_s: Callable[[], float]) -> list[str]:
        """Shut down, in this order, within the budget; nothing is skipped. Returns what does not end.

        That is a copy, or a call into storage, that never returns. Its memory is kept; the caller has to end the
        process. If nothing hangs, the first error of a step is raised last.

        budget_s: seconds left, asked before and during each wait, so that a second signal can shorten it.
        """
        shutdown = Shutdown(budget_s, self.clock)
        step, coordinator = shutdown.step, self.coordinator
        # 1. Admit nothing more: new tasks are rejected, "draining"; readiness goes red.
        coordinator.ready = False
        coordinator.stop_admitting()
        # 2. Wait for running tasks; when half of the budget is gone, tell them to end with what they have.
        if not await shutdown.within(budget_s() * RUNNING_SHARE, coordinator.quiet()):
            log.warning("ending running tasks", tasks=coordinator.cancel_running())
            ending_s = max(budget_s() * RUNNING_SHARE, self.config.server.deadline_slack)
            await shutdown.within(ending_s, coordinator.quiet())
        # 3. Fail what is queued, each task with its result.
        coordinator.fail_queued()
        # 4. Close what faces outward: events and reports, then the server once its results have left.
        if self.events is not None:
            self.events.close()
        await step("reports", self.reports.close())
        await step("server", self.server.close())
        coordinator.close()
        # 5. Close the cache (no more changes), workers (they wait for bytes in flight), the ways in and out, threads.
        await step("cache", self.cache.close())
        if self.peers is not None:
            await step("peers", self.peers.hang_up())  # or a peer that hangs could keep bytes in flight
        await self._close_ranks(shutdown)
        if self.peers is not None:
            await step("peers", self.peers.close())
        if self.tokens is not None:
            await step("storage", self.tokens.close())
        elif self.storage is not None:
            await step("storage", self.storage.close())
        if shutdown.hanging and self.storage is not None:
            shutdown.hanging += self.storage.abandon()
        shutdown.hanging += self.threads.close()
        if shutdown.errors and not shutdown.hanging:
            raise shutdown.errors[0]
        return shutdown.hanging

    async def _close_ranks(self, shutdown: Shutdown) -> None:
        """All ranks wait for their bytes together; then each one's memory is freed, unless bytes still move in it."""
        workers = self.workers
        names = [f"rank {worker.rank}" for worker in workers]
        settled = await every(
            shutdown.step(f"{name}: bytes in flight", worker.settled())
            for name, worker in zip(names, workers, strict=True)
        )
        for name, worker, quiet in zip(names, workers, settled, strict=True):
            if quiet:
                await shutdown.step(name, worker.close())

    # --- what can be seen from outside --------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """See stats.py."""
        return report.stats(self)

    def explain(self, task_id: str) -> dict[str, Any]:
        """The life of a task. Raises RequestError, code `unknown_task`."""
        notes = self.recorder.notes(task_id) if task_id else []  # "" has the daemon's own notes
        return task_story(task_id, notes, wall=self.clock.wall(), monotonic=self.clock.monotonic())

    @property
    def alive(self) -> bool:
        """The dispatcher moves, or has nothing to do. What the watchdog and /healthz ask.

        A slow task is no reason for alarm, a deadline that passes without being noticed is.
        """
        return self.coordinator.overdue_s < STUCK_AFTER_S

    @property
    def not_ready(self) -> str:
        """Why tasks are not served now; "" when they are."""
        if not self.coordinator.ready:
            return self.cache.why or "stopping, or a rank has died"
        return "" if self.coordinator.admitting else "draining"


def _build_peers(config: Config) -> PeerTransport | None:
    """In pd.mode "direct", what other daemons send to and receive from."""
    if config.pd.mode != "direct":
        return None
    return PeerTransport(TransferEngineCarrier(config), config.pd.listen, config.cache.ranks)


def _peer_path(config: Config, layout: BlockLayout, peers: PeerTransport) -> PeerPath:
    sealed = SealedBlocks(config.storage.model, layout)  # between daemons, whatever storage has
    staging = Staging(layout, config.pd.staging, sealed.slot_bytes, sealed.offsets, key="pd.staging")
    return PeerPath(peers, staging, sealed)


def _listeners(
    clients: Clients, reports: StatusServer, history: TaskHistory, events: EventFeed | None, clock: Clock
) -> Listeners:
    def ended(task: Task, result: TaskResult) -> None:
        reports.tasks.observe_result(task, result)
        history.ended(task, result, clock.monotonic())
        if events is not None:
            events.task_ended(task, result)

    if events is None:
        return Listeners(clients.deliver, ended, lambda _: None, lambda _: None, clients.announce_epoch)
    return Listeners(clients.deliver, ended, events.memory_gone, events.generation_changed, clients.announce_epoch)


def _build_cache(
    config: Config, workers: Sequence[RankWorker], coordinator: Coordinator, tokens: TokenStorage | None
) -> CacheMemory:
    file = config.storage.version_file
    next_generation = functools.partial(generation_of, file) if file else None
    return CacheMemory(workers, coordinator, creator(config), tokens=tokens, next_generation=next_generation)


def limits_of(
    config: Config,
    layout: BlockLayout,
    *,
    storage: bool,
    token_block: int = 0,
    only_flush: bool = False,
    direct: bool = False,
) -> Limits:
    """Admission's view of the configuration."""
    return Limits(
        ranks=config.cache.ranks,
        device_blocks=layout.device_blocks,
        host_blocks=layout.host_blocks,
        block_bytes=layout.block_bytes,
        storage=storage,
        direct=direct,
        token_block=token_block,
        only_flush=only_flush,
        max_queued=config.server.max_queued_tasks,
        max_queued_bytes=config.server.max_queued_bytes,
        max_bytes=config.server.max_inflight_bytes,
        lane_depth=config.server.lane_depth,
        deadline_slack=config.server.deadline_slack,
        result_ttl=config.server.result_ttl,
        max_results=config.server.max_results,
        max_result_bytes=config.server.max_result_bytes,
    )
