"""The flight recorder: the last few thousand things that happened, kept at the price of one append.

Every part that decides something notes it here under the task it concerns. An invariant failure
tells the story of its task from these notes, and a dump of the whole ring explains a crash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from transferd.clock import SYSTEM_CLOCK, Clock


class Note(NamedTuple):
    """One thing that happened. `at` is monotonic seconds; `task_id` is "" for what concerns no task."""

    at: float
    task_id: str
    what: str
    detail: dict[str, Any]

    def __str__(self) -> str:
        detail = " ".join(f"{key}={value!r}" for key, value in self.detail.items())
        return f"{self.at:.6f} {self.task_id or '-'} {self.what} {detail}".rstrip()


class Recorder:
    """A bounded ring of notes, newest last. Owned by the daemon; anyone may append."""

    def __init__(self, capacity: int = 8192, clock: Clock = SYSTEM_CLOCK) -> None:
        self._ring: deque[Note] = deque(maxlen=capacity)
        self._now = clock.monotonic

    def note(self, task_id: str, what: str, **detail: Any) -> None:
        self._ring.append(Note(self._now(), task_id, what, detail))

    def story(self, task_id: str) -> str:
        """What is still known of one task, one line a note."""
        return "\n".join(str(note) for note in self._ring if note.task_id == task_id) or "(no notes kept)"

    def __iter__(self) -> Iterator[Note]:
        return iter(tuple(self._ring))

    def __len__(self) -> int:
        return len(self._ring)
