"""`make gpu-check` itself: no row costs another one its result, and a run may be cut and resumed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import table
from tests.machine.gpu import beside, copy_speeds, environment, runner, sharing, speeds
from tests.machine.gpu.results import Results, driver_release
from tests.machine.gpu.rows import ROWS, Row, chosen
from tests.machine.gpu.runner import Run
from transferd.tiers.cuda.costs import Costs
from transferd.tiers.cuda.driver import DeviceInfo

GPU = DeviceInfo(0, "A GPU", "7" * 32, "0000:17:00.0", (9, 0))
TWIN = DeviceInfo(0, "A GPU", "6" * 32, "0000:18:00.0", (9, 0))
ANOTHER = DeviceInfo(0, "Another", "8" * 32, "", (9, 0))
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
        ratio = 0.1 if name.endswith("less") else 0.5
        row = {"name": "measures right", "value": 1.0, "limit": 2.0, "ratio": ratio, "unit": "GB/s"}
        row |= {"limit_name": "", "spread": 0.1}
        tell({"measured": [row]})
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


def results(where: Path, *, resume: bool = False, gpu: DeviceInfo = GPU, driver: str = "580.65") -> Results:
    return Results(where, gpu, driver, 1, resume=resume)


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
    assert written(quick)["environments"] == {GPU.uuid: {"uuid": GPU.uuid}}
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
    played(results(quick), ["d slow"])
    again = results(quick, resume=True)
    assert again.known == {"a right", "measures right", "d slow"}, "what was wrong or skipped runs again"
    assert results(quick, resume=True, gpu=ANOTHER).known == set()
    assert results(quick, resume=True, driver="590.1").known == set()
    assert results(quick, resume=True, gpu=TWIN).known == again.known, "another machine with such a GPU goes on"
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


def test_the_constants_of_the_model_are_found_again_from_speeds_that_it_predicts() -> None:
    costs, pieces, dma_most = (
        Costs(bus=50e9, gather=40e9, dma_s=1e-6, row_s=0.1e-6, pair_s=4e-7, kernel_loss=0.5),
        160,
        4 << 20,
    )
    found = {}
    for piece in (8192, 16384, 32768, 65536, 131072):
        sizes, copies = np.full(pieces, piece), -(-pieces // (dma_most // piece))
        heights = [pieces // copies] * copies
        seconds = {
            "gather": [costs.gathered(pieces * piece)] * 2,
            "straight": [costs.straight(sizes, outward=outward, dma_most=dma_most) for outward in (True, False)],
            "rows": [costs.rows(heights, pieces * piece)] * 2,
            "pairs": [costs.pairs(sizes)] * 2,
        }
        for way, (out, into) in seconds.items():
            loss = costs.kernel_loss if way == "gather" else costs.copy_loss
            found[piece, way] = figures(pieces * piece / out / 1e9, pieces * piece / into / 1e9, 1 - loss)
    fitted = beside.fitted(found, pieces, dma_most)
    for name in Costs.__dataclass_fields__:
        assert getattr(fitted, name) == pytest.approx(getattr(costs, name), rel=0.05), name


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


def test_what_was_found_on_any_gpu_stays_whatever_runs_afterwards(quick: Path) -> None:
    played(results(quick), ["a right", "b wrong", "measures right"])
    played(results(quick, gpu=ANOTHER), ["a slow", "measures slow"])
    played(results(quick, gpu=TWIN, resume=True), ["b right"])
    played(results(quick, driver="590.1"), ["a right"])
    found = [(row["gpu"], row["driver"], row["uuid"][0], row["name"]) for row in written(quick)["checks"]]
    assert found == [
        ("A GPU", "580.65", "7", "a right"),
        ("A GPU", "580.65", "7", "b wrong"),
        ("A GPU", "580.65", "7", "measures right"),
        ("Another", "580.65", "8", "a slow"),
        ("Another", "580.65", "8", "measures slow"),
        ("A GPU", "580.65", "6", "b right"),
        ("A GPU", "590.1", "7", "a right"),
    ]
    assert [row["uuid"][0] for row in written(quick, "copy-cuda.json")["rows"]] == ["7", "8"]


def test_a_worker_that_dies_early_leaves_the_environment_that_is_known(quick: Path) -> None:
    played(results(quick), ["a right"])
    again = results(quick)
    again.heard({"name": "b", "check": "b", "verdict": "wrong", "seconds": 0, "note": "died", "figures": {}})
    assert written(quick)["environments"] == {GPU.uuid: {"uuid": GPU.uuid}}


@pytest.mark.parametrize("text", ["{ half of a", '{"environment": {}, "checks": [{"name": "a right"}]}'])
def test_files_that_cannot_be_read_are_kept(quick: Path, text: str) -> None:
    quick.mkdir()
    (quick / "gpu-check.json").write_text(text)
    played(results(quick), ["a right"])
    assert verdicts(quick) == {"a right": "right"}
    (kept,) = quick.glob("gpu-check.json.unreadable-*")
    assert kept.read_text() == text


def test_rows_that_were_not_run_are_named(quick: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = results(quick)
    played(found, ["a right", "b right"], seconds=0.0)
    found.conclude(["a right", "b right"])
    assert "not run: a right, b right" in capfd.readouterr().out.splitlines()


def test_rows_may_be_left_out() -> None:
    left = [row.name for row in chosen(["bench"], bench=True, skip=["mla", "bench_gqa_alone"])]
    assert "bench_gqa_alone" not in left
    assert "bench_gqa_in_batches" in left
    assert not [name for name in left if "mla" in name]


def test_rows_come_in_the_order_in_which_a_cut_run_is_worth_most() -> None:
    names = [row.name for row in ROWS]
    order = ["the_environment", "the_bus_by_size", "every_layout_both_ways", "bench_gqa_alone", "bench_mla_alone"]
    order += ["the_best_settings_beside_a_busy_neighbour", "bench_dsa_alone", "calls_beside_a_pending_wait"]
    order += ["the_loop_lives_while_memory_is_made", "a_lost_device_is_noticed", "bench_gqa_in_batches"]
    assert [name for name in names if name in order] == order
    assert names[-1] == "a_full_launch_queue"
    assert ROWS[-1].limit_s <= 30, "it is expected to hang in some drivers"


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("3 arrays mapped, an event, timelines", True),
        ("TierError: memory of process 7 cannot be mapped: cuIpcOpenMemHandle failed: CUDA_ERROR_UNKNOWN", False),
        ("TierError: memory of process 7 cannot be mapped: …. It is in another PID namespace (container)", True),
        (sharing.NOT_ALLOWED, True),
    ],
)
def test_a_refusal_has_to_say_what_to_change(text: str, good: bool) -> None:
    assert sharing.explained(text) is good


SMI = """#!/bin/sh
case "$2" in *clocks_throttle_reasons.active*) echo 'a field is not a valid field to query'; exit 2;; esac
echo "$2" | sed 's/--query-gpu=//; s/,/, /g'
"""


def test_a_field_that_nvidia_smi_has_renamed_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = environment._smi("7" * 32)
    assert found == {name: name for name in environment.SMI if name != "clocks_throttle_reasons.active"}


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        (None, "CUDA 13.0"),
    ],
)
def test_results_name_the_driver(tmp_path: Path, text: str | None, release: str) -> None:
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text)
    assert driver_release(13000, file) == release


def test_the_tables_of_a_run_are_made_by_one_command_from_its_files(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions stand in the pages until then, between the same marks."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    page = tmp_path / "docs" / "performance.md"
    page.write_text("".join(f"<!-- {name} -->\npredicted\n<!-- end -->\n" for name in ("gpu-check", "copy-cuda")))
    monkeypatch.setattr(table, "ROOT", tmp_path)
    facts = {"cpu": "x", "cores": 2, "kernel": "6", "python": "3", "load_1min_before": 0.0}
    monkeypatch.setattr(Results, "_facts_of_machine", lambda _: facts)
    played(results(quick), ["a right", "measures right"])
    table.main([str(quick)])
    played(results(quick, gpu=ANOTHER), ["a slow"])
    table.main([str(quick)])
    table.main([str(quick)])  # adds nothing twice
    text = page.read_text()
    assert "predicted" not in text
    assert text.count("**A GPU, driver 580.65** (UUID 77777777)") == 2
    assert text.count("**Another, driver 580.65** (UUID 88888888)") == 1
    assert text.count("| a slow | slow |") == 1
    kept = json.loads((tmp_path / "benchmarks" / "results" / "gpu-check.json").read_text())
    assert [row["name"] for row in kept["checks"]] == ["a right", "measures right", "a slow"]
    with pytest.raises(SystemExit, match="has none of"):
        table.main([str(tmp_path)])
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "found"]):
        subprocess.run([*git, *command], check=True)
    table.main()
    played(results(tmp_path / "benchmarks" / "results"), ["a right", "measures less"])
    for _ in range(2):  # until it is committed, or mended
        with pytest.raises(SystemExit, match=r"slower than what is committed.*\nmeasures"):
            table.main()


def test_a_figure_that_fell_by_more_than_a_tenth_is_named() -> None:
    """FastDeploy's order once fell to a tenth, and the table said so in a row that nobody judged."""
    row = {"name": "FastDeploy's order out", "gpu": "H", "driver": "1", "limit_name": "one large copy"}
    before = {"rows": [row | {"ratio": 0.5}, row | {"ratio": 0.9}]}
    assert table.fallen(before, before) == []
    assert table.fallen(before, {"rows": [row | {"ratio": 0.1}, row | {"ratio": 0.82}]}) == [], "the last one counts"
    assert table.fallen(before, {"rows": [row | {"ratio": 0.1}, row | {"ratio": 0.3, "gpu": "another"}]}) == [
        "FastDeploy's order out (H, driver 1): of one large copy 0.10, and 0.90 before"
    ]
    check = {"name": "a_busy_neighbour", "gpu": "H", "driver": "1"}
    good = check | {"verdict": "fast", "figures": {"rows out": {"busy_GBs": 40.0, "p99_s": 1.0}, "share": 0.9}}
    bad = check | {"verdict": "slow", "figures": {"rows out": {"busy_GBs": 35.0, "p99_s": 0.1}, "share": 0.85}}
    assert table.fallen({"checks": [good]}, {"checks": [good, bad]}) == [
        "a_busy_neighbour (H, driver 1): verdict 0.50, and 1.00 before",
        "a_busy_neighbour (H, driver 1): rows out busy_GBs 35.00, and 40.00 before",
    ]
    assert table.fallen({"checks": [good]}, {"checks": [good, bad | {"verdict": "skipped"}]}) == []


def test_every_way_that_the_tier_chooses_is_judged() -> None:
    assert set(speeds.GOALS) == set(copy_speeds.DEFAULT_WAYS)
