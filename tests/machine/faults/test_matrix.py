"""A cut of the fault matrix, on real processes; `make faults` runs all of it (docs/faults.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.machine.faults import table
from tests.machine.faults.cell import CELLS, Cell, Row
from tests.machine.faults.host import ALL_SCENARIOS
from tests.machine.faults.matrix import DOCS, run_cells
from tests.machine.faults.resources import Finding
from tests.machine.faults.watch import problems
from transferd.cli.pool.master import master_executable

pytestmark = pytest.mark.one_loop

CUT = {
    "file": [
        Cell("kill -9", "daemon", "store", "file"),
        Cell("kill -9", "engine", "scatter", "file"),
        Cell("kill -9", "daemon", "push", "file"),
        Cell("stop", "engine", "load", "file"),
        Cell("slow", "daemon", "gather", "file"),
        Cell("slow", "engine", "match", "file"),
        Cell("kill -9", "daemon", "result", "file"),
    ],
    "mooncake": [
        Cell("kill -9", "mooncake_master", "store", "mooncake"),
        Cell("kill -9", "daemon", "load", "mooncake"),
        Cell("slow", "segment owner", "scatter", "mooncake"),
        Cell("stop", "mooncake_master", "match", "mooncake"),
    ],
}


@pytest.mark.parametrize("backend", CUT)
async def test_whatever_dies_or_stands_still_every_task_is_answered_once_and_nothing_is_wrong(
    backend: str, tmp_path: Path
) -> None:
    if backend == "mooncake" and master_executable() is None:
        pytest.skip("mooncake-transfer-engine is not installed")
    rows = await run_cells(CUT[backend], tmp_path)
    assert [table.line(row) for row in rows if row.problems] == []
    assert len(rows) == len(CUT[backend])
    assert all(row.checked for row in rows)


FINE = ["write", "ok", "", 3, True]
CASES = {
    "nothing happened": ("engine", [FINE], 0),
    "it heard of another engine's death": ("engine", [FINE, ["read", "cancelled", "engine_gone", 0, True]], 1),
    "bytes are wrong": ("mooncake_master", [FINE, ["read", "ok", "", 3, False]], 1),
    "what it had stored is gone with a daemon": ("daemon", [FINE, ["read", "miss", "", 0, True]], 1),
    "the daemon was lost before it had stored": (
        "daemon",
        [["write", "failed", "daemon_lost", 0, True], ["read", "miss", "", 0, True]],
        0,
    ),
    "the pool forgot": ("segment owner", [FINE, ["read", "miss", "", 0, True]], 0),
    "a bug of ours": ("daemon", [["write", "failed", "internal", 0, True]], 1),
    "a failure without a code": ("daemon", [["write", "failed", "", 0, True]], 1),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_second_engine_may_be_told_depends_on_whose_fault_it_is(case: str) -> None:
    victim, told, count = CASES[case]
    assert len(list(problems(Cell("kill -9", victim, "store", "mooncake"), told))) == count


def test_the_matrix_has_every_fault_for_every_process_in_every_phase() -> None:
    assert len(CELLS) == len(set(CELLS)) == 3 * 4 * 7 + 3 * 2 * 7
    assert {cell for cells in CUT.values() for cell in cells} <= set(CELLS)


def test_the_page_has_the_tables_of_the_file() -> None:
    found = json.loads((DOCS / "faults.json").read_text(encoding="utf-8"))
    page = (DOCS / "faults.md").read_text(encoding="utf-8")
    rows = [Row(**cell | {"cell": Cell(**cell["cell"])}) for cell in found["cells"]]
    assert table.markdown(rows) in page
    known = {(scenario.name, scenario.when): scenario for scenario in ALL_SCENARIOS}
    findings = [(known[row.pop("name"), row.pop("when")], Finding(**row)) for row in found["resources"]]
    assert table.resources(findings) in page
