"""Does a unit of work get dearer with more of what it is a part of, and does memory stay bounded?

    python -m benchmarks.growth [--format json] [--save]
    python -m benchmarks.growth --tasks 100000 [--format json]
    python -m benchmarks.growth --calls [--save]

* dispatch: the real dispatcher alone; n tasks are queued behind a pause, then all run to their end;
* a daemon in a process of its own: blocks of a swap, ranks, engines, clients, keys of a look-up, size of objects;
* memory of such a daemon after it was flooded again and again with more tasks than its queue takes.

Each row stands against the smallest of its kind. --save writes results/growth.json and docs/growth.svg. With --tasks
something else: a daemon's memory after so many tasks of 4,000 keys each, against after 1,000. With --calls: what each
call costs beside 1,000,000 objects, 1,000 engines or 100,000 queued tasks; fails where a cost grows with them, or where
a step of the event loop is longer than 50 ms. --save writes results/growth-calls.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.growth.axis import grow
from benchmarks.growth.calls import grown, measure
from benchmarks.growth.dispatch import QUEUED, per_task_us
from benchmarks.growth.memory import flood_rows, task_rows
from benchmarks.growth.picture import picture
from benchmarks.growth.served import AXES
from benchmarks.table import table
from transferd.cli.bench.harness import machine, print_report, report
from transferd.daemon.process import quiet_collector

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--save", action="store_true", help="write results/growth.json and docs/growth.svg")
    parser.add_argument("--tasks", type=int, help="measure memory after so many large tasks, and nothing else")
    parser.add_argument("--calls", action="store_true", help="measure what calls cost beside many things, and fail")
    arguments = parser.parse_args()
    before = machine()
    if arguments.calls:
        found = measure()
        tree: dict[str, Any] = {"bench": "growth of calls", "machine": before, "things": found}
        if arguments.save:
            _write("growth-calls.json", tree)
        print(table(tree))
        raise SystemExit("\n".join(grown(found)) or 0)
    if arguments.tasks is not None:
        tree = report("growth", before, task_rows(arguments.tasks))
    else:
        measured = {axis: rows() for axis, rows in AXES.items()}
        floods = flood_rows()
        quiet_collector()  # as in the daemon; here it is this process that dispatches
        measured = {QUEUED: grow(QUEUED, per_task_us)} | measured
        tree = report("growth", before, [row for rows in measured.values() for row in rows] + floods)
        tree["axes"] = [axis.tree(rows) for axis, rows in measured.items()]
    if arguments.save and "axes" in tree:
        _write("growth.json", tree)
        (ROOT / "docs" / "growth.svg").write_text(picture(tree["axes"]), encoding="utf-8")
    print_report(tree, arguments.format)


def _write(name: str, tree: dict[str, Any]) -> None:
    (ROOT / "benchmarks" / "results" / name).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
