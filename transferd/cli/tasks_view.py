"""`transferd tasks` and `transferd clients` as tables of 80 columns. Text from clients is escaped."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from transferd.config import DEFAULT_ENGINE
from transferd.errors import one_line
from transferd.observability.units import count, span

STYLES = {"ok": "green", "miss": "green", "running": "bold", "failed": "red", "expired": "red", "rejected": "red"}


def tasks_table(rows: list[dict[str, Any]]) -> Table:
    """One row per task, with where its time went or, while it runs, what it waits for."""
    table = _table()
    table.add_column("task", ratio=2, overflow="fold")  # whole ids, so that they can be copied
    for name in ("kind", "status"):
        table.add_column(name, no_wrap=True)
    for name in ("blocks", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("where the time went", ratio=3, overflow="fold")
    for row in rows:
        status = one_line(str(row["status"]))
        table.add_row(
            Text(one_line(whose(row) + str(row["task_id"]))),
            Text(one_line(str(row["kind"])) or "-"),
            Text(status, style=STYLES.get(status, "yellow")),
            f"{count(row['done'])}/{count(row['blocks'])}" if row["ended_s"] is not None else count(row["blocks"]),
            span(row["seconds"]) if row["kind"] else "-",
            Text(where(row)),
        )
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


def clients_table(rows: list[dict[str, Any]]) -> Table:
    """One row per connection."""
    table = _table()
    for name in ("client", "from", "may", "connected", "silent", "waits for"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(
            Text(one_line(whose(row) + str(row["client"]))),
            Text(one_line(str(row["peer"])) or "unknown"),
            "look" if row["observer"] else "all",
            span(row["connected_s"]),
            span(row["silent_s"]),
            f"{row['tasks']} tasks",
        )
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
