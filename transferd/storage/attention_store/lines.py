"""Serial executors for a blocking library: calls of one line run one at a time, in the order they came."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import TypeVar

from transferd.errors import StorageUnavailable
from transferd.runtime.threads import Crew, Work

T = TypeVar("T")

MOST_WAITING = 256  # in one line: tasks are far fewer, so the call at its head hangs


class Line(Crew):
    """A crew of one thread with a bound on what may wait for it."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 1, most_waiting=MOST_WAITING)

    def run(self, function: Callable[[], T], what: object = None) -> Work[T]:
        """As Crew.run. Raises StorageUnavailable when too many wait, as a call that never returns gathers them."""
        try:
            return super().run(function, what)
        except queue.Full:
            raise StorageUnavailable(f"{self.name}: {MOST_WAITING} calls are waiting already") from None
