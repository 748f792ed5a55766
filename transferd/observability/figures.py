"""How many tasks of each kind: the daemon makes these figures, and `stats`, `top`, the page and JSON show them.

A task runs on every rank of its engine. So within an engine a count of tasks is the highest of any rank, and over
engines counts are added. Bytes are added over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from transferd.observability.report import KindReport, RankReport, Report

if TYPE_CHECKING:  # at run time it would bring numpy, which starts threads, to every command
    from transferd.observability.task_log import Recent

MAIN_LANES = ("write", "read", "swap_out", "swap_in")  # always shown, and first; the others once they have had a task
Kinds = Mapping[str, KindReport]
_COUNTS = ("queued", "running", "done", "failed")
_RATES = ("tasks_per_s", "bytes_per_s", "tasks_per_s_1min", "bytes_per_s_1min", "p50_s", "p99_s")


def of_engine(ranks: Sequence[RankReport]) -> dict[str, KindReport]:
    """One engine's tasks by kind, from those of its ranks."""
    names = dict.fromkeys((*MAIN_LANES, *(name for rank in ranks for name in rank.lanes)))
    found = {}
    for name in names:
        lanes = [rank.lanes[name] for rank in ranks if name in rank.lanes]
        highest = {field: max((getattr(lane, field) for lane in lanes), default=0) for field in _COUNTS}
        found[name] = KindReport(**highest, bytes=sum(lane.bytes for lane in lanes))
    return found


def together(engines: Iterable[Kinds]) -> dict[str, KindReport]:
    """The tasks of several engines by kind. Without rates."""
    each = list(engines)
    names = dict.fromkeys((*MAIN_LANES, *(name for one in each for name in one)))
    return {name: added(one[name] for one in each if name in one) for name in names}


def added(kinds: Iterable[KindReport]) -> KindReport:
    """The sum of counts and bytes. Without rates."""
    each = list(kinds)
    return KindReport(**{field: sum(getattr(one, field) for one in each) for field in (*_COUNTS, "bytes")})


def with_rates(kind: KindReport, recent: Recent) -> KindReport:
    if not recent.tasks_per_s_1min:
        return kind
    return msgspec.structs.replace(kind, **{field: getattr(recent, field) for field in _RATES})


def shown(report: Report, engine: str = "") -> dict[str, KindReport]:
    """The kinds of tasks to show, of one engine or ("") of all: the main ones, and those that have had a task."""
    kinds: Kinds = report.engines[engine].lanes if engine in report.engines else report.lanes
    return {name: kind for name, kind in kinds.items() if name in MAIN_LANES or _busy(kind)}


def _busy(kind: KindReport) -> bool:
    return bool(kind.queued or kind.running or kind.done or kind.failed or kind.bytes or kind.tasks_per_s_1min)
