"""Prometheus metrics: read from one report at each scrape, plus what task_log.py counts of each task.

A field of the report that is a metric says so beside its default (report.py): its kind, name, help and labels. Labels
are bounded by construction: ranks, lanes, statuses, codes, tiers, and the engines that exist now.

status_server.py imports this where it listens: a daemon without [metrics] needs no prometheus_client.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import UNSET
from prometheus_client import ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from transferd.observability.concerns import CONCERNS
from transferd.observability.figure import Figure, Sections
from transferd.observability.report import Report, ReportSection
from transferd.observability.task_log import ENDED, LATENCY_BUCKETS_S, MISSED, STAGES, Counts, TaskMetrics
from transferd.tasks import Lane, Status

BREAKER_STATES = ("closed", "open", "half_open")
DURATIONS = "transferd_task_duration_seconds"
BOUNDS = [*(str(float(bound)) for bound in LATENCY_BUCKETS_S), "+Inf"]
KINDS = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}

Labels = dict[str, str]
Tasks = Iterable[tuple[str, str, Counts]]  # of an engine, of a kind; empty if it had none of these
Samples = dict[tuple[tuple[str, str], ...], float]  # by their labels


@functools.cache
def rows(section: type[ReportSection]) -> list[tuple[str, Figure | Sections]]:
    """The fields of a section that are metrics, or that hold sections with metrics."""
    found = []
    for name, kind in get_type_hints(section, include_extras=True).items():
        found += [(name, one) for one in getattr(kind, "__metadata__", ()) if isinstance(one, Figure | Sections)]
    return found


def families(report: Report) -> Iterator[Metric]:
    """Every metric of one report. A metric whose field is absent everywhere is absent, unless its keys are known."""
    samples: dict[str, tuple[Figure, Samples]] = {}
    _read(report, "transferd_", {}, samples)
    for name, (figure, values) in samples.items():
        labels = [label for label, _ in next(iter(values))]
        numbers = {tuple([text for _, text in place]): value for place, value in values.items()}
        yield _family(figure.kind, name, figure.help, labels, numbers)


def _read(section: Any, begins: str, labels: Labels, samples: dict[str, tuple[Figure, Samples]]) -> None:
    kind: type[ReportSection] = type(section)
    for name, row in rows(kind):
        value = getattr(section, name)
        if isinstance(row, Sections):
            around = {} if row.apart else labels
            for key, one in _each(value):
                own = {label: str(getattr(one, field) if field else key) for label, field in row.labels.items()}
                _read(one, f"transferd_{row.begins}", around | own, samples)
            continue
        value = row.none if value is None else value
        if row.label:
            found = dict.fromkeys(row.zero, 0) | {str(key): number for key, number in _items(value)}
            found = {key: number for key, number in found.items() if number is not UNSET}
        else:
            found = {} if value is None or value is UNSET else {"": value}
        if not found:
            continue
        _, places = samples.setdefault(f"{begins}{row.name or name}", (row, {}))
        for key, number in found.items():
            place = (*labels.items(), *([(row.label, key)] if row.label else []))
            places[place] = places.get(place, 0.0) + (1.0 if isinstance(number, str) else float(number))


def _each(value: Any) -> Iterable[tuple[Any, Any]]:
    """The sections in a field, with their keys in a map."""
    return _items(value) if isinstance(value, dict | list) else () if value is UNSET else [("", value)]


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    return value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()


def _of_report(report: Report, ready: bool) -> Iterator[Metric]:
    yield InfoMetricFamily("transferd_build", "the daemon's version", {"version": report.version})
    yield GaugeMetricFamily("transferd_ready", "whether every rank is ready and tasks are admitted", float(ready))
    lasting = {one.name for one in report.concerns}
    text = "1 while something is wrong, by what it is"
    concerns = {(name, one.severity): name in lasting for name, one in CONCERNS.items()}
    yield _family("gauge", "transferd_concern", text, ["concern", "severity"], concerns)
    breaker, backend = report.storage.breaker or "closed", report.storage.backend
    text = "1 while calls go through, 0 while they fail at once because storage did not answer"
    yield _family("gauge", "transferd_storage_available", text, ["backend"], {(backend,): breaker == "closed"})
    states = {(backend, state): breaker == state for state in BREAKER_STATES}
    text = "1 for the state that the circuit breaker is in"
    yield _family("gauge", "transferd_storage_breaker_state", text, ["backend", "state"], states)
    yield from families(report)


def _family(kind: str, name: str, text: str, labels: list[str], numbers: Mapping[Any, float]) -> Metric:
    family: GaugeMetricFamily | CounterMetricFamily = KINDS[kind](name, text, labels=labels)
    for values, number in numbers.items():
        family.add_metric(values, float(number))
    return family


def _of_tasks(tasks: Tasks) -> Iterator[Metric]:
    text = "seconds that ranks have spent on tasks, all ranks together"
    spent = {(engine, kind, stage): one.get(("spent", stage), 0.0) for engine, kind, one in tasks for stage in STAGES}
    yield _family("counter", "transferd_stage_seconds", text, ["engine", "kind", "stage"], spent)
    text = "tasks that missed their deadline, by the stage that took most of their time"
    missed = {(engine, kind, cause): one.get(("missed", cause), 0) for engine, kind, one in tasks for cause in MISSED}
    yield _family("counter", "transferd_deadlines_missed", text, ["engine", "kind", "cause"], missed)


def _durations(tasks: Tasks) -> Iterator[str]:
    """Lines of the histogram, 120 for each kind of task of an engine: prometheus_client takes ten times as long.

    A kind that it had none of has only those of `ok`, at 0, so that a rate sees the first one.
    """
    yield f"# HELP {DURATIONS} from a task's admission to its answer\n# TYPE {DURATIONS} histogram\n"
    for engine, kind, one in tasks:
        of = engine.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        of = f'engine="{of}",kind="{kind}"'
        for status in ENDED if one else (Status.OK,):
            times = [one.get(("took", status, place), 0) for place in range(len(BOUNDS))]
            for bound, number in zip(BOUNDS, itertools.accumulate(times), strict=True):
                yield f'{DURATIONS}_bucket{{{of},le="{bound}",status="{status}"}} {number}\n'
            yield f'{DURATIONS}_count{{{of},status="{status}"}} {sum(times)}\n'
            yield f'{DURATIONS}_sum{{{of},status="{status}"}} {one.get(("seconds", status), 0)}\n'


class _Families(NamedTuple):
    """Stands for a registry."""

    collect: Callable[[], Iterable[Metric]]


def exposition(not_ready: Callable[[], str], tasks: TaskMetrics | None) -> Callable[[Report], Callable[[], bytes]]:
    """Return a function that takes a report, on the event loop, and returns one for any thread, which makes the text.

    not_ready: as for StatusServer. tasks: the counts of tasks; see TaskMetrics.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each series, and no use
    process = ProcessCollector(registry=None)

    def begin(report: Report) -> Callable[[], bytes]:
        ready, counts = not not_ready(), {} if tasks is None else tasks.counted()

        def text() -> bytes:
            ended = [(name, str(one), kinds.get(one, {})) for name, kinds in counts.items() for one in Lane]
            found = _Families(lambda: itertools.chain(_of_report(report, ready), _of_tasks(ended), process.collect()))
            return generate_latest(found) + "".join(_durations(ended)).encode()

        return text

    return begin
