"""The benchmarks as a user calls them: JSON alone on stdout, every row complete."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("arguments", [["copy"], ["storage", "--backend", "memory"]])
def test_a_benchmark_prints_rows_with_ratios_and_nothing_else(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "transferd", "bench", *arguments, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert (tree["bench"], set(tree)) == (arguments[0], {"bench", "machine", "rows"})
    for row in tree["rows"]:
        assert set(row) == {"name", "value", "unit", "limit", "limit_name", "ratio", "spread"}
        assert row["value"] > 0
        assert row["ratio"] == pytest.approx(row["value"] / row["limit"])


def test_an_unknown_backend_is_one_line_and_exit_2() -> None:
    command = [sys.executable, "-m", "transferd", "bench", "storage", "--backend", "tape"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("--backend: expected one of")
