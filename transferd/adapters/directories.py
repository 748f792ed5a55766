"""The private directory of a daemon that an adapter starts, for its socket, configuration and log."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from transferd.errors import ConfigError


def own_directory(name: str, *below: str) -> Path:
    """`transferd-NAME-UID`, and directories below it, in $XDG_RUNTIME_DIR or /tmp; created if missing.

    Raises ConfigError if part of the path is a link or belongs to another user, who could replace its contents.
    """
    directory = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
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
