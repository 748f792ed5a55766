"""Prometheus metrics: read from one report at each scrape, plus what task_log.py counts of each task.

status_server.py imports this where it listens: a daemon without [metrics] needs no prometheus_client.

Labels are bounded by construction: ranks, lanes, statuses, codes, tiers, and the engines that exist now.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from transferd.config import DEFAULT_ENGINE
from transferd.observability.concerns import REMEDIES
from transferd.observability.report import (
    DiskReport,
    EngineReport,
    EventsReport,
    LevelReport,
    RankReport,
    Report,
    StorageReport,
)
from transferd.tasks import NOT_STORED, Status

# Label values that exist from the start, at 0: rate() would miss the first increment of a series that begins with 1.
STATUSES = [str(status) for status in Status]
REJECTS = (
    *("queue_full", "bytes_in_flight", "starting", "draining", "not_attached", "empty_block", "cleared", "cache_gone"),
    *(
        "bad_value",
        "id_out_of_range",
        "task_id_conflict",
        "task_id_busy",
        "no_storage_tier",
        "no_host_tier",
        "rank_died",
    ),
    *("malformed", "unsupported_version", "unknown_type", "too_large", "stale_session", "forbidden", "too_often"),
)
EFFECTS = ("Start", "StopTask", "ExpireRound", "Reply", "Publish", "WakeAt", "Unblock")
EVICTED_FOR = ("capacity", "medium_full", "shrink", "reserve")
BREAKER_STATES = ("closed", "open", "half_open")

# Counters that only some backends have, with their help texts.
_STORAGE_EVENTS = {
    "wrong_length": "Objects of another length than expected, made unreachable",
    "gone": "Objects that somebody else has removed",
    "waited_for_room": "Objects that were retried because the pool was full",
    "contested": "Stored objects that could not be found yet: another client was writing them",
    "taken_over": "Objects that replaced another client's unfinished write",
    "held": "Objects whose buffers were held because a transfer did not end",
    "under_replicated": "Objects stored with fewer copies than configured",
    "copies_made": "Copies that drains and mends of a pool have made",
    "peers_went_down": "Times that a node of the pool stopped answering",
    "connections_cut": "Connections that were ended to nodes of the pool that do not answer",
    "other_layout": "Lookups whose first absent key is stored in another layout of the model",
    "breaker_opened": "Times that storage did not answer",
    "not_admitted": "Objects that were not stored, because no second task had asked for them",
    "purged": "Objects removed by purges",
    "pins_expired": "Objects whose last pin has ended with its time",
    "lost": "Objects that were on disks when they failed",
}

_DISK_GAUGES = {
    "total_bytes": "Bytes of the file system that the store is on",
    "free_bytes": "Bytes of it that are free for the daemon",
    "reserve_bytes": "Bytes of it that the store leaves free",
    "room_bytes": "Bytes that the store may hold: its capacity, or less if the disk has less room",
    "files_free": "Inodes of it that are free; 0 if they have no fixed number",
    "read_only": "1 if it is mounted read-only",
}

_LEVEL_GAUGES = {
    "bytes": "Bytes that a level of the store holds",
    "pending_bytes": "Bytes that wait to be copied to a level",
    "kept_bytes": "Bytes of a level that wait for the first use after a prefetch",
    "hanging": "Calls to a level that have taken too long, and have not ended",
    "available": "1 while calls go to a level",
}
_LEVEL_COUNTS = {
    "hits": "Objects that loads found in a level",
    "misses": "Objects that loads asked a level for and did not find there",
    "corrupt": "Damaged copies of a level that were set aside",
    "copied": "Objects copied to a level from one above",
    "promoted": "Objects copied to a level from one below, because they were used",
    "prefetched": "Objects copied to a level from one below by prefetches and warm-ups",
    "lost": "Objects that were not copied to a level",
    "slow_calls": "Calls to a level that took much longer than others",
}

Reporter = Callable[[], Report]


class _StatsCollector:
    """Turns one report into metric families. not_ready: as for StatusServer."""

    def __init__(self, report: Reporter, not_ready: Callable[[], str]) -> None:
        self._report = report
        self._not_ready = not_ready

    def collect(self) -> Iterator[Metric]:
        report = self._report()
        yield InfoMetricFamily("transferd_build", "The daemon's version", {"version": report.version})
        yield from self._daemon(report)
        yield from self._server(report)
        lasting = {one.name for one in report.concerns or ()}
        family = GaugeMetricFamily("transferd_concern", "1 while something is wrong, by what it is", labels=["concern"])
        for name in REMEDIES:
            family.add_metric([name], float(name in lasting))
        yield family
        text = "Admitted tasks that ended with an error, by code"
        yield _counter("transferd_task_errors", text, ["code"], {"storage_full": 0, "expired": 0} | report.errors)
        yield from self._ranks(report.ranks)
        yield from self._engines(report.engines)
        yield from self._memory(report)
        yield from self._storage(report.storage)
        if report.events.batches is not UNSET:
            yield from self._events(report.events)
        if report.traces.exported is not UNSET:
            outcomes = msgspec.structs.asdict(report.traces)
            yield _counter("transferd_traces", "Traces of tasks, by outcome", ["outcome"], outcomes)

    def _daemon(self, report: Report) -> Iterator[Metric]:
        yield _gauge("transferd_uptime_seconds", "Seconds since the start", report.uptime_s)
        yield _gauge("transferd_ready", "1 when every rank is ready and tasks are admitted", not self._not_ready())
        yield _gauge("transferd_tasks_queued", "Tasks admitted and not running", report.queued)
        yield _gauge("transferd_tasks_running", "Tasks running", report.running)
        yield _gauge("transferd_tasks_straggling", "Answered tasks that a rank still works on", report.straggling)
        yield _counter(
            "transferd_tasks",
            "Tasks answered, by final status",
            ["status"],
            dict.fromkeys(STATUSES, 0) | report.tasks,
        )
        yield _counter(
            "transferd_rejects", "Requests refused, by code", ["code"], dict.fromkeys(REJECTS, 0) | report.rejects
        )
        barrier = report.barrier
        yield _gauge("transferd_barrier_rounds_open", "Rounds in which ranks have yet to arrive", barrier.open)
        yield _gauge("transferd_barrier_ranks_owing", "Arrivals still owed to rounds that have ended", barrier.owing)
        yield _count("transferd_barrier_rounds", "Rounds that have ended, for whatever reason", barrier.completed)
        text = "Rounds that a deadline ended without every rank"
        yield _count("transferd_barrier_rounds_expired", text, barrier.expired)
        yield _count("transferd_barrier_late_arrivals", "Arrivals dropped because their round had ended", barrier.late)
        text = "Seconds by which a rank has arrived after the first one of its round"
        skew = {str(rank): seconds for rank, seconds in enumerate(barrier.skew_s)}
        yield _counter("transferd_barrier_skew_seconds", text, ["rank"], skew)

    def _server(self, report: Report) -> Iterator[Metric]:
        server = report.server
        yield _counter("transferd_refused", "Connections and HTTP requests refused", ["reason"], report.refused)
        text = "Blocks that engines did not store, by reason"
        not_stored = dict.fromkeys(NOT_STORED, 0) | server.not_stored
        yield _counter("transferd_blocks_not_stored", text, ["reason"], not_stored)
        yield _gauge("transferd_clients", "Clients connected", server.clients)
        yield _count("transferd_clients_lost", "Clients that fell silent", server.clients_lost)
        yield _count("transferd_messages", "Messages received", server.messages)
        yield _count("transferd_undeliverable", "Answers whose client was gone", server.undeliverable)
        yield _counter(
            "transferd_effects_failed",
            "Instructions whose effect raised an exception (a bug)",
            ["effect"],
            dict.fromkeys(EFFECTS, 0) | report.effects_failed,
        )
        yield _count("transferd_log_dropped", "Log lines that were lost", report.log_dropped)
        yield _count("transferd_log_left_out", "Log lines beyond the rate limit", report.log_left_out)

    def _engines(self, engines: Mapping[str, EngineReport]) -> Iterator[Metric]:
        """Metrics of each present engine, which end with it. `transferd_tasks` keeps counting over all engines."""
        name_of = ["engine"]
        ready = GaugeMetricFamily("transferd_engine_ready", "1 when every rank of an engine is ready", labels=name_of)
        clients = GaugeMetricFamily("transferd_engine_clients", "Clients that speak for an engine", labels=name_of)
        queued = GaugeMetricFamily("transferd_engine_tasks_queued", "Queued tasks of an engine", labels=name_of)
        running = GaugeMetricFamily("transferd_engine_tasks_running", "Running tasks of an engine", labels=name_of)
        moved = CounterMetricFamily("transferd_engine_bytes", "Bytes that an engine's ranks have moved", labels=name_of)
        text = "Seconds for which clients have used an engine while memory of it was not attached; 0 if it is"
        unattached = GaugeMetricFamily("transferd_engine_unattached_seconds", text, labels=name_of)
        text = "Tasks of an engine that were answered, by final status"
        tasks = CounterMetricFamily("transferd_engine_tasks", text, labels=["engine", "status"])
        for name, engine in engines.items():
            ready.add_metric([name], float(engine.ready))
            unattached.add_metric([name], engine.unattached_s or 0.0)
            clients.add_metric([name], engine.clients)
            queued.add_metric([name], engine.queued)
            running.add_metric([name], engine.running)
            moved.add_metric([name], engine.bytes)
            for status in STATUSES:
                tasks.add_metric([name, status], engine.tasks.get(status, 0))
        yield from (ready, unattached, clients, queued, running, moved, tasks)

    def _ranks(self, ranks: Sequence[RankReport]) -> Iterator[Metric]:
        names = ["rank", "lane"]
        running = GaugeMetricFamily("transferd_lane_running", "Tasks running on a rank", labels=names)
        done = CounterMetricFamily("transferd_lane_done", "Tasks that a rank has completed", labels=names)
        failed = CounterMetricFamily("transferd_lane_failed", "Tasks that failed on a rank", labels=names)
        moved = CounterMetricFamily("transferd_lane_bytes", "Bytes a rank has moved", labels=names)
        for rank in ranks:
            if rank.engine != DEFAULT_ENGINE:
                continue  # every engine has a rank 0; `_engines` reports the others
            for name, lane in rank.lanes.items():
                labels = [str(rank.rank), name]
                running.add_metric(labels, lane.running)
                done.add_metric(labels, lane.done)
                failed.add_metric(labels, lane.failed)
                moved.add_metric(labels, lane.bytes)
        yield from (running, done, failed, moved)

    def _memory(self, report: Report) -> Iterator[Metric]:
        host, staging = report.host, report.staging
        yield _gauge("transferd_host_pool_bytes", "Host tier, all ranks", host.bytes)
        yield _gauge("transferd_host_pool_pinned", "1 when the host tier is locked in memory", host.pinned)
        yield _gauge("transferd_staging_capacity_bytes", "Staging memory there is, all ranks", staging.capacity)
        yield _gauge("transferd_staging_used_bytes", "Staging memory in use, all ranks", staging.used)
        yield _gauge("transferd_staging_peak_bytes", "Staging memory used at most, all ranks", staging.peak)
        owned = GaugeMetricFamily("transferd_memory_bytes", "Memory of the daemon, by purpose", labels=["owner"])
        for owner, nbytes in msgspec.structs.asdict(report.memory).items():
            owned.add_metric([owner], nbytes)
        yield owned

    def _storage(self, storage: StorageReport) -> Iterator[Metric]:
        backend = storage.backend
        for name, text, filled in (
            ("objects", "Stored objects", storage.objects),
            ("bytes", "Stored bytes", storage.bytes),
            ("capacity_bytes", "Bytes that may be stored", storage.capacity),
            ("pinned", "Objects that are pinned", storage.pinned),
            ("pinned_bytes", "Bytes that are pinned", storage.pinned_bytes),
            ("purging", "Objects that running purges have yet to look at", storage.purging),
            ("disks_failed", "Disks of the store that are out of use", storage.disks_failed),
            ("copies_missing", "Objects that lack copies, and that this node has to mend", storage.copies_missing),
            ("copying_bytes", "Bytes that a drain or mend of a pool has yet to copy", storage.copying_bytes),
        ):
            if filled is not None and filled is not UNSET:
                gauge = GaugeMetricFamily(f"transferd_storage_{name}", text, labels=["backend"])
                gauge.add_metric([backend], filled)
                yield gauge
        for key in ("hits", "misses", "corrupt", "errors"):
            yield _counter(f"transferd_storage_{key}", f"Storage {key}", ["backend"], {backend: getattr(storage, key)})
        for key, text in _STORAGE_EVENTS.items():
            if (number := getattr(storage, key)) is not UNSET:
                yield _counter(f"transferd_storage_{key}", text, ["backend"], {backend: number})
        if storage.scrub is not UNSET:
            for key in ("objects", "bytes", "damaged", "passes"):
                number, text = getattr(storage.scrub, key), f"Of the background scrub: {key}"
                yield _counter(f"transferd_storage_scrub_{key}", text, ["backend"], {backend: number})
        yield from self._holdings(storage)
        yield from self._disks(storage.disks or [])
        yield from self._levels(storage.levels or [])
        yield from self._breaker(storage.breaker or "closed", backend)
        if storage.peers_down is not UNSET:
            yield from self._peers(storage.peers_down)
        evicted = CounterMetricFamily("transferd_storage_evictions", "Objects evicted", labels=["backend", "reason"])
        for reason, number in (dict.fromkeys(EVICTED_FOR, 0) | (storage.evicted_for or {})).items():
            evicted.add_metric([backend, reason], number)
        yield evicted

    def _holdings(self, storage: StorageReport) -> Iterator[Metric]:
        """The objects of each engine; "" for those without an owner. Engines of one name (of several users) are one."""
        there = [] if storage.holdings is UNSET else storage.holdings
        for key, text in (
            ("bytes", "Bytes that an engine has stored"),
            ("share", "Bytes of the store that are kept for an engine"),
            ("pinned", "Bytes that an engine has pinned"),
        ):
            held = Counter[str]()
            for row in there:
                held[row.engine] += getattr(row, key)
            name = "bytes" if key == "bytes" else f"{key}_bytes"
            gauge = GaugeMetricFamily(f"transferd_storage_engine_{name}", text, labels=["engine"])
            for engine, nbytes in held.items():
                gauge.add_metric([engine], nbytes)
            yield gauge

    def _disks(self, disks: Sequence[DiskReport]) -> Iterator[Metric]:
        for key, text in _DISK_GAUGES.items():
            gauge = GaugeMetricFamily(f"transferd_storage_disk_{key}", text, labels=["path"])
            for disk in disks:
                gauge.add_metric([disk.path], float(getattr(disk, key.removesuffix("_bytes"))))
            yield gauge

    def _levels(self, levels: Sequence[LevelReport]) -> Iterator[Metric]:
        for key, text in _LEVEL_GAUGES.items():
            gauge = GaugeMetricFamily(f"transferd_storage_level_{key}", text, labels=["level"])
            for level in levels:
                if (value := getattr(level, key)) is not None:
                    gauge.add_metric([level.name], float(value))
            yield gauge
        for key, text in _LEVEL_COUNTS.items():
            counts = {level.name: getattr(level, key) for level in levels}
            yield _counter(f"transferd_storage_level_{key}", text, ["level"], counts)

    def _breaker(self, state: str, backend: str) -> Iterator[Metric]:
        text = "1 while calls go through, 0 while they fail at once because storage did not answer"
        gauge = GaugeMetricFamily("transferd_storage_available", text, labels=["backend"])
        gauge.add_metric([backend], float(state == "closed"))
        yield gauge
        text = "1 for the state that the circuit breaker is in"
        states = GaugeMetricFamily("transferd_storage_breaker_state", text, labels=["backend", "state"])
        for one in BREAKER_STATES:
            states.add_metric([backend, one], float(state == one))
        yield states

    def _peers(self, down: Iterable[str]) -> Iterator[Metric]:
        """A node that is up has no sample: there may be hundreds."""
        text = "1 for each node of the pool that does not answer: its objects fail at once"
        gauge = GaugeMetricFamily("transferd_storage_peer_down", text, labels=["peer"])
        for peer in down:
            gauge.add_metric([peer], 1.0)
        yield gauge

    def _events(self, events: EventsReport) -> Iterator[Metric]:
        yield _count("transferd_kv_events", "KV events published", events.events or 0)
        yield _count("transferd_kv_event_replays", "Replays sent to their end", events.replays or 0)
        yield _count("transferd_kv_event_snapshots", "Snapshots requested", events.snapshots or 0)
        announced = GaugeMetricFamily("transferd_kv_blocks_announced", "Blocks announced to routers", labels=["medium"])
        for medium, blocks in (events.announced or {}).items():
            announced.add_metric([medium], blocks)
        yield announced


def _gauge(name: str, text: str, value: Any) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))


def _count(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _counter(name: str, text: str, labels: list[str], values: dict[str, Any]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for label, value in values.items():
        family.add_metric([str(label)] if labels else [], value)
    return family


def exposition(report: Reporter, not_ready: Callable[[], str], tasks: Collector | None = None) -> Callable[[], bytes]:
    """Return the function that answers /metrics. tasks: the counts of tasks; see TaskMetrics."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each series, and no use
    registry = CollectorRegistry()
    registry.register(_StatsCollector(report, not_ready))
    if tasks is not None:
        registry.register(tasks)
    ProcessCollector(registry=registry)
    return functools.partial(generate_latest, registry)
