"""`transferd files`: the files that an operator installs beside the package: unit, users, alerts, dashboard, manifests.

A wheel carries them (setup.py puts them there). A source tree has them at its root.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from transferd.cli.asking import Format, FormatOption, show
from transferd.errors import ConfigError

FOLDERS = ("systemd", "deploy")  # as setup.py has them
UNITS = "systemd/transferd.service", "systemd/transferd-lend.service"
UNIT_PROGRAM = "ExecStart=/usr/bin/transferd "


def home() -> Path:
    """The directory with FOLDERS in it. Raises ConfigError."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "packaged", package.parent):
        if all((place / folder).is_dir() for folder in FOLDERS):
            return place
    raise ConfigError("files", "this installation was built without its systemd/ and deploy/ folders")


def contents(program: str) -> dict[str, bytes]:
    """Each file under its name relative to the target. program: the path of `transferd` that the unit runs."""
    source = home()
    found = {
        str(path.relative_to(source)): path.read_bytes()
        for folder in FOLDERS
        for path in sorted((source / folder).rglob("*"))
        if path.is_file()
    }
    for unit in UNITS:
        found[unit] = found[unit].replace(UNIT_PROGRAM.encode(), f"ExecStart={program} ".encode())
    return found


def write(directory: Path, program: str, *, force: bool) -> list[Path]:
    """Write the files below `directory`; return their paths. Files that are there with this content are left alone.

    Raises ConfigError, before anything is written, if others are there and `force` is not set.
    """
    wanted = {directory / name: content for name, content in contents(program).items()}
    changed = [path for path, content in wanted.items() if path.exists() and path.read_bytes() != content]
    if changed and not force:
        names = ", ".join(map(str, changed))
        raise ConfigError("files", f"these differ from the files of this version: {names}; --force overwrites them")
    for path, content in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path in changed:
            path.write_bytes(content)
    return list(wanted)


def files(
    directory: Annotated[Path, typer.Argument(help="Where to write them; created if absent.", file_okay=False)],
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that differ.")] = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Write the systemd unit with its drop-ins, sysusers and tmpfiles, the alerts, the dashboard and the manifests."""
    here = Path(sys.argv[0])
    installed = str(here.absolute()) if here.name == "transferd" else shutil.which("transferd")
    try:
        written = write(directory, installed or "/usr/bin/transferd", force=force)
    except OSError as error:
        raise ConfigError("files", f"cannot write: {error.strerror}", error.filename) from None
    paths = [str(path) for path in written]
    show(format_, {"written": paths}, "\n".join(paths))
