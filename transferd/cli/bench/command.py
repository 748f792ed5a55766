"""`transferd bench`: one verb per benchmark."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from transferd.cli.asking import INTERRUPTED, Format, FormatOption

if TYPE_CHECKING:
    from transferd.cli.bench import harness

app = typer.Typer(name="bench", help="Measure this machine against its own limits.", no_args_is_help=True)


@app.command()
def control(format_: FormatOption = Format.TEXT) -> None:
    """Measure the cost of a task besides moving its bytes, against a raw ZeroMQ echo."""
    from transferd.cli.bench import control as bench

    _run("control", bench.run(), format_)


@app.command()
def copy(
    device: Annotated[str, typer.Option(help="The device tier to measure.")] = "shm",
    format_: FormatOption = Format.TEXT,
) -> None:
    """Measure swaps between device and host memory, against one memcpy; on a GPU, against one large pinned copy."""
    from transferd.cli.bench import copy as bench

    _run("copy", bench.run(device), format_, bench.gpu() if device == "cuda" else None)


@app.command()
def storage(
    backend: Annotated[str, typer.Option(help="file, memory or mooncake.")] = "file",
    format_: FormatOption = Format.TEXT,
) -> None:
    """Measure writes and reads through a rank, against the backend's own raw calls."""
    from transferd.cli.bench import storage as bench

    _run("storage", bench.run(backend), format_)


def _run(name: str, measured: harness.Rows, format_: Format, more: dict[str, object] | None = None) -> None:
    """Measure, and print each new row on stderr; Ctrl-C reports the rows so far.

    more: facts about the machine, besides those that every benchmark reports.
    """
    from rich.console import Console

    from transferd.cli.bench import harness

    before = harness.machine() | (more or {})
    rows: list[harness.Row] = []
    progress, interrupted = Console(stderr=True, quiet=format_ is Format.JSON, highlight=False), False

    try:
        # Where this is not a terminal, only the rows are printed.
        with progress.status(f"measuring: {name}"), contextlib.closing(measured):
            for row in measured:
                rows.append(row)
                progress.print(f"{row.name}: {row.value:.4g} {row.unit}", soft_wrap=True, markup=False)
    except KeyboardInterrupt:
        interrupted = True
    tree = harness.report(name, before, rows) | ({"interrupted": True} if interrupted else {})
    harness.print_report(tree, format_)
    if interrupted:
        progress.print("interrupted: these rows were measured before")
        raise typer.Exit(INTERRUPTED)
