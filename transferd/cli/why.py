"""`transferd why KEY | miss | slow`: where a block is or has gone, why look-ups miss, where tasks spend their time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transferd.cli.asking import AskedDaemon, asks
from transferd.cli.lists import no_rows
from transferd.errors import one_line
from transferd.observability.units import count, span

if TYPE_CHECKING:
    from rich.console import RenderableType

    from transferd.client.client import Client

MISS, SLOW = "miss", "slow"
MOST = 1000  # tasks that `slow` looks at
STAGES = ("seconds", "queue_s", "copy_s", "storage_s")
REASONS = {
    "never_stored": "no engine has stored it (or so long ago that nobody remembers)",
    "evicted": "it was evicted: see `transferd stats` for what more room would do (what if)",
    "purged": "it was purged: `acts` of `transferd stats` says by whom",
    "damaged": "it was damaged, and put aside",
    "gone": "something other than this daemon has removed it, or its disk is out",
    "other_identity": "it is stored for another model, layout or generation",
    "level_out": "a level that has it, or may have it, is out of use",
    "not_admitted": 'only one task has named it so far (storage.admit = "second use")',
    "incomplete": "not every rank has it",
}


@asks()
def why(
    daemon: AskedDaemon,
    what: Annotated[str, typer.Argument(metavar="KEY|miss|slow", help="A block's key; or `miss`, or `slow`.")],
    engine: Annotated[str, typer.Option("--engine", help="Only this engine's (default: all).")] = "",
) -> None:
    """Say where a block is or why it has gone; why look-ups miss (last hour); or where tasks spend their time (p99)."""
    from transferd.cli.terminal import stdout

    async def ask(client: Client) -> Any:
        await no_rows(client, engine)
        if what == MISS:
            return {name: one["missed_for"] for name, one in _of(engine, (await client.stats())["engines"])}
        if what == SLOW:
            return slow(await client.tasks("recent", MOST, engine), await client.stats())
        return await client.why(what, engine)

    found = daemon.ask(ask)
    table = {MISS: miss_table, SLOW: slow_table}.get(what, key_table)
    daemon.show(found, lambda: stdout().print(table(found)))


def _of(engine: str, engines: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return [(name, one) for name, one in engines.items() if engine in ("", name)]


def miss_table(found: Mapping[str, Mapping[str, int]]) -> RenderableType:
    """Look-ups of the last hour by engine, and by why their first missing block was not there."""
    rows = [
        [one_line(name), count(number), reason.replace("_", " "), REASONS.get(reason, "")]
        for name, reasons in found.items()
        for reason, number in sorted(reasons.items(), key=lambda one: -one[1])
    ]
    return _table(["engine", "look-ups", "first block", "why"], rows) if rows else "no look-up of the last hour missed"


def slow(tasks: Iterable[Mapping[str, Any]], stats: Mapping[str, Any]) -> dict[str, Any]:
    """p50 and p99 of the latest tasks by engine and kind, of all and of each stage; and those of each level's calls."""
    times: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for task in tasks:
        if task["ended_s"] is not None and task["kind"]:
            times[task["engine"], task["kind"]].append(task)
    rows = [
        {"engine": engine, "kind": kind, "tasks": len(each)}
        | {f"{stage.removesuffix('_s')}_{name}_s": _at(each, stage, part) for stage in STAGES for name, part in PARTS}
        for (engine, kind), each in times.items()
    ]
    levels = [
        {name: level.get(name) for name in ("name", "load_p99_s", "store_p99_s")}
        for level in stats["storage"].get("levels", ())
    ]
    return {"tasks": sorted(rows, key=lambda row: -row["seconds_p99_s"]), "levels": levels}


PARTS = (("p50", 0.5), ("p99", 0.99))


def _at(tasks: Iterable[Mapping[str, Any]], stage: str, part: float) -> float:
    times = sorted(float(task[stage]) for task in tasks)
    return times[min(len(times) - 1, int(part * len(times)))]


def slow_table(found: Mapping[str, Any]) -> RenderableType:
    from rich.console import Group

    if not found["tasks"]:
        return "no task has ended yet"
    rows = [
        [one_line(row["engine"]), row["kind"], count(row["tasks"])]
        + [span(row[f"{stage.removesuffix('_s')}_{part}_s"]) for stage in STAGES for part, _ in PARTS]
        for row in found["tasks"]
    ]
    heads = ["engine", "kind", "tasks", "p50", "p99"]
    heads += [f"{stage} {part}" for stage in ("queue", "copy", "storage") for part, _ in PARTS]
    levels = [
        [one_line(level["name"]), *("-" if level[name] is None else span(level[name]) for name in CALLS)]
        for level in found["levels"]
    ]
    tables = [_table(heads, rows)]
    if any(level[name] is not None for level in found["levels"] for name in CALLS):
        tables.append(_table(["level", "p99 of a load, a MiB", "p99 of a store, a MiB"], levels))
    return Group(*tables)


CALLS = ("load_p99_s", "store_p99_s")


def key_table(found: list[dict[str, Any]]) -> RenderableType:
    """A line for each engine and generation that has or had the block."""
    if not found:
        return "no engine has looked up or stored anything yet"
    rows = []
    for row in found:
        whose = f"generation {row['generation'] or '-'}{'' if row['serves'] else ' (served before)'}"
        there = [f"on {number} of {row['ranks']} ranks in {level}" for level, number in row["there"].items()]
        told = [_said(one) for one in row["history"]]
        known = [*there, *told] or ["not there, and nothing is remembered of it: it was never stored, or long ago"]
        rows += [[one_line(row["engine"]), one_line(whose), one_line(text)] for text in known]
    return _table(["engine", "whose", "what is known"], rows)


def _said(one: Mapping[str, Any]) -> str:
    if one["what"] == "stored":
        return f"stored in {one['level']} {span(one['ago_s'])} ago" + (
            f" by engine {one['engine']}" if one["engine"] else ""
        )
    whose = f" to make room for engine {one['engine']}" if one["what"] == "evicted" and one["engine"] else ""
    by = one["stored_by"]
    after = "" if one["stored_s"] is None else f", {span(one['stored_s'])} after engine {by} had stored it"
    return f"{one['what']} from {one['level']} {span(one['ago_s'])} ago{whose}{after}"


def _table(heads: list[str], rows: list[list[str]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head)
    for row in rows:
        table.add_row(*row)
    return table
