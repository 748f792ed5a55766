"""Prometheus metrics: one row for each, read from one report at each scrape, plus what task_log.py counts of each task.

A row names a field of the report (report.py) and the metric that it is. Labels are bounded by construction: ranks,
lanes, statuses, codes, tiers, and the engines that exist now.

status_server.py imports this where it listens: a daemon without [metrics] needs no prometheus_client.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET
from prometheus_client import ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from transferd.config import DEFAULT_ENGINE
from transferd.observability.concerns import REMEDIES
from transferd.observability.report import Report
from transferd.tasks import NOT_STORED, Status

# Label values that exist from the start, at 0: rate() would miss the first increment of a series that begins with 1.
STATUSES = [str(status) for status in Status]
REJECTS = (
    *("queue_full", "bytes_in_flight", "starting", "draining", "not_attached", "empty_block", "cleared", "cache_gone"),
    *("bad_value", "id_out_of_range", "task_id_conflict", "task_id_busy", "no_storage_tier", "no_host_tier"),
    *("rank_died", "malformed", "unsupported_version", "unknown_type", "too_large", "stale_session", "forbidden"),
    "too_often",
)
EFFECTS = ("Start", "StopTask", "ExpireRound", "Reply", "Publish", "WakeAt", "Unblock")
EVICTED_FOR = ("capacity", "medium_full", "shrink", "reserve")
BREAKER_STATES = ("closed", "open", "half_open")

Labels = tuple[str, ...]
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily


class MetricRow(NamedTuple):
    """One metric. field: dotted, of a subject (SUBJECTS). by: the label of a map's keys. zero: keys always there."""

    name: str
    kind: Any
    text: str
    field: str
    by: str = ""
    zero: Iterable[str] = ()


def _lanes(report: Report) -> Iterator[tuple[Labels, Any]]:
    """Every engine has a rank 0: these are of [cache]; `engine_…` has the others."""
    for rank in report.ranks:
        if rank.engine == DEFAULT_ENGINE:
            yield from (((str(rank.rank), name), lane) for name, lane in rank.lanes.items())


def _holdings(report: Report) -> Iterator[tuple[Labels, Any]]:
    """The objects of each engine that is here. "" has those of all others: names come and go for months."""
    held: dict[str, Counter[str]] = {}
    for row in report.storage.holdings or ():
        held.setdefault(row.engine if row.there else "", Counter()).update(
            bytes=row.bytes, share=row.share, pinned=row.pinned
        )
    return (((name,), _Sums(**counts)) for name, counts in held.items())


class _Sums(msgspec.Struct):
    bytes: int
    share: int
    pinned: int


# What metrics are about: the beginning of their names, their labels, and the subjects in a report.
SUBJECTS: dict[str, tuple[Labels, Callable[[Report], Iterable[tuple[Labels, Any]]]]] = {
    "": ((), lambda report: [((), report)]),
    "lane_": (("rank", "lane"), _lanes),
    "engine_": (("engine",), lambda report: (((name,), one) for name, one in report.engines.items())),
    "storage_": (("backend",), lambda report: [((report.storage.backend,), report.storage)]),
    "storage_engine_": (("engine",), _holdings),
    "storage_disk_": (("path",), lambda report: (((one.path,), one) for one in report.storage.disks or ())),
    "storage_level_": (("level",), lambda report: (((one.name,), one) for one in report.storage.levels or ())),
}

