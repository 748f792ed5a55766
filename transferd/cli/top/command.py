"""The options of `transferd top`. The rest is imported when it runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from transferd.cli.asking import (
    EndpointOption,
    Format,
    FormatOption,
    KeyFileOption,
    ServerKeyFileOption,
    TimeoutOption,
    connected,
)
from transferd.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from transferd.client.client import Client


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one screen after one interval, and exit.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=60.0, help="Seconds between refreshes.")] = 1.0,
    engine: Annotated[str, typer.Option("--engine", help="Only this engine's tasks.")] = "",
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 2.0,
    key_file: KeyFileOption = None,
    server_key_file: ServerKeyFileOption = None,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Watch a daemon: rates, latencies by kind, the slowest tasks and what they wait for. The last line lists keys."""
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("top", "needs a terminal; use `transferd top --once`")

    from transferd.cli.top.loop import watch

    def client() -> AbstractAsyncContextManager[Client]:
        return connected(endpoint, timeout, key_file, server_key_file)

    watch(client, once=once, interval=interval, engine=engine, format_=format_)
