"""A named pipe that a process under test writes to. Its reader is here: asleep, or dead after `die`."""

from __future__ import annotations

import fcntl
import os
import select
from pathlib import Path

F_SETPIPE_SZ = 1031


class Fifo:
    """Owns the reader's end until `die`. It reads nothing."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(self._fd, F_SETPIPE_SZ, 4096)  # the least: a dozen lines
        self._probe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)

    @property
    def full(self) -> bool:
        """Nothing more fits: whoever writes there hangs in it."""
        return not select.select([], [self._probe], [], 0)[1]

    def fill(self) -> None:
        """Leave no room."""
        while not self.full:
            os.write(self._probe, b"x" * 512)

    def die(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            os.close(self._probe)
            self._fd = -1
