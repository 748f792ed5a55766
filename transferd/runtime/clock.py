"""The seams for time and chance: everything else in the package asks these, never `time` or `uuid`.

A simulation hands in a `Clock` that reads its event loop's virtual time and an `Entropy` drawn from
one seed; then the real dispatcher, barrier, workers and client run unchanged and reproducibly.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field


def _random_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time and fresh identities come from.

    monotonic: seconds, never goes back; for every duration and deadline. Must be the clock of the
        event loop's own timers (asyncio and uvloop use `time.monotonic`).
    wall: seconds since the epoch; only for what people and other machines read.
    fresh_id: a new opaque identity (boot ids, client names).
    """

    monotonic: Callable[[], float] = field(default=time.monotonic)
    wall: Callable[[], float] = field(default=time.time)
    fresh_id: Callable[[], str] = field(default=_random_id)


SYSTEM_CLOCK = Clock()
