"""Compare this machine's ratios with the recorded ones, and fail when one has got worse by more than its spread.

    python benchmarks/gate.py [control copy storage-file storage-memory growth]

A ratio compares two things measured in turn on one machine, so it travels between machines far better than a speed,
but not perfectly: pass a gate on the machine that recorded the results, or record your own first (README.md). A row
fails if it is worse in each of TRIES runs by more than the larger of its two spreads, recorded and measured now, and
by more than LEAST. Rows that only one side has are listed, and fail nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
COMMANDS = {
    "control": ["-m", "transferd", "bench", "control", "--format", "json"],
    "copy": ["-m", "transferd", "bench", "copy", "--format", "json"],
    "storage-file": ["-m", "transferd", "bench", "storage", "--backend", "file", "--format", "json"],
    "storage-memory": ["-m", "transferd", "bench", "storage", "--backend", "memory", "--format", "json"],
    "growth": ["-m", "benchmarks.growth", "--format", "json"],
}
TRIES = 3
LEAST = 0.1  # a tenth is never a regression: the median of five runs moves by that much
MORE_IS_BETTER = ("GB/s", "tasks/s", "messages/s")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row, recorded and now. allowed: the share by which it may be worse."""

    name: str
    recorded: float
    now: float
    allowed: float
    worse: float  # by which share; negative: better

    @property
    def failed(self) -> bool:
        return self.worse > self.allowed


def compare(recorded: dict[str, Any], now: dict[str, Any]) -> tuple[list[Verdict], list[str]]:
    """Compare two results of one benchmark. Returns a verdict for each common row, and the names on one side only."""
    before = {row["name"]: row for row in recorded["rows"]}
    after = {row["name"]: row for row in now["rows"]}
    verdicts = [_verdict(before[name], row) for name, row in after.items() if name in before and _compared(row)]
    return verdicts, sorted(before.keys() ^ after.keys())


def _compared(row: dict[str, Any]) -> bool:
    """A limit beside itself, and a raw call beside another, say nothing about transferd."""
    return row["limit_name"] != "itself" and not row["name"].startswith("raw ")


def _verdict(before: dict[str, Any], after: dict[str, Any]) -> Verdict:
    change = after["ratio"] / before["ratio"] if before["ratio"] else 1.0
    more_is_better = after["unit"] in MORE_IS_BETTER
    worse = 1.0 / change - 1.0 if more_is_better and change else change - 1.0
    allowed = max(before["spread"], after["spread"], LEAST)
    return Verdict(after["name"], before["ratio"], after["ratio"], allowed, worse)


def measure(name: str) -> dict[str, Any]:
    """Run one benchmark. Raises CalledProcessError; what the benchmark says goes to stderr."""
    done = subprocess.run([sys.executable, *COMMANDS[name]], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    tree: dict[str, Any] = json.loads(done.stdout)
    return tree


def gate(name: str) -> list[str]:
    """Run a benchmark up to TRIES times. Returns the rows that were worse each time."""
    recorded = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    failed: set[str] | None = None
    for attempt in range(1, TRIES + 1):
        verdicts, lacking = compare(recorded, measure(name))
        bad = {verdict.name for verdict in verdicts if verdict.failed}
        failed = bad if failed is None else failed & bad
        print(f"{name}, run {attempt}:")
        for verdict in verdicts:
            mark = "worse" if verdict.failed else "ok"
            print(
                f"  {mark:6} {verdict.name:56} {verdict.recorded:7.2f} -> {verdict.now:7.2f} (±{verdict.allowed:.0%})"
            )
        for missing in lacking:
            print(f"  -      {missing}: on one side only")
        if not failed:
            break
    return sorted(failed or ())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", nargs="*", help=f"which of {', '.join(COMMANDS)} (default: all)")
    wanted = parser.parse_args(arguments).benchmark or list(COMMANDS)
    if unknown := sorted(set(wanted) - COMMANDS.keys()):
        parser.error(f"no such benchmark: {', '.join(unknown)}")
    failed = {name: gate(name) for name in wanted}
    for name, rows in failed.items():
        for row in rows:
            print(f"REGRESSION {name}: {row}")
    return 1 if any(failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
