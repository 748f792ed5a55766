"""The quarantine of a file store: bad objects, and whatever lay in an object's place, kept for inspection. Blocking.

The newest few stay. A file in it that cannot be removed stays too, and the others go on being bounded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transferd.runtime.clock import Clock
from transferd.storage.paths import is_set_aside, temporary_of

FILES = 16
BYTES = 64 * 1024**2


@dataclass(eq=False)
class Quarantine:
    """One directory.

    path: ends with a slash. make: creates a directory. numbers: tell files of one moment apart. remove: a file, or
    keeps it for another object.
    """

    path: str
    _clock: Clock
    _numbers: Iterator[int]
    _make: Callable[[str], None]
    _remove: Callable[[str], None]

    def take(self, path: str) -> str:
        """Move a file or directory here. Returns its new path. Raises OSError."""
        number = int(self._clock.wall() * 1e9) + next(self._numbers)
        kept = temporary_of(f"{self.path}{os.path.basename(path)}", number)
        try:
            os.rename(path, kept)
        except FileNotFoundError:
            if os.path.isdir(self.path):
                raise
            self._make(self.path)
            os.rename(path, kept)
        return kept

    def empty(self, until: float) -> None:
        """Remove what was set aside up to this Unix time. Raises OSError."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                mine = is_set_aside(entry.name) and not entry.is_dir(follow_symlinks=False)
                with contextlib.suppress(FileNotFoundError):  # another thread trims
                    if mine and entry.stat(follow_symlinks=False).st_mtime <= until:
                        os.unlink(entry.path)

    def trim(self) -> None:
        """Remove the oldest files, as far as they can be removed."""
        ours: list[tuple[os.stat_result, str]] = []
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                if is_set_aside(entry.name) and not entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(OSError):
                        ours.append((entry.stat(follow_symlinks=False), entry.path))
        ours.sort(key=lambda file: file[0].st_mtime_ns, reverse=True)
        total = 0
        for count, (status, path) in enumerate(ours, start=1):
            total += status.st_size
            if count > FILES or total > BYTES:
                with contextlib.suppress(OSError):
                    self._remove(path)
