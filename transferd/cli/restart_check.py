"""`transferd restart-check`: what a restart of the daemon would lose, and one verdict.

The daemon's report says what goes on; one more request says what only the daemon's memory has, and whether its
configuration is valid (wire.RestartCheck). The exit status is 0 if nothing would be lost, 1 if something would, and 3
if that ends by itself (`--wait`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from transferd.cli.asking import AskedDaemon, asks
from transferd.errors import RequestError, one_line
from transferd.observability.units import count, size

if TYPE_CHECKING:
    from transferd.client.client import Client
    from transferd.observability.report import Report
    from transferd.wire.answers import AtRestart

LOOK_S = 0.5  # how often a wait looks again
SAFE, WAIT, LOSES = "safe", "wait", "loses"
EXIT = {SAFE: 0, LOSES: 1, WAIT: 3}


class Stake(NamedTuple):
    """One thing that a restart concerns. state: safe, wait (until it ends by itself) or loses."""

    what: str
    state: str
    text: str


def rows(report: Report, lost: AtRestart, *, drained: bool = False, waited: int = 0) -> Iterator[Stake]:
    """What a restart would do to each part.

    drained: by this command, so drains are no holds.
    waited: bytes that waited to be copied before the levels were asked for `lost`, which takes long.
    """
    if lost.configuration:
        yield Stake("configuration", LOSES, f"the daemon would not start: {lost.configuration}")
    else:
        yield Stake("configuration", SAFE, "on disk it is valid")
    yield from _stored(report, lost, waited)
    yield from _tasks(report)
    holds = [one for one in report.held if one.what != "drain" or not drained]
    held = "; ".join(f"{one.what} of engine {one.engine}, by {one.holder}" for one in holds)
    yield Stake("holds", LOSES if held else SAFE, f"would end unknown to their holders: {held}" if held else "none")
    yield from _engines(report)


def _stored(report: Report, lost: AtRestart, waited: int) -> Iterator[Stake]:
    storage = report.storage
    coming = _pending(report)
    moving = {
        "wait to be copied to lower levels": coming,
        "of a level that is drained": sum(level.draining_bytes for level in storage.levels),
        "of copies to other nodes": storage.copying_bytes or 0,
        "of a warm-up": storage.warming_bytes or 0,
    }
    text = ", ".join(f"{size(nbytes)} {what}" for what, nbytes in moving.items() if nbytes)
    yield Stake("copies", WAIT if text else SAFE, text or "none under way")
    alone = f"{count(lost.objects)} objects, {size(lost.bytes)}, are in this daemon's memory and nowhere else"
    if lost.unknown:
        yield Stake("stored blocks", LOSES, f"it is not known which ones only this daemon has: {lost.unknown}")
    elif not lost.objects:
        yield Stake("stored blocks", SAFE, "none is in this daemon's memory alone")
    elif lost.stop_copies_s:
        yield Stake("stored blocks", SAFE, f"{alone}; a stop has {lost.stop_copies_s:g} s to copy them (drain_at_stop)")
    else:
        yield Stake("stored blocks", WAIT if lost.bytes <= max(coming, waited) else LOSES, alone)


def _pending(report: Report) -> int:
    return sum(level.pending_bytes for level in report.storage.levels)


def _tasks(report: Report) -> Iterator[Stake]:
    if report.straggling:
        yield Stake("tasks", LOSES, f"{report.straggling} hang: a stop must abandon their memory (`transferd tasks`)")
    elif report.queued or report.running:
        text = f"{report.running} running and {report.queued} queued; a stop would fail what is queued"
        yield Stake("tasks", WAIT, text)
    else:
        yield Stake("tasks", SAFE, "none")


def _engines(report: Report) -> Iterator[Stake]:
    for name, engine in report.engines.items():
        if not engine.registered and not engine.clients:
            continue
        nbytes = engine.host_blocks * engine.block_bytes * engine.ranks
        host = f"; its {size(nbytes)} of host blocks are lost" if nbytes else ""
        what = f"engine {one_line(name)}"
        if engine.returns:
            yield Stake(what, SAFE, f"comes back by itself{host}")
        elif engine.returns is None:
            yield Stake(what, SAFE, f"no process of it says whether it comes back{host}")
        else:
            yield Stake(what, LOSES, f"does not come back by itself: restart it as well (Client.on_new_boot){host}")


def verdict(found: list[Stake]) -> str:
    states = {row.state for row in found}
    return LOSES if LOSES in states else WAIT if WAIT in states else SAFE


async def _check(client: Client, *, drained: bool = False) -> list[Stake]:
    from transferd.observability.report import read

    waited = _pending(read(await client.stats()))
    lost = await client.restart_check()
    return list(rows(read(await client.stats()), lost, drained=drained, waited=waited))


async def _coming(client: Client) -> str:
    """The verdict of a report alone, which costs nothing: whether anything is under way that a wait outwaits."""
    from transferd.observability.report import read
    from transferd.wire.answers import AtRestart

    return verdict(list(rows(read(await client.stats()), AtRestart(), drained=True)))


async def _drained(daemon: AskedDaemon, client: Client, stack: contextlib.AsyncExitStack) -> None:
    """Let no engine's tasks in until the stack ends, and wait for those that are there."""
    for name, engine in (await client.stats())["engines"].items():
        if engine["ready"]:
            of_engine = await stack.enter_async_context(daemon.connected(engine=name if engine["registered"] else ""))
            with contextlib.suppress(RequestError):  # it has left meanwhile
                await of_engine.drain()


@asks(timeout=600.0)
def restart_check(
    daemon: AskedDaemon,
    wait: Annotated[
        bool, typer.Option("--wait", help="Drain all engines, and wait for tasks and copies (--timeout).")
    ] = False,
) -> None:
    """Say whether the daemon can be restarted without loss: exit 0 if so, 1 if not, 3 if it can be soon (--wait).

    With --wait engines are refused new tasks (`draining`) until this command ends: restart the daemon right after it.
    Run it as the daemon's user or root.
    """

    import asyncio

    async def ask() -> list[Stake]:
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(daemon.connected())
            found = await _check(client)
            if not wait or verdict(found) != WAIT:
                return found
            deadline = asyncio.get_running_loop().time() + daemon.timeout
            draining = asyncio.ensure_future(_drained(daemon, client, stack))
            stack.callback(draining.cancel)
            while True:
                late = asyncio.get_running_loop().time() >= deadline
                coming = await _coming(client)
                if late or coming == LOSES or (coming == SAFE and draining.done()):
                    if draining.done():
                        draining.result()
                    found = await _check(client, drained=True)
                    if late or verdict(found) != WAIT:
                        return found
                await asyncio.wait({draining}, timeout=LOOK_S) if not draining.done() else await asyncio.sleep(LOOK_S)

    found = asyncio.run(ask())
    said = verdict(found)
    tree: dict[str, Any] = {"verdict": said, "rows": [row._asdict() for row in found]}
    daemon.show(tree, lambda: _print(found, said))
    raise typer.Exit(EXIT[said])


SAID = {
    SAFE: "safe to restart: nothing is lost",
    WAIT: "not yet: it will be safe when this has ended (--wait)",
    LOSES: "not safe to restart",
}


def _print(found: list[Stake], said: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from transferd.cli.terminal import stdout

    styles = {SAFE: "green", WAIT: "yellow", LOSES: "bold red"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for row in found:
        table.add_row(Text(row.state, style=styles[row.state]), row.what, Text(one_line(row.text)))
    console = stdout()
    console.print(table)
    console.print(Text(SAID[said], style=styles[said]))
