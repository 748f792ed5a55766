"""The engines of a daemon by name: who registered them, who speaks for them, and how they leave.

    absent ──register──▶ building ──▶ registered ──unregister, or loss of its last client──▶ leaving ──▶ absent

A client names its engine in every Hello, and shows the token of its registration. It is then *bound* to that engine, so
its requests cannot reach any other one. A client without the token may at most control the engine (belonging.py).

The name is leased: an engine stays while at least one client lives that has registered it, offered or attached its
memory, or pushed a task to it (a client that falls silent counts as lost). As long as it stays, no other client can
register the name. A client that only names the engine, such as that of a restarted engine, does not keep the old one.
Each registration begins a new epoch.

An engine that leaves admits nothing more. Its queued tasks fail, its running tasks are stopped, and once no rank
touches a block its memory is unmapped and freed. Its name is free at once: the next engine shares nothing with it.

The engine of [cache] is called "default". It exists from start to stop; no client can register or unregister it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from transferd.config import DEFAULT_ENGINE, CacheSection, Config, Size, names
from transferd.config.rules import check_cache
from transferd.config.sections import PdSection
from transferd.control.engine_bounds import HostBudget, Total
from transferd.daemon.acts import Acts
from transferd.daemon.belonging import digest, may_control, refusal, shows
from transferd.daemon.clients import Clients, KnownClient
from transferd.daemon.engine import HostedEngine, Registrant, Shared
from transferd.daemon.holdings import Holdings
from transferd.daemon.memories import check_memories, memories_of
from transferd.daemon.prefetches import EnginePrefetches
from transferd.daemon.preflight import EnginePlan, Plan, build_engine, device_bytes, host_memory
from transferd.daemon.weights import Origin, adopted
from transferd.errors import ConfigError, EngineGone, InvariantError, RequestError, TransferError
from transferd.observability.figures import Kinds, of_engine, together
from transferd.observability.report import KindReport
from transferd.runtime.compat import convert, wait_for
from transferd.runtime.limits import memory_total
from transferd.runtime.threads import Direction
from transferd.tasks import ErrorInfo
from transferd.tiers.base import DeviceHandle
from transferd.wire import protocol as wire
from transferd.wire.credentials import hidden

log = structlog.get_logger(__name__)


SHARE = 4  # an engine that registers may have this fraction, 1/SHARE, of the bounds in [server]
MORE_PLACES = 0.25  # of engines.max_engines, one for each user without any, when all are taken
UNREGISTERED = "unregistered"  # how a registration ended: its token is worth nothing any more
MOST_ENDED = 4096  # registrations that have ended and are remembered
LOOK_S = 0.5  # between two looks at tasks that may be settled before the one that is waited for
LEAST_TOKEN = 16  # characters: 64 random bits, if they are hexadecimal digits


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """The counts of engines, those that have left included: the daemon's counters never fall."""

    tasks: Counter[str] = field(default_factory=Counter)
    rejects: Counter[str] = field(default_factory=Counter)
    barrier: Counter[str] = field(default_factory=Counter)
    effects_failed: Counter[str] = field(default_factory=Counter)
    corrupt: int = 0
    missed: int = 0
    lanes: dict[str, KindReport] = field(default_factory=dict)

    def and_of(self, engine: HostedEngine, lanes: Kinds) -> EngineCounts:
        """These counts and those of one more engine."""
        return EngineCounts(
            tasks=self.tasks + engine.dispatcher.statuses,
            rejects=self.rejects + engine.dispatcher.rejects,
            barrier=self.barrier + engine.barrier.counts,
            effects_failed=self.effects_failed + engine.coordinator.effects_failed,
            corrupt=self.corrupt + sum(worker.corrupt for worker in engine.workers),
            missed=self.missed + sum(worker.missed for worker in engine.workers),
            lanes=together([self.lanes, lanes]),
        )


@dataclass(slots=True, eq=False)
class Building:
    """An engine that is being created. waiting: how many clients wait for it."""

    registrant: Registrant
    task: asyncio.Task[HostedEngine]
    waiting: int = 0


