"""The regression gate: which change of a ratio fails, in which direction, and how often it must be seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gate


def row(name: str, ratio: float, unit: str = "us", spread: float = 0.05, limit_name: str = "us echo") -> dict[str, Any]:
    return {"name": name, "ratio": ratio, "unit": unit, "spread": spread, "limit_name": limit_name}


def tree(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"rows": list(rows)}


@pytest.mark.parametrize(
    ("unit", "before", "now", "failed"),
    [
        ("us", 2.0, 2.19, False),
        ("us", 2.0, 2.21, True),
        ("us", 2.0, 1.0, False),
        ("GB/s", 0.9, 0.82, False),
        ("GB/s", 0.9, 0.81, True),
        ("GB/s", 0.9, 1.8, False),
        ("tasks/s", 0.1, 0.05, True),
    ],
)
def test_worse_than_the_spread_fails_in_the_direction_that_hurts(
    unit: str, before: float, now: float, failed: bool
) -> None:
    verdicts, lacking = gate.compare(tree(row("a", before, unit)), tree(row("a", now, unit)))
    assert [verdict.failed for verdict in verdicts] == [failed]
    assert lacking == []


def test_the_larger_spread_counts_and_what_says_nothing_about_us_is_left_out() -> None:
    wide = gate.compare(tree(row("a", 1.0, spread=0.5)), tree(row("a", 1.4)))[0]
    assert not wide[0].failed
    assert gate.compare(tree(row("a", 1.0)), tree(row("a", 1.4, spread=0.5)))[0][0].allowed == 0.5
    others = tree(row("raw write", 1.0), row("raw echo beside them", 1.0, limit_name="itself"))
    assert gate.compare(others, others) == ([], [])
    assert gate.compare(tree(row("old", 1.0)), tree(row("new", 1.0))) == ([], ["new", "old"])


@pytest.mark.parametrize(
    ("ratios", "code", "runs"),
    [([1.0], 0, 1), ([2.0, 1.0], 0, 2), ([2.0, 2.0, 1.05], 0, 3), ([2.0, 2.0, 2.0], 1, 3)],
    ids=["good", "once bad", "twice bad", "always bad"],
)
def test_only_what_is_worse_every_time_is_a_regression(
    ratios: list[float], code: int, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "control.json").write_text(json.dumps(tree(row("a", 1.0))))
    measured: list[str] = []

    def measure(name: str) -> dict[str, Any]:
        measured.append(name)
        return tree(row("a", ratios[len(measured) - 1]))

    monkeypatch.setattr(gate, "RESULTS", tmp_path)
    monkeypatch.setattr(gate, "measure", measure)
    assert gate.main(["control"]) == code
    assert measured == ["control"] * runs
    assert ("REGRESSION control: a" in capsys.readouterr().out) is bool(code)


def test_every_gated_benchmark_has_a_recorded_result() -> None:
    for name in gate.COMMANDS:
        recorded = json.loads((gate.RESULTS / f"{name}.json").read_text())
        assert gate.compare(recorded, recorded)[0], name


def test_an_unknown_benchmark_is_an_error() -> None:
    with pytest.raises(SystemExit):
        gate.main(["nothing"])
