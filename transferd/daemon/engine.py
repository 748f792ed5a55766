"""One engine as the daemon hosts it: its ranks, their memory, its tasks. docs/adr/0040 lists what engines share.

build   geometry → barrier, dispatcher, ranks, coordinator, cache memory
open    register stagings with storage, create memory or wait for it; then the engine is ready
close   in the order of `Daemon.stop`, which closes all engines together
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transferd.barrier import RankBarrier
from transferd.blocks.formats import SealedBlocks
from transferd.config import DEFAULT_ENGINE
from transferd.config.generation import generation_of
from transferd.config.loading import to_tree
from transferd.config.ownership import creator
from transferd.control.admission import Limits
from transferd.control.byte_ranges import ByteRanges
from transferd.control.dispatcher import Dispatcher
from transferd.control.engine_bounds import Total
from transferd.control.order import Claim
from transferd.daemon.belonging import digest
from transferd.daemon.cache_memory import CacheMemory
from transferd.daemon.coordinator import Coordinator
from transferd.daemon.kv_events.departures import Departures
from transferd.daemon.kv_events.feed import KvEventFeed
from transferd.daemon.kv_events.sockets import EventSockets
from transferd.daemon.preflight import EnginePlan
from transferd.daemon.shutdown import Shutdown
from transferd.daemon.traffic import KeyTraffic
from transferd.daemon.weights import Origin
from transferd.observability.recorder import Recorder
from transferd.observability.report import RankReport
from transferd.observability.task_log import Ran, TaskLog
from transferd.runtime.aio import Background, every
from transferd.runtime.clock import Clock
from transferd.runtime.loop_turns import OneATurn
from transferd.runtime.threads import Threads
from transferd.storage.base import Storage
from transferd.storage.divided import divided
from transferd.storage.peer.transport import PeerTransport
from transferd.storage.queues import EngineOwner
from transferd.tasks import ErrorInfo, Task, TaskResult
from transferd.tiers.extents import Claims
from transferd.tiers.pinned import HostPool, Pinning
from transferd.tiers.registry import create_device_tier, create_pinning
from transferd.tiers.staging import CHUNK_BYTES, Staging
from transferd.wire import protocol as wire
from transferd.workers.context import INLINE_CHECK_BYTES, PeerPath, RankContext
from transferd.workers.rank import RankWorker

# Ranks of an engine that registers and make or free memory at once, which takes minutes for terabytes. The rest of the
# daemon's threads for that (daemon.py) is for engines that come, offer or leave meanwhile.
SET_UP_AT_ONCE = 12


class Speakers(Protocol):
    """The part of the daemon's clients (clients.py) that an engine needs."""

    def deliver(self, client: bytes, seq: int, result: TaskResult) -> None:
        """Send one terminal result to the client that waits for it."""

    def progressed(self, client: bytes, seq: int, layers: int) -> None:
        """Report the part of a task that is there."""

    def say_hello(self, engine: HostedEngine, why: str) -> None:
        """Make the clients of an engine say Hello."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the daemon lends to its engines, and closes after them."""

    boot_id: str
    clock: Clock
    recorder: Recorder
    threads: Threads
    storage: Storage | None  # None without a keyed backend
    peers: PeerTransport | None  # set in pd.mode "direct"
    clients: Speakers
    events: EventSockets  # the sockets of KV events
    departures: Departures
    tasks: TaskLog  # gets every answered task
    traffic: KeyTraffic  # gets every look-up and answered task
    inline_check_bytes: int = INLINE_CHECK_BYTES
    claims: Claims = field(default_factory=Claims)  # on the device memory of all engines
    ranges: ByteRanges[Claim] = field(default_factory=ByteRanges)  # the windows of their tasks
    pieces: OneATurn = field(default_factory=OneATurn)  # of requests with many keys


@dataclass(frozen=True, slots=True, eq=False)
class Registrant:
    """A client's registration, and the user id and process of the client; None on tcp."""

    asked: wire.Register
    uid: int | None
    pid: int | None


