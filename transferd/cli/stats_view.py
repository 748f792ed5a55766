"""`transferd stats` as text: one screen, with the same parts always in the same place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import UNSET
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from transferd.config import DEFAULT_ENGINE
from transferd.errors import ConfigError, one_line
from transferd.observability.concerns import concerns
from transferd.observability.figures import shown
from transferd.observability.report import ActReport, EngineReport, RankReport, Report, StorageReport, WhatIfReport
from transferd.observability.units import bar, count, share, size, span

MOST_CONCERNS = 6
MOST_ACTS = 2
SEVERITIES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
WIDE, NARROW = 72, 50  # columns of a terminal that has room for all, and for half of it


def view(report: Report, width: int = 80) -> RenderableType:
    """The report of stats() as something rich can print, in about 25 lines of 80 columns. width: of the terminal."""
    shown = _identity(report), _engine(report), _tasks(report), lanes(report, width=width)
    return Group(*shown, _tiers(report, width), Text(), *outlook(report))


def engine_view(report: Report, name: str, width: int = 80) -> RenderableType:
    """One engine of the report: its state, and the facts that engines must share to read its blocks.

    Raises ConfigError if there is no such engine.
    """
    engines = report.engines
    if name not in engines:
        raise ConfigError("--engine", f"is not one of {', '.join(engines) or 'none'}", name)
    engine = engines[name]
    state = "ready" if engine.ready else f"not ready: {engine.why}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    facts = fingerprint_of(engine)
    for key, value in {"engine": name, "state": state, "ranks": engine.ranks, **facts}.items():
        table.add_row(Text(one_line(key), style="bold"), Text(one_line(str(value))))
    return Group(table, Text(), lanes(report, name, width))


def fingerprint_of(engine: EngineReport) -> dict[str, Any]:
    """Model, generation, fingerprint, layout and facts of an engine, in the order in which to show them."""
    found, named = engine.fingerprint, {"model": engine.model, "generation": engine.generation}
    return {**named, "fingerprint": found.digest, "layout": found.layout, **found.facts}


def lanes(report: Report, engine: str = "", width: int = 80) -> Table:
    """The tasks of each kind, of one engine or ("") of all together. figures.py says how ranks and engines count.

    width: of the terminal; a narrow one gets fewer columns.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("lane", style="bold")
    names = ("queued", "running", "done", "failed", "moved", "in 10 s: tasks/s", "bytes/s")
    there = range(len(names)) if width >= WIDE else (1, 2, 3, 5) if width >= NARROW else (1, 3)
    for n in there:
        table.add_column(names[n], justify="right", no_wrap=True)
    for name, kind in shown(report, engine).items():
        cells = (
            count(kind.queued),
            count(kind.running),
            count(kind.done),
            Text(count(kind.failed), style="red" if kind.failed else ""),
            size(kind.bytes),
            count(kind.tasks_per_s),
            size(kind.bytes_per_s),
        )
        table.add_row(name, *(cells[n] for n in there))
    return table


def identity(report: Report, *, lost: bool = False) -> Text:
    """One line: the daemon's identity, its uptime and state. lost: the daemon no longer answers."""
    paused = report.paused or any(engine.paused for engine in report.engines.values())
    serving = report.ready and not report.draining and not paused
    state = "ready" if serving else "draining" if report.draining else "paused" if paused else "not ready"
    if lost:
        serving, state = False, "no answer"
    line = Text.assemble(
        (f"transferd {one_line(report.version)}", "bold"),
        f"  boot {one_line(report.boot_id)[:12]}  up {span(report.uptime_s)}  ",
    )
    return line.append(state, style="green" if serving else "bold red")


def _identity(report: Report) -> Text:
    line = identity(report).append("\n")
    line.append(one_line("  ".join(report.endpoint)))
    if report.generation:
        line.append(f"  generation {one_line(report.generation)}")
    return line