ROWS: dict[str, list[MetricRow]] = {
    "": [
        MetricRow("uptime_seconds", GAUGE, "Seconds since the start", "uptime_s"),
        MetricRow("tasks_queued", GAUGE, "Tasks admitted and not running", "queued"),
        MetricRow("tasks_running", GAUGE, "Tasks running", "running"),
        MetricRow("tasks_straggling", GAUGE, "Answered tasks that a rank still works on", "straggling"),
        MetricRow("tasks", COUNTER, "Tasks answered, by final status", "tasks", "status", STATUSES),
        MetricRow("rejects", COUNTER, "Requests refused, by code", "rejects", "code", REJECTS),
        MetricRow(
            "task_errors",
            COUNTER,
            "Admitted tasks that ended with an error, by code",
            "errors",
            "code",
            ("storage_full", "expired"),
        ),
        MetricRow("barrier_rounds_open", GAUGE, "Rounds in which ranks have yet to arrive", "barrier.open"),
        MetricRow("barrier_ranks_owing", GAUGE, "Arrivals still owed to rounds that have ended", "barrier.owing"),
        MetricRow("barrier_rounds", COUNTER, "Rounds that have ended, for whatever reason", "barrier.completed"),
        MetricRow(
            "barrier_rounds_expired", COUNTER, "Rounds that a deadline ended without every rank", "barrier.expired"
        ),
        MetricRow("barrier_late_arrivals", COUNTER, "Arrivals dropped because their round had ended", "barrier.late"),
        MetricRow(
            "barrier_skew_seconds",
            COUNTER,
            "Seconds by which a rank has arrived after the first one of its round",
            "barrier.skew_s",
            "rank",
        ),
        MetricRow("refused", COUNTER, "Connections and HTTP requests refused", "refused", "reason"),
        MetricRow(
            "blocks_not_stored",
            COUNTER,
            "Blocks that engines did not store, by reason",
            "server.not_stored",
            "reason",
            NOT_STORED,
        ),
        MetricRow("clients", GAUGE, "Clients connected", "server.clients"),
        MetricRow("clients_lost", COUNTER, "Clients that fell silent", "server.clients_lost"),
        MetricRow("messages", COUNTER, "Messages received", "server.messages"),
        MetricRow("undeliverable", COUNTER, "Answers whose client was gone", "server.undeliverable"),
        MetricRow(
            "effects_failed",
            COUNTER,
            "Instructions whose effect raised an exception (a bug)",
            "effects_failed",
            "effect",
            EFFECTS,
        ),
        MetricRow("log_dropped", COUNTER, "Log lines that were lost", "log_dropped"),
        MetricRow("log_left_out", COUNTER, "Log lines beyond the rate limit", "log_left_out"),
        MetricRow("host_pool_bytes", GAUGE, "Host tier, all ranks", "host.bytes"),
        MetricRow("host_pool_pinned", GAUGE, "1 when the host tier is locked in memory", "host.pinned"),
        MetricRow("staging_capacity_bytes", GAUGE, "Staging memory there is, all ranks", "staging.capacity"),
        MetricRow("staging_used_bytes", GAUGE, "Staging memory in use, all ranks", "staging.used"),
        MetricRow("staging_peak_bytes", GAUGE, "Staging memory used at most, all ranks", "staging.peak"),
        MetricRow("memory_bytes", GAUGE, "Memory of the daemon, by purpose", "memory", "owner"),
        MetricRow("traces", COUNTER, "Traces of tasks, by outcome", "traces", "outcome"),
        MetricRow("kv_events", COUNTER, "KV events published", "events.events"),
        MetricRow("kv_event_replays", COUNTER, "Replays sent to their end", "events.replays"),
        MetricRow("kv_event_snapshots", COUNTER, "Snapshots requested", "events.snapshots"),
        MetricRow("kv_blocks_announced", GAUGE, "Blocks announced to routers", "events.announced", "medium"),
        MetricRow(
            "storage_peer_down",
            GAUGE,
            "1 for each node of the pool that does not answer: its objects fail at once",
            "storage.peers_down",
            "peer",
        ),
    ],
    "lane_": [
        MetricRow("running", GAUGE, "Tasks running on a rank", "running"),
        MetricRow("done", COUNTER, "Tasks that a rank has completed", "done"),
        MetricRow("failed", COUNTER, "Tasks that failed on a rank", "failed"),
        MetricRow("bytes", COUNTER, "Bytes a rank has moved", "bytes"),
    ],
    "engine_": [
        MetricRow("ready", GAUGE, "1 when every rank of an engine is ready", "ready"),
        MetricRow("clients", GAUGE, "Clients that speak for an engine", "clients"),
        MetricRow("tasks_queued", GAUGE, "Queued tasks of an engine", "queued"),
        MetricRow("tasks_running", GAUGE, "Running tasks of an engine", "running"),
        MetricRow("bytes", COUNTER, "Bytes that an engine's ranks have moved", "bytes"),
        MetricRow(
            "unattached_seconds",
            GAUGE,
            "Seconds for which clients have used an engine while memory of it was not attached; 0 if it is",
            "unattached_s",
        ),
        MetricRow(
            "tasks", COUNTER, "Tasks of an engine that were answered, by final status", "tasks", "status", STATUSES
        ),
    ],
    "storage_": [
        MetricRow("objects", GAUGE, "Stored objects", "objects"),
        MetricRow("bytes", GAUGE, "Stored bytes", "bytes"),
        MetricRow("capacity_bytes", GAUGE, "Bytes that may be stored", "capacity"),
        MetricRow("pinned", GAUGE, "Objects that are pinned", "pinned"),
        MetricRow("pinned_bytes", GAUGE, "Bytes that are pinned", "pinned_bytes"),
        MetricRow("purging", GAUGE, "Objects that running purges have yet to look at", "purging"),
        MetricRow("disks_failed", GAUGE, "Disks of the store that are out of use", "disks_failed"),
        MetricRow(
            "copies_missing", GAUGE, "Objects that lack copies, and that this node has to mend", "copies_missing"
        ),
        MetricRow("copying_bytes", GAUGE, "Bytes that a drain or mend of a pool has yet to copy", "copying_bytes"),
        MetricRow("hits", COUNTER, "Storage hits", "hits"),
        MetricRow("misses", COUNTER, "Storage misses", "misses"),
        MetricRow("corrupt", COUNTER, "Storage corrupt", "corrupt"),
        MetricRow("errors", COUNTER, "Storage errors", "errors"),
        MetricRow("wrong_length", COUNTER, "Objects of another length than expected, made unreachable", "wrong_length"),
        MetricRow("gone", COUNTER, "Objects that somebody else has removed", "gone"),
        MetricRow("waited_for_room", COUNTER, "Objects that were retried because the pool was full", "waited_for_room"),
        MetricRow(
            "contested",
            COUNTER,
            "Stored objects that could not be found yet: another client was writing them",
            "contested",
        ),
        MetricRow("taken_over", COUNTER, "Objects that replaced another client's unfinished write", "taken_over"),
        MetricRow("held", COUNTER, "Objects whose buffers were held because a transfer did not end", "held"),
        MetricRow("under_replicated", COUNTER, "Objects stored with fewer copies than configured", "under_replicated"),
        MetricRow("copies_made", COUNTER, "Copies that drains and mends of a pool have made", "copies_made"),
        MetricRow("peers_went_down", COUNTER, "Times that a node of the pool stopped answering", "peers_went_down"),
        MetricRow(
            "connections_cut",
            COUNTER,
            "Connections that were ended to nodes of the pool that do not answer",
            "connections_cut",
        ),
        MetricRow(
            "other_layout",
            COUNTER,
            "Lookups whose first absent key is stored in another layout of the model",
            "other_layout",
        ),
        MetricRow("breaker_opened", COUNTER, "Times that storage did not answer", "breaker_opened"),
        MetricRow(
            "not_admitted",
            COUNTER,
            "Objects that were not stored, because no second task had asked for them",
            "not_admitted",
        ),
        MetricRow("purged", COUNTER, "Objects removed by purges", "purged"),
        MetricRow("pins_expired", COUNTER, "Objects whose last pin has ended with its time", "pins_expired"),
        MetricRow("lost", COUNTER, "Objects that were on disks when they failed", "lost"),
        MetricRow("scrub_objects", COUNTER, "Of the background scrub: objects", "scrub.objects"),
        MetricRow("scrub_bytes", COUNTER, "Of the background scrub: bytes", "scrub.bytes"),
        MetricRow("scrub_damaged", COUNTER, "Of the background scrub: damaged", "scrub.damaged"),
        MetricRow("scrub_passes", COUNTER, "Of the background scrub: passes", "scrub.passes"),
        MetricRow("evictions", COUNTER, "Objects evicted", "evicted_for", "reason", EVICTED_FOR),
    ],
    "storage_engine_": [
        MetricRow("bytes", GAUGE, "Bytes that an engine has stored", "bytes"),
        MetricRow("share_bytes", GAUGE, "Bytes of the store that are kept for an engine", "share"),
        MetricRow("pinned_bytes", GAUGE, "Bytes that an engine has pinned", "pinned"),
    ],
    "storage_disk_": [
        MetricRow("total_bytes", GAUGE, "Bytes of the file system that the store is on", "total"),
        MetricRow("free_bytes", GAUGE, "Bytes of it that are free for the daemon", "free"),
        MetricRow("reserve_bytes", GAUGE, "Bytes of it that the store leaves free", "reserve"),
        MetricRow(
            "room_bytes",
            GAUGE,
            "Bytes that the store may hold: its capacity, or less if the disk has less room",
            "room",
        ),
        MetricRow("files_free", GAUGE, "Inodes of it that are free; 0 if they have no fixed number", "files_free"),
        MetricRow("read_only", GAUGE, "1 if it is mounted read-only", "read_only"),
        MetricRow("stuck", GAUGE, "Objects, files and directories that refuse and are set aside", "stuck"),
    ],
    "storage_level_": [
        MetricRow("bytes", GAUGE, "Bytes that a level of the store holds", "bytes"),
        MetricRow("pending_bytes", GAUGE, "Bytes that wait to be copied to a level", "pending_bytes"),
        MetricRow("kept_bytes", GAUGE, "Bytes of a level that wait for the first use after a prefetch", "kept_bytes"),
        MetricRow("hanging", GAUGE, "Calls to a level that have taken too long, and have not ended", "hanging"),
        MetricRow("available", GAUGE, "1 while calls go to a level", "available"),
        MetricRow("hits", COUNTER, "Objects that loads found in a level", "hits"),
        MetricRow("misses", COUNTER, "Objects that loads asked a level for and did not find there", "misses"),
        MetricRow("corrupt", COUNTER, "Damaged copies of a level that were set aside", "corrupt"),
        MetricRow("copied", COUNTER, "Objects copied to a level from one above", "copied"),
        MetricRow("promoted", COUNTER, "Objects copied to a level from one below, because they were used", "promoted"),
        MetricRow(
            "prefetched", COUNTER, "Objects copied to a level from one below by prefetches and warm-ups", "prefetched"
        ),
        MetricRow("lost", COUNTER, "Objects that were not copied to a level", "lost"),
        MetricRow("slow_calls", COUNTER, "Calls to a level that took much longer than others", "slow_calls"),
    ],
}
MAY_BE_NONE = ("unattached_s", "evicted_for")  # which then count as 0


