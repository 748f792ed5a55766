"""Removes directories of the file backend when no object is left in them. Blocking; called from I/O threads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable

AT_ONCE = 256  # departures of objects; as many as the directories that one generation's objects fan out into


class Pruning:
    """The directories that objects have left, any of which may be empty.

    We look at them after every AT_ONCE departures, and keep each whose parent has received an object since the last
    look. Otherwise a store with few objects would remove a directory and create another for nearly every object that it
    writes over, which takes as long as writing the object. So the directories of a generation go once no objects of
    that generation are stored any more.
    """

    def __init__(self, root: str) -> None:
        """root: ends with a slash, and stays."""
        self._root = root
        self._left: dict[str, None] = {}
        self._departures = 0
        self._in_use: set[str] = set()  # the parents of directories that objects have arrived in since the last look
        self._lock = threading.Lock()

    def arrived(self, path: str) -> None:
        """Note that an object was stored at this path."""
        parent = _directory_of(_directory_of(path))
        with self._lock:
            self._in_use.add(parent)

    def left(self, path: str) -> None:
        """Note that an object has left this path."""
        directory = _directory_of(path)
        with self._lock:
            self._left[directory] = None
            self._departures += 1
            if self._departures < AT_ONCE:
                return
            self._departures = 0
            in_use, self._in_use = self._in_use, set()
            unused = [left for left in self._left if _directory_of(left) not in in_use]
            for left in unused:
                del self._left[left]
        self._remove_empty(unused)

    def finish(self) -> int:
        """Look at all of them now. Returns how many were removed."""
        with self._lock:
            left, self._left = self._left, {}
        return self._remove_empty(left)

    def _remove_empty(self, directories: Iterable[str]) -> int:
        """Remove those that are empty, and each parent that becomes empty. Returns how many."""
        removed = 0
        for directory in directories:
            with contextlib.suppress(OSError):  # not empty, usually; or in use again, or gone
                while len(directory) > len(self._root):
                    os.rmdir(directory)
                    removed += 1
                    directory = _directory_of(directory)
        return removed


def _directory_of(path: str) -> str:
    """Like os.path.dirname, in a fifth of the time. Every path here has a slash, and no two in a row."""
    return path[: path.rindex("/")]
