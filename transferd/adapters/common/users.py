"""Who uses a daemon that engines have started: it lives until the last of them has left, whoever started it.

    a FIFO in the daemon's directory   every engine's process holds it open for writing, the daemon reads it
    the last engine leaves             the daemon reads the end, and stops; the kernel counts, the killed as well
    the daemon has ended               nobody reads, and the next engine, or one that is left, starts another

Nothing is ever written. A process that an engine forks holds the FIFO as well.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

NAME = "users"


class Users:
    """One engine among the users of the daemon of a directory. Not thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._mine = -1

    def join(self) -> bool:
        """Count as a user, until `leave`. Returns whether a daemon's process lives. Idempotent. Raises OSError."""
        try:
            end = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.ENOENT):  # nobody reads, or somebody has removed the directory
                return False
            raise
        if self._mine < 0:
            self._mine = end
        else:
            os.close(end)
        return True

    @contextlib.contextmanager
    def watched(self) -> Iterator[int]:
        """What a daemon that is started within the context reads: it ends when no user is left. Joins."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._path, 0o600)
            self._let_go()  # of one that is not there any more
        end = self._readable()
        try:
            self.join()
            os.set_blocking(end, True)
            yield end
        finally:
            os.close(end)

    def leave(self) -> bool:
        """Count no more. Returns whether no user is left. Idempotent."""
        self._let_go()
        try:
            end = self._readable()
        except FileNotFoundError:
            return True
        try:
            return os.read(end, 1) == b""
        except BlockingIOError:  # others have it open
            return False
        finally:
            os.close(end)

    def _let_go(self) -> None:
        if self._mine >= 0:
            os.close(self._mine)
            self._mine = -1

    def _readable(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
