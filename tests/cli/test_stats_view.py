"""The report for people: one screen, the right figures, and every trouble with what to do."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from transferd import SwapOutTask, SyncClient
from transferd.cli.stats_view import view
from transferd.client.launch import running
from transferd.observability.concerns import Measured, Trouble, Watch, concerns, find
from transferd.observability.figures import of_engine, together
from transferd.observability.report import KindReport, LaneReport, RankReport, Report, read


def shown(report: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(view(read(report)))
    return out.getvalue()


def test_it_fits_a_screen_and_has_the_figures(report: dict[str, Any]) -> None:
    text = shown(report)
    assert len(text.splitlines()) <= 25
    assert max(map(len, text.splitlines())) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["write"][:4] == ["0", "0", "1", "0"]  # queued, running, done, failed: a task counts once for all ranks
    assert rows["read"][:4] == ["0", "0", "2", "0"]
    assert "ok 2  miss 1  rejected 1  queued 0, running 0" in text
    assert "attached to each rank: 1, 1" in text
    assert report["hits"]
    assert f"({report['hits']} of {report['hits'] + report['misses']})" in text


def test_a_task_counts_once_for_all_ranks_and_engines_are_added() -> None:
    def lanes(done: int, failed: int, nbytes: int) -> dict[str, LaneReport]:
        return {"read": LaneReport(queued=2, done=done, failed=failed, bytes=nbytes)}

    one = of_engine([RankReport(rank=0, lanes=lanes(3, 0, 10)), RankReport(rank=1, lanes=lanes(2, 1, 5))])
    other = of_engine([RankReport(rank=0, engine="b", lanes=lanes(7, 10, 100))])
    assert one["read"] == KindReport(queued=2, done=3, failed=1, bytes=15)
    both = together([one, other])
    assert both["read"] == KindReport(queued=4, done=10, failed=11, bytes=115)
    assert list(both)[:4] == ["write", "read", "swap_out", "swap_in"]


def texts(report: dict[str, Any]) -> list[str]:
    """The lines for what a look at this report finds."""
    watch = Watch()
    watch.look(find(read(report)), 0.0)
    return concerns(Report(concerns=watch.concerns(0.0)))


def test_all_is_well_appears_only_without_concerns(report: dict[str, Any]) -> None:
    assert report["concerns"] == []
    assert "all is well" in shown(report)
    report["degraded"] = ["rank 0: staging memory is not pinned: no room"]
    (found,) = find(read(report))
    report["concerns"] = [{"name": "degraded", "text": found.text, "action": "Raise it.", "for_s": 61.0, "times": 2}]
    assert "all is well" not in shown(report)
    assert "! rank 0: staging memory is not pinned: no room" in shown(report)
    report["degraded"] += ["rank 0: a", "rank 1: staging memory is not pinned: no room", "[e] rank 0: a", "rank 12: a"]
    assert [one.text for one in find(read(report))] == [
        "ranks 0, 1: staging memory is not pinned: no room", "ranks 0, 12: a", "[e] rank 0: a"
    ]  # fmt: skip


def test_the_view_names_the_reason_for_not_being_ready(report: dict[str, Any]) -> None:
    report["ready"] = False
    found = find(read(report), Measured(not_ready="rank 1 is opening"))
    assert found == [Trouble("not_ready", "not ready: rank 1 is opening")]


@pytest.mark.parametrize(
    ("section", "value", "told"),
    [
        ("barrier", {"dead": [1]}, "rank 1 has died"),
        ("cache", {"cleared": True}, "the cache is cleared"),
        ("cache", {"missing": [0, 1]}, "ranks 0, 1 without memory"),
        ("storage", {"breaker": "open"}, "storage file does not answer"),
        ("storage", {"corrupt": 2}, "2 damaged objects"),
        ("storage", {"errors": 1}, "1 storage calls failed"),
        ("tasks", {"expired": 3}, "3 tasks missed their deadline"),
        ("refused", {"unknown_key": 4}, "refused connections: unknown_key 4"),
        ("effects_failed", {"Start": 1}, "internal errors"),
        ("", {"ready": False}, "not ready"),
        ("", {"draining": True}, "the daemon is stopping"),
        ("", {"straggling": 1}, "1 answered tasks still occupy blocks"),
        ("", {"log_dropped": 9}, "9 log lines were lost"),
        ("", {"held": [{"what": "pause", "holder": "\x1b[2Jme", "for_s": 61.0}]}, r"pause for 1 min 1 s, held by \x1b"),
    ],
)
def test_the_view_names_each_trouble(report: dict[str, Any], section: str, value: dict[str, Any], told: str) -> None:
    (report[section] if section else report).update(value)
    (only,) = texts(report)
    assert told in only
    assert only.isprintable()


def of_engines(client: SyncClient) -> list[str]:
    """The concerns that are not about a machine that is busy with other tests."""
    return [line for line in concerns(read(client.stats())) if "attached" in line]


def test_ranks_that_no_engine_has_attached_are_a_trouble_once_tasks_are_rejected_for_it(tmp_path: Path) -> None:
    tree = {"cache": {"device_blocks": 8, "host_blocks": 8}}
    with running(tree, tmp_path) as process, SyncClient(process.endpoint) as client:
        bad = client.submit(SwapOutTask(task_id="bad", gpu_block_ids=[99], cpu_block_ids=[0]))
        assert bad.error is not None
        assert bad.error.code != "not_attached"
        report = client.stats()
        assert report["cache"]["unmapped"] == [0, 1]
        assert of_engines(client) == [], "nor is a task that is rejected for another reason"

        early = client.submit(SwapOutTask(task_id="early", gpu_block_ids=[1], cpu_block_ids=[0]))
        assert early.error is not None
        assert early.error.code == "not_attached"
        (said,) = of_engines(client)
        assert said.startswith("no engine has attached ranks 0, 1")

        client.attach(1)
        (said,) = of_engines(client)
        assert said.startswith("no engine has attached rank 0")
        client.attach(0)
        assert of_engines(client) == []
