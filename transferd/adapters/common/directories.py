"""The private directory of a daemon that an adapter starts, for its socket, configuration and log; its environment."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from transferd.adapters.common.packaged import nobody_listens
from transferd.errors import ConfigError
from transferd.runtime.address import LONGEST_SOCKET_PATH

SOCKET = "transferd.sock"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def own_socket(directory: Path) -> str:
    """The endpoint of a daemon with this `own_directory`. If its name would be too long for a socket: one in /tmp."""
    if len(os.fsencode(path := directory / SOCKET)) > LONGEST_SOCKET_PATH:
        name = hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]
        path = own_directory("socket", name, base=Path(tempfile.gettempdir())) / SOCKET
    return f"ipc://{path}"


def own_directory(name: str, *below: str, base: Path | None = None) -> Path:
    """`transferd-NAME-UID`, and directories below it, in `base` ($XDG_RUNTIME_DIR or /tmp); created if missing.

    Raises ConfigError if part of the path is a link or belongs to another user, who could replace its contents.
    """
    directory = base or Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    directory.mkdir(parents=True, exist_ok=True)
    for part in (f"transferd-{name}-{os.getuid()}", *below):
        directory /= part
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError("XDG_RUNTIME_DIR", "must not contain a file or link of this name", str(directory))
        if found.st_uid != os.getuid():
            raise ConfigError("XDG_RUNTIME_DIR", "belongs to another user", str(directory))
        directory.chmod(0o700)
    return directory


def started_daemons() -> list[str]:
    """The endpoints of the daemons that engines of this user have started and that listen now."""
    user = os.getuid()
    bases = {os.environ.get("XDG_RUNTIME_DIR") or "", f"/run/user/{user}", tempfile.gettempdir()} - {""}
    places = [f"transferd-*-{user}/{SOCKET}", f"transferd-*-{user}/*/{SOCKET}"]
    found = {f"ipc://{path}" for base in bases for place in places for path in Path(base).glob(place)}
    return sorted(endpoint for endpoint in found if not nobody_listens(endpoint))


def remove_leftovers(directory: Path) -> None:
    """Remove the configuration and log files of this user's engines that have ended: each start creates two files."""
    for file in directory.glob("*.*"):
        if file.suffix in (".toml", ".log") and file.stem.isdecimal() and not Path("/proc", file.stem).exists():
            file.unlink(missing_ok=True)


def sees_all_gpus() -> dict[str, str]:
    """The environment of a daemon for several engines. It also sees GPUs hidden here: engines name theirs by UUID."""
    environment = dict(os.environ)
    if not environment.get(VISIBLE_GPUS, "").startswith("MIG"):  # a slice of a GPU is visible only if it is named
        environment.pop(VISIBLE_GPUS, None)
    return environment
