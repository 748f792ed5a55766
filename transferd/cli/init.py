"""`transferd config`: writes a commented configuration file for this machine, and checks one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transferd.cli.asking import Format, FormatOption, show

app = typer.Typer(name="config", help="Make a configuration file, or check it.", no_args_is_help=True)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML configuration file.", dir_okay=False)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value; overrides file and environment.")
]

STORE = "/var/lib/transferd/blocks"
STORE_SHARE = 0.5  # the share of the free space to begin with: others write to the same disk
GIB = 1024**3


@app.command()
def init(
    path: Annotated[
        str, typer.Option("--store", help="Directory for stored blocks; its free space decides the capacity.")
    ] = STORE,
) -> None:
    """Print a commented configuration for this machine to stdout: every setting, what it means, its default."""
    from transferd.config.template import template

    print(template(for_this_machine(path)), end="")


@app.command()
def check(
    config: ConfigOption = None,
    set_: SetOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Print only what differs from the defaults.")] = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Print the effective configuration, the memory it needs and where settings come from; or what is wrong here."""
    from transferd import config as configuration
    from transferd.cli import effective
    from transferd.config.toml import to_toml
    from transferd.daemon.preflight import build, examine

    found = configuration.load(config, overrides=set_ or ())
    plan = build(found)
    examine(found, plan)
    tree = effective.changed(found) if changed else configuration.to_tree(found)
    comments = effective.comments(found, plan.sizes, configuration.origins(config, overrides=set_ or ()))
    show(format_, tree, to_toml(tree).rstrip() + ("" if changed else f"\n{comments}"))


def for_this_machine(store: str) -> dict[str, object]:
    """The settings that depend on the machine: one rank per GPU, and a capacity for the room on its disk."""
    from transferd.cli.doctor.machine import Machine
    from transferd.config.size import Size

    machine = Machine()
    gpus = len(machine.entries("/proc/driver/nvidia/gpus"))
    _, free = machine.space(store)
    return {
        "server.endpoint": "ipc:///run/transferd/transferd.sock",
        "cache.ranks": gpus or 2,
        "cache.device": "cuda" if gpus else "shm",
        "storage.backend": "file",
        "storage.file.path": store,
        "storage.file.capacity": Size(max(GIB, int(free * STORE_SHARE) // GIB * GIB)),
    }
