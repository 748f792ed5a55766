"""A serial executor runs the calls of a blocking library one at a time, in the order of their arrival.

It replaces ThreadPoolExecutor(1), whose queue has no bound and whose thread keeps the process from ending.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import TypeVar

from transferd.errors import StorageUnavailable
from transferd.runtime.threads import Crew, Work

T = TypeVar("T")

MOST_WAITING = 256  # far more than there are tasks, so a full queue means that the running call hangs


class SerialExecutor(Crew):
    """A crew of one thread, with a bound on the calls that wait for it."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 1, most_waiting=MOST_WAITING)

    def run(self, function: Callable[[], T], what: object = None) -> Work[T]:
        """Like Crew.run. Raises StorageUnavailable if MOST_WAITING calls already wait: the running one must hang."""
        try:
            return super().run(function, what)
        except queue.Full:
            raise StorageUnavailable(f"{self.name}: a call hangs and {MOST_WAITING} more wait behind it") from None
