"""The benchmarks as a user calls them: JSON alone on stdout, every row complete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import small_objects
from transferd.cli.bench import storage
from transferd.cli.pool.master import master_executable


@pytest.mark.parametrize("arguments", [["storage", "--backend", "memory"]])  # copy takes a minute
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


def test_files_are_measured_in_a_store_with_room_and_in_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "RUNS", 1)
    rows = list(storage.run("file"))
    ours = [row.name.split(",")[0] for row in rows if "raw" not in row.name]
    assert ours == ["file write", "file read", "file (full) write", "file (full) read"]
    assert all(row.value > 0 for row in rows)


def test_small_objects_are_measured_in_a_full_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(small_objects, "RUNS", 1)
    rows = small_objects.measure(small_objects.KIB[0], tmp_path)
    assert rows
    assert all(row.value > 0 for row in rows)


@pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")
def test_mooncake_is_measured_in_own_memory_and_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "RUNS", 1)
    monkeypatch.setattr(storage, "CACHE", storage.CACHE | {"layers": 1})
    rows = list(storage.run("mooncake"))
    assert [row.limit_name for row in rows] == ["GB/s raw", "GB/s raw", "GB/s memcpy", "GB/s memcpy"] * 2
    assert [row.name.split(", ")[1] for row in rows[::4]] == ["own memory write", "another's memory by TCP write"]
    assert all(row.value > 0 for row in rows)


def test_an_unknown_backend_is_one_line_and_exit_2() -> None:
    command = [sys.executable, "-m", "transferd", "bench", "storage", "--backend", "tape"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("--backend: expected one of")
