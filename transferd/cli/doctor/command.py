"""The options of `transferd doctor`. The rest is imported when it runs, because it imports the whole daemon."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from transferd.cli.asking import AskedDaemon, asks


@asks()
def doctor(
    daemon: AskedDaemon,
    config: Annotated[Path | None, typer.Option("--config", help="The daemon's configuration.", dir_okay=False)] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the file.")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="Engines to compare: say why they do not share blocks (default: of one model)."),
    ] = None,
    fastdeploy: Annotated[
        str,
        typer.Option(
            "--fastdeploy",
            help="What FastDeploy will do here with this --kvcache-storage-backend (none: a CPU cache alone).",
        ),
    ] = "",
) -> None:
    """Check this machine and its daemon, with a remedy for each problem; exit 1 if a check fails."""
    from rich.console import Console

    from transferd import config as configuration
    from transferd.adapters.common.packaged import nobody_listens
    from transferd.cli.doctor import report
    from transferd.cli.doctor.checks import Level
    from transferd.cli.doctor.machine import Machine
    from transferd.cli.terminal import stdout

    with Console(stderr=True).status("checking this machine"):
        findings = report.examine(Machine(), config, set_ or [])
    if fastdeploy:
        from transferd.cli.doctor.fastdeploy import plans

        findings += plans(Machine(), fastdeploy)
    effective = configuration.load(config, overrides=set_ or ())
    where = daemon.endpoint or effective.server.endpoints[0]
    device = "shm" if effective.cache is None else effective.cache.device
    if not fastdeploy or not nobody_listens(where):  # else FastDeploy is yet to start
        findings += report.running(replace(daemon, endpoint=where), device, engine or ())
    console = stdout()
    table = report.table(findings, one_line_each=not console.is_terminal)
    daemon.show([asdict(finding) for finding in findings], lambda: console.print(table))
    raise typer.Exit(1 if any(finding.level is Level.FAIL for finding in findings) else 0)
