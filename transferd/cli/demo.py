"""`transferd demo`: the main job in under a minute, on any machine, explained in plain words."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from transferd.cli.replay import command
from transferd.cli.replay.report import ReplayReport
from transferd.cli.replay.trace import generated_workload
from transferd.errors import one_line

REQUESTS = 1000
RANKS = 2
CONCURRENCY = 8
SEED = 7
# Small pools, so that blocks have to move: from device to host, then out, and back from storage.
CACHE = {"device_blocks": 160, "host_blocks": 96}


def run(console: Console) -> ReplayReport:
    """Replay a generated workload against a private daemon."""
    requests = generated_workload(SEED, REQUESTS)
    console.print(
        f"Starting a daemon with {RANKS} ranks. Its 'GPU memory' is shared memory, its storage a temporary directory.\n"
        f"A small engine then serves {REQUESTS} requests of multi-turn conversations, {CONCURRENCY} at a time.\n"
    )
    return command.run(
        requests,
        endpoint=None,
        config=None,
        ranks=RANKS,
        concurrency=CONCURRENCY,
        quiet=False,
        cache=CACHE,
    )


def print_summary(report: ReplayReport, console: Console) -> None:
    """Print the report, and explain it to a reader who knows LLM serving but not transferd."""
    report.print(console)
    hits = report.hits
    total = max(1, hits.total())
    saved = total - hits["none"]
    console.print("\n[bold]What just happened[/]")
    console.print(
        f"The requests had {total:,} prefix blocks. {saved:,} of them ({saved / total:.0%}) were not recomputed:\n"
        f"  {hits['device']:,} were still in device memory,\n"
        f"  {hits['host']:,} had been swapped out to pinned host memory and came back (swap_in),\n"
        f"  {hits['storage']:,} had left both and were read from the storage pool (read).\n"
        f"The other {hits['none']:,} were computed and stored for the next request (write). "
        "When device memory was full, idle blocks went to host memory (swap_out).\n"
        f"Each task ran on {RANKS} ranks at once and got one answer that says what every rank really did: "
        f"{report.statuses.total():,} tasks, {report.statuses.total():,} results."
    )
    if report.verify_failures:
        console.print(f"[bold red]{report.verify_failures} blocks had wrong bytes. This is a bug.[/]")
    elif report.good:
        console.print(
            f"{report.blocks_verified:,} times, a block that was loaded or reused was compared with the computed one, "
            "byte by byte on every rank: no difference."
        )
    else:
        console.print("[bold red]The demo failed:[/]", escape(one_line(report.aborted or "; ".join(report.errors))))
    # We may claim this: if the daemon ends badly or leaves memory behind, replay/own.py raises an error.
    console.print("The daemon was stopped with SIGTERM and left nothing behind.")
