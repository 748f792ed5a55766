"""Not ThreadPoolExecutor(1), because the queue needs a bound and the thread must not keep the process from ending.

A serial executor runs the calls of a blocking library one at a time, in the order they came.
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
        """As Crew.run. Raises StorageUnavailable if MOST_WAITING calls already wait, behind one that never returns."""
        try:
            return super().run(function, what)
        except queue.Full:
            raise StorageUnavailable(f"{self.name}: a call hangs and {MOST_WAITING} more wait behind it") from None