def _engine(report: Report) -> Text:
    layout, cache = report.layout, report.cache
    others = _others(report)
    if layout.block_bytes is UNSET:
        return Text(others or "engine   none: this daemon has no [cache], and no engine has registered")
    devices = ", ".join(str(rank.device) for rank in _own_ranks(report))
    clients, lost = report.server.clients, report.server.clients_lost
    text = f"engine   {one_line(str(layout.attention))}, {layout.layers} layers, {len(_own_ranks(report))} ranks on "
    text += f"devices {devices}; a block is {size(layout.block_bytes)} a rank\n"
    attached = ", ".join(map(str, cache.mapped))
    text += f"clients  {clients} connected with this command, {lost} lost; attached to each rank: {attached}"
    return Text(f"{text}\n{others}" if others else text)


def _own_ranks(report: Report) -> list[RankReport]:
    """The ranks of the engine of [cache]."""
    return [rank for rank in report.ranks if rank.engine == DEFAULT_ENGINE]


def _others(report: Report) -> str:
    """A line for each engine that has registered."""
    lines = [
        f"engine   {one_line(name)}: {one_line(one.model)}, {one.ranks} ranks, {one.clients} clients, "
        + f"{count(one.totals.tasks_per_s)} tasks/s, {one.totals.queued} queued, {one.totals.running} running, "
        + ("paused" if one.paused else "ready" if one.ready else f"not ready: {one_line(one.why)}")
        for name, one in report.engines.items()
        if one.registered
    ]
    return "\n".join(lines)


def _tasks(report: Report) -> Text:
    line = Text("tasks    ")
    parts = [(status, number) for status, number in report.tasks.items() if number]
    for status, number in parts:
        style = "" if status in ("ok", "partial", "miss") else "red" if status == "failed" else "yellow"
        line.append(f"{one_line(status)} {count(number)}  ", style=style)
    line.append(f"{'' if parts else 'none yet; '}queued {report.queued}, running {report.running}\n")
    return line


def stored(storage: StorageReport, *, width: int = 80) -> Iterator[tuple[str, str, Text]]:
    """A row for each level of the store, and for each of its disks if there are several, or one is in trouble.

    Yields (heading, bar, text).
    """
    several = len(storage.levels) > 1
    for number, level in enumerate(storage.levels):
        objects = "" if level.objects is None else f"{count(level.objects)} objects, "
        text = f"{objects}{_filled(level.bytes or 0, level.capacity or 0)}"
        if level.bytes is None:
            text = "what it holds, its server knows"
        out = "out of use" if not level.available and several else ""
        state = level.state if level.state != "used" else out
        notes = [f"{size(level.pending_bytes)} wait to be copied there"] * bool(level.pending_bytes)
        notes += [f"{count(level.lost)} not copied there"] * bool(level.lost)
        bar_of = bar(level.bytes or 0, level.capacity) if level.capacity and width >= WIDE else ""
        line = Text(one_line(f"{level.name}: "))
        line.append(f"{state.upper()}, " if state else "", style="red")
        yield "" if number else "storage", bar_of, line.append("; ".join([text, *notes]))
        for disk in level.disks:
            wrong = disk.failed or disk.problem or ("mounted read-only" if disk.read_only else "")
            if wrong:
                yield "", "", Text(one_line(f"{disk.path}: OUT OF USE: {wrong}"), style="red")
            elif len(level.disks) > 1:
                yield "", "", Text(one_line(f"{disk.path}: {_filled(disk.bytes, disk.capacity)}"))


def _filled(nbytes: int, capacity: int) -> str:
    return f"{size(nbytes)} of {size(capacity)}, {share(nbytes, capacity)}" if capacity else size(nbytes)


def what_if(rows: Iterable[WhatIfReport]) -> list[str]:
    """A line for each level: the share of hits with other sizes of it."""
    levels: dict[str, list[WhatIfReport]] = {}
    for row in rows:
        levels.setdefault(row.level, []).append(row)
    return [
        f"{one_line(name)}: hits " + ", ".join(f"{100 * one.hit_share:.0f} % with {one.times:g} x" for one in each)
        for name, each in levels.items()
    ]