class Engines:
    """Registers, finds and dismisses engines. Changed on the loop only. Owns every engine until it has left.

    config: the daemon's.
    own: the engine of [cache]; None without it.
    shared: what the daemon lends to its engines.
    clients: the daemon's; borrowed.
    total: the tasks that all engines together have admitted.
    host: the memory of engines that register.
    holdings: the objects of engines in storage.
    prefetches: the prefetches of all engines.
    traffic: what engines look up and store.
    acts: what operators and engines have ordered.
    leaving: the engines that leave now, each with a task that ends when it has left.
    closed: the daemon stops, and no engine may register any more.
    """

    def __init__(self, config: Config, shared: Shared, clients: Clients, plan: Plan) -> None:
        """Build the engine of [cache], if there is one. Raises ConfigError, TierError."""
        self.config = config
        self.shared = shared
        self.clients = clients
        self.holdings = Holdings(config, shared.storage)
        self.prefetches = EnginePrefetches(config, shared)
        self.traffic = shared.traffic
        self._epochs = itertools.count(1)
        server = config.server
        self.total = Total(server)
        self.host = HostBudget(*host_memory(config, plan.sizes))
        self._by_name: dict[str, HostedEngine] = {}
        self._building: dict[str, Building] = {}  # by name, until all of an engine is there
        self._ended: dict[str, ErrorInfo] = {}  # how registrations ended, by digest of the token, the oldest first
        self.leaving: dict[HostedEngine, asyncio.Task[None]] = {}
        self.closed = False
        self.acts = Acts(shared.clock.monotonic)
        self.opened = asyncio.Event()  # set once storage is open and engines may register
        self.departed = EngineCounts()  # of the engines that have left
        self.own: HostedEngine | None = None
        if plan.engine is not None:
            self.own = HostedEngine(DEFAULT_ENGINE, plan.engine, shared, self.total, self._epochs)
            self._by_name[DEFAULT_ENGINE] = self.own
            self.total.engines.append(self.own.dispatcher.lanes)

    def __iter__(self) -> Iterator[HostedEngine]:
        """All engines that have a name now; leaving ones have lost it."""
        return iter(list(self._by_name.values()))

    def get(self, name: str) -> HostedEngine | None:
        return self._by_name.get(name)

    @property
    def all(self) -> list[HostedEngine]:
        """All engines, including those that are leaving."""
        return [*self._by_name.values(), *self.leaving]

    # --- clients ------------------------------------------------------------------------------------

    def join(self, client: KnownClient, said: wire.Hello) -> None:
        """Bind a client to the engine that its Hello names, if it may."""
        client.said, client.engine_name = said, said.engine or DEFAULT_ENGINE
        engine, refused = self._by_name.get(client.engine_name), None
        if said.registration:
            client.ended = self._ended.get(digest(said.registration))
        if engine is not None:
            # A client that holds the engine has shown its token. Its Hello may be older than our answer.
            holds = client.holds and client.engine is engine
            if engine.registration is not None:
                uid, shown = client.uid, engine.token if holds else said.registration
                refused = refusal(engine.name, engine.token, engine.uid, shown, uid)
                engine = engine if refused is None or may_control(engine.uid, uid) else None
            if engine is not None and refused is None and not holds:
                refused = self._contradicts(engine, said)
        if engine is not client.engine or (refused is None) != (client.refused is None):
            self.leave(client)
        client.engine, client.refused = engine, refused
        client.generation = said.generation if client.belongs else None
        if engine is not None:
            engine.heard.set()

    def _contradicts(self, engine: HostedEngine, said: wire.Hello) -> ErrorInfo | None:
        """Adopt the generation that a client served before the daemon's restart, or return why it cannot be served."""
        before, boot_id = engine.coordinator.generation, self.shared.boot_id
        about = {"boot_id": boot_id, "generation": before, "configured": engine.configured}
        try:
            taken = adopted(engine.name, said, origin=engine.origin, **about)
            if taken is not None:
                engine.cache.set_generation(taken)
                log.info("generation adopted from a client", engine=engine.name, generation=taken, before=before)
        except RequestError as error:
            return ErrorInfo(error.reason, str(error))
        if said.generation is not None and engine.origin is Origin.CONFIGURED:
            engine.origin = Origin.SAID
        return None

    def bound(self, client: KnownClient, *, control: bool = False) -> HostedEngine:
        """The engine that the client belongs to or, if `control`, may control.

        Raises RequestError: unknown_engine, not_yours, not_this_engine.
        """
        if client.engine is None and client.refused is None:  # the engine may have registered since the last Hello
            self.join(client, client.said or wire.Hello(client.engine_name))
        if client.engine is not None and (client.belongs or control):
            return client.engine
        if client.refused is not None:
            raise RequestError(client.refused.message, code=client.refused.code)
        raise RequestError(self.absent(client), code="unknown_engine")

    def absent(self, client: KnownClient) -> str:
        """Why the client belongs to no engine."""
        name = client.engine_name or DEFAULT_ENGINE
        if client.refused is not None:
            return client.refused.message
        if name in self._building:
            return f"the engine {name!r} is still being created"
        if client.ended is not None:
            return f"no engine {name!r} is registered: {client.ended.message}"
        if name == DEFAULT_ENGINE:
            return "this daemon has no engine of its own (no [cache]); name one, or register it"
        return f"no engine {name!r} is registered"

    def leave(self, client: KnownClient, how: str = "has left") -> None:
        """Unbind a client that is gone or changes its engine. A registered engine leaves with its last client.

        how: the client left or was lost, for those who come later.
        """
        engine, client.engine = client.engine, None
        if engine is None:
            return
        engine.heard.set()
        engine.coordinator.client_gone(client.peer)
        engine.cache.client_gone(client.peer)
        self.prefetches.left(client.peer)
        held, client.holds = client.holds, False
        if held and engine.registration is not None and not self._held(engine):
            log.warning("engine gone with its last client", engine=engine.name)
            what = f"every client of the engine {engine.name!r} has gone; the last one {how}"
            self._dismiss(engine, ErrorInfo(EngineGone.code, what))

    def hold(self, client: KnownClient) -> None:
        """Keep the client's engine for as long as the client lives."""
        if client.engine is not None and not client.holds:
            client.holds = True
            if client.engine.origin is Origin.CONFIGURED:
                client.engine.origin = Origin.SAID

    def _held(self, engine: HostedEngine) -> bool:
        """Whether a client keeps the engine."""
        return any(client.holds for client in self.clients.at(engine))

    async def offer(self, client: KnownClient, rank: int, handle: DeviceHandle, epoch: int) -> str | None:
        """Map a client's memory as a rank's of its engine; see CacheMemory.offer."""
        engine = self.bound(client)
        if (new := memories_of(handle) - engine.cache.memories(rank)) > 0:
            mapped = [(one.uid, one.cache.memories()) for one in self.all]
            check_memories(new, engine.name, client.uid, mapped)
        answer = await engine.cache.offer(client.peer, rank, handle, epoch)
        if client.engine is engine:
            self.hold(client)
        return answer

    async def set_generation(self, client: KnownClient, engine: HostedEngine, generation: str) -> None:
        """Let an engine use another generation. Returns once its other clients have answered with it, or are lost.

        If the daemon then dies, each of them asserts the new generation to the next daemon. Raises RequestError.
        """
        engine.cache.set_generation(generation)
        await self._make_known(client, engine, generation)

    async def restore(self, client: KnownClient, engine: HostedEngine, restore: wire.RestoreCache) -> int:
        """Restore a cleared cache. Returns when `set_generation` would: the engine's other clients know of it."""
        epoch = await engine.cache.restore(restore.generation, same_weights=restore.same_weights)
        await self._make_known(client, engine, engine.coordinator.generation)
        return epoch

    async def _make_known(self, client: KnownClient, engine: HostedEngine, generation: str) -> None:
        engine.origin = Origin.SET
        self.clients.say_hello(engine, "the generation was changed", but=client)
        now = self.shared.clock.monotonic
        give_up = now() + 2 * self.config.server.client_timeout
        while self._behind(client, engine) and engine.coordinator.generation == generation and now() < give_up:
            engine.heard.clear()
            with contextlib.suppress(TimeoutError):
                await wait_for(engine.heard.wait(), give_up - now())

    def _behind(self, client: KnownClient, engine: HostedEngine) -> bool:
        """Whether the last Hello of another client of the engine named another generation."""
        said = {one.generation for one in self.clients.at(engine) if one is not client}
        return not said <= {None, engine.coordinator.generation}

    # --- registration -------------------------------------------------------------------------------

    async def register(self, client: KnownClient, asked: wire.Register) -> dict[str, Any]:
        """Create the client's engine, or find the one that the same registration created. Returns its epoch.

        Waits while the daemon starts. Raises RequestError (engine_exists, too_many_engines, layout_mismatch,
        bad_value, …), TierError.
        """
        _check_visible(client.uid)
        await self.opened.wait()
        name, uid = client.engine_name or DEFAULT_ENGINE, client.uid
        ended = self._ended.get(digest(asked.token))
        if ended is not None and ended.code == UNREGISTERED:
            raise RequestError(f"{ended.message}; register it with a new token", code=UNREGISTERED)
        there, building = self._by_name.get(name), self._building.get(name)
        if building is not None:
            self._check_same(name, building.registrant, asked, shared=building.registrant.uid == uid)
        elif there is not None:
            if asked.generation == there.coordinator.generation and there.registration is not None:
                asked = msgspec.structs.replace(asked, generation=there.registration.asked.generation)
            self._check_same(name, there.registration, asked)
        else:
            building = self._begun(name, client, asked)
        engine = there if building is None else await self._built(building)
        assert engine is not None
        if self._by_name.get(name) is not engine:
            raise EngineGone(f"the engine {name!r} was given up while it was built")
        self.join(client, wire.Hello(name, engine.token))
        if client.engine is not engine:
            raise RequestError(self.absent(client), code="not_yours")
        self.hold(client)
        return {"epoch": engine.cache.epoch, "registered": engine.first_epoch}

    def _check_same(self, name: str, before: Registrant | None, asked: wire.Register, *, shared: bool = True) -> None:
        """Raise RequestError unless this registration is one that was made before. before: None for [cache]."""
        if before is None or not shared or not shows(before.asked.token, asked.token):
            what = f"an engine {name!r} is already registered, and one of its clients is alive"
            raise RequestError(what, code="engine_exists")
        if asked != before.asked:
            what = f"the engine {name!r} is registered with another geometry, model or generation"
            raise RequestError(what, code="layout_mismatch")

    def _begun(self, name: str, client: KnownClient, asked: wire.Register) -> Building:
        """Begin to create an engine. Raises RequestError."""
        self._check_room(name, client.uid)
        share = self.holdings.share_of(asked.storage_share)
        for what, kind in ((asked.generation, names.GENERATION), (asked.model, names.SHOWN_MODEL)):
            if problem := kind.wrong(what):
                raise RequestError(f"{problem}, not {what[:80]!r}", code="bad_value")
        if len(asked.token) < LEAST_TOKEN:
            raise RequestError(f"a registration's token has at least {LEAST_TOKEN} characters", code="bad_value")
        config, registrant = self._configured(asked, client.uid), Registrant(asked, *client.who)
        task = asyncio.get_running_loop().create_task(self._made(name, config, registrant, share))
        task.add_done_callback(lambda _: self._building.pop(name))
        building = self._building[name] = Building(registrant, task)
        return building

    async def _built(self, building: Building) -> HostedEngine:
        """Wait for an engine, with all clients that registered it together. It is built even if they leave."""
        building.waiting += 1
        try:
            return await asyncio.shield(building.task)
        except asyncio.CancelledError:
            building.task.add_done_callback(functools.partial(self._orphaned, building))
            raise
        finally:
            building.waiting -= 1

    async def _made(self, name: str, config: Config, registration: Registrant, share: float) -> HostedEngine:
        run = self.shared.threads.run
        try:
            # In a thread: an engine chooses how many layers and ranks it has.
            plan = await run(Direction.SETUP, functools.partial(_planned, config), "planning an engine")
            self.host.book(registration, name, plan.sizes.memory)
            parts = name, plan, self.shared, self.total, self._epochs, registration
            engine = await run(Direction.SETUP, lambda: HostedEngine(*parts), "making an engine")
        except BaseException:
            self.host.give_back(registration)
            raise
        if self.closed:
            await engine.end(ErrorInfo("shutdown", "the daemon is shutting down"))
            self.host.give_back(registration)
            raise TransferError("the daemon is shutting down", code="shutdown")
        self._by_name[name] = engine
        engine.storage_share = min(share, self.holdings.left_over)  # another may have registered meanwhile
        self.holdings.came(engine)
        self.total.engines.append(engine.dispatcher.lanes)
        try:
            engine.kv_events.start()
            await engine.open()
        except Exception as error:
            code = error.reason if isinstance(error, TransferError) else InvariantError.code
            self._dismiss(engine, ErrorInfo(code, str(error) or type(error).__name__))
            raise
        which = {"registration": engine.digest, "fingerprint": plan.layout.fingerprint}
        log.info("engine registered", engine=name, ranks=len(engine.workers), **which)
        return engine

    def _check_room(self, name: str, uid: int | None) -> None:
        if self.closed:
            raise TransferError("the daemon is shutting down", code="shutdown")
        if what := names.ENGINE.wrong(name):
            raise RequestError(f"{what}, unlike {name[:80]!r}", code="bad_value")
        most = self.config.engines.max_engines
        owners = [engine.registration.uid for engine in self.all if engine.registration is not None]
        owners += [one.registrant.uid for other, one in self._building.items() if other not in self._by_name]
        if len(owners) >= (most if uid in owners else most + math.ceil(most * MORE_PLACES)):
            what = f"all {most} places for engines are taken (engines.max_engines)"
            raise RequestError(what, code="too_many_engines")

    def _configured(self, asked: wire.Register, uid: int | None) -> Config:
        """The daemon's configuration, with this user's engine's cache, model and generation. Raises RequestError."""
        config = self.config
        devices = config.engines.devices
        given = {"device": devices[0], "ownership": "attach"} | asked.layout
        named = {"ranks": asked.ranks, "host_blocks": asked.host_blocks, "first_rank": asked.first_rank}
        if asked.group_ranks:
            named["group_ranks"] = asked.group_ranks
        try:
            cache = convert(given | named, CacheSection)
            check_cache(cache)
            if config.server.open_to_all and uid not in (None, os.geteuid()):  # nobody has said that users may share
                cache = msgspec.structs.replace(cache, fingerprint=cache.fingerprint | {"user": uid})
        except (msgspec.ValidationError, ConfigError) as error:
            raise RequestError(f"the engine's layout cannot be used: {error}", code="bad_value") from None
        if cache.device not in devices:
            what = f"engines that register may use {', '.join(devices)} (engines.devices), not {cache.device[:40]!r}"
            raise RequestError(what, code="bad_value")
        if not asked.model:
            raise RequestError("an engine must name its model: it is part of every key", code="bad_value")
        storage = msgspec.structs.replace(
            config.storage,
            model=asked.model,
            generation=asked.generation,
            version_file="",
            key_schema="transferd",  # FastDeploy's names contain neither model nor layout
        )
        server = msgspec.structs.replace(
            config.server,
            max_queued_tasks=max(1, config.server.max_queued_tasks // SHARE),
            max_queued_bytes=Size(config.server.max_queued_bytes // SHARE),
            max_inflight_bytes=Size(config.server.max_inflight_bytes // SHARE),
        )
        events = msgspec.structs.replace(config.events, dp_rank=asked.dp_rank)
        return msgspec.structs.replace(
            config, cache=cache, storage=storage, server=server, events=events, pd=PdSection()
        )

    async def restart_check(self, client: KnownClient) -> dict[str, Any]:
        """See Holdings.restart_check. A thread looks at the configuration: its disks may hang."""
        work = Direction.SETUP, self.acts.would_not_start, "checking for a restart"
        return await self.holdings.restart_check(client, lambda: self.shared.threads.run(*work))

    # --- leaving ------------------------------------------------------------------------------------

    async def unregister(self, engine: HostedEngine) -> None:
        """Remove the engine; return when its tasks have ended and its memory is unmapped. Raises RequestError."""
        if engine.registration is None:
            raise RequestError("the engine of [cache] ends with the daemon", code="bad_request")
        log.info("engine unregistered", engine=engine.name)
        what = f"the engine {engine.name!r} was unregistered by a client of its own"
        await asyncio.shield(self._dismiss(engine, ErrorInfo(EngineGone.code, what), UNREGISTERED))

    def _dismiss(self, engine: HostedEngine, why: ErrorInfo, how: str = "") -> asyncio.Task[None]:
        """Remove the engine. how: a code for its clients, if they should not register it again."""
        leaving = self.leaving.get(engine)
        if leaving is None:
            self._ended.pop(engine.digest, None)
            self._ended[engine.digest] = ErrorInfo(how or why.code, why.message)
            while len(self._ended) > MOST_ENDED:
                del self._ended[next(iter(self._ended))]
            self._by_name.pop(engine.name, None)
            self.total.engines.remove(engine.dispatcher.lanes)
            self.prefetches.dismissed(engine)
            work = self._closed(engine, why, self._building.get(engine.name))
            leaving = self.leaving[engine] = asyncio.get_running_loop().create_task(work)
            self.clients.say_hello(engine, why.message)
            for client in self.clients.at(engine):
                client.engine, client.holds = None, False
                client.refused = ErrorInfo("unknown_engine", f"{why.message}; say Hello")
        return leaving

    async def _closed(self, engine: HostedEngine, why: ErrorInfo, building: Building | None) -> None:
        """building: what may still open it. Memory that this makes once the engine has ended would be nobody's."""
        try:
            if building is not None:
                await asyncio.wait([building.task])
            await engine.end(why)
            log.info("engine has left", engine=engine.name)
        except TransferError as error:
            log.warning("error while an engine was leaving", engine=engine.name, problem=str(error))
        finally:
            del self.leaving[engine]
            self.holdings.left(engine)
            self.departed = self.departed.and_of(engine, of_engine(engine.ranks()))
            if engine.name not in self._by_name:  # else these are also the counts of the next engine of its name
                self.shared.tasks.left(engine.name)
                self.shared.traffic.left(engine.name)
            self.host.give_back(engine.registration)

    async def task_settled(self, name: str, task_id: str) -> None:
        """Wait until no rank of any engine of this name, leaving ones included, touches a block for this task."""
        for engine in [engine for engine in self.all if engine.name == name]:
            await engine.coordinator.settled(task_id)

    def check_left(self, name: str, task_id: str) -> None:
        """Raise RequestError if a leaving engine of this name may still touch a block for this task."""
        if not all(engine.dispatcher.settled(task_id) for engine in self.leaving if engine.name == name):
            what = f"the engine {name!r} that had this task is leaving, and a rank of it still copies"
            raise RequestError(what, code=EngineGone.code)

    def is_settled(self, name: str, task_id: str) -> bool:
        """Whether `task_settled` would return at once."""
        return all(engine.dispatcher.settled(task_id) for engine in self.all if engine.name == name)

    async def some_settled(self, name: str, task_ids: Sequence[str]) -> list[str]:
        """Wait until some of these tasks are settled, as `task_settled` does for one; return all that are.

        Only the first one is waited for, and the others are looked at now and then: a wait costs each of the engine's
        events something.
        """
        while True:
            if settled := [one for one in task_ids if self.is_settled(name, one)]:
                return settled
            with contextlib.suppress(TimeoutError):
                await wait_for(self.task_settled(name, task_ids[0]), LOOK_S)

    async def settled(self) -> None:
        """Wait until every leaving engine has left."""
        while self.leaving or self._building:
            await asyncio.wait([*self.leaving.values(), *(one.task for one in self._building.values())])

    def _orphaned(self, building: Building, task: asyncio.Task[HostedEngine]) -> None:
        """After a registering client was lost: remove the engine if no other client uses it."""
        if building.waiting or task.cancelled() or task.exception() is not None:
            return
        engine = task.result()
        if self._by_name.get(engine.name) is engine and not self._held(engine):
            self._dismiss(engine, ErrorInfo(EngineGone.code, "its client has gone"))


def _planned(config: Config) -> EnginePlan:
    """The plan of an engine. Raises RequestError if its layout is invalid, or larger than this machine's memory."""
    try:
        plan = build_engine(config)
    except ConfigError as error:
        raise RequestError(f"the engine's layout cannot be used: {error}", code="bad_value") from None
    cache = config.geometry
    nbytes, memory = device_bytes(plan.layout) * cache.ranks, memory_total()
    if cache.device == "shm" and nbytes > memory:
        what = f"{cache.ranks} ranks of {cache.device_blocks} blocks have {nbytes} bytes, this machine {memory}"
        raise RequestError(f"{what}: register fewer blocks, layers or ranks", code="no_room")
    return plan


def _check_visible(uid: int | None) -> None:
    """Raise RequestError for a uid that several users share: a client's engine could not be protected."""
    if hidden(uid):
        what = f"the daemon sees your user as {uid}, like every user that its user namespace does not map"
        remedy = "use one user namespace for daemon and engine (PrivateUsers=no in the unit; containers: --userns)"
        raise RequestError(f"{what}, so you cannot own an engine; {remedy}", code="user_hidden")
