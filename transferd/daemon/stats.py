"""Fills the daemon's report, which observability/report.py describes."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from transferd.config.ownership import Creator
from transferd.daemon.clients import KnownClient
from transferd.daemon.engine import HostedEngine
from transferd.daemon.engines import Engines
from transferd.daemon.kv_events.sockets import EventSockets
from transferd.daemon.preflight import device_bytes
from transferd.daemon.server import Server
from transferd.observability import logs
from transferd.observability import report as rows
from transferd.observability.figures import Kinds, added, of_engine, together
from transferd.observability.report import Report
from transferd.observability.task_log import Windows
from transferd.observability.traces import Traces
from transferd.runtime.loop_turns import loop_turns
from transferd.runtime.version import VERSION
from transferd.wire.credentials import hidden_uid, users_problem
from transferd.wire.kv_events import MEDIUM_CPU, MEDIUM_GPU, MEDIUM_STORAGE

MEDIA = (MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE)
SUMS = ("queued", "running", "straggling")  # of all engines

S = TypeVar("S", bound=rows.StoreFigures)
MOST_LAYOUT = 1024  # characters of a layout; pages may name thousands of sizes


class Parts(Protocol):
    """The sources of a report: the part of the daemon (daemon.py) that this module needs."""

    started_at: float
    engines: Engines
    server: Server
    windows: Windows
    traces: Traces | None

    def refused(self) -> dict[str, int]:
        """Connections and requests refused, by reason."""

    @property
    def not_ready(self) -> str:
        """Why tasks are not served; "" if they are."""


def report_of(parts: Parts) -> Generator[None, None, Report]:
    """The report as it is now, without concerns, in pieces of one engine: about a millisecond at 8 ranks."""
    engines, own, storage, shared = parts.engines.all, parts.engines.own, _storage(parts), parts.engines.shared
    ranks, found = dict[HostedEngine, list[rows.RankReport]](), dict[HostedEngine, rows.EngineReport]()
    clients = parts.server.clients.by_engine()
    total = parts.engines.departed  # an engine that leaves before the report is made is among `engines`
    for engine in engines:
        ranks[engine] = engine.ranks()
        kinds = of_engine(ranks[engine])
        total = total.and_of(engine, kinds)
        found[engine] = _engine(engine, clients.get(engine, ()), parts, kinds, storage)
        yield
    server, lanes = parts.server.statistics(), together([total.lanes])
    for name, kind in lanes.items():
        yield
        parts.windows.recent(kind, None, name)
    yield
    totals = parts.windows.recent(added(lanes.values()))
    yield
    sums = {name: sum(getattr(one, name) for one in found.values()) for name in SUMS}
    yield
    host, staging = _host(parts.engines, own), _staging(engines)
    yield
    memory, now = _memory(parts, engines, host), shared.clock.monotonic()
    endpoints = list(parts.server.clients.transport.endpoints)
    yield
    return Report(
        version=VERSION,
        host_name=socket.gethostname(),
        pid=os.getpid(),
        boot_id=shared.boot_id,
        uptime_s=now - parts.started_at,
        loop_longest_s=loop_turns().longest_s,
        endpoint=endpoints,
        ranks=[rank for engine in engines for rank in ranks[engine]],
        lanes=lanes,
        totals=totals,
        errors=dict(sum(shared.tasks.errors.values(), Counter())),
        hits=shared.tasks.found.total(),
        misses=shared.tasks.missing.total(),
        **sums,
        tasks=dict(total.tasks),
        rejects=dict(total.rejects + Counter(server.rejects) + Counter(server.turned_away)),
        held=_held(now, engines),
        argument_bytes=memory.task_arguments,
        results_kept=sum(len(engine.dispatcher.results) for engine in engines),
        result_bytes=memory.results,
        barrier=_barrier(engines, own, total.barrier),
        refused=parts.refused(),
        users=_users(endpoints),
        degraded=[reason for engine in engines for reason in _degraded(engine)],
        host=host,
        staging=staging,
        memory=memory,
        storage=storage,
        what_if=parts.engines.traffic.what_if(storage.levels),
        pd=rows.PdReport() if shared.peers is None else rows.PdReport(mode="direct", **shared.peers.statistics()),
        events=_events(shared.events, engines),
        traces=rows.TracesReport() if parts.traces is None else parts.traces.statistics(),
        server=server,
        effects_failed=dict(total.effects_failed),
        engines={engine.name: found[engine] for engine in parts.engines if engine in found},
        engines_leaving=len(engines) - sum(1 for _ in parts.engines),
        acts=parts.engines.acts.report(),
        reload_refused=parts.engines.acts.reload_refused,
        **logs.statistics(),
        **_of_own_engine(parts, own),
    )


def _of_own_engine(parts: Parts, own: HostedEngine | None) -> dict[str, Any]:
    """The fields of Report about the engine in the daemon's own configuration."""
    if own is None:
        return {"ready": not parts.not_ready, "draining": parts.engines.closed}
    return {
        "ready": not own.why_not_ready,
        "generation": own.dispatcher.generation,
        "paused": own.dispatcher.gate.paused,
        "draining": parts.engines.closed or own.dispatcher.gate.draining,
        "cache": own.cache.statistics(),
        "layout": _layout(own),
        "configured": own.shared_settings,
    }


