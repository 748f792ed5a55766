"""Run the fault matrix and print its table.

    python -m tests.faults.matrix [--only WORD …] [--write]

--only: cells whose name has every word, such as `--only file 'kill -9'`. --write: the table goes to
docs/faults.md and docs/faults.json. Exit code 1 when a cell is red.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults import table
from tests.faults.cell import CELLS, Cell, Row
from tests.faults.runner import Runner
from tests.faults.world import ROOT, World

DOCS = ROOT / "docs"


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
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    cells = [cell for cell in CELLS if all(word in cell.name for word in options.only)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="transferd-faults-") as directory:
        rows = asyncio.run(run_cells(cells, Path(directory), say=True))
    summary = table.summary(rows, time.monotonic() - began)
    print(summary)
    if options.write:
        table.write_json(DOCS / "faults.json", rows)
        table.replace_section(DOCS / "faults.md", "matrix", f"\n{summary}\n\n{table.markdown(rows)}\n")
    return 1 if not rows or any(row.problems for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
