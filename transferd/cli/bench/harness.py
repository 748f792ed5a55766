"""Rows of a benchmark: medians of several runs, with spread, next to a limit from the same run."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from transferd.cli.terminal import stdout

RUNS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ratio = value / limit; spread = (max - min) / median over the runs."""

    name: str
    value: float
    unit: str
    limit: float
    limit_name: str
    spread: float

    @property
    def ratio(self) -> float:
        return self.value / self.limit

    def tree(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


Rows = Generator[Row, None, None]  # of a benchmark, each as soon as it is measured


def timed(work: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def row(name: str, values: Sequence[float], unit: str, limit: float, limit_name: str) -> Row:
    """The median of `values` as a row."""
    median = statistics.median(values)
    return Row(name, median, unit, limit, limit_name, (max(values) - min(values)) / median if median else 0.0)


def machine() -> dict[str, Any]:
    """The machine that the figures were measured on."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min_before": os.getloadavg()[0],
    }


def report(bench: str, before: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON of a benchmark."""
    return {"bench": bench, "machine": before, "rows": [item.tree() for item in rows]}


def print_report(tree: dict[str, Any], form: str) -> None:
    """Print a benchmark on stdout. form: "json", or "text" for a table."""
    if form == "json":
        print(json.dumps(tree))
        return
    table = Table(title=f"{tree['bench']} on {tree['machine']['cpu']}, {tree['machine']['cores']} cores")
    for column in ("what", "value", "limit", "ratio", "spread"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for item in tree["rows"]:
        table.add_row(
            item["name"],
            f"{item['value']:,.2f} {item['unit']}",
            f"{item['limit']:,.2f} {item['limit_name']}",
            f"{item['ratio']:.2f}",
            f"{item['spread']:.0%}",
        )
    stdout().print(table)
