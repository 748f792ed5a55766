"""Concerns begin, count, change their text and end by themselves; each has its remedy and its row in the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from tests.support.exposed import exposed
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.observability.concerns import CONCERNS, Trouble, Watch, concerns, find
from transferd.observability.report import (
    CacheReport,
    ConcernReport,
    DiskReport,
    EngineReport,
    LevelReport,
    Report,
    StorageReport,
)
from transferd.runtime.clock import Clock
from transferd.tasks import RankResult, ReadStorageTask, Status, TaskResult, WriteStorageTask

ROOT = Path(__file__).parents[2]


def one(watch: Watch, now: float) -> ConcernReport:
    (only,) = watch.concerns(now)
    return only


def test_a_state_lasts_from_the_look_that_saw_it_first_to_the_one_that_did_not() -> None:
    watch = Watch()
    watch.look([Trouble("degraded", "rank 0: a")], 10.0)
    watch.look([Trouble("degraded", "rank 0: a"), Trouble("degraded", "rank 1: b")], 40.0)
    found = one(watch, 41.0)
    assert (found.text, found.for_s, found.times) == ("rank 0: a; rank 1: b", 31.0, 1)
    watch.look([], 50.0)
    assert watch.concerns(50.0) == []
    watch.look([Trouble("degraded", "rank 0: a")], 60.0)
    assert (one(watch, 61.0).for_s, one(watch, 61.0).times) == (1.0, 2), "it began twice in ten minutes"


def test_events_count_for_ten_minutes_and_then_are_over() -> None:
    watch = Watch()
    watch.look([Trouble("storage_errors", "2 storage calls failed", 2)], 0.0)
    watch.look([Trouble("storage_errors", "2 storage calls failed", 2)], 100.0)
    watch.look([Trouble("storage_errors", "5 storage calls failed", 5)], 500.0)
    found = one(watch, 500.0)
    assert (found.text, found.for_s, found.times) == ("5 storage calls failed", 500.0, 5)
    watch.look([Trouble("storage_errors", "5 storage calls failed", 5)], 700.0)
    assert one(watch, 700.0).times == 3
    watch.look([Trouble("storage_errors", "5 storage calls failed", 5)], 1101.0)
    assert watch.concerns(1101.0) == [], "the total since the start is no concern"
    watch.look([Trouble("storage_errors", "6 storage calls failed", 6)], 2000.0)
    assert (one(watch, 2000.0).for_s, one(watch, 2000.0).times) == (0.0, 1)


def test_the_log_has_a_line_when_a_concern_begins_and_ends_and_every_ten_minutes_between() -> None:
    watch = Watch()
    with structlog.testing.capture_logs() as lines:
        for second in range(1500):
            watch.look([Trouble("storage_silent", "it does not answer")], float(second))
        watch.look([], 1500.0)
    assert [(line["event"], line["concern"]) for line in lines] == [("concern", "storage_silent")] * 3 + [
        ("concern over", "storage_silent")
    ]
    assert lines[0]["action"] == CONCERNS["storage_silent"].remedy
    with structlog.testing.capture_logs() as lines:
        watch.look([Trouble("no_memory", "ranks 0, 1 without memory")], 2000.0)
        watch.look([], 2005.0)
        watch.look([Trouble("storage_errors", "1 storage calls failed", 1)], 2006.0)
    assert [line["concern"] for line in lines] == ["storage_errors"], "a start passes without a line"


def test_the_most_urgent_comes_first_and_text_from_outside_is_one_line() -> None:
    watch = Watch()
    watch.look([Trouble("refused", "x\x1b[2J\ny", 1), Trouble("rank_died", "rank 1 has died")], 0.0)
    lines = concerns(Report(concerns=watch.concerns(90.0)))
    assert lines[0] == f"rank 1 has died (for 1 min 30 s): {CONCERNS['rank_died'].remedy}"
    assert all(line.isprintable() for line in lines)


def test_memory_that_nobody_needs_any_more_is_no_concern() -> None:
    report = Report(ready=True, rejects={"not_attached": 3}, cache=CacheReport(unmapped=[0]))
    report.engines["default"] = EngineReport(unattached=[0])
    assert find(report) == [], "the engine that pushed too early has left"
    report.engines["default"].unattached_s = 0.1
    assert [trouble.name for trouble in find(report)] == ["not_attached"]


def test_deadlines_that_were_missed_with_some_blocks_done_are_a_concern() -> None:
    (trouble,) = find(Report(ready=True, errors={"expired": 4}, tasks={"partial": 4, "expired": 1}))
    assert (trouble.name, trouble.total) == ("deadlines_missed", 4)


def full(refused: int, gone: int = 0, *, short: bool = False) -> Report:
    disk = DiskReport(path="/d", total=100, room=10 if short else 100, capacity=50)
    storage = StorageReport(levels=[LevelReport(disks=[disk])], evicted_for={"medium_full": gone})
    return Report(ready=True, errors={"storage_full": refused}, storage=storage)


def test_a_full_store_is_told_from_a_full_disk_whatever_was_full_before() -> None:
    assert [(one.name, one.total) for one in find(full(2, gone=1))] == [("disk_full", 1), ("store_full", 2)]
    watch = Watch()

    def names(report: Report, now: float) -> list[str]:
        watch.look([one for one in find(report) if one.name.endswith("_full") and one.total is not None], now)
        return [one.name for one in watch.concerns(now)]

    assert names(full(1, gone=1, short=True), 0.0) == ["disk_full"]
    assert watch.concerns(0.0)[0].times == 2
    assert names(full(1, gone=1), 10.0) == ["disk_full"], "what found no room before found none on the disk"
    assert names(full(2, gone=1), 1000.0) == ["store_full"]
    assert watch.concerns(1000.0)[0].times == 1
    assert names(full(2, gone=1, short=True), 2000.0) == [], "nothing more has happened"
    assert names(full(3, gone=1, short=True), 3000.0) == ["disk_full"]
    assert watch.concerns(3000.0)[0].times == 1


def test_every_concern_has_its_row_in_the_docs() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| .+ \| (.+) \|$", text, re.MULTILINE))
    assert {name: rows.get(name) for name in CONCERNS} == {name: one.remedy for name, one in CONCERNS.items()}


class World:
    """A daemon that was built and not opened, at a time that stands still."""

    def __init__(self, directory: Path, **tree: Any) -> None:
        self.now = 100.0
        cache = {"ranks": 2, "device_blocks": 8, "host_blocks": 0}
        described = {
            "server": {"endpoint": f"ipc://{directory}/t.sock"},
            "cache": cache,
            "storage": {"backend": "memory"},
        }
        self.daemon = Daemon(from_tree(described | tree), clock=Clock(monotonic=lambda: self.now))
        self.daemon.default.dispatcher.cache_ready(self.now)
        self.daemon.default.coordinator.ready = True

    def names(self) -> list[str]:
        found = self.daemon.report().concerns
        assert isinstance(found, list)
        return [concern.name for concern in found if concern.name != "no_memory"]  # this daemon was never opened


async def test_storage_that_is_slow_for_the_last_minute_is_a_concern(tmp_path: Path) -> None:
    world = World(tmp_path)
    task = ReadStorageTask(task_id="t", keys=["k"], gpu_block_ids=[0])

    def end(storage_s: float) -> None:
        ranks = [RankResult(rank=n, status=Status.OK, storage_s=storage_s / (n + 1)) for n in range(2)]
        world.daemon.tasks.ended("default", task, TaskResult(task_id="t", status=Status.OK, ranks=ranks))

    for _ in range(200):
        end(0.01)
    assert world.names() == []
    for _ in range(4):
        end(3.0)
    assert world.names() == ["storage_slow"]
    page = exposed(world.daemon)
    assert 'transferd_concern{concern="storage_slow",severity="warning"} 1.0' in page
    assert 'transferd_concern{concern="disk_full",severity="warning"} 0.0' in page
    world.now += 61
    assert world.names() == []


async def test_a_task_that_hangs_is_named_with_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    engine = world.daemon.default
    for worker in engine.workers:
        monkeypatch.setattr(worker, "start", lambda *_: None)
    engine.dispatcher.mappings_changed(world.now, (), {})
    task = WriteStorageTask(task_id="slow one", keys=["k"], gpu_block_ids=[0], timeout=600.0)
    assert engine.coordinator.submit(b"me", 1, task)
    engine.recorder.step("slow one", "put", 1, 1)
    assert world.names() == []
    world.now += 11
    assert world.names() == ["task_hangs"]
    found = world.daemon.report().concerns[-1]
    assert "'slow one' of engine 'default' waits for rank 0, rank 1 put" in found.text
    engine.coordinator.close()
