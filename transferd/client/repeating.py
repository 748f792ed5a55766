"""When a client repeats what the daemon must know: at once in a new life, then at growing intervals until it is so.

A *life* is whatever the daemon knows things by: its boot, our session, the epoch. A repetition may be refused for
a reason that passes (an engine that leaves still has the name, or the memory), so one attempt a life is not enough.
"""

from __future__ import annotations

from collections.abc import Hashable

FIRST_S, LONGEST_S = 0.5, 30.0


class Repeating:
    """One thing to repeat."""

    def __init__(self, life: Hashable = None) -> None:
        """life: the one in which it was said and answered."""
        self._life = life
        self._wait_s = FIRST_S
        self._next_at = 0.0

    def due(self, life: Hashable, now: float, *, known: bool) -> bool:
        """Whether to say it now; the caller then does. known: the daemon shows that it knows it. now: monotonic."""
        if life != self._life:
            self._life, self._wait_s = life, FIRST_S
        elif known or now < self._next_at:
            return False
        else:
            self._wait_s = min(2 * self._wait_s, LONGEST_S)
        self._next_at = now + self._wait_s
        return True
