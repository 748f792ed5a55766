"""One thing that grows, and what a unit of work costs at each size of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transferd.cli.bench.harness import RUNS, Row, row


@dataclass(frozen=True, slots=True)
class Axis:
    """What grows.

    title: for the picture. name: of a row; {} is the size. unit: of a figure, such as "us/block".
    """

    title: str
    name: str
    unit: str
    sizes: Sequence[int]

    def tree(self, rows: Sequence[Row]) -> dict[str, Any]:
        """One panel of the picture, in JSON types."""
        points = [
            {"size": size, "ratio": row.ratio, "spread": row.spread} for size, row in zip(self.sizes, rows, strict=True)
        ]
        return {"title": self.title, "unit": self.unit, "points": points}


def grow(axis: Axis, measure: Callable[[int], float]) -> list[Row]:
    """Measure all sizes in turn, RUNS times after a warm-up. Each row's limit is the smallest size."""
    values: dict[int, list[float]] = {size: [] for size in axis.sizes}
    for number in range(RUNS + 1):
        for size in axis.sizes:
            value = measure(size)
            if number:  # the first is warm-up
                values[size].append(value)
    first = axis.sizes[0]
    smallest = statistics.median(values[first])
    limit = f"{axis.unit} at {first:,}"
    return [row(axis.name.format(f"{size:,}"), values[size], axis.unit, smallest, limit) for size in axis.sizes]
