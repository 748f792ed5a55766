"""What the alerts and the dashboard in deploy/ show: fields of the report, and concerns. See describe_report.py.

An alert stands for each concern that is more than somebody's wish, with the concern's own severity and remedy. The
other alerts, and all panels, name fields of the report ("storage.levels.bytes"); names, labels, units and descriptions
of their metrics are those of the fields' rows, so that a field that is renamed or gone is an error here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transferd.observability.concerns import Concern
from transferd.observability.figure import Figure

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
ALERTS, DASHBOARD = DEPLOY / "prometheus" / "alerts.yml", DEPLOY / "grafana" / "transferd.json"


class Metric(NamedTuple):
    """A field of the report as a metric. figure: its row; None for one that is no field."""

    name: str
    labels: list[str]
    figure: Figure | None

    def row(self) -> str:
        """Its row in docs/metrics.md."""
        assert self.figure is not None
        shown = f"{{{','.join(self.labels)}}}" if self.labels else ""
        return f"| `{self.name}{shown}` | {self.figure.kind} | {self.figure.help} |"


# Metrics that are no fields of the report (metrics.py, task_log.py, and prometheus_client's own).
OTHERS = {
    "ready": Metric("transferd_ready", [], None),
    "concern": Metric("transferd_concern", ["concern", "severity"], None),
    "task_seconds": Metric("transferd_task_duration_seconds_bucket", ["engine", "kind", "status"], None),
    "stage_seconds": Metric("transferd_stage_seconds_total", ["engine", "kind", "stage"], None),
    "deadlines": Metric("transferd_deadlines_missed_total", ["engine", "kind", "cause"], None),
    "resident": Metric("process_resident_memory_bytes", [], None),
    "descriptors": Metric("process_open_fds", [], None),
    "most_descriptors": Metric("process_max_fds", [], None),
    "started": Metric("process_start_time_seconds", [], None),
}


# --- alerts -----------------------------------------------------------------------------------------


class Alert(NamedTuple):
    """An alert that no concern stands for. when: [FIELD] is the name of its metric."""

    name: str
    when: str
    lasts: str  # before it fires; "" at once
    severity: str
    summary: str  # ends with where
    action: str


ALONE = [
    Alert("Down", 'up{job="transferd"} == 0', "1m", "critical", "No answer from transferd",
          "Read `systemctl status transferd` and the end of its journal. Exit code 2 is the configuration: run"
          " `transferd config check`."),
    Alert("Restarts", 'changes([started]{job="transferd"}[30m]) > 2', "", "critical", "transferd keeps restarting",
          "Engines lose their device and host cache each time. Read the journal around each start, and the newest"
          " dump of the flight recorder."),
    Alert("TasksFail", 'sum by (instance, engine) (rate([engines.tasks]{status="failed"}[5m]))'
          " / sum by (instance, engine) (rate([engines.tasks][5m])) > 0.01", "5m", "warning",
          "{{ $value | humanizePercentage }} of the tasks of engine {{ $labels.engine }} fail",
          "`transferd tasks --failed` names them with their error; `transferd explain ID` tells one rank by rank."),
    Alert("Slow", "histogram_quantile(0.99, sum by (le, instance, engine, kind) (rate([task_seconds][5m]))) > 5",
          "10m", "warning",
          "The slowest 1 % of the {{ $labels.kind }} tasks of engine {{ $labels.engine }} take more than 5 s",
          "`transferd why slow` says which stage or level takes the time."),
    Alert("Thrashes", "sum by (instance, level) (rate([storage.levels.hits][30m])) / (sum by (instance, level)"
          " (rate([storage.levels.hits][30m])) + sum by (instance, level) (rate([storage.levels.misses][30m]))) < 0.1"
          " and on (instance, level) sum by (instance, level) (rate([storage.levels.evicted_for][30m])) > 1",
          "30m", "info", "The level {{ $labels.level }} evicts what is asked for again",
          "It is too small for what engines repeat: `transferd stats` says what twice its size would do."),
    Alert("Descriptors", '[descriptors]{job="transferd"} / [most_descriptors]{job="transferd"} > 0.8', "5m", "warning",
          "transferd runs out of file descriptors",
          "Raise LimitNOFILE= of the unit, or find who opens the connections with `transferd clients`."),
]  # fmt: skip
LASTS = {"critical": "1m", "warning": "5m"}  # what is said of a concern that ends by itself soon wakes nobody


def alerts(metrics: Mapping[str, Metric], concerns: Mapping[str, Concern], when: Mapping[str, str]) -> str:
    """The rules. when: each concern's beginning, in words."""
    known = {**metrics, **OTHERS}
    each = [
        Alert(
            "".join(word.capitalize() for word in name.split("_")),
            f'[concern]{{concern="{name}"}} == 1',
            LASTS[one.severity],
            one.severity,
            _plain(when[name]),
            one.remedy,
        )
        for name, one in concerns.items()
        if one.severity in LASTS
    ]
    lines = [
        '# Alert rules for Prometheus, which expect the job to be called "transferd" (scrape.yml).',
        "# Made by `python scripts/describe_report.py`: a rule for each concern of `stats`, and a few besides.",
        "groups:",
        "  - name: transferd",
        "    rules:",
    ]
    for one in [*ALONE, *each]:
        lines += [f"      - alert: Transferd{one.name}", f"        expr: {_named(one.when, known)}"]
        lines += [f"        for: {one.lasts}"] * bool(one.lasts)
        lines += ["        labels:", f"          severity: {one.severity}", "        annotations:"]
        lines += [f"          summary: {_quoted(f'On {{{{ $labels.instance }}}}: {one.summary}')}"]
        lines += [f"          action: {_quoted(one.action)}"]
    return "\n".join(lines) + "\n"


