"""Prometheus metrics: read from one stats() dict at each scrape, plus what task_metrics.py counts of each task.

Labels are bounded by construction: ranks, lanes, statuses, codes, tiers, and the engines that exist now.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from transferd.config import DEFAULT_ENGINE
from transferd.observability.concerns import concerns
from transferd.observability.http import MAX_CONNECTIONS, Asked, HttpServer, Page, Route
from transferd.observability.page import ROWS, as_json, front_page, story_page
from transferd.observability.task_metrics import TaskMetrics
from transferd.runtime.descriptors import spare
from transferd.tasks import Status

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
EFFECTS = ("Start", "StopTask", "ExpireRound", "Reply", "Publish", "WakeAt")
EVICTED_FOR = ("capacity", "medium_full", "shrink")
BREAKER_STATES = ("closed", "open", "half_open")

# Counters that only some backends have, with their help texts.
_STORAGE_EVENTS = {
    "wrong_length": "Objects of another length than expected, made unreachable",
    "waited_for_room": "Objects that were retried because the pool was full",
    "contested": "Stored objects that could not be found yet: another client was writing them",
    "taken_over": "Objects that replaced another client's unfinished write",
    "held": "Objects whose buffers were held because a transfer did not end",
    "other_layout": "Lookups whose first absent key is stored in another layout of the model",
    "breaker_opened": "Times that storage did not answer",
}

# Key of stats()["storage"], metric, help.
_STORAGE_FILL = (
    ("objects", "objects", "Stored objects"),
    ("bytes", "bytes", "Stored bytes"),
    ("capacity", "capacity_bytes", "Bytes that may be stored"),
)

# Key of stats()["barrier"], metric, help.
_BARRIER_COUNTS = (
    ("completed", "rounds", "Rounds that have ended, for whatever reason"),
    ("expired", "rounds_expired", "Rounds that a deadline ended without every rank"),
    ("late", "late_arrivals", "Arrivals dropped because their round had ended"),
)

Stats = Callable[[], dict[str, Any]]


class _StatsCollector:
    """Turns one stats() dict into metric families. not_ready: as for StatusServer."""

    def __init__(self, stats: Stats, not_ready: Callable[[], str]) -> None:
        self._stats = stats
        self._not_ready = not_ready

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield InfoMetricFamily("transferd_build", "The daemon's version", {"version": stats["version"]})
        yield from self._daemon(stats)
        yield from self._ranks(stats)
        yield from self._engines(stats.get("engines", {}))
        yield from self._memory(stats)
        yield from self._storage(stats["storage"])
        if "batches" in stats["events"]:
            yield from self._events(stats["events"])
        if stats["traces"]:
            yield _counter("transferd_traces", "Traces of tasks, by outcome", ["outcome"], stats["traces"])

    def _daemon(self, stats: dict[str, Any]) -> Iterator[Metric]:
        yield _gauge("transferd_uptime_seconds", "Seconds since the start", stats["uptime_s"])
        yield _gauge("transferd_ready", "1 when every rank is ready and tasks are admitted", not self._not_ready())
        yield _gauge("transferd_tasks_queued", "Tasks admitted and not running", stats["queued"])
        yield _gauge("transferd_tasks_running", "Tasks running", stats["running"])
        yield _gauge("transferd_tasks_straggling", "Answered tasks that a rank still works on", stats["straggling"])
        yield _counter(
            "transferd_tasks",
            "Tasks answered, by final status",
            ["status"],
            dict.fromkeys(STATUSES, 0) | stats["tasks"],
        )
        yield _counter(
            "transferd_rejects", "Requests refused, by code", ["code"], dict.fromkeys(REJECTS, 0) | stats["rejects"]
        )
        barrier = stats["barrier"]
        yield _gauge("transferd_barrier_rounds_open", "Rounds in which ranks have yet to arrive", barrier["open"])
        yield _gauge("transferd_barrier_ranks_owing", "Arrivals still owed to rounds that have ended", barrier["owing"])
        for key, name, text in _BARRIER_COUNTS:
            yield _counter(f"transferd_barrier_{name}", text, [], {"": barrier[key]})
        text = "Seconds by which a rank has arrived after the first one of its round"
        skew = {str(rank): seconds for rank, seconds in enumerate(barrier["skew_s"])}
        yield _counter("transferd_barrier_skew_seconds", text, ["rank"], skew)
        yield _counter("transferd_refused", "Connections and HTTP requests refused", ["reason"], stats["refused"])
        yield _gauge("transferd_clients", "Clients connected", stats["server"]["clients"])
        yield _counter("transferd_clients_lost", "Clients that fell silent", [], {"": stats["server"]["clients_lost"]})
        yield _counter("transferd_messages", "Messages received", [], {"": stats["server"]["messages"]})
        yield _counter(
            "transferd_undeliverable", "Answers whose client was gone", [], {"": stats["server"]["undeliverable"]}
        )
        yield _counter(
            "transferd_effects_failed",
            "Instructions whose effect raised an exception (a bug)",
            ["effect"],
            dict.fromkeys(EFFECTS, 0) | stats["effects_failed"],
        )
        yield _counter("transferd_log_dropped", "Log lines that were lost", [], {"": stats["log_dropped"]})
        yield _counter("transferd_log_left_out", "Log lines beyond the rate limit", [], {"": stats["log_left_out"]})

    def _engines(self, engines: dict[str, Any]) -> Iterator[Metric]:
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
            ready.add_metric([name], float(engine["ready"]))
            unattached.add_metric([name], engine["unattached_s"] or 0.0)
            for family, key in ((clients, "clients"), (queued, "queued"), (running, "running"), (moved, "bytes")):
                family.add_metric([name], engine[key])
            for status in STATUSES:
                tasks.add_metric([name, status], engine["tasks"].get(status, 0))
        yield from (ready, unattached, clients, queued, running, moved, tasks)

    def _ranks(self, stats: dict[str, Any]) -> Iterator[Metric]:
        names = ["rank", "lane"]
        running = GaugeMetricFamily("transferd_lane_running", "Tasks running on a rank", labels=names)
        done = CounterMetricFamily("transferd_lane_done", "Tasks that a rank has completed", labels=names)
        failed = CounterMetricFamily("transferd_lane_failed", "Tasks that failed on a rank", labels=names)
        moved = CounterMetricFamily("transferd_lane_bytes", "Bytes a rank has moved", labels=names)
        for rank in stats["ranks"]:
            if rank.get("engine", DEFAULT_ENGINE) != DEFAULT_ENGINE:
                continue  # every engine has a rank 0; `_engines` reports the others
            for name, lane in rank["lanes"].items():
                labels = [str(rank["rank"]), name]
                running.add_metric(labels, lane["running"])
                done.add_metric(labels, lane["done"])
                failed.add_metric(labels, lane["failed"])
                moved.add_metric(labels, lane["bytes"])
        yield from (running, done, failed, moved)

    def _memory(self, stats: dict[str, Any]) -> Iterator[Metric]:
        host, staging = stats["host"], stats["staging"]
        yield _gauge("transferd_host_pool_bytes", "Host tier, all ranks", host["bytes"])
        yield _gauge("transferd_host_pool_pinned", "1 when the host tier is locked in memory", host["pinned"])
        for key, text in (("capacity", "there is"), ("used", "in use"), ("peak", "used at most")):
            yield _gauge(f"transferd_staging_{key}_bytes", f"Staging memory {text}, all ranks", staging[key])
        owned = GaugeMetricFamily("transferd_memory_bytes", "Memory of the daemon, by purpose", labels=["owner"])
        for owner, nbytes in stats["memory"].items():
            owned.add_metric([owner], nbytes)
        yield owned

    def _storage(self, storage: dict[str, Any]) -> Iterator[Metric]:
        backend = {"backend": storage["backend"]}
        for key, name, text in _STORAGE_FILL:
            if storage.get(key) is not None:
                gauge = GaugeMetricFamily(f"transferd_storage_{name}", text, labels=["backend"])
                gauge.add_metric([backend["backend"]], storage[key])
                yield gauge
        for key in ("hits", "misses", "corrupt", "errors"):
            counter = CounterMetricFamily(f"transferd_storage_{key}", f"Storage {key}", labels=["backend"])
            counter.add_metric([backend["backend"]], storage.get(key) or 0)
            yield counter
        for key, text in _STORAGE_EVENTS.items():
            if key in storage:
                counter = CounterMetricFamily(f"transferd_storage_{key}", text, labels=["backend"])
                counter.add_metric([backend["backend"]], storage[key])
                yield counter
        if "scrub" in storage:
            for key in ("objects", "bytes", "damaged", "passes"):
                text = f"Of the background scrub: {key}"
                yield _counter(
                    f"transferd_storage_scrub_{key}", text, ["backend"], {backend["backend"]: storage["scrub"][key]}
                )
        yield from self._breaker(storage.get("breaker", "closed"), storage["backend"])
        evicted = CounterMetricFamily("transferd_storage_evictions", "Objects evicted", labels=["backend", "reason"])
        for reason, number in (dict.fromkeys(EVICTED_FOR, 0) | storage.get("evicted_for", {})).items():
            evicted.add_metric([storage["backend"], reason], number)
        yield evicted

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

    def _events(self, events: dict[str, Any]) -> Iterator[Metric]:
        yield _counter("transferd_kv_events", "KV events published", [], {"": events["events"]})
        yield _counter("transferd_kv_event_replays", "Replays sent to their end", [], {"": events["replays"]})
        yield _counter("transferd_kv_event_snapshots", "Snapshots requested", [], {"": events["snapshots"]})
        announced = GaugeMetricFamily("transferd_kv_blocks_announced", "Blocks announced to routers", labels=["medium"])
        for medium, blocks in events["announced"].items():
            announced.add_metric([medium], blocks)
        yield announced


def _gauge(name: str, text: str, value: Any) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, labels: list[str], values: dict[str, Any]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for label, value in values.items():
        family.add_metric([str(label)] if labels else [], value)
    return family


class StatusServer:
    """Serves /metrics, /healthz, /readyz, /status, the page at / and what that page polls.

    stats: the report. alive: whether the dispatcher makes progress or is idle. not_ready: why it is not ready, or "".
    tasks: called with a number, returns at most that many of the newest tasks. explain: called with a task and its
    engine, returns its story. Without these two there is no page.
    """

    def __init__(
        self,
        listen: str,
        stats: Stats,
        alive: Callable[[], bool],
        not_ready: Callable[[], str],
        *,
        tasks: Callable[[int], list[dict[str, Any]]] | None = None,
        explain: Callable[[str, str], dict[str, Any]] | None = None,
        hosts: Collection[str] = (),
    ) -> None:
        """hosts: see HttpServer."""
        self._stats = stats
        self._alive = alive
        self._not_ready = not_ready
        self._registry = CollectorRegistry()
        self._registry.register(_StatsCollector(stats, not_ready))
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each series, and no use
        ProcessCollector(registry=self._registry)
        self.tasks = TaskMetrics(self._registry)
        routes: dict[str, Route] = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status": self._status,
        }
        asked: dict[str, Asked] = {}
        if tasks is not None and explain is not None:
            routes["/"] = front_page
            routes["/live"] = lambda: self._live(tasks)
            asked["/explain"] = functools.partial(story_page, explain)
        most = spare(MAX_CONNECTIONS)
        self.http = HttpServer(listen, routes, asked=asked, hosts=hosts, max_connections=most) if listen else None

    def refused(self) -> dict[str, int]:
        """HTTP requests and connections that were refused, by reason."""
        return {} if self.http is None else dict(self.http.refused)

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be bound."""
        if self.http is not None:
            await self.http.start()

    async def close(self) -> None:
        if self.http is not None:
            await self.http.close()

    def _metrics(self) -> Page:
        return Page(generate_latest(self._registry), "text/plain; version=0.0.4; charset=utf-8")

    def _healthz(self) -> Page:
        stalled = b"dispatcher stalled: tasks are running and a deadline is overdue\n"
        return Page(b"ok\n") if self._alive() else Page(stalled, status=503)

    def _readyz(self) -> Page:
        reason = self._not_ready()
        return Page(f"{reason}\n".encode(), status=503) if reason else Page(b"ready\n")

    def _live(self, tasks: Callable[[int], list[dict[str, Any]]]) -> Page:
        report, not_ready = self._stats(), self._not_ready()
        troubles = concerns(report, not_ready)
        return as_json({"report": report, "not_ready": not_ready, "concerns": troubles, "tasks": tasks(ROWS)})

    def _status(self) -> Page:
        return Page(json.dumps(self._stats(), default=str).encode() + b"\n", "application/json")
