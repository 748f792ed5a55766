"""`transferd tasks` and `transferd clients` as tables. A narrow terminal gets fewer columns. Text is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from transferd.cli.terminal import ENDLESS
from transferd.config import DEFAULT_ENGINE
from transferd.errors import one_line
from transferd.observability.report import EngineReport
from transferd.observability.units import count, share, span

WIDE, MIDDLE = 72, 56  # columns of a terminal that has room for all, and for all but the least
STYLES = {"ok": "green", "miss": "green", "running": "bold", "failed": "red", "expired": "red", "rejected": "red"}


def tasks_table(rows: list[dict[str, Any]], width: int = WIDE) -> Table:
    """One row per task: how it spent its time or, while it runs, what it waits for. width: of the terminal."""
    table = _table(width)
    wide, middle = width >= WIDE, width >= MIDDLE
    table.add_column("task", ratio=2, overflow="fold")  # whole ids, so that they can be copied
    for name in ("kind", "status") if middle else ("status",):
        table.add_column(name, no_wrap=True)
    for name in ("blocks", "time") if wide else ("time",):
        table.add_column(name, justify="right", no_wrap=True)
    if middle:
        table.add_column("where the time went", ratio=3, overflow="fold")
    for row in rows:
        status = one_line(str(row["status"]))
        done = f"{count(row['done'])}/{count(row['blocks'])}" if row["ended_s"] is not None else count(row["blocks"])
        cells: list[Text | str] = [Text(one_line(whose(row) + str(row["task_id"])))]
        cells += [Text(one_line(str(row["kind"])) or "-")] if middle else []
        cells.append(Text(status, style=STYLES.get(status, "yellow")))
        cells += [done] if wide else []
        cells.append(span(row["seconds"]) if row["kind"] else "-")
        cells += [Text(where(row))] if middle else []
        table.add_row(*cells)
    return table


def whose(row: dict[str, Any]) -> str:
    """A prefix for a task's id that names its engine; "" for the engine of [cache]."""
    engine = str(row.get("engine", DEFAULT_ENGINE))
    return "" if engine in ("", DEFAULT_ENGINE) else f"[{engine}] "


def where(row: dict[str, Any]) -> str:
    """What a task waits for, or why it failed and where its time went, the longest stage first."""
    if row["waits_for"]:
        return f"waits for {one_line(str(row['waits_for']))}"
    stages = sorted(("queue", "copy", "storage"), key=lambda stage: row[f"{stage}_s"], reverse=True)
    parts = [f"{stage} {span(row[f'{stage}_s'])}" for stage in stages if row[f"{stage}_s"]]
    if row["code"]:
        parts.insert(0, one_line(f"{row['code']}: {row['problem']}" if row["problem"] else str(row["code"])))
    if row["ended_s"] is not None:
        parts.append(f"{span(row['ended_s'])} ago")
    return ", ".join(parts)


def clients_table(rows: list[dict[str, Any]], width: int = WIDE) -> Table:
    """One row per connection. width: of the terminal."""
    table = _table(width)
    names = ("client", "from", "may", "connected", "silent", "waits for")
    shown = [n for n in range(len(names)) if width >= WIDE or n in ((0, 1, 3, 5) if width >= MIDDLE else (0, 5))]
    for n in shown:
        table.add_column(names[n], overflow="fold", no_wrap=n > 1)
    for row in rows:
        cells = (
            Text(one_line(whose(row) + str(row["client"]))),
            Text(one_line(str(row["peer"])) or "unknown"),
            "look" if row["observer"] else "all",
            span(row["connected_s"]),
            span(row["silent_s"]),
            f"{row['tasks']} tasks",
        )
        table.add_row(*(cells[n] for n in shown))
    return table


def engines_table(engines: Mapping[str, EngineReport]) -> Table:
    """One row per engine."""
    table = _table(WIDE)
    for name in ("engine", "state", "tasks/s", "queued", "running", "p99", "hits"):
        table.add_column(name, overflow="fold")
    for name, one in engines.items():
        state = "paused" if one.paused else "ready" if one.ready else f"not ready: {one.why}"
        counts = count(one.totals.tasks_per_s), str(one.queued), str(one.running), span(one.totals.p99_s)
        table.add_row(Text(one_line(name)), Text(one_line(state)), *counts, share(one.hits, one.hits + one.misses))
    return table


def _table(width: int) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=width < ENDLESS)
