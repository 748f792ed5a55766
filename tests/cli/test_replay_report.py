"""The report: the contract's keys, and a verdict that cannot be bought."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
from rich.console import Console

from transferd.cli.replay.kvdata import Mismatch
from transferd.cli.replay.report import ReplayReport
from transferd.tasks import ErrorInfo, ReadStorageTask, Status, SwapInTask, TaskResult

READ = ReadStorageTask(task_id="r[1]", keys=["a"], gpu_block_ids=[0])
SWAP = SwapInTask(task_id="s", gpu_block_ids=[0], cpu_block_ids=[0])


def result(status: Status, error: str = "", nbytes: int = 0) -> TaskResult:
    told = ErrorInfo("tier_error", error) if error else None
    return TaskResult(task_id="r[1]", status=status, error=told, bytes=nbytes)


def told(report: ReplayReport) -> str:
    out = io.StringIO()
    report.print(Console(file=out, width=100))
    return out.getvalue()


def test_the_tree_has_the_keys_of_the_contract_and_is_json() -> None:
    report = ReplayReport(requests=2, blocks_written=3, blocks_read=1, seconds=2.0)
    report.hits.update({"device": 1, "storage": 1, "none": 2})
    for seconds in (0.001, 0.002, 0.003):
        report.task(READ, result(Status.OK, nbytes=10**9), seconds)
    report.task(SWAP, result(Status.OK), 0.5)
    tree = json.loads(json.dumps(report.tree()))
    assert (tree["requests"], tree["tasks"], tree["bytes"], tree["seconds"]) == (2, 4, 3 * 10**9, 2.0)
    assert (tree["blocks_written"], tree["blocks_read"], tree["verify_failures"]) == (3, 1, 0)
    assert tree["hit_blocks"] == {"device": 1, "host": 0, "storage": 1, "none": 2}
    assert tree["hit_rate"] == {"device": 0.25, "host": 0.0, "storage": 0.25, "none": 0.5}
    assert tree["statuses"] == {"ok": 4}
    assert tree["gb_per_s"] == 1.5
    assert tree["latency_ms"]["read"] == {"p50": pytest.approx(2.0), "p99": pytest.approx(2.98)}
    assert tree["latency_ms"]["swap_in"] == {"p50": 500.0, "p99": 500.0}


def test_an_empty_report_divides_by_nothing() -> None:
    tree = ReplayReport().tree()
    assert tree["hit_rate"] == dict.fromkeys(("device", "host", "storage", "none"), 0.0)
    assert tree["gb_per_s"] == 0.0
    assert tree["latency_ms"] == {}


@pytest.mark.parametrize("status", [Status.OK, Status.PARTIAL, Status.MISS])
def test_a_healthy_run_counts_as_good(status: Status) -> None:
    report = ReplayReport()
    report.task(READ, result(status), 0.001)
    assert report.good


@pytest.mark.parametrize(
    "spoil",
    [
        lambda report: report.task(READ, result(Status.FAILED, "no luck"), 0.1),
        lambda report: report.task(READ, result(Status.PARTIAL, "rank 1: no luck"), 0.1),
        lambda report: report.task(READ, result(Status.EXPIRED), 0.1),
        lambda report: report.task(READ, result(Status.REJECTED), 0.1),
        lambda report: report.task(READ, result(Status.CANCELLED), 0.1),
        lambda report: report.verified(1, [Mismatch(7, 3, 1, "key", 2, 9)]),
        lambda report: report.error("match: no luck"),
        lambda report: setattr(report, "aborted", "the daemon is gone"),
    ],
    ids=["failed", "partial with an error", "expired", "rejected", "cancelled", "wrong bytes", "error", "ended early"],
)
def test_anything_else_is_not(spoil: Callable[[ReplayReport], None]) -> None:
    report = ReplayReport()
    report.task(READ, result(Status.OK), 0.001)
    assert report.good
    spoil(report)
    assert not report.good


def test_every_mismatch_is_counted_and_the_first_few_are_named() -> None:
    report = ReplayReport()
    for content in range(0, 8, 2):
        report.verified(10, [Mismatch(content, 3, 1, "key", 2, 9), Mismatch(content + 1, 4, 0, "value", 0, 0)])
    tree = report.tree()
    assert (tree["blocks_verified"], tree["verify_failures"]) == (40, 8)
    assert [item["content"] for item in tree["mismatches"]] == [0, 1, 2, 3, 4]
    assert tree["mismatches"][0] == {
        "content": 0, "block": 3, "rank": 1, "plane": "key", "layer": 2, "offset": 9
    }  # fmt: skip
    assert "content 0 in block 3: rank 1, key of layer 2, from byte 9" in told(report)


def test_errors_are_printed_unchanged_even_with_brackets() -> None:
    report = ReplayReport(aborted="rank [0] gone")
    report.task(READ, result(Status.FAILED, "[Errno 28] no space"), 0.1)
    text = told(report)
    assert "read r[1]: failed: [Errno 28] no space" in text
    assert "rank [0] gone" in text


def test_the_text_names_what_a_good_run_shows_and_nothing_that_did_not_happen() -> None:
    report = ReplayReport(requests=1, seconds=1.0)
    report.task(READ, result(Status.OK), 0.001)
    text = told(report)
    assert "verify failures" in text
    for absent in ("truncated", "busy", "error"):
        assert absent not in text
