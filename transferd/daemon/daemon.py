"""The daemon: what all engines share, and the one function that shuts everything down.

build   configuration → storage, sockets, reports; the engine of [cache] (engine.py)
open    listen → open storage → open the engine → announce readiness
stop    numbered, within one time budget (`Daemon.stop`)

process.py runs one from its start to its end.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from transferd.blocks.formats import FOOTER_BYTES
from transferd.config import DEFAULT_ENGINE, Config
from transferd.daemon.clients import Clients
from transferd.daemon.coordinator import Coordinator
from transferd.daemon.engine import HostedEngine, Shared, close_ranks
from transferd.daemon.engines import Engines
from transferd.daemon.health import HealthCheck
from transferd.daemon.kv_events.departures import Departures
from transferd.daemon.kv_events.feed import KvEventFeed
from transferd.daemon.kv_events.pool_watch import watch_pool
from transferd.daemon.kv_events.sockets import EventSockets
from transferd.daemon.listing import Listing
from transferd.daemon.preflight import build
from transferd.daemon.requests import Requests
from transferd.daemon.server import Server
from transferd.daemon.shutdown import Shutdown
from transferd.daemon.traffic import KeyTraffic
from transferd.observability.page import PageParts
from transferd.observability.recorder import Recorder
from transferd.observability.report import Report, parts_of, tree
from transferd.observability.status_server import StatusServer
from transferd.observability.story import task_story
from transferd.observability.task_log import TaskLog, TaskMetrics, Windows
from transferd.observability.traces import Traces
from transferd.runtime.aio import every
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.loop_turns import finished
from transferd.runtime.threads import ThreadPools, Threads
from transferd.storage.admission import second_use
from transferd.storage.base import Storage
from transferd.storage.joined import joined
from transferd.storage.peer.transport import PeerTransport
from transferd.tiers.owner import as_data, this_process
from transferd.wire.protocol import encoded
from transferd.wire.transport import ServerTransport, ZmqServerTransport
from transferd.workers.context import INLINE_CHECK_BYTES

log = structlog.get_logger(__name__)

COPY_THREADS = 2  # per direction: two ranks' copies overlap; more only share the same memory bandwidth
SETUP_THREADS = 16  # the most ranks that a server's engine has; their memory is allocated in parallel
RUNNING_SHARE = 0.5  # the share of the shutdown budget for running tasks, and of the rest for stopping tasks
LEAVING_SHARE = 0.9  # the share of the budget then left for copies to other nodes, at most
FLUSH_SHARE = 0.5  # the share of the budget then left for copies to slower levels of storage
STUCK_AFTER_S = 5.0  # if a deadline is overdue by this much, stop feeding the watchdog


class Daemon:
    """What engines share, and the engines by name. Owns every part, from `open` to `stop`."""

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
        self.clock = clock
        self.boot_id = clock.fresh_id()
        self.recorder = Recorder(config.recorder.tasks, clock)
        plan = build(config, clock, storage)
        self.tokens, self.storage = plan.tokens, plan.storage
        self.threads = threads if threads is not None else ThreadPools(COPY_THREADS, setup=SETUP_THREADS, native=0)
        if self.storage is not None:
            self.storage = joined(self.storage, self.threads, inline_check_bytes)
            self.storage.index.expect(_plausible if plan.engine is None else plan.engine.objects.possible)
        self.peers = _build_peers(config)
        self.events = EventSockets(config.events, config.server, clock)
        self.transport = transport if transport is not None else ZmqServerTransport(config.server)
        self.clients = Clients(self.transport, self.boot_id, self.recorder)
        self.traces: Traces | None = None
        if config.traces.endpoint:
            self.traces = Traces(config.traces.endpoint, config.traces.sample, self.boot_id, wall=clock.wall)
        metrics, self.windows = TaskMetrics(*([] if config.cache is None else [DEFAULT_ENGINE])), Windows(clock)
        observers = [metrics.ended, self.windows.ended, *([] if self.traces is None else [self.traces.ended])]
        self.tasks = TaskLog(clock, observers, [metrics.left])
        shared = Shared(
            boot_id=self.boot_id,
            clock=clock,
            recorder=self.recorder,
            threads=self.threads,
            storage=self.storage,
            peers=self.peers,
            clients=self.clients,
            events=self.events,
            departures=Departures(self.storage),
            tasks=self.tasks,
            inline_check_bytes=inline_check_bytes,
            traffic=KeyTraffic(self.storage, clock, second_use(config.storage, clock.monotonic)),
        )
        self.engines = Engines(config, shared, self.clients, plan)
        self.listing = Listing(self.engines)
        self._health = HealthCheck(self, self.listing)
        self.server = self._build_server()
        self.reports = self._build_reports(metrics)
        self.started_at = clock.monotonic()
        self._pool_watch: asyncio.Task[None] | None = None

    def _build_reports(self, tasks: TaskMetrics) -> StatusServer:
        return StatusServer(
            self.config.metrics.listen,
            self._health.viewed,
            lambda: self.alive,
            lambda: self.not_ready,
            live=PageParts(self.listing.timeline, self.listing.tasks, self._health.history),
            explain=self.explain,
            hosts=self.config.metrics.hosts,
            tasks=tasks,
        )

    def _build_server(self) -> Server:
        report = functools.partial(self._health.viewed.made, _for_the_wire)
        return Server(
            self.engines,
            Requests(self.engines, self.listing, report, self.explain),
            process=as_data(this_process()) if isinstance(self.transport, ZmqServerTransport) else {},
            hello_arrived=self._health.hello_arrived,
        )

    @property
    def default(self) -> HostedEngine:
        """The engine of [cache], which must exist."""
        engine = self.engines.own
        assert engine is not None
        return engine

    def _feeds(self) -> list[KvEventFeed]:
        return [engine.kv_events for engine in self.engines if engine.kv_events.has_followers]

    @property
    def host_bytes(self) -> int:
        """Host memory of all ranks: staging and host tiers."""
        return sum(worker.host_bytes for engine in self.engines for worker in engine.workers)

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Listen, open storage and the engine. Raises TransferError; then call `stop`, which cleans up.

        Because it listens first, a second daemon on the same socket is refused before it allocates anything,
        and an early client gets "not ready" instead of no answer.
        """
        self.threads.open()
        await self.server.start()  # first: the error names the pid of a daemon that has the endpoint
        await self.reports.start()
        if self.traces is not None:
            self.traces.start()
        if self.config.events.endpoint:
            self.events.start()
            log.info(
                "publishing KV events",
                endpoint=self.events.endpoint,
                replay_endpoint=self.events.replay_endpoint,
                token_ids=self.config.events.token_ids,
            )
        for engine in self.engines:
            engine.kv_events.start()
        for part in (self.storage, self.peers):
            if part is not None:
                await part.open()
        if self.storage is not None and self.storage.pool is not None:
            self._pool_watch = asyncio.get_running_loop().create_task(watch_pool(self.storage, self._feeds))
        for engine in self.engines:
            engine.storage_share = self.engines.holdings.share_of(None)
            self.engines.holdings.came(engine)
            await engine.open()
        self.engines.opened.set()

    async def stop(self, budget_s: Callable[[], float]) -> list[str]:
        """Shut down, in this order, within the budget, without skipping a step. Returns the names of steps that hang.

        A step hangs if a copy or a call into storage never returns. Its memory is kept, and the caller must end the
        process. If nothing hangs, raises the first error of a step at the end.

        budget_s: returns the seconds left. Called before and during each wait, so that a second signal can shorten it.
        """
        shutdown = Shutdown(budget_s, self.clock)
        step, engines = shutdown.step, list(self.engines)
        leaving_s = self.config.storage.drain_at_stop  # a part of the budget for copies to other nodes alone
        self.engines.closed = True
        coordinators = [engine.coordinator for engine in engines]
        # 1. Admit nothing more: new tasks are rejected ("draining"), and /readyz reports not ready.
        for coordinator in coordinators:
            coordinator.ready = False
            coordinator.hear(coordinator.dispatcher.shut_down)
        # 2. Wait for running tasks; when half of the budget is gone, make them end with what they have.
        if not await shutdown.within((budget_s() - leaving_s) * RUNNING_SHARE, _quiet(coordinators)):
            log.warning("ending running tasks", tasks=sum(c.cancel_running() for c in coordinators))
            ending_s = max((budget_s() - leaving_s) * RUNNING_SHARE, self.config.server.deadline_slack)
            await shutdown.within(ending_s, _quiet(coordinators))
        # 3. Fail what is queued, each task with its result.
        for coordinator in coordinators:
            coordinator.hear(coordinator.dispatcher.abandon_queue)
        if leaving_s and self.storage is not None:  # while reports still say how far it is
            flush_s = (budget_s() - leaving_s) * RUNNING_SHARE
            leaving = _leave(self.storage, flush_s, min(leaving_s, budget_s() * LEAVING_SHARE))
            await step("copies to other nodes", leaving)
        # 4. Close what faces outward: events and reports, then the server, once its results were sent.
        await every(engine.kv_events.close() for engine in engines)
        if self._pool_watch is not None:
            self._pool_watch.cancel()
        self.events.close()
        self._health.close()
        await step("reports", self.reports.close())
        if self.traces is not None:
            await step("traces", self.traces.close())
        await step("server", self.server.close())
        for coordinator in coordinators:
            coordinator.close()
        await step("engines that were leaving", self.engines.settled())
        # 5. Close what moves blocks, and threads.
        await self._close_inside(engines, shutdown, budget_s)
        shutdown.hanging += self.threads.close()
        if shutdown.errors and not shutdown.hanging:
            raise shutdown.errors[0]
        return shutdown.hanging

    async def _close_inside(
        self, engines: Sequence[HostedEngine], shutdown: Shutdown, budget_s: Callable[[], float]
    ) -> None:
        """Close the caches (no more changes), workers (they wait for bytes in flight), peers and storage."""
        step = shutdown.step
        for engine in engines:
            await step("cache", engine.cache.close())
        if self.peers is not None:
            await step("peers", self.peers.hang_up())  # or a peer that hangs could keep bytes in flight
        await close_ranks(engines, shutdown)
        if self.peers is not None:
            await step("peers", self.peers.close())
        if self.tokens is not None:
            await step("storage", self.tokens.close())
        if self.storage is not None:
            if self.storage.levels is not None:
                flush = self.storage.levels.flush(max(0.0, budget_s() * FLUSH_SHARE))
                await step("copies between levels of storage", flush)
            await step("storage", self.storage.close())
        if shutdown.hanging and self.storage is not None:
            shutdown.hanging += self.storage.abandon()

    # --- observers ----------------------------------------------------------------------------------

    def report(self) -> Report:
        """The daemon's report as it is now."""
        return finished(self._health.report())

    def stats(self) -> dict[str, Any]:
        """The report as plain data, for clients."""
        return tree(self.report())

    def explain(self, task_id: str, engine: str = "", asker: str = "") -> dict[str, Any]:
        """The story of a task, even if its engine has left. Raises RequestError, code `unknown_task`.

        engine: only of this engine; "" for any. Several engines may have had a task of this id: then that of the
        `asker` counts, else the newest; `also` names the others.
        """
        notes = self.recorder.notes(task_id, of_any=True) if task_id else []  # "" has the daemon's own notes
        return task_story(task_id, notes, engine, asker, wall=self.clock.wall(), monotonic=self.clock.monotonic())

    def refused(self) -> dict[str, int]:
        """Connections and requests refused since the start, by reason."""
        counts = Counter(self.transport.refused())
        counts.update(self.reports.refused())
        counts.update(self.events.refused())
        return dict(counts)

    @property
    def alive(self) -> bool:
        """Whether the dispatcher makes progress or is idle; for the watchdog and /healthz.

        A slow task does not count as a problem; an overdue deadline that has not fired does.
        """
        return all(engine.coordinator.overdue_s < STUCK_AFTER_S for engine in self.engines.all)

    @property
    def not_ready(self) -> str:
        """Why tasks are not served now, or no engine can register; "" if all is well."""
        if self.engines.own is not None:
            return self.engines.own.why_not_served
        if self.engines.closed:
            return "stopping"
        return "" if self.engines.opened.is_set() else "the daemon is starting"


