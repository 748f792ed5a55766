"""`transferd tasks` and `transferd clients`: what a daemon is working on, and who is connected."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from transferd.cli.asking import AskedDaemon, asks
from transferd.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from transferd.client.client import Client
    from transferd.wire.protocol import Which

EngineOption = Annotated[str, typer.Option("--engine", help="Only this engine's.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=1000, help="Maximum number of rows.")]


@asks()
def tasks(
    daemon: AskedDaemon,
    running: Annotated[bool, typer.Option("--running", help="Queued and running tasks, oldest first.")] = False,
    slow: Annotated[bool, typer.Option("--slow", help="The last thousand tasks, slowest first.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Failed and refused tasks, newest first.")] = False,
    limit: LimitOption = 20,
    engine: EngineOption = "",
) -> None:
    """List tasks and where their time goes. `transferd explain` shows one task in detail."""
    chosen: list[Which] = []
    chosen += ["running"] if running else []
    chosen += ["slow"] if slow else []
    chosen += ["failed"] if failed else []
    if len(chosen) > 1:
        raise ConfigError("tasks", f"choose one of --{' and --'.join(chosen)}")
    which: Which = chosen[0] if chosen else "recent"

    async def rows_of(client: Client) -> list[dict[str, Any]]:
        return await client.tasks(which, limit, engine) or await no_rows(client, engine)

    rows = daemon.ask(rows_of)
    _report(rows, "tasks", daemon, "no matching tasks" if chosen else "no tasks yet")


@asks()
def clients(
    daemon: AskedDaemon,
    limit: LimitOption = 100,
    engine: EngineOption = "",
) -> None:
    """List connected clients, this command included: since when, and how many tasks each waits for."""

    async def rows_of(client: Client) -> list[dict[str, Any]]:
        return await client.clients(limit, engine) or await no_rows(client, engine)

    rows = daemon.ask(rows_of)
    _report(rows, "clients", daemon, "no clients")


async def no_rows(client: Client, engine: str) -> list[dict[str, Any]]:
    """An empty list, if the engine exists. Raises RequestError, code `unknown_engine`, if it does not."""
    if engine:
        names = (await client.stats())["engines"]
        if engine not in names:
            there = f"there are: {', '.join(sorted(names))}" if names else "none is registered"
            raise RequestError(f"no engine {engine!r}; {there}", code="unknown_engine")
    return []


def _report(rows: list[dict[str, Any]], what: Literal["tasks", "clients"], daemon: AskedDaemon, nothing: str) -> None:
    if daemon.as_json:
        print(json.dumps(rows))
    elif not rows:
        print(nothing)
    else:
        from transferd.cli.tasks_view import clients_table, tasks_table
        from transferd.cli.terminal import stdout

        console, table = stdout(), tasks_table if what == "tasks" else clients_table
        console.print(table(rows, console.width))
