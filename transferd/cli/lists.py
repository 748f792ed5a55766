"""`transferd tasks`, `clients` and `engines`: what a daemon is working on, and for whom; `pause` and `resume`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from transferd.cli.asking import AskedDaemon, asks
from transferd.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from transferd.client.client import Client
    from transferd.wire.protocol import Which

EngineOption = Annotated[str, typer.Option("--engine", help="Only this engine's.")]
HeldOption = Annotated[str, typer.Option("--engine", help="Whose tasks (default: those of the engine of [cache]).")]
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
    given: dict[Which, bool] = {"running": running, "slow": slow, "failed": failed}
    chosen = [which for which, wanted in given.items() if wanted]
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


@asks()
def engines(daemon: AskedDaemon) -> None:
    """List the engines that a daemon serves: their tasks, their hits, and whether they are ready or paused."""
    from transferd.observability.report import read

    tree = daemon.ask(lambda client: client.stats())

    def table() -> None:
        from transferd.cli.tasks_view import engines_table
        from transferd.cli.terminal import stdout

        stdout().print(engines_table(read(tree).engines))

    daemon.show(tree["engines"], table if tree["engines"] else "no engines")


@asks()
def pause(daemon: AskedDaemon, engine: HeldOption = "") -> None:
    """Let none of an engine's tasks start, until Ctrl-C or `transferd resume`: new ones are admitted, and wait.

    Run it as the engine's user, the daemon's user or root.
    """
    import asyncio

    async def hold() -> None:
        async with daemon.connected(engine=engine) as client:
            await client.pause()
            daemon.show({"paused": True, "engine": engine}, "paused: no task touches a block. Ctrl-C ends it.")
            sys.stdout.flush()
            await asyncio.Event().wait()

    asyncio.run(hold())


@asks()
def resume(daemon: AskedDaemon, engine: HeldOption = "") -> None:
    """End all pauses and drains of an engine, whoever holds them. `transferd stats` names the holders.

    Run it as the engine's user, the daemon's user or root.
    """
    daemon.ask(lambda client: client.resume(), engine=engine)
    daemon.show({"paused": False, "engine": engine}, "resumed")


async def no_rows(client: Client, engine: str) -> list[dict[str, Any]]:
    """An empty list, if the engine exists. Raises RequestError, code `unknown_engine`, if it does not."""
    if engine:
        names = (await client.stats())["engines"]
        if engine not in names:
            there = f"there are: {', '.join(sorted(names))}" if names else "none is registered"
            raise RequestError(f"no engine {engine!r}; {there}", code="unknown_engine")
    return []


def _report(rows: list[dict[str, Any]], what: Literal["tasks", "clients"], daemon: AskedDaemon, nothing: str) -> None:
    def table() -> None:
        from transferd.cli.tasks_view import clients_table, tasks_table
        from transferd.cli.terminal import stdout

        console, made = stdout(), tasks_table if what == "tasks" else clients_table
        console.print(made(rows, console.width))

    daemon.show(rows, table if rows else nothing)
