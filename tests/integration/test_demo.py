"""`transferd demo`: what a person who has never seen transferd is shown, and that it is true."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from transferd.cli import demo
from transferd.cli.replay.kvdata import Mismatch
from transferd.cli.replay.report import ReplayReport


def told(report: ReplayReport) -> str:
    out = io.StringIO()
    demo.print_summary(report, Console(file=out, width=1000))
    return out.getvalue()


def test_a_short_demo_uses_every_tier_reports_it_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(demo, "REQUESTS", 300)
    out = io.StringIO()
    report = demo.run(Console(file=out))
    assert report.good, report
    assert report.requests == 300
    assert all(report.hits[tier] > 0 for tier in ("device", "host", "storage", "none"))
    assert "2 ranks" in out.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_the_words_say_what_the_figures_say() -> None:
    report = ReplayReport(requests=3, blocks_verified=60)
    report.hits.update({"device": 40, "host": 15, "storage": 5, "none": 40})
    text = told(report)
    assert "100 prefix blocks" in text
    assert "60 of them (60%) were not recomputed" in text
    assert "no difference" in text


def test_wrong_bytes_are_not_talked_away() -> None:
    report = ReplayReport(requests=3)
    report.verified(10, [Mismatch(1, 2, 0, "key", 0, 0)])
    text = told(report)
    assert "wrong bytes" in text
    assert "no difference" not in text


def test_a_replay_that_ended_early_is_not_called_a_success() -> None:
    report = ReplayReport(requests=3, aborted="the daemon was lost")
    text = told(report)
    assert "the daemon was lost" in text
    assert "no difference" not in text
