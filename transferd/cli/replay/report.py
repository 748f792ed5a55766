"""The report of a replay, as data and as text. It has all keys of the public contract, and some more."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transferd.cli.replay.kvdata import Mismatch
from transferd.errors import one_line
from transferd.tasks import NOT_ADMITTED, Status, Task, TaskResult

LISTED = 5  # the most mismatches and errors that a report lists; it counts all
AS_THEY_ARE = (  # fields of the plain data that have the names of ours
    *("requests", "blocks_written", "blocks_read", "bytes", "blocks_verified", "verify_failures"),
    *("error_count", "errors", "aborted", "seconds"),
)
TIERS = ("device", "host", "storage", "none")
GOOD = frozenset({Status.OK, Status.PARTIAL, Status.MISS})


@dataclass(slots=True)
class ReplayReport:
    """Counts of one replay. Filled by the engine."""

    requests: int = 0  # requests that were played to their end
    truncated: int = 0  # requests with more blocks than the device has
    blocks_written: int = 0
    blocks_read: int = 0
    blocks_verified: int = 0
    bytes: int = 0
    busy: int = 0  # "busy" answers; each task was pushed again
    verify_failures: int = 0
    error_count: int = 0
    seconds: float = 0.0
    aborted: str = ""  # why the replay ended early
    interrupted: bool = False  # by Ctrl-C
    hits: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    latencies: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    mismatches: list[Mismatch] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def task(self, task: Task, result: TaskResult, seconds: float) -> None:
        """Count a task that ended `seconds` after it was pushed."""
        self.statuses[result.status] += 1
        self.bytes += result.bytes
        self.latencies[task.kind].append(seconds)
        if result.error is not None and result.error.code != NOT_ADMITTED:  # that is what storage.admit is for
            self.error(f"{task.kind} {task.task_id}: {result.status}: {result.error.message}")

    def error(self, text: str) -> None:
        """Count an error that does not happen in a healthy run."""
        self.error_count += 1
        if len(self.errors) < LISTED:
            self.errors.append(text)

    def verified(self, blocks: int, mismatches: Sequence[Mismatch]) -> None:
        """Count `blocks` compared blocks, and those that were wrong."""
        self.blocks_verified += blocks
        self.verify_failures += len(mismatches)
        self.mismatches += mismatches[: LISTED - len(self.mismatches)]

    @property
    def good(self) -> bool:
        """Whether the replay reached its end, every byte was right, and every task ended as in a healthy run."""
        healthy = not self.error_count and not self.aborted and set(self.statuses) <= GOOD
        return healthy and not self.verify_failures

    def tree(self) -> dict[str, Any]:
        """The report as plain data."""
        total = sum(self.hits.values())
        return {name: getattr(self, name) for name in AS_THEY_ARE} | {
            "tasks": sum(self.statuses.values()),
            "hit_blocks": {tier: self.hits[tier] for tier in TIERS},
            "hit_rate": {tier: self.hits[tier] / total if total else 0.0 for tier in TIERS},
            "gb_per_s": self.bytes / self.seconds / 1e9 if self.seconds else 0.0,
            "mismatches": [asdict(mismatch) for mismatch in self.mismatches],
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "busy_retries": self.busy,
            "truncated_requests": self.truncated,
            "latency_ms": {kind: percentiles_ms(values) for kind, values in sorted(self.latencies.items())},
        }

    def print(self, console: Console) -> None:
        """Print the report as text."""
        tree = self.tree()
        summary = Table(title="replay", show_header=False)
        for name in ("requests", "tasks", "blocks_written", "blocks_read", "blocks_verified"):
            summary.add_row(name.replace("_", " "), f"{tree[name]:,}")
        for name in ("truncated_requests", "busy_retries", "error_count"):
            if tree[name]:
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
            console.print("[red]wrong bytes:[/]", escape(one_line(str(mismatch))), soft_wrap=True)
        for error in self.errors:
            console.print("[red]error:[/]", escape(one_line(error)), soft_wrap=True)
        if self.aborted:
            console.print("[bold red]ended early:[/]", escape(one_line(self.aborted)), soft_wrap=True)


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Half of them, and 99 of 100, took at most so many milliseconds; empty without any."""
    if len(seconds) < 2:
        return {name: one * 1e3 for one in seconds for name in ("p50", "p99")}
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49] * 1e3, "p99": cuts[98] * 1e3}