def _users(endpoints: Sequence[str]) -> rows.UsersReport:
    why = users_problem(endpoints)
    return rows.UsersReport(told_apart=not why, hidden_as=hidden_uid(), why=why)


def _engine(
    engine: HostedEngine, clients: Sequence[KnownClient], parts: Parts, kinds: Kinds, storage: rows.StorageReport
) -> rows.EngineReport:
    cache, tasks, traffic, log = engine.cache, engine.dispatcher, engine.shared.traffic, engine.shared.tasks
    unattached, unattached_s = _unattached(engine, clients)
    totals = parts.windows.recent(added(kinds.values()), engine.name)
    return rows.EngineReport(
        ready=engine.coordinator.ready,
        why=engine.why_not_served,
        registered=engine.registration is not None,
        registration=engine.digest,
        uid=engine.uid,
        ranks=len(engine.workers),
        first_rank=engine.config.geometry.first_rank,
        dp_rank=engine.config.events.dp_rank,
        clients=len(clients),
        returns=_returns(engine, clients),
        model=engine.config.storage.model,
        generation=engine.dispatcher.generation,
        fingerprint=_fingerprint(engine),
        epoch=cache.epoch,
        missing=cache.missing,
        owners=cache.owners,
        unattached=unattached,
        unattached_s=unattached_s,
        tasks=dict(tasks.statuses),
        queued=tasks.lanes.queued,
        running=tasks.lanes.running,
        straggling=len(tasks.stragglers),
        paused=tasks.gate.paused,
        draining=tasks.gate.draining,
        rejects=dict(tasks.rejects),
        errors=dict(log.errors.get(engine.name, ())),
        hits=log.found[engine.name],
        misses=log.missing[engine.name],
        missed_for=traffic.missed_for(engine.name),
        what_if=traffic.what_if(storage.levels, engine.name),
        bytes=totals.bytes,
        block_bytes=engine.layout.block_bytes,
        device_blocks=engine.layout.device_blocks,
        host_blocks=engine.layout.host_blocks,
        host_bytes=engine.nbytes,
        lanes={name: parts.windows.recent(kind, engine.name, name) for name, kind in kinds.items()},
        totals=totals,
    )


def _unattached(engine: HostedEngine, clients: Sequence[KnownClient]) -> tuple[list[int], float | None]:
    """Ranks without attached or offered memory, and for how many seconds a client has needed it.

    A client needs it if it has registered the engine, offered, attached or pushed, or turned tasks away itself.
    """
    came = min((client.came_at for client in clients if client.holds or client.turned_away), default=None)
    ranks, since = engine.cache.unattached
    if not ranks or came is None:
        return ranks, None
    return ranks, engine.shared.clock.monotonic() - max(came, since)


def _returns(engine: HostedEngine, clients: Sequence[KnownClient]) -> bool | None:
    """Whether it comes back by itself after a restart of the daemon; None if its clients do not say.

    Clients register and offer their memory again by themselves; whoever has attached memory must attach it anew. Each
    that has registered the engine, offered, attached or pushed must find the way to a new daemon.
    """
    said = [client.said.returns for client in clients if client.holds and client.said is not None]
    if engine.cache.creator is Creator.ENGINE:
        return True if said else None if engine.registration is None else False
    return False if False in said else True if True in said else None


def _fingerprint(engine: HostedEngine) -> rows.FingerprintReport:
    layout, facts = engine.layout, engine.config.geometry.fingerprint
    return rows.FingerprintReport(digest=layout.fingerprint, layout=layout.identity[:MOST_LAYOUT], facts=dict(facts))


def _held(now: float, engines: Sequence[HostedEngine]) -> list[rows.HoldReport]:
    held = [(hold, engine.name) for engine in engines for hold in engine.dispatcher.gate.held]
    held.sort(key=lambda one: one[0].since)
    return [rows.HoldReport(hold.what, hold.holder, name, now - hold.since) for hold, name in held]


def _barrier(engines: Sequence[HostedEngine], own: HostedEngine | None, counts: Counter[str]) -> rows.BarrierReport:
    dead = [rank for engine in engines for rank in sorted(engine.barrier.dead)]
    return rows.BarrierReport(dead=dead, skew_s=[] if own is None else list(own.coordinator.skew_s), **counts)


def _host(engines: Engines, own: HostedEngine | None) -> rows.HostReport:
    pools = [w.context.host.memory for e in engines.all for w in e.workers if w.context.host is not None]
    return rows.HostReport(
        blocks=0 if own is None else own.layout.host_blocks,
        bytes=sum(pool.nbytes for pool in pools if pool.allocated),
        pinned=bool(pools) and all(pool.pinned for pool in pools),
        budget=engines.host.statistics(),
    )


