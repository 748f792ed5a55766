"""Removes directories of the file backend when no object is left in them. Blocking, but for `note`."""

from __future__ import annotations

import contextlib
import os
import threading

AT_ONCE = 4096  # departures of objects; more than the directories that a generation's objects fan out into


class Pruning:
    """The directories that objects have left, any of which may be empty.

    We look at them after every AT_ONCE departures, so that a store with few objects does not remove a directory and
    create another for nearly every object that it writes over: that takes as long as writing the object.
    """

    def __init__(self, root: str) -> None:
        """root: ends with a slash, and stays."""
        self._root = root
        self._left: set[str] = set()
        self._departures = 0
        self._lock = threading.Lock()

    def left(self, path: str) -> None:
        """Note that an object has left this path, and look at the directories if that is due. In a thread."""
        if self.note(path):
            self.finish()

    def note(self, path: str) -> bool:
        """Note that an object has left this path. Returns whether `finish` is due."""
        with self._lock:
            self._left.add(_directory_of(path))
            self._departures += 1
            return self._departures >= AT_ONCE

    def finish(self) -> int:
        """Remove those that are empty now, and each parent that becomes empty. Returns how many."""
        with self._lock:
            left, self._left, self._departures = self._left, set(), 0
        removed = 0
        for directory in left:
            with contextlib.suppress(OSError):  # not empty, usually; or in use again, or gone
                while len(directory) > len(self._root):
                    os.rmdir(directory)
                    removed += 1
                    directory = _directory_of(directory)
        return removed


def _directory_of(path: str) -> str:
    """Like os.path.dirname, in a fifth of the time. Every path here has a slash, and no two in a row."""
    return path[: path.rindex("/")]
