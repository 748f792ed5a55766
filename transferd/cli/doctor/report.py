"""Collects the findings (configuration, machine, daemon) and prints them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from transferd import config as configuration
from transferd.blocks.fingerprint import differences
from transferd.cli.asking import AskedDaemon
from transferd.cli.doctor.checks import Diagnosis, Level, Patient, fail, local, ok, warn
from transferd.cli.doctor.machine import Machine
from transferd.cli.doctor.sharing import look_at, sharing
from transferd.daemon import preflight
from transferd.errors import ConfigError, TransferError, one_line
from transferd.observability.concerns import CONCERNS, concerns
from transferd.observability.report import EngineReport, Report, UsersReport, read
from transferd.observability.units import size
from transferd.runtime.version import VERSION

if TYPE_CHECKING:
    from transferd.client.client import Client

MOST_ENGINES = 16  # processes that are compared with the daemon
MOST_PAIRS = 16  # of engines whose fingerprints are compared
MOST_DIFFERENCES = 12  # that are named for a pair
STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def examine(machine: Machine, config: Path | None, overrides: list[str]) -> list[Diagnosis]:
    """Check the configuration, then this machine. Raises ConfigError for a configuration that cannot be read."""
    effective = configuration.load(config, overrides=overrides)
    plan = preflight.build(effective)
    try:
        preflight.examine(effective, plan)
        first = ok("configuration", f"{config or 'defaults'}; takes {size(plan.sizes.memory)} of memory")
    except ConfigError as error:
        first = fail("configuration", str(error), "correct that key; `transferd config check` says the same")
    return [first, *local(Patient(machine, effective, plan))]


def running(there: AskedDaemon, device: str, compared: Sequence[str] = ()) -> list[Diagnosis]:
    """Examine the daemon and, if it answers, how each connected engine shares memory with it, and blocks with others.

    device: cache.device.
    compared: names of engines, see `compare`. Raises ConfigError for a name that no engine has.
    """

    async def question(client: Client) -> tuple[Report, list[dict[str, Any]]]:
        return read(await client.stats()), await client.clients()

    try:
        report, clients = there.ask(question)
    except (TransferError, TimeoutError) as error:
        remedy = "start it: systemctl start transferd, or `transferd serve`"
        return [warn("daemon", str(error) or "no answer in time", remedy)]
    local = [row for row in clients if not row["observer"] and row["uid"] is not None and row["pid"] != os.getpid()]
    pids = list(dict.fromkeys(row["pid"] or 0 for row in local))  # without duplicates; 0: in another PID namespace
    known = report.pid  # an older daemon does not report it
    engines = [sharing(device, look_at(known), look_at(pid)) for pid in pids[:MOST_ENGINES] if known]
    return [daemon(report), *users(report.users), *engines, *compare(report.engines, compared)]


def users(found: UsersReport) -> list[Diagnosis]:
    """A warning if the daemon cannot tell its users apart; an older daemon does not report that."""
    if found.hidden_as is None:
        return []
    remedy = "run it in the engines' user namespace: PrivateUsers=no in the unit, or containers with the same --userns"
    return [warn("daemon's users", found.why, remedy)]


def daemon(report: Report) -> Diagnosis:
    """Whether the daemon is ready and has our version."""
    troubles = concerns(report)
    if not report.ready:
        return fail("daemon", f"not ready: {'; '.join(troubles)}", "see /readyz, and the log")
    remedy = "run `transferd stats` for the details"
    if report.version != VERSION:
        troubles.insert(0, f"the daemon is {report.version}, this command {VERSION}")
        remedy = "restart the daemon after an upgrade; docs/operations.md says in which order"
    if troubles:
        critical = any(one.name in CONCERNS and CONCERNS[one.name].severity == "critical" for one in report.concerns)
        return (fail if critical else warn)("daemon", "; ".join(troubles), remedy)
    return ok("daemon", f"{report.version}, ready, {report.server.clients} clients, all is well")


def table(findings: list[Diagnosis], *, one_line_each: bool = False) -> Table:
    """What was found, a row each. one_line_each: with its remedy beside it instead of below."""
    between = "  " if one_line_each else "\n"
    lines = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        lines.add_column(overflow="fold")
    for finding in findings:
        text = Text(one_line(finding.found))
        if finding.remedy:
            text.append(f"{between}→ {one_line(finding.remedy)}", style="bold")
        lines.add_row(Text(finding.level, style=STYLES[finding.level]), Text(finding.name, style="bold"), text)
    return lines


def compare(engines: Mapping[str, EngineReport], names: Sequence[str]) -> Iterator[Diagnosis]:
    """Compare engines of a daemon.

    names: engines to compare with the first of them.

    Without names, every engine is compared with the first one of its model. Raises ConfigError for an unknown name.
    """
    if unknown := [name for name in names if name not in engines]:
        raise ConfigError("--engine", f"is not one of {', '.join(engines) or 'none'}", unknown[0])
    pairs = [(names[0], name) for name in names[1:]] if names else _pairs(engines)
    for one, other in pairs[:MOST_PAIRS]:
        yield _pair(one, engines[one], other, engines[other])


def _pairs(engines: Mapping[str, EngineReport]) -> list[tuple[str, str]]:
    first: dict[str, str] = {}
    pairs = []
    for name, engine in engines.items():
        if (before := first.setdefault(engine.model, name)) != name:
            pairs.append((before, name))
    return pairs


def _pair(one: str, first: EngineReport, other: str, second: EngineReport) -> Diagnosis:
    name, found = f"{one} and {other}", differences(_in_common(first), _in_common(second))
    if not found:
        return ok(name, "read each other's blocks")
    more = [f"and {len(found) - MOST_DIFFERENCES} more"] if len(found) > MOST_DIFFERENCES else []
    return ok(name, f"do not read each other's blocks: {'; '.join(found[:MOST_DIFFERENCES] + more)}")


def _in_common(engine: EngineReport) -> dict[str, Any]:
    """All that engines must have in common."""
    found, named = engine.fingerprint, {"model": engine.model, "generation": engine.generation}
    return {**named, "layout": found.layout.partition(" facts=")[0], **found.facts}