def families(report: Report) -> Iterator[Metric]:
    """Every row of one report. A metric whose field is absent in all subjects is absent."""
    for prefix, rows in ROWS.items():
        labels, subjects_of = SUBJECTS[prefix]
        subjects = list(subjects_of(report))
        for row in rows:
            family = row.kind(f"transferd_{prefix}{row.name}", row.text, labels=[*labels, row.by] if row.by else labels)
            for values, subject in subjects:
                _add(family, values, row, subject)
            if family.samples or row.zero or prefix not in ("", "storage_"):
                yield family


def _add(family: Any, labels: Labels, row: MetricRow, subject: Any) -> None:
    try:
        value = attrgetter(row.field)(subject)
    except AttributeError:  # a section that does not apply is UNSET
        return
    if value in (None, UNSET) and row.field in MAY_BE_NONE:
        value = {} if row.by else 0
    if value is None or value is UNSET:
        return
    if not row.by:
        family.add_metric(labels, float(value))
        return
    for key, number in {**dict.fromkeys(row.zero, 0), **_by_key(value)}.items():
        if number is not UNSET:
            family.add_metric((*labels, str(key)), 1.0 if isinstance(number, str) else float(number))


def _by_key(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    return dict(enumerate(value)) if isinstance(value, list) else value


def _of_report(report: Report, ready: bool) -> Iterator[Metric]:
    yield InfoMetricFamily("transferd_build", "The daemon's version", {"version": report.version})
    yield GaugeMetricFamily("transferd_ready", "1 when every rank is ready and tasks are admitted", float(ready))
    lasting = {one.name for one in report.concerns or ()}
    text = "1 while something is wrong, by what it is"
    yield _states("transferd_concern", text, ["concern"], {(name,): name in lasting for name in REMEDIES})
    breaker, backend = report.storage.breaker or "closed", report.storage.backend
    text = "1 while calls go through, 0 while they fail at once because storage did not answer"
    yield _states("transferd_storage_available", text, ["backend"], {(backend,): breaker == "closed"})
    states: dict[Labels, bool] = {(backend, state): breaker == state for state in BREAKER_STATES}
    text = "1 for the state that the circuit breaker is in"
    yield _states("transferd_storage_breaker_state", text, ["backend", "state"], states)
    yield from families(report)


def _states(name: str, text: str, labels: list[str], states: Mapping[Labels, bool]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, on in states.items():
        family.add_metric(values, float(on))
    return family


class _Families(NamedTuple):
    """Stands for a registry."""

    collect: Callable[[], Iterable[Metric]]


def exposition(not_ready: Callable[[], str], tasks: Collector | None) -> Callable[[Report], Callable[[], bytes]]:
    """Return a function that takes a report, on the event loop, and returns one for any thread, which makes the text.

    not_ready: as for StatusServer. tasks: the counts of tasks; see TaskMetrics.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each series, and no use
    process = ProcessCollector(registry=None)

    def begin(report: Report) -> Callable[[], bytes]:
        ready, counted = not not_ready(), [] if tasks is None else list(tasks.collect())
        found = _Families(lambda: itertools.chain(_of_report(report, ready), counted, process.collect()))
        return functools.partial(generate_latest, found)

    return begin
