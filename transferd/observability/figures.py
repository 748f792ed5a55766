"""Figures that are made of several parts of a report: `stats`, `top`, the page and JSON all show these.

A task runs on every rank of its engine. So within an engine a count of tasks is the highest of any rank, and over
engines counts are added. Bytes are added over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from transferd.observability.report import LaneReport, RankReport, Report

MAIN_LANES = ("write", "read", "swap_out", "swap_in")  # always shown; the others once they have had a task


def lane_totals(report: Report, engine: str = "") -> dict[str, LaneReport]:
    """Queued, running and finished tasks, and bytes, of each kind of task, the main kinds first.

    engine: only of this engine; "" for all together.
    """
    ranks: dict[str, list[RankReport]] = {}
    for rank in report.ranks:
        if engine in ("", rank.engine):
            ranks.setdefault(rank.engine, []).append(rank)
    names = dict.fromkeys(MAIN_LANES) | {name: None for rank in report.ranks for name in rank.lanes}
    return {name: _sum(_highest(one, name) for one in ranks.values()) for name in names}


def busy(lane: LaneReport) -> bool:
    """Whether it has or has had a task."""
    return bool(lane.queued or lane.running or lane.done or lane.failed or lane.bytes)


def _highest(ranks: Iterable[RankReport], name: str) -> LaneReport:
    """One engine's lane."""
    lanes = [rank.lanes[name] for rank in ranks if name in rank.lanes] or [LaneReport()]
    return LaneReport(
        queued=max(lane.queued for lane in lanes),
        running=max(lane.running for lane in lanes),
        done=max(lane.done for lane in lanes),
        failed=max(lane.failed for lane in lanes),
        bytes=sum(lane.bytes for lane in lanes),
    )


def _sum(engines: Iterable[LaneReport]) -> LaneReport:
    lanes = list(engines)
    return LaneReport(
        queued=sum(lane.queued for lane in lanes),
        running=sum(lane.running for lane in lanes),
        done=sum(lane.done for lane in lanes),
        failed=sum(lane.failed for lane in lanes),
        bytes=sum(lane.bytes for lane in lanes),
    )
