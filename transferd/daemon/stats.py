"""The daemon's report: one dict, used by `transferd stats`, /status and /metrics."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from transferd.config.loading import to_tree
from transferd.config.ownership import Creator
from transferd.daemon.preflight import device_bytes
from transferd.observability import logs
from transferd.runtime.version import VERSION

if TYPE_CHECKING:
    from transferd.control.dispatcher import DispatchStatistics
    from transferd.control.gate import Hold
    from transferd.daemon.daemon import Daemon


def stats(daemon: Daemon) -> dict[str, Any]:
    """The keys of the public contract, and more. Plain data; costs about a millisecond at 8 ranks."""
    dispatch = daemon.default.dispatcher.statistics()
    server = daemon.server.statistics()
    return {
        "version": VERSION,
        "boot_id": daemon.boot_id,
        "uptime_s": daemon.clock.monotonic() - daemon.started_at,
        "ready": daemon.default.coordinator.ready,
        "endpoint": list(daemon.transport.endpoints),
        "generation": daemon.default.dispatcher.generation,
        "ranks": _ranks(daemon, dispatch.lanes),
        "tasks": dispatch.tasks,
        "queued": dispatch.queued,
        "running": dispatch.running,
        "straggling": dispatch.straggling,
        "paused": dispatch.paused,
        "draining": dispatch.draining,
        "held": _held(daemon, dispatch.held),
        "argument_bytes": dispatch.argument_bytes,
        "results_kept": dispatch.results_kept,
        "result_bytes": dispatch.result_bytes,
        "rejects": dict(Counter(dispatch.rejects) + Counter(server["rejects"])),
        "barrier": dataclasses.asdict(daemon.default.barrier.statistics())
        | {"skew_s": list(daemon.default.coordinator.skew_s)},
        "refused": {**daemon.transport.refused(), **daemon.reports.refused()},
        "cache": daemon.default.cache.statistics(),
        "host": _host(daemon),
        "degraded": _degraded(daemon),
        "staging": _staging(daemon),
        "memory": _memory(daemon, dispatch),
        "storage": _storage(daemon),
        "pd": _pd(daemon),
        "events": {} if daemon.default.kv_events is None else daemon.default.kv_events.statistics(),
        "traces": {} if daemon.traces is None else daemon.traces.statistics(),
        "server": server,
        "effects_failed": dict(daemon.default.coordinator.effects_failed),
        **logs.statistics(),
        "layout": _layout(daemon),
        "configured": _configured(daemon),
    }


def _held(daemon: Daemon, holds: list[Hold]) -> list[dict[str, Any]]:
    """Who pauses or drains, and for how many seconds; the longest first."""
    now = daemon.clock.monotonic()
    return [{"what": hold.what, "holder": hold.holder, "for_s": now - hold.since} for hold in holds]


def _ranks(daemon: Daemon, lanes: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    ranks = [worker.statistics() for worker in daemon.default.workers]
    for rank in ranks:
        for name, lane in rank["lanes"].items():
            lane["queued"] = lanes[name]["queued"]  # one queue for all ranks: the dispatcher's
    return ranks


def _host(daemon: Daemon) -> dict[str, Any]:
    pools = [w.context.host.statistics() for w in daemon.default.workers if w.context.host is not None]
    return {
        "blocks": daemon.default.layout.host_blocks,  # per rank
        "bytes": sum(pool["bytes"] for pool in pools),
        "pinned": bool(pools) and all(pool["pinned"] for pool in pools),
    }


def _degraded(daemon: Daemon) -> list[str]:
    """The reasons why the daemon runs slower than it should; empty if there are none."""
    reasons: list[str] = []
    for worker in daemon.default.workers:
        context = worker.context
        regions = {"staging": context.staging.memory} | ({"host": context.host.memory} if context.host else {})
        reasons += [
            f"rank {context.rank}: {name} memory is not pinned: {region.degraded}"
            for name, region in regions.items()
            if region.degraded
        ]
        reasons += [f"rank {context.rank}: {name}: {r.misplaced}" for name, r in regions.items() if r.misplaced]
    return reasons


def _staging(daemon: Daemon) -> dict[str, int]:
    contexts = [worker.context for worker in daemon.default.workers]
    stagings = [c.staging for c in contexts] + [c.peer.staging for c in contexts if c.peer is not None]
    each = [staging.statistics() for staging in stagings]
    return {key: sum(one[key] for one in each) for key in ("capacity", "used", "peak")}


def _memory(daemon: Daemon, dispatch: DispatchStatistics) -> dict[str, int]:
    """Bytes that the daemon holds, by what for. Device memory of an engine's making is not the daemon's."""
    cache, contexts = daemon.default.cache, [worker.context for worker in daemon.default.workers]
    made = len(contexts) - len(cache.missing) if cache.creator is Creator.DAEMON else 0
    storage = daemon.storage.statistics() if daemon.config.storage.backend == "memory" and daemon.storage else {}
    return {
        "device_cache": made * device_bytes(daemon.default.layout),
        "host_pool": sum(context.host.statistics()["bytes"] for context in contexts if context.host is not None),
        "staging": sum(context.staging.statistics()["capacity"] for context in contexts),
        "peer_staging": sum(one.peer.staging.statistics()["capacity"] for one in contexts if one.peer is not None),
        "stored_objects": storage.get("bytes") or 0,
        "task_arguments": dispatch.argument_bytes,
        "results": dispatch.result_bytes,
    }


def _storage(daemon: Daemon) -> dict[str, Any]:
    report: dict[str, Any] = {"backend": daemon.config.storage.backend}
    report |= dict.fromkeys(("objects", "bytes", "hits", "misses", "errors"), 0)
    storage = daemon.tokens or daemon.storage
    if storage is not None:
        report |= storage.statistics()
    workers = daemon.default.workers
    if "corrupt" not in report:  # a backend that counts its quarantine includes ours
        report["corrupt"] = sum(worker.corrupt for worker in workers)
    report["misses"] = (report["misses"] or 0) + sum(worker.missed for worker in workers)
    return report


def _pd(daemon: Daemon) -> dict[str, Any]:
    if daemon.peers is None:
        return {"mode": "storage"}
    return {"mode": "direct"} | daemon.peers.statistics()


def _layout(daemon: Daemon) -> dict[str, Any]:
    layout = daemon.default.layout
    return {
        "attention": daemon.config.cache.attention,
        "planes": list(dict.fromkeys(plane.name for plane in layout.planes)),
        "layers": layout.layers,
        "mtp_layers": layout.mtp_layers,
        "block_bytes": layout.block_bytes,
        "device_blocks": layout.device_blocks,
        "fingerprint": layout.fingerprint,
    }


def _configured(daemon: Daemon) -> dict[str, Any]:
    """The settings that an engine has to agree with; addresses and paths, which may hold secrets, are not told."""
    storage = daemon.config.storage
    return {
        "cache": to_tree(daemon.config)["cache"] | {"devices": daemon.config.cache.device_of_rank},
        "storage": {
            "backend": storage.backend,
            "model": storage.model,
            "key_schema": storage.key_schema,
            "version_file": storage.version_file,
            "attention_store": {
                "only_flush": daemon.default.only_flush,
                "splitwise_role": storage.attention_store.splitwise_role,
                "dp_id": storage.attention_store.dp_id,
            },
        },
    }
