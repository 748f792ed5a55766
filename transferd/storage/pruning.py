"""Removes directories of the file backend when no object is left in them. Blocking; called from I/O threads."""

from __future__ import annotations

import contextlib
import os
import threading

AT_ONCE = 256  # directories; as many as one generation's objects fan out into


class Pruning:
    """The directories that objects have left since the last look, any of which may be empty.

    They wait until there are AT_ONCE of them. A store with few objects would otherwise remove a directory and create
    another for nearly every object that it writes over, which took as long as the object's bytes.
    """

    def __init__(self, root: str) -> None:
        """root: ends with a slash, and stays."""
        self._root = root
        self._left: dict[str, None] = {}
        self._lock = threading.Lock()

    def left(self, path: str) -> None:
        """An object has left this path."""
        directory = os.path.dirname(path)
        with self._lock:
            self._left[directory] = None
            many = len(self._left) >= AT_ONCE
        if many:
            self.finish()

    def finish(self) -> None:
        """Look at all of them now: remove those that are empty, and each parent that becomes empty."""
        with self._lock:
            left, self._left = self._left, {}
        for directory in left:
            with contextlib.suppress(OSError):  # not empty, usually; or in use again, or gone
                while len(directory) > len(self._root):
                    os.rmdir(directory)
                    directory = os.path.dirname(directory)
