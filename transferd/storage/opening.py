"""How the store opens files. Blocking; called from I/O threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# There may be something other than a file at an object's path. A FIFO or device must not hang `open`, and is not read.
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


@contextlib.contextmanager
def opened(path: str | Path, flags: int, mode: int = 0o600) -> Iterator[int]:
    """The descriptor of a file within the `with` block. Raises OSError."""
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)