def _kept(storage: StorageReport) -> list[str]:
    """What is pinned, kept for engines and not admitted: a line each, if there is any."""
    lines = []
    if storage.pinned:
        lines.append(f"{count(storage.pinned)} objects pinned, {size(storage.pinned_bytes or 0)}")
    if storage.not_admitted:
        lines.append(f"{count(storage.not_admitted)} objects not admitted: no second task had asked for them")
    holdings = [] if storage.holdings is UNSET else [row for row in storage.holdings if row.share]
    lines += [f"engine {one_line(row.engine)}: {size(row.bytes)}, {size(row.share)} kept for it" for row in holdings]
    return lines


def _tiers(report: Report, width: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    host, staging, storage = report.host, report.staging, report.storage
    if report.layout.block_bytes is not UNSET:
        ranks, block = len(_own_ranks(report)), report.layout.block_bytes
        blocks, creator = report.layout.device_blocks or 0, report.cache.creator
        in_all = f"\n{blocks} blocks a rank, {size(blocks * ranks * block)}, created by the {creator}"
        table.add_row("\ndevice", "", in_all)
    of_own = f"{host.blocks} blocks a rank, " if host.blocks else ""
    in_host = f"{of_own}{size(host.bytes)} in all, {'pinned' if host.pinned else 'not pinned'}"
    table.add_row("host", "", in_host if host.bytes else "none")
    table.add_row(
        "staging",
        bar(staging.used, staging.capacity) if width >= WIDE else "",
        f"{size(staging.used)} of {size(staging.capacity)}, peak {size(staging.peak)}",
    )
    for row in stored(storage, width=width):
        table.add_row(*row)
    if not storage.levels:
        table.add_row("storage", "", "none")
    table.add_row("", "", hits(report))
    for number, line in enumerate(what_if(report.what_if)):
        table.add_row("" if number else "what if", "", Text(line))
    for line in _kept(storage):
        table.add_row("", "", Text(line))
    for number, act in enumerate(report.acts[:MOST_ACTS]):
        table.add_row("" if number else "acts", "", Text(one_line(said(act))))
    return table


def said(act: ActReport) -> str:
    """What was done, and by whom."""
    who = "" if act.uid is None else f"uid {act.uid}, pid {act.pid}, "
    by = f", by {who}client {act.client[:12]}" if act.client else ""
    whose = f" of engine {act.engine}" if act.engine else ""
    return f"{act.what}{f' ({act.wanted})' if act.wanted else ''}{whose} {span(act.ago_s)} ago{by}"


def hits(report: Report) -> Text:
    """How often storage had the requested blocks, and its other counts."""
    storage, found, missed = report.storage, report.hits, report.misses
    now = "-" if storage.hit_share_1min is None else f"{100 * storage.hit_share_1min:.0f} %"
    line = f"hits {now} in 1 min, {share(found, found + missed)} in all ({count(found)} of {count(found + missed)})"
    line += "\n" if storage.evictions is UNSET else f"\nevictions {count(storage.evictions)}, "
    line += f"corrupt {count(storage.corrupt)}, errors {count(storage.errors)}"
    return Text(line + (f", breaker {one_line(storage.breaker)}" if storage.breaker is not UNSET else ""))


def outlook(report: Report, most: int = MOST_CONCERNS) -> list[Text]:
    """A line for each of the most urgent concerns, or that all is well."""
    if not report.concerns:
        return [Text("all is well", style="green")]
    lines = [
        Text(f"! {text}", style=SEVERITIES.get(one.severity, "yellow"))
        for text, one in zip(concerns(report), report.concerns, strict=True)
    ]
    more = len(lines) - most
    if more > 0:
        lines[most:] = [Text(f"  and {more} more: `transferd stats`" if most < MOST_CONCERNS else f"  and {more} more")]
    return lines
