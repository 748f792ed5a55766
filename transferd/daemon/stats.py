"""The daemon's report: one dict, used by `transferd stats`, /status and /metrics."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transferd.config.loading import to_tree
from transferd.config.ownership import Creator
from transferd.daemon.preflight import device_bytes
from transferd.observability import logs
from transferd.runtime.version import VERSION
from transferd.wire.credentials import hidden_uid, users_problem
from transferd.wire.kv_events import MEDIUM_CPU, MEDIUM_GPU, MEDIUM_STORAGE

if TYPE_CHECKING:
    from transferd.control.dispatcher import DispatchStatistics
    from transferd.control.gate import Hold
    from transferd.daemon.daemon import Daemon
    from transferd.daemon.engine import HostedEngine


def stats(daemon: Daemon) -> dict[str, Any]:
    """The keys of the public contract, and more. Plain data; costs about a millisecond at 8 ranks.

    Counts, memory and ranks are those of all engines together. Keys that describe one engine (generation, cache,
    layout, configured) are those of [cache], or empty without it. `engines` describes each engine.
    """
    engines, own = daemon.engines.all, daemon.engines.own
    each = {engine: engine.dispatcher.statistics() for engine in engines}
    told = list(each.values())
    server = daemon.server.statistics()
    rejects = daemon.engines.departed.rejects + Counter(server["rejects"]) + Counter(server["turned_away"])
    rejects = sum((Counter(one.rejects) for one in told), rejects)
    return {
        "version": VERSION,
        "pid": os.getpid(),
        "boot_id": daemon.boot_id,
        "uptime_s": daemon.clock.monotonic() - daemon.started_at,
        "ready": not daemon.not_ready if own is None else own.coordinator.ready,
        "endpoint": list(daemon.transport.endpoints),
        "generation": "" if own is None else own.dispatcher.generation,
        "ranks": [rank for engine in engines for rank in _ranks(engine, each[engine].lanes)],
        "tasks": dict(sum((Counter(one.tasks) for one in told), daemon.engines.departed.tasks)),
        "queued": sum(one.queued for one in told),
        "running": sum(one.running for one in told),
        "straggling": sum(one.straggling for one in told),
        "paused": own is not None and each[own].paused,
        "draining": daemon.engines.closed or (own is not None and each[own].draining),
        "held": _held(daemon, [hold for one in told for hold in one.held]),
        "argument_bytes": sum(one.argument_bytes for one in told),
        "results_kept": sum(one.results_kept for one in told),
        "result_bytes": sum(one.result_bytes for one in told),
        "rejects": dict(rejects),
        "barrier": _barrier(engines, own),
        "refused": daemon.refused(),
        "users": _users(daemon),
        "cache": NO_CACHE if own is None else own.cache.statistics(),
        "host": _host(engines, own) | {"budget": daemon.engines.host.statistics()},
        "degraded": [reason for engine in engines for reason in _degraded(engine)],
        "staging": _staging(engines),
        "memory": _memory(daemon, each),
        "storage": _storage(daemon, engines),
        "pd": _pd(daemon),
        "events": _events(daemon, engines),
        "traces": {} if daemon.traces is None else daemon.traces.statistics(),
        "server": server,
        "effects_failed": dict(sum((engine.coordinator.effects_failed for engine in engines), Counter())),
        **logs.statistics(),
        "layout": {} if own is None else _layout(own),
        "configured": {} if own is None else _configured(daemon, own),
        "engines": {engine.name: _engine(engine, each[engine]) for engine in daemon.engines},
        "engines_leaving": len(engines) - sum(1 for _ in daemon.engines),
    }


def _users(daemon: Daemon) -> dict[str, Any]:
    """Whether the daemon can tell the users of its clients apart, and why not."""
    why = users_problem(daemon.transport.endpoints)
    return {"told_apart": not why, "hidden_as": hidden_uid(), "why": why}


MEDIA = (MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE)
MOST_LAYOUT = 1024  # characters of a layout; pages may name thousands of sizes
# The value of stats()["cache"] without [cache].
NO_CACHE = {"creator": "engine", "epoch": 0, "cleared": False, "missing": [], "owners": []} | {
    key: [] for key in ("unmapped", "mapped", "outdated")
}


def _engine(engine: HostedEngine, dispatch: DispatchStatistics) -> dict[str, Any]:
    """One engine: whether it is ready, its ranks and clients, its tasks so far and now."""
    cache = engine.cache.statistics()
    return {
        "ready": engine.coordinator.ready,
        "why": engine.why_not_served,
        "registered": engine.registration is not None,
        "registration": engine.digest,
        "uid": engine.uid,
        "ranks": len(engine.workers),
        "first_rank": engine.config.geometry.first_rank,
        "dp_rank": engine.config.events.dp_rank,
        "clients": len(engine.clients),
        "model": engine.config.storage.model,
        "generation": engine.dispatcher.generation,
        "fingerprint": _fingerprint(engine),
        "epoch": cache["epoch"],
        "missing": cache["missing"],
        "owners": cache["owners"],
        "unattached": (unattached := engine.unattached())[0],
        "unattached_s": unattached[1],
        "tasks": dispatch.tasks,
        "queued": dispatch.queued,
        "running": dispatch.running,
        "straggling": dispatch.straggling,
        "paused": dispatch.paused,
        "draining": dispatch.draining,
        "rejects": dispatch.rejects,
        "bytes": sum(lane.bytes for worker in engine.workers for lane in worker.lanes.values()),
        "block_bytes": engine.layout.block_bytes,
        "device_blocks": engine.layout.device_blocks,
        "host_blocks": engine.layout.host_blocks,
        "host_bytes": engine.nbytes,
    }


def _fingerprint(engine: HostedEngine) -> dict[str, Any]:
    """What engines must have in common to read each other's blocks, besides model and generation.

    digest: as in every object's name. layout: what a block is. facts: about the model, as the engine has said them.
    """
    layout, facts = engine.layout, engine.config.geometry.fingerprint
    return {"digest": layout.fingerprint, "layout": layout.identity[:MOST_LAYOUT], "facts": facts}


def _held(daemon: Daemon, holds: list[Hold]) -> list[dict[str, Any]]:
    """The holders of pauses and drains, and for how many seconds each has held; the longest first."""
    now = daemon.clock.monotonic()
    holds.sort(key=lambda hold: hold.since)
    return [{"what": hold.what, "holder": hold.holder, "for_s": now - hold.since} for hold in holds]


def _ranks(engine: HostedEngine, lanes: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    ranks = [worker.statistics() | {"engine": engine.name} for worker in engine.workers]
    for rank in ranks:
        for name, lane in rank["lanes"].items():
            lane["queued"] = lanes[name]["queued"]  # all ranks share the dispatcher's queue
    return ranks


def _barrier(engines: Sequence[HostedEngine], own: HostedEngine | None) -> dict[str, Any]:
    each = [dataclasses.asdict(engine.barrier.statistics()) for engine in engines]
    counts = {key: sum(one[key] for one in each) for key in ("open", "owing", "completed", "expired", "late")}
    skew = [] if own is None else list(own.coordinator.skew_s)
    return counts | {"dead": [rank for one in each for rank in one["dead"]], "skew_s": skew}


def _host(engines: Sequence[HostedEngine], own: HostedEngine | None) -> dict[str, Any]:
    pools = [w.context.host.statistics() for e in engines for w in e.workers if w.context.host is not None]
    return {
        "blocks": 0 if own is None else own.layout.host_blocks,  # per rank
        "bytes": sum(pool["bytes"] for pool in pools),
        "pinned": bool(pools) and all(pool["pinned"] for pool in pools),
    }


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


def _staging(engines: Sequence[HostedEngine]) -> dict[str, int]:
    contexts = [worker.context for engine in engines for worker in engine.workers]
    stagings = [c.staging for c in contexts] + [c.peer.staging for c in contexts if c.peer is not None]
    each = [staging.statistics() for staging in stagings]
    return {key: sum(one[key] for one in each) for key in ("capacity", "used", "peak")}


def _memory(daemon: Daemon, each: Mapping[HostedEngine, DispatchStatistics]) -> dict[str, int]:
    """Bytes that the daemon holds, by purpose. Device memory that an engine created does not count."""
    contexts = [worker.context for engine in each for worker in engine.workers]
    made = [e for e in each if e.cache.creator is Creator.DAEMON]
    storage = daemon.storage.statistics() if daemon.config.storage.backend == "memory" and daemon.storage else {}
    return {
        "device_cache": sum((len(e.workers) - len(e.cache.missing)) * device_bytes(e.layout) for e in made),
        "host_pool": sum(context.host.statistics()["bytes"] for context in contexts if context.host is not None),
        "staging": sum(context.staging.statistics()["capacity"] for context in contexts),
        "peer_staging": sum(one.peer.staging.statistics()["capacity"] for one in contexts if one.peer is not None),
        "stored_objects": storage.get("bytes") or 0,
        "task_arguments": sum(dispatch.argument_bytes for dispatch in each.values()),
        "results": sum(dispatch.result_bytes for dispatch in each.values()),
    }


def _storage(daemon: Daemon, engines: Sequence[HostedEngine]) -> dict[str, Any]:
    report: dict[str, Any] = {"backend": daemon.config.storage.backend}
    report |= dict.fromkeys(("objects", "bytes", "hits", "misses", "errors", "shared_loads", "shared_stores"), 0)
    storage = daemon.tokens or daemon.storage
    if storage is not None:
        report |= storage.statistics()
    workers, departed = [worker for engine in engines for worker in engine.workers], daemon.engines.departed
    if "corrupt" not in report:  # a backend that counts its own quarantine already includes these
        report["corrupt"] = departed.corrupt + sum(worker.corrupt for worker in workers)
    report["misses"] = (report["misses"] or 0) + departed.missed + sum(worker.missed for worker in workers)
    return report


def _events(daemon: Daemon, engines: Sequence[HostedEngine]) -> dict[str, Any]:
    each = [engine.kv_events.statistics() for engine in engines if engine.kv_events is not None]
    if not each and daemon.events is None:
        return {}
    announced = sum((Counter(one["announced"]) for one in each), Counter(dict.fromkeys(MEDIA, 0)))
    peers = {name: told for one in each for name, told in one["peers"].items()}
    sockets = {} if daemon.events is None else daemon.events.statistics()
    return sockets | {"announced": {m: announced[m] for m in MEDIA}, "peers": peers}


def _pd(daemon: Daemon) -> dict[str, Any]:
    if daemon.peers is None:
        return {"mode": "storage"}
    return {"mode": "direct"} | daemon.peers.statistics()


def _layout(engine: HostedEngine) -> dict[str, Any]:
    layout = engine.layout
    return {
        "attention": engine.config.geometry.attention,
        "planes": list(dict.fromkeys(plane.name for plane in layout.planes)),
        "layers": layout.layers,
        "mtp_layers": layout.mtp_layers,
        "block_bytes": layout.block_bytes,
        "device_blocks": layout.device_blocks,
        "fingerprint": layout.fingerprint,
    }


def _configured(daemon: Daemon, engine: HostedEngine) -> dict[str, Any]:
    """The settings that an engine must agree with. Omits addresses and paths, which may contain secrets."""
    storage = daemon.config.storage
    return {
        "cache": to_tree(daemon.config)["cache"] | {"devices": engine.config.geometry.device_of_rank},
        "storage": {
            "backend": storage.backend,
            "model": storage.model,
            "key_schema": storage.key_schema,
            "version_file": storage.version_file,
            "attention_store": {
                "only_flush": engine.only_flush,
                "splitwise_role": storage.attention_store.splitwise_role,
                "dp_id": storage.attention_store.dp_id,
            },
        },
    }
