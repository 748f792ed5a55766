"""The history of the last minutes, and the hit rate of now, from reports that came regularly or not."""

from __future__ import annotations

from transferd.observability.history import EVERY_S, KEPT_S, History
from transferd.observability.report import EngineReport, KindReport, Report


def report(hits: int, misses: int, tasks_per_s: float = 0.0) -> Report:
    totals = KindReport(tasks_per_s=tasks_per_s)
    engines = {"a": EngineReport(totals=totals)}
    return Report(hits=hits, misses=misses, totals=totals, engines=engines)


def test_the_hit_rate_of_now_is_that_of_the_last_minute() -> None:
    history, now = History(0.0), 0.0
    for second in range(1, 200):
        now = float(second)
        bad = min(second, 100)  # misses for 100 seconds, then hits
        history.add(report(second - bad, bad), now)
    assert history.hit_share(report(99, 100), now) == 1.0
    history.add(report(99, 100), now + 100)
    assert history.hit_share(report(99, 100), now + 100) is None, "nobody looked anything up"


def test_a_young_daemon_counts_from_its_start() -> None:
    assert History(50.0).hit_share(report(3, 1), 51.0) == 0.75


def test_lookups_after_a_long_silence_are_all_of_now() -> None:
    """Without clients nobody makes a report; the last one says what there was before."""
    history = History(0.0)
    history.add(report(0, 1000), 10.0)
    history.add(report(0, 1000), 5000.0)
    assert history.hit_share(report(4, 1000), 5001.0) == 1.0


def test_five_minutes_are_kept_a_value_for_five_seconds_at_most() -> None:
    history = History(0.0)
    for second in range(1, 1000):
        history.add(report(0, 0, tasks_per_s=float(second)), float(second))
    columns = history.tree(1000.0)
    assert len({len(values) for values in columns.values()}) == 1
    assert len(columns["ago_s"]) <= KEPT_S / EVERY_S + 1
    assert [1000.0 - ago for ago in columns["ago_s"]] == columns["tasks_per_s"]
    assert columns == history.tree(1000.0, "a")
    assert set(history.tree(1000.0, "nobody")["tasks_per_s"]) == {0.0}
