"""`make gpu-check` itself: no row costs another one its result, and a run may be cut and resumed."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import beside, runner
from tests.gpu.results import Results
from tests.gpu.rows import ROWS, Row, chosen
from tests.gpu.runner import Run
from transferd.tiers.cuda.driver import DeviceInfo

GPU = DeviceInfo(0, "A GPU", "7" * 32, "0000:17:00.0", (9, 0))
# Plays rows by the beginnings of their names.
WORKER = """
import json, os, signal, sys, time
to = os.fdopen(int(sys.argv[1]), "w")
tell = lambda message: print(json.dumps(message), file=to, flush=True)
tell({"environment": {"uuid": "7" * 32}})
for name in sys.argv[2:]:
    tell({"begins": name})
    if name.startswith("hangs"):
        time.sleep(600)
    if name.startswith("crashes"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if name.startswith("measures"):
        tell({"measured": [{"name": name, "value": 1.0, "limit": 2.0, "ratio": 0.5}]})
    verdict = name.split()[-1]
    tell({"row": {"name": name, "check": name, "verdict": verdict, "seconds": 0.1, "note": "", "figures": {}}})
tell({"over": True})
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Workers that play. Where one hangs, its end is not waited for; one that is done may take its time to end."""
    worker = tmp_path / "worker.py"
    worker.write_text(textwrap.dedent(WORKER))
    monkeypatch.setattr(runner, "GRACE_S", 0.05)
    monkeypatch.setattr(runner, "END_S", 60.0)
    monkeypatch.setattr(Results, "_facts_of_machine", lambda _: {"cpu": "x"})
    monkeypatch.setattr(Run, "_command", lambda _, to, rows: [sys.executable, str(worker), str(to), *rows])
    return tmp_path / "results"


def played(results: Results, names: list[str], *, first: bool = False, seconds: float = 600.0) -> None:
    options = argparse.Namespace(device=0, seed=1, first=first)
    rows = [Row(name, ROWS[0].check, 0.2 if name.startswith("hangs") else 60.0) for name in names]
    Run(results, options, Path("/nowhere"), time.monotonic() + seconds).rows(rows)


def results(where: Path, *, partial: bool = False, resume: bool = False, gpu: DeviceInfo = GPU) -> Results:
    return Results(where, gpu, 1, partial=partial, resume=resume)


def written(where: Path, name: str = "gpu-check.json") -> Any:
    return json.loads((where / name).read_text())


def verdicts(where: Path) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in written(where)["checks"]}


def test_a_row_that_hangs_or_crashes_costs_only_itself(quick: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ["a right", "crashes", "b slow", "hangs", "measures right", "c wrong", "d right"]
    found = results(quick)
    played(found, names)
    expected = ["right", "wrong", "slow", "wrong", "right", "wrong", "right"]
    assert verdicts(quick) == dict(zip(names, expected, strict=True))
    notes = {row["name"]: row["note"] for row in written(quick)["checks"]}
    assert "by signal 11" in notes["crashes"]
    assert "by signal 9" in notes["hangs"]
    assert [row["name"] for row in written(quick, "copy-cuda.json")["rows"]] == ["measures right"]
    assert written(quick)["environment"] == {"uuid": GPU.uuid}
    assert found.conclude(names) == 1
    assert capfd.readouterr().out.splitlines()[-1] == "FAILED"


def test_the_first_failure_may_end_it(quick: Path) -> None:
    played(results(quick), ["a right", "b wrong", "c right"], first=True)
    assert verdicts(quick) == {"a right": "right", "b wrong": "wrong", "c right": "skipped"}


def test_without_time_rows_are_not_run_and_nothing_is_wrong(quick: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = results(quick)
    played(found, ["a right", "b right"], seconds=0.0)
    assert verdicts(quick) == {"a right": "skipped", "b right": "skipped"}
    assert found.conclude(["a right", "b right"]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last == "all good; 2 rows were not run: make gpu-check ARGS=--resume"


def test_a_run_goes_on_where_the_last_one_ended(quick: Path) -> None:
    played(results(quick), ["a right", "b wrong", "measures right"])
    played(results(quick, partial=True), ["d slow"])
    again = results(quick, resume=True)
    assert again.known == {"a right", "measures right", "d slow"}, "what was wrong or skipped runs again"
    assert results(quick, resume=True, gpu=DeviceInfo(0, "Another", "8" * 32, "", (9, 0))).known == set()
    again.heard({"name": "a right", "check": "a", "verdict": "skipped", "seconds": 0, "note": "", "figures": {}})
    assert verdicts(quick) == {"a right": "right", "b wrong": "wrong", "measures right": "right", "d slow": "slow"}


def figures(out: float, into: float, share: float) -> dict[str, float]:
    return {"out_GBs": out, "in_GBs": into, "share": share}


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ({"fast": figures(50, 50, 0.5), "kind": figures(20, 20, 0.9), "slow": figures(10, 10, 1.0)}, "kind"),
        ({"fast": figures(50, 50, 0.3), "kind": figures(20, 20, 0.6), "same": figures(30, 20, 0.57)}, "same"),
    ],
)
def test_the_best_settings_are_the_fastest_that_leave_the_neighbour_its_due(
    rows: dict[str, dict[str, float]], best: str
) -> None:
    assert max(rows, key=lambda name: beside._value(rows[name], rows.values())) == best


@pytest.mark.parametrize(
    ("straight", "expected"),
    [
        ({16: 50, 32: 50, 64: 50}, 16),
        ({16: 10, 32: 50, 64: 50}, 32),
        ({16: 50, 32: 10, 64: 50}, 64),
        ({16: 50, 32: 50, 64: 10}, 1 << 30),
    ],
)
def test_pieces_go_straight_from_the_length_at_which_all_longer_ones_are_as_fast(
    straight: dict[int, int], expected: int
) -> None:
    found = {(piece, "straight"): figures(speed, 0, 1) for piece, speed in straight.items()}
    found |= {(piece, "gather"): figures(50, 0, 1) for piece in straight}
    assert beside._crossing(found, "out_GBs") == expected


@pytest.mark.parametrize(
    ("words", "bench", "expected"),
    [
        (["a_busy_neighbour"], True, ["a_busy_neighbour"]),
        (["a busy neighbour under mps"], True, ["a_busy_neighbour_under_mps"]),
        (["kernel_comp", "mla_in_batches"], True, ["kernel_compiles", "bench_mla_in_batches"]),
        (["kernel_comp", "mla_in_batches"], False, ["kernel_compiles"]),
        (["no such row"], True, []),
    ],
)
def test_rows_are_chosen_by_their_names_and_a_whole_name_means_one_row(
    words: list[str], bench: bool, expected: list[str]
) -> None:
    """The row with MPS runs the row without it once more: a name that means both would never end."""
    assert [row.name for row in chosen(words, bench=bench)] == expected


def test_rows_have_names_of_their_own_and_fit_into_ten_minutes_one_by_one() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert max(row.limit_s for row in ROWS) < runner.TOTAL_S < 600
