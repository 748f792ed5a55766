"""Where the daemon of a normal user keeps its socket and files by default.

The packaged unit makes the default directories for its own user. Other users may not write there: their daemon gets a
socket below $XDG_RUNTIME_DIR and files below the directories that the XDG base directory specification names. A user's
own clients then find the daemon there (client.default_endpoint).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping

from transferd.config.sections import DEFAULT_ENDPOINT, FileStorageSection, RecorderSection

SOCKET = "transferd/transferd.sock"  # below $XDG_RUNTIME_DIR


def may_make(path: str) -> bool:
    """Whether this user may create files below a directory that may not exist yet."""
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return os.access(path, os.W_OK | os.X_OK)


def settings(environment: Mapping[str, str], may: Callable[[str], bool] = may_make) -> dict[str, str]:
    """{"section.key": value} instead of the defaults; empty for a user who may use those, and without $XDG_RUNTIME_DIR.

    may: whether the user may create files below a directory.
    """
    runtime, home = environment.get("XDG_RUNTIME_DIR", ""), environment.get("HOME", "")
    if not runtime or may(os.path.dirname(DEFAULT_ENDPOINT.removeprefix("ipc://"))):
        return {}
    found = {"server.endpoint": f"ipc://{runtime}/{SOCKET}"}
    cache = environment.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    state = environment.get("XDG_STATE_HOME") or (home and f"{home}/.local/state")
    if cache and not may(FileStorageSection().paths[0]):
        found["storage.file.path"] = f"{cache}/transferd/blocks"
    if state and not may(RecorderSection().directory):
        found["recorder.directory"] = f"{state}/transferd/flight"
    return found


def endpoint(environment: Mapping[str, str]) -> str:
    """Where clients of this user look: at the packaged daemon's socket or, if there is none, at the user's own one."""
    own = f"{environment.get('XDG_RUNTIME_DIR', '')}/{SOCKET}"
    if os.path.lexists(DEFAULT_ENDPOINT.removeprefix("ipc://")) or not os.path.isabs(own):
        return DEFAULT_ENDPOINT
    try:
        status = os.lstat(own)
    except OSError:
        return DEFAULT_ENDPOINT
    mine = stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()
    return f"ipc://{own}" if mine else DEFAULT_ENDPOINT