def _degraded(engine: HostedEngine) -> list[str]:
    """Why an engine runs slower than it should; empty if it does not."""
    reasons: list[str] = []
    for worker in engine.workers:
        context, regions = worker.context, worker.context.regions
        reasons += [
            f"{engine.called(context.rank)}: {name} memory is not pinned: {region.degraded}"
            for name, region in regions.items()
            if region.degraded
        ]
        reasons += [f"rank {context.rank}: {name}: {r.misplaced}" for name, r in regions.items() if r.misplaced]
    return reasons


def _staging(engines: Sequence[HostedEngine]) -> rows.StagingReport:
    contexts = [worker.context for engine in engines for worker in engine.workers]
    stagings = [c.staging for c in contexts] + [c.peer.staging for c in contexts if c.peer is not None]
    each = [staging.statistics() for staging in stagings]
    return rows.StagingReport(**{key: sum(one[key] for one in each) for key in ("capacity", "used", "peak")})


def _memory(parts: Parts, engines: Sequence[HostedEngine], host: rows.HostReport) -> rows.MemoryReport:
    contexts = [worker.context for engine in engines for worker in engine.workers]
    made, storage = [e for e in engines if e.cache.creator is Creator.DAEMON], parts.engines.shared.storage
    return rows.MemoryReport(
        device_cache=sum((len(e.workers) - len(e.cache.missing)) * device_bytes(e.layout) for e in made),
        host_pool=host.bytes,
        staging=sum(context.staging.nbytes for context in contexts),
        peer_staging=sum(one.peer.staging.nbytes for one in contexts if one.peer is not None),
        stored_objects=0 if storage is None else storage.memory_bytes,
        carried=getattr(storage, "carried_bytes", 0),
        task_arguments=sum(engine.dispatcher.hazards.nbytes for engine in engines),
        results=sum(engine.dispatcher.results.nbytes for engine in engines),
    )


def _storage(parts: Parts) -> rows.StorageReport:
    own = parts.engines.own
    storage = parts.engines.shared.storage if own is None else own.tokens or own.shared.storage
    found = {} if storage is None else dict(storage.statistics())
    workers, departed = [worker for engine in parts.engines.all for worker in engine.workers], parts.engines.departed
    if "corrupt" not in found:  # a backend that counts its own quarantine already includes these
        found["corrupt"] = departed.corrupt + sum(worker.corrupt for worker in workers)
    found["misses"] = (found.get("misses") or 0) + departed.missed + sum(worker.missed for worker in workers)
    if parts.engines.traffic.admission is not None:
        found |= parts.engines.traffic.admission.statistics()
    if "pinned" in found:
        found["holdings"] = parts.engines.holdings.report()
    levels = [_section(rows.LevelReport, level) for level in found.pop("levels", ())]
    report = _section(rows.StorageReport, {"backend": parts.engines.config.storage.title, **found, "levels": levels})
    report.other = {key: value for key, value in found.items() if key not in rows.StorageReport.__struct_fields__}
    rows.as_levels(report)
    alone = len(report.levels) == 1
    for level in report.levels if "pinned" in found else ():
        level.holdings = found["holdings"] if alone else parts.engines.holdings.report(level.name)
    return report


def _section(kind: type[S], found: Mapping[str, Any]) -> S:
    """One store's or level's section, from what its storage reports. It may report more."""
    known = {name: found[name] for name in kind.__struct_fields__ if name in found}
    if "scrub" in known:
        known["scrub"] = rows.ScrubReport(**known["scrub"])
    if "disks" in known:
        known["disks"] = [rows.DiskReport(**disk) for disk in known["disks"]]
    return kind(**known)


def _events(sockets: EventSockets, engines: Sequence[HostedEngine]) -> rows.EventsReport:
    feeds = [engine.kv_events for engine in engines if engine.kv_events.has_followers]
    if not feeds and not sockets.endpoint:
        return rows.EventsReport()
    announced = sum((Counter(feed.residency.statistics()) for feed in feeds), Counter(dict.fromkeys(MEDIA, 0)))
    return rows.EventsReport(
        announced={medium: announced[medium] for medium in MEDIA},
        peers={name: peer for feed in feeds for name, peer in feed.followed().items()},
        **(sockets.statistics() if sockets.endpoint else {}),
    )


def _layout(engine: HostedEngine) -> rows.LayoutReport:
    layout = engine.layout
    return rows.LayoutReport(
        attention=engine.config.geometry.attention,
        planes=list(dict.fromkeys(plane.name for plane in layout.planes)),
        layers=layout.layers,
        mtp_layers=layout.mtp_layers,
        block_bytes=layout.block_bytes,
        device_blocks=layout.device_blocks,
        fingerprint=layout.fingerprint,
    )
