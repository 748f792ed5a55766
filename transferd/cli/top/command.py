"""The options of `transferd top`. The rest is imported when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from transferd.cli.asking import AskedDaemon, asks
from transferd.errors import ConfigError


@asks()
def top(
    daemon: AskedDaemon,
    once: Annotated[bool, typer.Option("--once", help="Print one screen after one interval, and exit.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=60.0, help="Seconds between refreshes.")] = 1.0,
    engine: Annotated[str, typer.Option("--engine", help="Only this engine's tasks.")] = "",
) -> None:
    """Watch a daemon: rates, latencies by kind, the slowest tasks and what they wait for. The last line lists keys."""
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("top", "needs a terminal; use `transferd top --once`")

    from transferd.cli.top.loop import watch

    watch(daemon.connected, once=once, interval=interval, engine=engine, format_=daemon.format)
