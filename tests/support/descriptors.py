"""Which files this process has open. Their number would say less: the garbage of an earlier test may close some."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_below(directory: Path) -> list[str]:
    """The paths of open files in this directory."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in found if path.startswith(f"{directory}/") or path == str(directory))