@dataclass(eq=False, repr=False)
class HostedEngine:
    """All parts of one engine. Owns every one of them; borrows `shared`.

    To make one allocates host memory, perhaps in a thread. Raises ConfigError, TierError.

    registration: None for [cache].
    epochs: never yields a number twice.
    """

    name: str
    plan: EnginePlan
    shared: Shared
    total: Total
    epochs: Iterator[int]
    registration: Registrant | None = None

    def __post_init__(self) -> None:
        name, plan, shared, registration = self.name, self.plan, self.shared, self.registration
        self.token = "" if registration is None else registration.asked.token  # "" for the engine of [cache]
        self.digest = digest(self.token)  # stands for the token in reports
        # The only user whose processes may speak for this engine; None for any.
        self.uid = None if registration is None else registration.uid
        self.owner = EngineOwner(name, self.uid)  # of its objects in storage
        self.config = config = plan.config
        self.block_size = config.geometry.block_size  # tokens of a block, as configured
        self.nbytes, self.configured = plan.sizes.memory, plan.generation
        self.origin = Origin.CONFIGURED if registration is None else Origin.SAID  # of its generation
        self.heard = asyncio.Event()  # set when a client's Hello has named its generation, and when a client has left
        self.storage_share = 0.0  # of the store, kept for it
        self.recorder = shared.recorder.of(name)
        self.layout, self.objects, self.tokens = plan.layout, plan.objects, plan.tokens
        self.blocks = None if shared.storage is None else divided(shared.storage, self.objects.parts)
        self._setting_up = asyncio.Semaphore(sys.maxsize if registration is None else SET_UP_AT_ONCE)
        self.dispatcher = self._build_dispatcher(plan.generation)
        self.barrier = RankBarrier(config.geometry.ranks)
        self.workers = [self._build_rank(rank) for rank in range(config.geometry.ranks)]
        self.kv_events = KvEventFeed(plan, self.blocks, shared.events, shared.departures, name)
        self.coordinator = Coordinator(
            self.dispatcher,
            self.barrier,
            self.workers,
            shared.clients.deliver,
            shared.clients.progressed,
            self._ended,
            clock=shared.clock,
            recorder=self.recorder,
            engine=name,
            owner=self.owner,
        )
        self.cache = self._build_cache()
        self.first_epoch = self.cache.epoch

    def _build_dispatcher(self, generation: str) -> Dispatcher:
        return Dispatcher(
            self._limits(),
            boot_id=self.shared.boot_id,
            generation=generation,
            recorder=self.recorder,
            admitting=False,
            total=self.total,
            ranges=self.shared.ranges,
        )

    def _limits(self) -> Limits:
        """Admission's view of the configuration."""
        config, layout = self.config, self.layout
        return Limits(
            ranks=config.geometry.ranks,
            device_blocks=layout.device_blocks,
            host_blocks=layout.host_blocks,
            block_bytes=layout.block_bytes,
            storage=self.shared.storage is not None or self.tokens is not None,
            direct=config.pd.mode == "direct",
            token_block=0 if self.tokens is None else config.geometry.block_size,
            only_flush=self.plan.only_flush,
            server=config.server,
            salts=self.tokens is not None and self.tokens.salts,
        )

    def _build_rank(self, rank: int) -> RankWorker:
        config, layout, shared = self.config, self.layout, self.shared
        device = create_device_tier(config, layout, rank, shared.threads)
        pinning = create_pinning(config, rank)
        staging = Staging(
            layout,
            config.host.staging,
            self.objects.slot_bytes,
            self.objects.offsets,
            pinning=pinning,
            chunk_bytes=CHUNK_BYTES if self.blocks is None else self.blocks.chunk_bytes,
            later=True,
        )
        staging.memory.rank = object_rank = config.geometry.first_rank + rank
        staging.memory.lender = (self.registration and self.registration.pid) or self.name, object_rank
        context = RankContext(
            rank=rank,
            layout=layout,
            device=device,
            host=HostPool(layout, pinning, later=True) if layout.host_blocks else None,
            staging=staging,
            storage=self.blocks,
            format=self.objects,
            threads=shared.threads,
            clock=shared.clock,
            recorder=self.recorder,
            background=Background(),
            peer=None if config.pd.mode != "direct" or shared.peers is None else self._peer_path(shared.peers, pinning),
            inline_check_bytes=shared.inline_check_bytes,
            tokens=self.tokens,
            block_size=config.geometry.block_size,
            only_flush=self.plan.only_flush,
            engine=self.name,
            claims=shared.claims,
            admission=shared.traffic.admission,
            object_rank=object_rank,
            setting_up=self._setting_up,
        )
        return RankWorker(context)

    def _peer_path(self, peers: PeerTransport, pinning: Pinning) -> PeerPath:
        config, layout = self.config, self.layout
        sealed = SealedBlocks(config.storage.model, layout)  # between daemons, whatever storage uses
        staging = Staging(
            layout, config.pd.staging, sealed.slot_bytes, sealed.offsets, key="pd.staging", pinning=pinning, later=True
        )
        staging.memory.urgent = True  # a decode engine waits for these bytes
        return PeerPath(peers, staging, sealed)

    def _build_cache(self) -> CacheMemory:
        file = self.config.storage.version_file
        return CacheMemory(
            self.coordinator,
            creator(self.config),
            tokens=self.tokens,
            next_generation=lambda: generation_of(file) if file else self.dispatcher.generation,
            epochs=self.epochs,
            feed=self.kv_events,
            epoch_began=lambda: self.shared.clients.say_hello(self, "the cache was cleared"),
        )

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open every rank, then become ready. Requires open storage. Raises TransferError.

        If the inference engine creates the cache, this becomes ready later, once every rank's memory was offered.
        """
        for worker in self.workers:
            worker.watch(self.coordinator.rank_died)
        await every(worker.open() for worker in self.workers)
        await self.cache.open()
        self.kv_events.storage_opened()

    @functools.cached_property
    def identity(self) -> wire.Identity:
        """What clients compare at each new life of the daemon, or of the engine."""
        cache, layout = self.config.geometry, self.layout.fingerprint
        model, group = self.config.storage.model, cache.tensor_parallel_size
        return wire.Identity(model, layout, cache.first_rank, cache.ranks, group)

    @functools.cached_property
    def shared_settings(self) -> dict[str, Any]:
        """The settings that clients must agree with. Omits addresses and paths, which may contain secrets."""
        storage = self.config.storage
        return {
            "cache": to_tree(self.config)["cache"] | {"devices": self.config.geometry.device_of_rank},
            "storage": {
                "backend": storage.title,
                "model": storage.model,
                "key_schema": storage.key_schema,
                "version_file": storage.version_file,
                "attention_store": {
                    "only_flush": self.plan.only_flush,
                    "splitwise_role": storage.attention_store.splitwise_role,
                    "dp_id": storage.attention_store.dp_id,
                },
            },
        }

    @property
    def why_not_ready(self) -> str:
        """Why this engine's tasks are refused now; "" if they are not."""
        if not self.coordinator.ready:
            return self.cache.why or "the daemon is stopping, or a rank has died"
        return "" if self.shared.storage is None else self.shared.storage.unusable()

    @property
    def why_not_served(self) -> str:
        """Why this engine's tasks are not served now; "" if they are. Includes reasons that may pass by themselves."""
        if self.why_not_ready:
            return self.why_not_ready
        hung = next((worker.hung for worker in self.workers if worker.hung), "")
        return hung or ("" if self.dispatcher.gate.refusal is None else "draining")

    def _ended(self, task: Task, result: TaskResult, ran: Ran | None) -> None:
        tasks = self.shared.tasks
        self.shared.traffic.ended(self.coordinator, task, result, asks=self.name in tasks.asking)
        tasks.ended(self.name, task, result, ran)
        if self.kv_events.has_followers:
            self.kv_events.task_ended(task, result)

    def ranks(self) -> list[RankReport]:
        """Its ranks as a report has them."""
        waiting = self.dispatcher.lanes.waiting
        return [worker.statistics(waiting, self.coordinator.skew_s[worker.rank]) for worker in self.workers]

    async def end(self, why: ErrorInfo) -> None:
        """Answer every task, then unmap and free all memory. Waits for running copies and transfers.

        Raises the first error of a rank, after all were closed.
        """
        for worker in self.workers:
            worker.leaving()
        self.coordinator.withdraw(why, end=True)
        await self.coordinator.empty()
        self.coordinator.close()
        await self.kv_events.close()
        await self.cache.close()
        await every(worker.settled() for worker in self.workers)
        await every(worker.close() for worker in self.workers)
        self.dispatcher.results.clear()  # nobody can ask for them, and an engine stays until the collector comes

    def called(self, rank: int) -> str:
        """A rank's name in reports."""
        return f"rank {rank}" if self.name == DEFAULT_ENGINE else f"rank {rank} of engine {self.name}"


async def close_ranks(engines: Sequence[HostedEngine], shutdown: Shutdown) -> None:
    """Wait for all ranks' bytes in flight; then free each rank's memory, unless bytes still move in it."""
    named = [(engine.called(worker.rank), worker) for engine in engines for worker in engine.workers]
    settled = await every(shutdown.step(f"{name}: bytes in flight", worker.settled()) for name, worker in named)
    quiet = (rank for rank, quiet in zip(named, settled, strict=True) if quiet)
    await every(shutdown.step(name, worker.close()) for name, worker in quiet)
