"""Decides from the times of messages whether the daemon is alive, and when to send the next Hello.

Pure: it sends nothing, sets no timer and reads no clock. `Conversation` does that and reports here.

We send Hello every HEARTBEAT_S, so a live daemon answers at least that often. When a Hello is SILENCE_S old and
nothing has arrived since, the daemon is doubted; if it is still silent DOUBT_S later, it is lost. The second look
covers our own stalls: if this process was suspended, the answer is already in the socket. A daemon whose process
runs, or waits for a CPU or a disk, is only slow: it stays doubted until it has been silent for SLOW_S. A lost daemon
comes back with a Welcome; older answers do not count.
"""

from __future__ import annotations

from collections.abc import Callable

from transferd.runtime.compat import StrEnum

HEARTBEAT_S = 1.0
SILENCE_S = 3.5  # of silence after a Hello: then the daemon is doubted
DOUBT_S = 0.1
SLOW_S = 15.0  # of silence after a Hello: then a daemon is lost even if its process waits for CPU or disk at every look
FIRST_HELLO_S = 0.002  # the first delay between Hellos until a daemon is ready; it doubles
SLOWEST_HELLO_S = 0.1  # the longest of these delays
LOST_HELLO_S = 5.0  # between Hellos to a lost daemon; those sent before wait in the socket for its successor
TIMER_RESOLUTION_S = 0.001  # a timer may fire this early
assert HEARTBEAT_S + SILENCE_S + DOUBT_S < 5, "we promise to notice within 5 s of a daemon's death"


class Presence(StrEnum):
    """What we know about the daemon."""

    CLOSED = "closed"  # we are not connected
    SEEKING = "seeking"  # we sent Hello and have no answer yet
    PRESENT = "present"  # a Welcome has come
    DOUBTED = "doubted"  # it was silent for too long at the last look; any message makes it present
    LOST = "lost"  # it was still silent at the next look; only a Welcome makes it present


class Heartbeat:
    """The heartbeat of one conversation, from `opened` to `closed`. It can be opened again.

    open: not CLOSED.
    lost: LOST.
    newest: the number of the newest Hello.
    asked_at: when we sent the oldest Hello that no message has followed; None without such a Hello: `heard` would then
        change nothing.
    """

    def __init__(self) -> None:
        self.presence = Presence.CLOSED
        self.open = self.lost = False
        self._reset()

    def _reset(self) -> None:
        self.newest = 0
        self._welcomed = 0  # number of the Hello that the newest Welcome answers
        self.asked_at: float | None = None
        self._hello_delay = FIRST_HELLO_S

    @property
    def hello_under_way(self) -> bool:
        """Whether the newest Hello is still unanswered. Its Welcome will be the newest."""
        return self.newest > self._welcomed

    def opened(self) -> None:
        self._become(Presence.SEEKING)
        self._reset()

    def closed(self) -> None:
        self._become(Presence.CLOSED)

    def said_hello(self, number: int, now: float) -> None:
        self.newest = number
        if self.asked_at is None:
            self.asked_at = now

    def heard(self) -> None:
        """Note that any message arrived."""
        if self.presence is Presence.DOUBTED:
            self._become(Presence.PRESENT)
        self.asked_at = None

    def welcomed(self, number: int) -> bool:
        """Note a Welcome that answers Hello `number`. Returns False if it is stale: a newer one came first."""
        if number <= self._welcomed:
            return False
        self._welcomed = number
        self._become(Presence.PRESENT)
        return True

    def look(self, now: float, wants_machine: Callable[[], bool] = lambda: False) -> Presence | None:
        """Judge the silence. Returns the new presence, DOUBTED or LOST, or None for no change.

        wants_machine: whether the daemon's process is known to be alive and to want a CPU or a disk; called in doubt.
        """
        before = self.presence
        silent_s = 0.0 if self.asked_at is None else now - self.asked_at
        slow = before is Presence.DOUBTED and silent_s < SLOW_S and wants_machine()
        if slow or before is Presence.LOST or silent_s < SILENCE_S - TIMER_RESOLUTION_S:
            return None
        self._become(Presence.LOST if before is Presence.DOUBTED else Presence.DOUBTED)
        return self.presence

    def next_hello(self, now: float, *, ready: bool) -> float:
        """Seconds until the next Hello, or until silence turns into doubt. ready: what the daemon reported last."""
        if self.lost:
            return LOST_HELLO_S
        if not ready:
            self._hello_delay = min(2 * self._hello_delay, SLOWEST_HELLO_S)
            return self._hello_delay
        self._hello_delay = FIRST_HELLO_S
        asked_at = now if self.asked_at is None else self.asked_at
        return min(HEARTBEAT_S, max(asked_at + SILENCE_S - now, 0.0))

    def _become(self, presence: Presence) -> None:
        self.presence = presence
        self.open, self.lost = presence is not Presence.CLOSED, presence is Presence.LOST
