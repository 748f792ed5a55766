"""Which files this process has open. Their number would say less: the garbage of an earlier test may close some."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

NETWORK = ("socket:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]")


def open_below(directory: Path) -> list[str]:
    """The paths of open files in this directory."""
    return sorted(path for path in _links() if path.startswith(f"{directory}/") or path == str(directory))


def open_memory_and_files() -> Counter[str]:
    """What is open besides sockets: how often each is. A library's own threads may open sockets at any time."""
    return Counter(link for link in _links() if not link.startswith((*NETWORK, "/proc/")))


def _links() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found
