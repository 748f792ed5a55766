"""Rates cover the time that their name says, and quantiles come close to the true ones."""

from __future__ import annotations

import math
import random

import pytest

from transferd.observability.report import KindReport
from transferd.observability.task_log import LONG_S, SHORT_S, TaskLog, Windows
from transferd.runtime.clock import Clock
from transferd.tasks import ReadStorageTask, Status, TaskResult, WriteStorageTask


class World:
    """Windows on a clock that stands still, from second 1000 on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.windows = Windows(clock := Clock(monotonic=lambda: self.now))
        self.log = TaskLog(clock, [self.windows.ended])

    def end(
        self, times: int = 1, *, engine: str = "a", kind: str = "read", nbytes: int = 0, seconds: float = 1.0
    ) -> None:
        task = (ReadStorageTask if kind == "read" else WriteStorageTask)(task_id="t", keys=["k"], gpu_block_ids=[0])
        result = TaskResult(task_id="t", status=Status.OK, duration=seconds, bytes=nbytes)
        for _ in range(times):
            self.log.ended(engine, task, result)


def test_a_steady_load_has_its_rate_in_both_windows() -> None:
    world = World()
    for _ in range(600):
        world.now += 0.125
        world.end(nbytes=100)
    recent = world.windows.recent(KindReport())
    assert recent.tasks_per_s == pytest.approx(8, rel=0.02)
    assert recent.tasks_per_s_1min == pytest.approx(8, rel=0.02)
    assert recent.bytes_per_s == pytest.approx(800, rel=0.02)


def test_a_burst_is_in_the_short_window_for_ten_seconds_and_in_the_long_one_for_a_minute() -> None:
    world = World()
    world.now += 100
    world.end(60)
    world.now += 8
    assert world.windows.recent(KindReport()).tasks_per_s == pytest.approx(6, rel=0.15)
    world.now += 3
    recent = world.windows.recent(KindReport())
    assert recent.tasks_per_s == 0
    assert recent.tasks_per_s_1min == pytest.approx(1, rel=0.02)
    world.now += 50
    assert world.windows.recent(KindReport()) == KindReport()
    assert not world.windows._series, "what has left is forgotten"


def test_a_daemon_that_has_just_started_has_a_rate_over_its_own_time() -> None:
    world = World()
    world.now += 4
    world.end(20)
    assert world.windows.recent(KindReport()).tasks_per_s == 5


def test_engines_and_kinds_have_figures_of_their_own_and_together() -> None:
    world = World()
    world.now += 59
    for engine, kind, times in (("a", "read", 1), ("a", "write", 2), ("b", "read", 4), ("c", "write", 8)):
        world.end(times, engine=engine, kind=kind)
    per_minute = {
        asked: round(world.windows.recent(KindReport(), *asked).tasks_per_s_1min * 59)
        for asked in ((None, None), ("a", None), ("a", "write"), (None, "read"), ("nobody", None))
    }
    assert list(per_minute.values()) == [15, 3, 2, 5, 0]


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_within_a_tenth_of_the_true_ones(seed: int) -> None:
    world, rng = World(), random.Random(seed)
    times = [rng.lognormvariate(-6, 2) for _ in range(2000)]
    for seconds in times:
        world.end(seconds=seconds)
    recent = world.windows.recent(KindReport(), "a", "read")
    times.sort()
    assert recent.p50_s == pytest.approx(times[999], rel=0.1)
    assert recent.p99_s == pytest.approx(times[1979], rel=0.1)


def test_more_than_any_number_of_recent_tasks_counts() -> None:
    """The list of recent tasks ends at a thousand; a window does not."""
    world = World()
    world.end(5000, seconds=1.0)
    world.end(3000, seconds=0.001)
    assert world.windows.recent(KindReport()).p50_s == pytest.approx(1.0, rel=0.1)


def test_a_time_of_zero_has_a_bucket() -> None:
    world = World()
    world.end(seconds=0.0)
    assert world.windows.recent(KindReport()).p99_s == pytest.approx(1e-6, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_the_kept_sum_of_a_minute_equals_a_fresh_sum_of_all_tasks(seed: int) -> None:
    """The sum of a minute is kept from second to second; tasks that are older must leave nothing behind in it."""
    world, rng = World(), random.Random(seed)
    world.now += 100
    ended: list[tuple[int, str, str, float, int]] = []  # second, engine, kind, seconds, bytes
    for _ in range(400):
        world.now += rng.choice((0.0, 0.2, 0.9, 3.0, 30.0) if rng.random() < 0.9 else (59.0, 61.0, 200.0))
        engine, kind, nbytes = rng.choice("abc"), rng.choice(("read", "write")), rng.randrange(1000)
        seconds = rng.lognormvariate(-6, 2)
        world.end(engine=engine, kind=kind, nbytes=nbytes, seconds=seconds)
        ended.append((int(world.now), engine, kind, seconds, nbytes))
        asked = rng.choice((None, *"abc")), rng.choice((None, "read", "write"))
        recent, found = world.windows.recent(KindReport(), *asked), []
        for second, whose, what, took, size in ended:
            if second > int(world.now) - LONG_S and asked[0] in (None, whose) and asked[1] in (None, what):
                found.append((second, took, size))
        covered = LONG_S - 1 + world.now - int(world.now)
        short = [one for one in found if one[0] > int(world.now) - SHORT_S]
        assert recent.tasks_per_s_1min == pytest.approx(len(found) / covered)
        assert recent.bytes_per_s_1min == pytest.approx(sum(one[2] for one in found) / covered)
        assert recent.tasks_per_s == pytest.approx(len(short) / (covered - LONG_S + SHORT_S))
        if found:
            times = sorted(one[1] for one in found)
            assert recent.p50_s == pytest.approx(times[math.ceil(len(times) / 2) - 1], rel=0.1)
        else:
            assert recent == KindReport()
