"""A named pipe that a process under test writes to. Its reader is here: asleep, or dead after `die`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import termios
from pathlib import Path

F_SETPIPE_SZ = 1031
CAPACITY = 4096  # the least that a pipe can have: a dozen lines
SHORTEST_LINE = 80  # a warning as JSON: 70 bytes, and an event of ten letters


class Fifo:
    """Owns the reader's end until `die`. It reads nothing."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(self._fd, F_SETPIPE_SZ, CAPACITY)
        self._probe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)

    @property
    def full(self) -> bool:
        """No line fits any more: whoever writes one hangs in it. (A pipe that is not ready may still have room.)"""
        held = fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4))
        return CAPACITY - int.from_bytes(held, sys.byteorder) < SHORTEST_LINE

    def fill(self) -> None:
        """Leave no room."""
        for size in (512, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(self._probe, b"x" * size)

    def die(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            os.close(self._probe)
            self._fd = -1
