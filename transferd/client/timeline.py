"""Timelines: how an engine names work that a task has to wait for on every rank, before that work is done.

timeline = Timeline()                              # where tasks are pushed
after = timeline.next()                            # goes to every rank with the step's other metadata
await client.push(SwapOutTask(…, after=after))     # any time: before the kernels are launched, or after

words = await client.timelines(rank)               # on every rank, once
words.advance(after, stream)                       # behind the kernels; stream: its CUDA address
"""

from __future__ import annotations

import time
from collections.abc import Callable

from transferd.tasks import TIMELINE_SLOTS


class Timeline:
    """Points of a stream of work, as numbers that always rise, even after a restart of this engine.

    Use one timeline for each stream of work that tasks wait for separately. slot: 0 to TIMELINE_SLOTS - 1; two engines
    on one daemon need different ones. The numbers follow the clock, so they need no agreement between processes and no
    reset after a restart. Do not set this machine's clock back while a daemon runs that has seen them.
    """

    def __init__(self, slot: int = 0, *, clock: Callable[[], int] = time.time_ns) -> None:
        if not 0 <= slot < TIMELINE_SLOTS:
            raise ValueError(f"a timeline's slot is 0 to {TIMELINE_SLOTS - 1}, not {slot}")
        self._slot = slot
        self._clock = clock
        self._last = 0

    def next(self) -> tuple[int, int]:
        """The next point. Pass it to tasks as `after`, and have every rank advance to it behind the work."""
        self._last = max(self._last + 1, self._clock())
        return self._slot, self._last
