"""How many tasks of each kind: the daemon makes these figures, and `stats`, `top`, the page and JSON show them.

A task runs on every rank of its engine. So within an engine a count of tasks is the highest of any rank, and over
engines counts are added. Bytes are added over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from transferd.observability.report import EngineReport, KindReport, RankReport, Report, TasksReport
from transferd.tasks import Lane

MAIN_LANES = ("write", "read", "swap_out", "swap_in")  # always shown, and first; the others once they have had a task
KINDS = dict.fromkeys((*MAIN_LANES, *map(str, Lane)))
Kinds = Mapping[str, KindReport]
_COUNTS = ("queued", "running", "done", "failed", "bytes")


def of_engine(ranks: Sequence[RankReport]) -> dict[str, KindReport]:
    """One engine's tasks by kind, from those of its ranks."""
    found = {name: KindReport() for name in KINDS}
    for rank in ranks:
        for name, lane in rank.lanes.items():
            kind = found[name]
            kind.queued, kind.running = max(kind.queued, lane.queued), max(kind.running, lane.running)
            kind.done, kind.failed = max(kind.done, lane.done), max(kind.failed, lane.failed)
            kind.bytes += lane.bytes
    return found


def together(engines: Iterable[Kinds]) -> dict[str, KindReport]:
    """The tasks of several engines by kind. Without rates."""
    each = list(engines)
    return {name: added(one[name] for one in each if name in one) for name in KINDS}


def added(kinds: Iterable[KindReport]) -> KindReport:
    """The sum of counts and bytes. Without rates."""
    each = list(kinds)
    return KindReport(**{name: sum(getattr(one, name) for one in each) for name in _COUNTS})


def shown(report: Report, engine: str = "") -> dict[str, KindReport]:
    """The kinds of tasks to show, of one engine or ("") of all: the main ones, and those that have had a task."""
    kinds = tasks_of(report, engine).lanes
    return {name: kind for name, kind in kinds.items() if name in MAIN_LANES or _busy(kind)}


def tasks_of(report: Report, engine: str = "") -> TasksReport:
    """The tasks of one engine, none if it is not there, or ("") of all."""
    return report.engines.get(engine, EngineReport()) if engine else report


def _busy(kind: KindReport) -> bool:
    return bool(kind.queued or kind.running or kind.done or kind.failed or kind.bytes or kind.tasks_per_s_1min)
