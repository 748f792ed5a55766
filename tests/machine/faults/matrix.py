"""Run the fault matrix and print its table.

    python -m tests.machine.faults.matrix [--only WORD …] [--scenarios WORD …] [--write]

--only: cells whose name has every word, such as `--only file 'kill -9'`, and nothing else (`--only ,` for every cell).
--scenarios: of what runs out or goes wrong, what has one of the words in its name, and nothing else. --write: the
tables go to docs/faults.md and docs/faults.json; with --scenarios only the rows that ran, with --only not the other
table. Exit code 1 when something is red.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.machine.faults import table
from tests.machine.faults.cell import CELLS, Cell, Row
from tests.machine.faults.host import ALL_SCENARIOS
from tests.machine.faults.resources import Finding, Scenario
from tests.machine.faults.resources import run as run_scenario
from tests.machine.faults.runner import Runner
from tests.machine.faults.world import ROOT, World

DOCS = ROOT / "docs"


async def run_scenarios(scenarios: Sequence[Scenario], directory: Path) -> list[tuple[Scenario, Finding]]:
    """Run what this machine allows of them."""
    findings = []
    for number, scenario in enumerate(scenarios):
        if scenario.missing:
            print(f"{scenario.name}: skipped, {scenario.missing}")
            continue
        home = directory / f"resources-{number}"
        home.mkdir()
        finding = await run_scenario(scenario, home)
        findings.append((scenario, finding))
        print(f"{scenario.name}: told {'; '.join(finding.told)} {finding.problems or 'green'}", flush=True)
    return findings


async def run_cells(cells: Sequence[Cell], directory: Path, say: bool = False) -> list[Row]:
    """Run cells in one world for each backend. A world that a red cell leaves behind is not used again."""
    rows: list[Row] = []
    for backend in dict.fromkeys(cell.backend for cell in cells):
        waiting = [cell for cell in cells if cell.backend == backend]
        while waiting:
            home = directory / f"{backend}-{len(rows)}"
            home.mkdir()
            world = World(home, backend)
            async with Runner(world) as runner:
                while waiting:
                    row = await runner.run(waiting.pop(0))
                    rows.append(row)
                    if say:
                        print(table.line(row), flush=True)
                    if row.problems:
                        if say:
                            print(world.log_end(), flush=True)
                        break
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--scenarios", nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    cells = [cell for cell in CELLS if all(word in cell.name for word in options.only)]
    chosen = [one for one in ALL_SCENARIOS if any(word in one.name for word in options.scenarios or [""])]
    rows: list[Row] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="transferd-faults-") as directory:
        if not options.scenarios:
            rows = asyncio.run(run_cells(cells, Path(directory), say=True))
        seconds = time.monotonic() - began
        findings = [] if options.only else asyncio.run(run_scenarios(chosen, Path(directory)))
    summary = table.summary(rows, seconds)
    if rows:
        print(summary)
    if options.write and options.scenarios:
        findings_now = table.merge_json(DOCS / "faults.json", findings, ALL_SCENARIOS)
        table.replace_section(DOCS / "faults.md", "resources", f"\n{table.resources(findings_now)}\n")
    elif options.write:
        table.write_json(DOCS / "faults.json", rows, None if options.only else findings)
        table.replace_section(DOCS / "faults.md", "matrix", f"\n{summary}\n\n{table.markdown(rows)}\n")
        if not options.only:
            table.replace_section(DOCS / "faults.md", "resources", f"\n{table.resources(findings)}\n")
    red = any(row.problems for row in rows) or any(finding.problems for _, finding in findings)
    return 1 if red or not (rows or findings) else 0


if __name__ == "__main__":
    sys.exit(main())
