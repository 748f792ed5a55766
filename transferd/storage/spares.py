"""Files of objects that have left a file store, kept empty, so that new objects need no new files.

Only the extension (_files.c) writes to them, so without it none is kept.

ext4 passes over each inode that was freed in the last minutes, one by one, whenever it makes a file: after a purge that
took 300 to 600 µs of CPU a file. A spare has no bytes: what was purged is gone, and nothing but an inode counts.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator

from transferd.storage import file_io
from transferd.storage.opening import opened

MOST = 4096  # files


class Spares:
    """One directory, which ends with a slash. Thread-safe; all but `take` block.

    numbers: tell files apart.
    """

    def __init__(self, path: str, numbers: Iterator[int]) -> None:
        self._path = path
        self._numbers = numbers
        self._free: deque[str] = deque()

    def release(self, path: str) -> None:
        """Take a file that nobody reads from this path, or remove it. Raises OSError."""
        if not (file_io.NATIVE and self._keep(path)):
            os.unlink(path)

    def _keep(self, path: str) -> bool:
        if len(self._free) >= MOST:
            return False
        spare = f"{self._path}{next(self._numbers)}"
        try:
            with opened(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:  # another link may be somebody's backup
                    return False
                os.rename(path, spare)
                os.ftruncate(fd, 0)
        except OSError:
            return not os.path.lexists(path)  # a file that could not be emptied is removed with all others
        self._free.append(spare)
        return True

    def take(self) -> str | None:
        """The path of a spare file, which is the caller's now; None if there is none."""
        with contextlib.suppress(IndexError):
            return self._free.popleft()
        return None

    def give_back(self, spares: Iterable[str]) -> None:
        """Return what was taken and perhaps not used. What cannot be used any more is not taken again."""
        for path in spares:
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                    self._free.append(path)

    def remove(self) -> int:
        """Remove all spares, and whatever else is called like one, as far as that works. Returns how many."""
        self._free.clear()
        removed = 0
        with contextlib.suppress(OSError), os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name.isascii() and entry.name.isdigit():
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                        removed += 1
        return removed
