"""The lock of a store's directory: one daemon uses it at a time. Blocking; called from I/O threads, but for `identity`.

The lock is a file at a fixed path, locked with flock. A file that was removed from there, or replaced, locks nothing,
because another daemon makes and locks a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from transferd.errors import ConfigError
from transferd.storage.opening import READ_FLAGS

_MODE = 0o640


class StoreLock:
    """See the module's docstring. Owns the descriptor."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = str(root / "lock")
        self._fd = -1
        self._ours = (0, 0)  # device and inode

    def take(self) -> None:
        """Lock the file, or make it first; nothing happens if it is ours. Raises ConfigError, OSError, ValueError."""
        if not self.problem():
            return
        fd = os.open(self._path, READ_FLAGS | os.O_CREAT, _MODE)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                problem = "cannot be used: its lock is not a regular file"
                raise ConfigError("storage.file.path", problem, self._path)
            self._lock(fd)
        except BaseException:
            os.close(fd)
            raise
        self.release()
        self._fd, self._ours = fd, (status.st_dev, status.st_ino)
        with contextlib.suppress(OSError):  # the pid is only for people; a full disk must not prevent the start
            Path(self._path).write_text(f"{os.getpid()}\n")

    @property
    def identity(self) -> tuple[str, int, int]:
        """The path, and the device and inode that it must lead to; those are 0 if it is not taken."""
        return self._path, *(self._ours if self._fd >= 0 else (0, 0))

    def problem(self) -> str:
        """Why the directory is not ours; "" if it is. Costs one system call."""
        return "its lock is not taken" if self._fd < 0 else changed("lock", self._path, self._ours, follow=False)

    def release(self) -> None:
        """Unlock it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            problem = f"is in use by another daemon (pid {holder}), and one directory serves one"
            raise ConfigError("storage.file.path", problem, str(self._root)) from error


def changed(what: str, path: str, ours: tuple[int, int], *, follow: bool) -> str:
    """Why a path does not lead to our file or directory any more; "" if it does. ours: its device and inode."""
    try:
        there = os.stat(path, follow_symlinks=follow)
    except OSError as error:
        return f"its {what} was removed ({error.strerror})"
    return "" if (there.st_dev, there.st_ino) == ours else f"its {what} was replaced"
