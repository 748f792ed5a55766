"""One screen of `transferd top` as lines of text that fit the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.text import Text

from transferd.cli.stats_view import hits, identity, outlook, stored
from transferd.cli.tasks_view import STYLES, where
from transferd.cli.top.figures import Figures
from transferd.errors import one_line
from transferd.observability.report import EngineReport
from transferd.observability.units import count, size, span, sparkline

SORTS = ("slowest", "newest", "largest")
KEYS = "q quit   s sort   p pause   ↑↓ choose   enter story   esc back"
SPARK = 20  # characters of a sparkline
MOST_CONCERNS = 4


@dataclass(slots=True)
class View:
    """The user's choices."""

    sort: str = SORTS[0]
    paused: bool = False
    chosen: tuple[str, str] | None = None  # engine and id of the marked task
    story: list[str] | None = None  # the lines of the open story, or None
    scrolled: int = 0  # how many lines of the story are above the screen
    problem: str = ""  # why the figures are old


def screen(figures: Figures | None, view: View, width: int, height: int) -> list[Text]:
    """The lines to draw. figures: None until the daemon has answered."""
    if view.story is not None:
        body = [Text(one_line(line)) for line in view.story[view.scrolled : view.scrolled + height - 1]]
        lines = body + [Text()] * (height - 1 - len(body))
    elif figures is None:
        lines = [Text(one_line(view.problem or "connecting"), style="yellow")] + [Text()] * (height - 2)
    else:
        head = _head(figures, view)
        rows = ordered(figures.rows, view.sort)[: max(0, height - len(head) - 2)]
        lines = [*head, _columns(view), *(_task(row, view) for row in rows)]
        lines += [Text()] * (height - 1 - len(lines))
    lines = [*lines[: height - 1], Text(KEYS, style="dim")]
    for line in lines:
        if view.problem and figures is not None and line.plain != KEYS and not line.plain.startswith("! "):
            line.stylize("dim")  # these figures are old
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines


def ordered(rows: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    """Sort the rows. Running tasks come first only in the order `newest`."""
    if sort == "newest":
        return sorted(rows, key=lambda row: (row["ended_s"] is not None, row["ended_s"] or -row["seconds"]))
    return sorted(rows, key=lambda row: row["seconds" if sort == "slowest" else "bytes"], reverse=True)


def _head(figures: Figures, view: View) -> list[Text]:
    report = figures.report
    first = identity(report, lost=bool(view.problem))
    if view.paused:
        first.append("  [paused]", style="bold yellow")
    tasks, moved = figures.tasks_per_s, figures.bytes_per_s
    totals = Text(f"10 s: tasks {count(tasks[-1] if tasks else 0):>6}/s {sparkline(tasks, SPARK)}   ")
    totals.append(f"moved {size(moved[-1] if moved else 0):>9}/s {sparkline(moved, SPARK)}")
    lines = [first, totals]
    head = "kind      queued running  tasks/s    bytes/s      p50      p99  10 s; p50, p99: 1 min"
    lines.append(Text(head, style="bold"))
    for name, kind in figures.kinds.items():
        text = f"{name:<9} {count(kind.queued):>6} {count(kind.running):>7} {count(kind.tasks_per_s):>8}"
        text += f" {size(kind.bytes_per_s):>10} {span(kind.p50_s):>8} {span(kind.p99_s):>8}"
        lines.append(Text(f"{text}  {sparkline(figures.histories[name], 16)}"))
    lines.append(Text(f"waits     {'; '.join(figures.waits) or 'no round waits for a rank'}"))
    if len(report.engines) > 1:
        lines += [_engine(name, engine) for name, engine in report.engines.items()]
    for heading, filled, says in stored(report.storage):
        lines.append(Text.assemble(f"{heading:<10}", filled[: SPARK // 2], " " if filled else "", says))
    lines += hits(report).split("\n")
    if view.problem:
        return [*lines, Text(f"! {one_line(view.problem)}", style="yellow")]
    return lines + outlook(report, MOST_CONCERNS)


def _engine(name: str, engine: EngineReport) -> Text:
    state = "paused" if engine.paused else "ready" if engine.ready else f"not ready: {one_line(engine.why)}"
    line = Text(f"{one_line(name)[:20]:<20} {count(engine.totals.tasks_per_s):>6} tasks/s ")
    line.append(f"{size(engine.totals.bytes_per_s):>9}/s  p99 {span(engine.totals.p99_s):>8}  ")
    return line.append(state, style="" if state == "ready" else "yellow")


def _columns(view: View) -> Text:
    return Text(f"{'task':<24} {'kind':<8} {'status':<9} {'time':>9}  {view.sort} first", style="bold reverse")


def _task(row: dict[str, Any], view: View) -> Text:
    task_id = one_line(str(row["task_id"]))
    task_id = task_id if len(task_id) <= 24 else task_id[:23] + "…"
    status = one_line(str(row["status"]))
    line = Text(f"{task_id:<24} {one_line(str(row['kind'])):<8} ")
    line.append(f"{status:<9}", style=STYLES.get(status, "yellow"))
    line.append(f" {span(row['seconds']):>9}  {where(row)}")
    if (row["engine"], row["task_id"]) == view.chosen:
        line.stylize("reverse")
    return line
