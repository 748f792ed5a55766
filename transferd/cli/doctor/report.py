"""Collects the findings (configuration, machine, daemon) and prints them."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from transferd import config as configuration
from transferd.cli.asking import ask
from transferd.cli.doctor.checks import Finding, Level, Patient, fail, local, ok, warn
from transferd.cli.doctor.machine import Machine
from transferd.daemon import preflight
from transferd.errors import ConfigError, TransferError, one_line
from transferd.observability.concerns import concerns
from transferd.observability.units import size
from transferd.runtime.version import VERSION

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def examine(machine: Machine, config: Path | None, overrides: list[str]) -> list[Finding]:
    """Check the configuration, then this machine. Raises ConfigError for a configuration that cannot be read."""
    effective = configuration.load(config, overrides=overrides)
    plan = preflight.build(effective)
    try:
        preflight.examine(effective, plan)
        first = ok("configuration", f"{config or 'defaults'}; takes {size(plan.sizes.memory)} of memory")
    except ConfigError as error:
        first = fail("configuration", str(error), "correct that key; `transferd check-config` says the same")
    return [first, *local(Patient(machine, effective, plan))]


def daemon(endpoint: str, timeout: float, key_file: Path | None, server_key_file: Path | None) -> Finding:
    """Whether the daemon answers, is ready, and has this version."""
    try:
        report = ask(lambda client: client.stats(), endpoint, timeout, key_file, server_key_file)
    except (TransferError, TimeoutError) as error:
        return warn(
            "daemon", str(error) or "no answer in time", "start it: systemctl start transferd, or `transferd serve`"
        )
    troubles = concerns(report)
    if not report["ready"]:
        return fail("daemon", f"not ready: {'; '.join(troubles)}", "see /readyz, and the log")
    if report["version"] != VERSION:
        what = f"the daemon is {report['version']}, this command {VERSION}"
        return warn("daemon", what, "restart the daemon after an upgrade; docs/operations.md says in which order")
    if troubles:
        return warn("daemon", "; ".join(troubles), "run `transferd stats` for the details")
    return ok("daemon", f"{report['version']}, ready, {report['server']['clients']} clients, all is well")


def table(findings: list[Finding]) -> Table:
    lines = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        text = Text(one_line(finding.found))
        if finding.remedy:
            text.append(f"\n→ {one_line(finding.remedy)}", style="bold")
        lines.add_row(Text(finding.level, style=STYLES[finding.level]), Text(finding.name, style="bold"), text)
    return lines
