"""What a replay found, as data and as text. Keys as in the public contract."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from transferd.replay.kvdata import Mismatch
from transferd.tasks import Status, Task, TaskResult

TOLD_MISMATCHES = 5
GOOD = frozenset({Status.OK, Status.PARTIAL, Status.MISS})


@dataclass(slots=True)
class Report:
    """Counts of one replay. Filled by the engine."""

    requests: int = 0
    truncated: int = 0  # requests with more blocks than the device has
    blocks_written: int = 0
    blocks_read: int = 0
    bytes: int = 0
    busy: int = 0  # answers "busy", each pushed again
    verify_failures: int = 0
    seconds: float = 0.0
    hits: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    latencies: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    mismatches: list[Mismatch] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def task(self, task: Task, result: TaskResult, seconds: float) -> None:
        self.statuses[result.status] += 1
        self.bytes += result.bytes
        self.latencies[task.kind].append(seconds)
        if result.error is not None and len(self.errors) < TOLD_MISMATCHES:
            self.errors.append(f"{task.kind}: {result.status}: {result.error.message}")

    def mismatch(self, mismatch: Mismatch) -> None:
        self.verify_failures += 1
        if len(self.mismatches) < TOLD_MISMATCHES:
            self.mismatches.append(mismatch)

    @property
    def good(self) -> bool:
        """Every byte right, and every task ended as one may in a healthy run."""
        return not self.verify_failures and not self.errors and set(self.statuses) <= GOOD

    def tree(self) -> dict[str, Any]:
        """The report as plain data."""
        total = sum(self.hits.values())
        tiers = ("device", "host", "storage", "none")
        return {
            "requests": self.requests,
            "tasks": sum(self.statuses.values()),
            "blocks_written": self.blocks_written,
            "blocks_read": self.blocks_read,
            "hit_blocks": {tier: self.hits[tier] for tier in tiers},
            "hit_rate": {tier: self.hits[tier] / total if total else 0.0 for tier in tiers},
            "bytes": self.bytes,
            "gb_per_s": self.bytes / self.seconds / 1e9 if self.seconds else 0.0,
            "verify_failures": self.verify_failures,
            "mismatches": [asdict(mismatch) for mismatch in self.mismatches],
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "busy_retries": self.busy,
            "truncated_requests": self.truncated,
            "errors": self.errors,
            "latency_ms": {kind: _percentiles(values) for kind, values in sorted(self.latencies.items())},
            "seconds": self.seconds,
        }

    def print(self, console: Console) -> None:
        """The report for people."""
        tree = self.tree()
        summary = Table(title="replay", show_header=False)
        for name in ("requests", "tasks", "blocks_written", "blocks_read"):
            summary.add_row(name.replace("_", " "), f"{tree[name]:,}")
        summary.add_row("bytes moved", f"{self.bytes / 1e9:.2f} GB at {tree['gb_per_s']:.2f} GB/s")
        summary.add_row("seconds", f"{self.seconds:.1f}")
        summary.add_row("statuses", ", ".join(f"{status} {count:,}" for status, count in tree["statuses"].items()))
        style = "bold green" if not self.verify_failures else "bold red"
        summary.add_row("verify failures", f"[{style}]{self.verify_failures}[/]")
        hits = Table(title="where blocks came from")
        hits.add_column("tier")
        hits.add_column("blocks", justify="right")
        hits.add_column("share", justify="right")
        for tier, share in tree["hit_rate"].items():
            hits.add_row("computed" if tier == "none" else tier, f"{self.hits[tier]:,}", f"{share:.1%}")
        latency = Table(title="milliseconds per task")
        for column in ("task", "p50", "p99"):
            latency.add_column(column, justify="left" if column == "task" else "right")
        for kind, values in tree["latency_ms"].items():
            latency.add_row(kind, f"{values['p50']:.2f}", f"{values['p99']:.2f}")
        for table in (summary, hits, latency):
            console.print(table)
        for mismatch in self.mismatches:
            console.print(f"[red]wrong bytes:[/] {mismatch}")
        for error in self.errors:
            console.print(f"[red]error:[/] {error}")


def _percentiles(values: list[float]) -> dict[str, float]:
    if len(values) == 1:
        return {"p50": values[0] * 1e3, "p99": values[0] * 1e3}
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49] * 1e3, "p99": cuts[98] * 1e3}