def _named(expression: str, known: Mapping[str, Metric]) -> str:
    """An expression with the names of its metrics."""
    return re.sub(r"\[([a-z_.]*[a-z_])\]", lambda field: known[field[1]].name, expression)


def _plain(text: str) -> str:
    """Words of the docs without their links and quotes."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)


def _quoted(text: str) -> str:
    """YAML's single quotes."""
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


# --- dashboard --------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One curve, or one for each value of `by`. A counter is shown as its rate.

    part: FIELD / (FIELD + part), or with `whole`, FIELD / whole. only: label values. quantile: of a histogram.
    """

    field: str
    by: tuple[str, ...] = ()
    called: str = ""
    part: str = ""
    whole: str = ""
    quantile: float | None = None
    positive: bool = False


class Panel(NamedTuple):
    title: str
    lines: list[Line]
    kind: str = "timeseries"
    wide: int = 8
    unit: str = ""
    says: str = ""  # otherwise what the first field's row says


ENGINE, LEVEL, DISK = ("engine",), ("level",), ("level", "path")
EACH = ("instance",)
ROWS: list[tuple[int, list[Panel]]] = [  # their heights
    (4, [
        Panel("Ready", [Line("ready", EACH)], "stat", 4, says="Every rank has its memory and tasks are admitted."),
        Panel("Concerns", [Line("concern", ("severity",), positive=True)], "stat", 4,
              says="What is wrong, by severity; `transferd stats` says it in words."),
        Panel("Up for", [Line("uptime_s", EACH)], "stat", 4, "s"),
        Panel("Hit rate", [Line("hits", EACH, part="misses")], "stat", 4),
        Panel("Engines ready", [Line("engines.ready")], "stat", 4),
        Panel("Clients", [Line("server.clients", EACH)], "stat", 4),
    ]),
    (7, [Panel("Concerns that last", [Line("concern", ("severity", "concern"), positive=True)], wide=24,
               says="Each has its remedy in `transferd stats` and in docs/metrics.md.")]),
    (8, [
        Panel("Hit rate, by engine", [Line("engines.hits", ENGINE, part="engines.misses")]),
        Panel("Why look-ups missed, by engine", [Line("engines.missed_for", ("engine", "reason"), positive=True)]),
        Panel("Hit rate with other sizes of a level", [Line("what_if.hit_share", ("level", "times"))]),
    ]),
    (8, [
        Panel("Tasks a second, by engine and status", [Line("engines.tasks", ("engine", "status"), positive=True)]),
        Panel("Task time, p99 by engine and kind", [Line("task_seconds", ("engine", "kind"), quantile=0.99)], unit="s",
              says="From admission to answer."),
        Panel("Bytes a second, by engine", [Line("engines.bytes", ENGINE)]),
    ]),
    (8, [
        Panel("Where the time goes, by engine and stage", [Line("stage_seconds", ("engine", "stage"))], unit="s",
              says="Seconds of all ranks in each second."),
        Panel("Queued and running, by engine", [
            Line("engines.queued", ENGINE, "queued"), Line("engines.running", ENGINE, "running"),
            Line("engines.straggling", ENGINE, "straggling", positive=True)]),
        Panel("Turned away, by engine and code", [Line("engines.rejects", ("engine", "code"), positive=True)]),
    ]),
    (8, [
        Panel("Missed deadlines, by engine and cause", [Line("deadlines", ("engine", "cause"), positive=True)],
              unit="ops", says="What took most of the time of a task that missed its deadline."),
        Panel("Bytes a second, by engine and lane", [Line("ranks.lanes.bytes", ("engine", "lane"))]),
        Panel("Seconds a second that ranks come late", [Line("ranks.late_s", ("engine", "rank"))], unit="none"),
    ]),
    (8, [
        Panel("Levels: how full", [Line("storage.levels.bytes", LEVEL, whole="storage.levels.capacity")],
              says="Full is normal: the least recently used is evicted."),
        Panel("Levels: waiting to be copied there", [Line("storage.levels.pending_bytes", LEVEL)]),
        Panel("Levels: p99 of a MiB", [
            Line("storage.levels.load_p99_s", LEVEL, "load"), Line("storage.levels.store_p99_s", LEVEL, "store")]),
    ]),
    (8, [
        Panel("Levels: hits and misses of loads", [
            Line("storage.levels.hits", LEVEL, "hits"), Line("storage.levels.misses", LEVEL, "misses")]),
        Panel("Levels: whose bytes", [Line("storage.levels.holdings.bytes", ("level", "engine"))]),
        Panel("Levels: who evicts whom", [
            Line("storage.levels.holdings.evicted", ("level", "engine", "by"), positive=True)]),
    ]),
    (8, [
        Panel("Levels: evictions by cause", [Line("storage.levels.evicted_for", ("level", "reason"), positive=True)]),
        Panel("Levels: errors, damage, copies given up", [
            Line("storage.levels.errors", LEVEL, "errors"), Line("storage.levels.corrupt", LEVEL, "damaged"),
            Line("storage.levels.lost", LEVEL, "not copied")]),
        Panel("Levels: calls go there", [Line("storage.levels.available", LEVEL)]),
    ]),
    (8, [
        Panel("Disks: free", [Line("storage.levels.disks.free", DISK)]),
        Panel("Disks: stored", [Line("storage.levels.disks.bytes", DISK)]),
        Panel("Disks: errors", [Line("storage.levels.disks.errors", DISK)]),
    ]),
    (8, [
        Panel("Memory by purpose", [Line("memory", ("owner",))], unit="bytes"),
        Panel("Staging", [
            Line("staging.used", EACH, "used"), Line("staging.capacity", EACH, "capacity")], unit="bytes"),
        Panel("The process, and refusals", [Line("resident", EACH, "resident")], unit="bytes",
              says="Resident memory of the daemon."),
    ]),
    (8, [
        Panel("Refused connections, lost log lines", [
            Line("refused", ("reason",), positive=True), Line("log_dropped", (), "log lines lost")], wide=12),
        Panel("Task errors, by engine and code", [Line("engines.errors", ("engine", "code"), positive=True)], wide=12),
    ]),
]  # fmt: skip


def dashboard(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    known = {**metrics, **OTHERS}
    source = {"type": "prometheus", "uid": "${datasource}"}
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        _variable("instance", "Node", f"label_values({known['ready'].name}, instance)"),
        _variable("engine", "Engine", f"label_values({known['engines.ready'].name}, engine)"),
    ]
    panels: list[dict[str, Any]] = []
    y = 0
    for height, row in ROWS:
        x = 0
        for one in row:
            at = {"x": x, "y": y, "w": one.wide, "h": height}
            panels.append({"id": len(panels) + 1, "datasource": source, "gridPos": at} | _panel(one, known))
            x += one.wide
        y += height
    return {
        "uid": "transferd", "title": "transferd", "tags": ["transferd", "kv-cache"], "schemaVersion": 39, "version": 2,
        "editable": True, "refresh": "15s", "timezone": "browser", "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables}, "panels": panels,
    }  # fmt: skip


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    every = {"multi": True, "includeAll": True, "current": {"text": "All", "value": "$__all"}, "refresh": 2}
    return {"name": name, "type": "query", "label": label, "datasource": source, "query": query} | every


def _panel(one: Panel, known: Mapping[str, Metric]) -> dict[str, Any]:
    first = known[one.lines[0].field].figure
    defaults: dict[str, Any] = {"unit": one.unit or _unit(one.lines[0], known)}
    if (first is not None and first.help.startswith("whether")) or one.lines[0].field == "ready":
        colours = {"0": {"text": "no", "color": "red"}, "1": {"text": "yes", "color": "green"}}
        defaults["mappings"] = [{"type": "value", "options": colours}]
    if defaults["unit"] == "percentunit":
        defaults |= {"min": 0, "max": 1}
    targets = [
        {"refId": chr(ord("A") + number), "expr": _query(line, known), "legendFormat": _legend(line)}
        for number, line in enumerate(one.lines)
    ]
    says = one.says or (first.help[0].upper() + first.help[1:] + "." if first is not None else "")
    field = {"defaults": defaults, "overrides": []}
    return {"title": one.title, "type": one.kind, "description": says, "fieldConfig": field, "targets": targets}


def _query(line: Line, known: Mapping[str, Metric]) -> str:
    value = _summed(line, line.field, known)
    if line.part:
        value = f"{value} / ({value} + {_summed(line, line.part, known)})"
    if line.whole:
        value = f"{value} / {_summed(line, line.whole, known)}"
    if line.quantile is not None:
        value = f"histogram_quantile({line.quantile}, {value})"
    return f"{value} > 0" if line.positive else value


def _summed(line: Line, field: str, known: Mapping[str, Metric]) -> str:
    metric = known[field]
    unknown = set(line.by) - {*metric.labels, "instance"}
    assert not unknown, f"{metric.name} has no label {unknown}"
    chosen = 'instance=~"$instance"' + (', engine=~"$engine"' if "engine" in metric.labels else "")
    value = f"{metric.name}{{{chosen}}}"
    if metric.name.endswith(("_total", "_bucket")):
        value = f"rate({value}[$__rate_interval])"
    by = ", ".join([*(["le"] if line.quantile is not None else []), *line.by])
    return f"sum by ({by}) ({value})" if by else f"sum({value})"


def _legend(line: Line) -> str:
    return " ".join([*(f"{{{{{label}}}}}" for label in line.by), *([line.called] if line.called else [])])


def _unit(line: Line, known: Mapping[str, Metric]) -> str:
    """What Grafana calls the unit of a metric, by the end of its name."""
    name = known[line.field].name
    if line.part or line.whole or name.endswith("_share"):
        return "percentunit"
    stem = name.removesuffix("_total")
    counted = stem != name
    if stem.endswith("bytes"):
        return "Bps" if counted else "bytes"
    if stem.endswith("seconds"):
        return "s"
    return "ops" if counted else "short"


def files(metrics: Mapping[str, Metric], concerns: Mapping[str, Concern], when: Mapping[str, str]) -> dict[Path, str]:
    """What describe_report.py writes besides the docs."""
    made = json.dumps(dashboard(metrics), indent=1, ensure_ascii=False) + "\n"
    return {ALERTS: alerts(metrics, concerns, when), DASHBOARD: made}