async def _quiet(coordinators: Sequence[Coordinator]) -> None:
    """Wait until no rank of any engine touches a block."""
    for coordinator in coordinators:
        await coordinator.quiet()  # it stays quiet: nothing is admitted, and no queued task starts


async def _leave(storage: Storage, flush_s: float, within_s: float) -> None:
    """Copy the objects that only this node has to other nodes, for so long at most. flush_s: before, down to it."""
    if storage.pool is None:
        return
    if storage.levels is not None:
        await storage.levels.flush(flush_s)
    await storage.pool.leave(within_s)


def _build_peers(config: Config) -> PeerTransport | None:
    """In pd.mode "direct", the transport to other daemons; otherwise None."""
    if config.pd.mode != "direct":
        return None
    from transferd.storage.peer.transfer_engine import TransferEngineCarrier  # with the Mooncake backend's modules

    carrier = TransferEngineCarrier(config.pd, config.storage.mooncake.native_log)
    return PeerTransport(carrier, config.pd.listen, config.geometry.ranks)


def _for_the_wire(report: Report) -> Any:
    return encoded(parts_of(report))


def _plausible(name: str, nbytes: int) -> bool:  # noqa: ARG001 - no layout is known yet that would tell the length
    """Whether a stored object could be one of ours."""
    return nbytes > FOOTER_BYTES
