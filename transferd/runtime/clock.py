"""The seam for time and randomness: the core uses a `Clock` instead of `time` and `uuid`.

A simulation passes a `Clock` with virtual time and ids drawn from one seed; the real dispatcher, barrier, workers
and client then run unchanged and reproducibly.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Clock:
    """The source of time and of new ids.

    monotonic: seconds that never go back; for durations and deadlines. Must be the clock of the event loop's
        timers (asyncio and uvloop use `time.monotonic`).
    wall: seconds since the epoch; only for what people and other machines read.
    fresh_id: a new opaque id (boot ids, client names).
    cpu: seconds of CPU that the calling thread has used; for what work costs.
    """

    monotonic: Callable[[], float] = field(default=time.monotonic)
    wall: Callable[[], float] = field(default=time.time)
    fresh_id: Callable[[], str] = field(default=lambda: uuid.uuid4().hex)
    cpu: Callable[[], float] = field(default=time.thread_time)


SYSTEM_CLOCK = Clock()
