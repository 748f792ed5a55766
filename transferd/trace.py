"""The flight recorder: the last thousands of things that happened, at the price of a few stores each.

Every part that decides or begins something notes it here under the task it concerns. An invariant
failure tells the story of its task from these notes, `transferd explain` tells it to people
(explain.py), and a dump of all notes explains a crash (dumps.py).

What is noted is the *beginning* of each step that may take long, so that a task that hangs shows in
what; the note after it says when the step ended. There are three rings:

    steps    what ranks do for tasks: most notes by far, and all of them a word, a rank and a number.
             Packed into one block of memory, 24 bytes each where objects take 200, so that a few
             thousand tasks fit into little and nothing is left for the collector
    notes    what admitted tasks go through, with details
    asides   everything else (refusals, clients that come and go, bad messages), apart, so that a flood
             of nonsense cannot push out the history of real tasks

A step names its task by the hash of its id; the notes know the ids. Details are numbers and short text
only, so the garbage collector leaves them alone, and memory is bounded. Each append and each copy of a
ring is one operation under the interpreter lock: a dump may be taken from another thread, also while
the event loop is stuck.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from transferd.clock import SYSTEM_CLOCK, Clock

NOTES = 8192  # of admitted tasks; about two a task. Everything together is about 4 MiB when full
STEPS_PER_NOTE = 4
NOTES_PER_ASIDE = 8
LONGEST_TEXT = 200  # characters of a text that came from outside

_STEP = struct.Struct("<dqHhi")  # when, hash of the task's id, which of STEPS, rank (-1: all), how many
_KEY, _KEY_OFFSET = struct.Struct("<q"), struct.calcsize("<d")  # the hash, and where in a step it lies
_pack_step = _STEP.pack_into

# Every kind of step, and what its rank and number mean. Each begins something unless said otherwise.
STEPS: dict[str, tuple[str, ...]] = {
    "started": (),  # every rank is at work: looking up keys, or copying
    "found": ("rank", "blocks"),  # read: the look-up has ended; so many leading keys are stored
    "fetch": ("rank", "objects"),  # read: waiting for staging, then storage → staging
    "shares fetch": ("rank", "objects"),  # read: another task has begun it
    "to store": ("rank", "blocks"),  # write: the look-up has ended; so many are not stored yet
    "copy": ("rank", "blocks"),  # between device and staging, or device and host
    "put": ("rank", "objects"),  # write: staging → storage
    "stored": ("rank", "objects"),  # write: a put has ended
    "arrived": ("rank", "blocks"),  # this rank's share has ended
}
_NUMBER = {what: number for number, what in enumerate(STEPS)}
_WORD = tuple(STEPS)

# Every other kind of note, and what it says.
FIELDS: dict[str, tuple[str, ...]] = {
    # an admitted task
    "admitted": ("kind", "blocks", "client", "timeout", "generation", "waits_for"),  # waits_for: tasks before it
    "blocks free": ("after",),  # the task that it waited for last
    "told to end": ("reason",),
    "nobody waits": ("client",),  # the last one has gone
    "slack used up": (),  # ranks that have not arrived are left behind
    "corrupt object": ("rank", "name", "reason"),
    "error": ("rank", "code", "problem"),
    "done": ("status", "blocks", "code"),
    "straggling": ("ranks",),  # answered; these ranks still hold its blocks
    "straggler left": ("rank",),
    # pushes that admitted nothing
    "repeated": ("client",),  # answered from memory
    "joined": ("client",),  # one more waits for a task that runs
    "busy": ("code", "client"),
    "rejected": ("code", "client"),
    "failed": ("code", "client"),
    "bad message": ("code", "client"),
    # the daemon and its clients
    "client came": ("client", "session"),
    "client left": ("client",),
    "client silent": ("client",),
    "answer lost": ("client", "seq", "session"),  # could not be handed over; a new session begins
    "pause": (),
    "resume": (),
    "drain": (),
    "shutdown": (),
    "generation": ("old", "new"),
    "cache withdrawn": ("problem",),
    "cache ready": (),
    "rank died": ("rank", "cause"),
    "failure": ("problem",),
}


class Note(NamedTuple):
    """One thing that happened. `at` is monotonic seconds; `task_id` is "" for what concerns no task."""

    at: float
    task_id: str
    what: str
    detail: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """The detail as JSON can say it: a client's name, which is bytes, in hexadecimal."""
        return {key: value.hex() if isinstance(value, bytes) else value for key, value in self.detail.items()}

    def __str__(self) -> str:
        detail = " ".join(f"{key}={value!r}" for key, value in self.detail.items())
        return f"{self.at:.6f} {self.task_id or '-'} {self.what} {detail}".rstrip()


# Notes in the making; a plain tuple costs half as much as a Note.
_Entry = tuple[float, str, str, tuple[Any, ...]]


class Recorder:
    """Three bounded rings, newest last. Owned by the daemon; anyone may append.

    on_failure: told, with one line, when something happened that must not; set by whoever keeps dumps.
    """

    def __init__(self, capacity: int = NOTES, clock: Clock = SYSTEM_CLOCK) -> None:
        """capacity: notes of admitted tasks that are kept; the other rings are sized after it."""
        self._ring: deque[_Entry] = deque(maxlen=capacity)
        self._asides: deque[_Entry] = deque(maxlen=max(1, capacity // NOTES_PER_ASIDE))
        self._append = self._ring.append
        self._steps = bytearray(capacity * STEPS_PER_NOTE * _STEP.size)
        self._next = 0  # where in it the next step goes
        self._now = clock.monotonic
        self.on_failure: Callable[[str], None] = _nobody_keeps_dumps

    def step(self, task_id: str, what: str, rank: int, number: int) -> None:
        """What a rank (-1: all of them) does for an admitted task; `what` is one of STEPS. On the event loop only."""
        at = self._next
        _pack_step(self._steps, at, self._now(), hash(task_id), _NUMBER[what], rank, number)
        at += _STEP.size
        self._next = at if at < len(self._steps) else 0

    def note(self, task_id: str, what: str, *detail: Any) -> None:
        """Of an admitted task. detail: numbers and short text, as FIELDS names them for this `what`."""
        self._append((self._now(), task_id, what, detail))

    def aside(self, task_id: str, what: str, *detail: Any) -> None:
        """Of anything else; task_id "" or that of a task that is not admitted. detail: as for `note`."""
        self._asides.append((self._now(), task_id[:LONGEST_TEXT], what, detail))

    def failure(self, task_id: str, problem: str) -> None:
        """A promise that this package makes to itself was broken."""
        problem = problem.partition("\n")[0][:LONGEST_TEXT]
        self.aside(task_id, "failure", problem)
        self.on_failure(problem)

    def notes(self, task_id: str | None = None) -> list[Note]:
        """All that is kept, or what is kept of one task, oldest first. Safe from any thread."""
        ring, asides = list(self._ring), list(self._asides)
        steps = bytes(self._steps)
        if task_id is None:
            unpacked = _all_steps(steps, {hash(entry[1]): entry[1] for entry in ring})
        else:
            unpacked = _steps_of(steps, task_id)
            ring = [entry for entry in ring if entry[1] == task_id]
            asides = [entry for entry in asides if entry[1] == task_id[:LONGEST_TEXT]]
        kept = [
            Note(at, task, what, dict(zip(FIELDS[what], detail, strict=True)))
            for at, task, what, detail in (*ring, *asides)
        ]
        kept += unpacked
        kept.sort(key=_when)
        return kept

    def story(self, task_id: str) -> str:
        """What is still known of one task, one line a note."""
        return "\n".join(map(str, self.notes(task_id))) or "(no notes kept)"

    def __iter__(self) -> Iterator[Note]:
        return iter(self.notes())


def _steps_of(steps: bytes, task_id: str) -> Iterator[Note]:
    """Those of one task, found by searching for its hash: a tenth of a millisecond rather than ten."""
    key = _KEY.pack(hash(task_id))
    at = steps.find(key)
    while at >= 0:
        if at % _STEP.size == _KEY_OFFSET:
            yield _step(_STEP.unpack_from(steps, at - _KEY_OFFSET), task_id)
        at = steps.find(key, at + 1)


def _all_steps(steps: bytes, names: dict[int, str]) -> Iterator[Note]:
    """names: task ids by their hash; a task whose notes are gone is named by the hash."""
    for step in _STEP.iter_unpack(steps):
        if any(step):  # else this place was never written
            yield _step(step, names.get(step[1]) or f"#{step[1] & (1 << 64) - 1:016x}")


def _step(fields: tuple[Any, ...], task_id: str) -> Note:
    at, _, number, rank, count = fields
    what = _WORD[number]
    return Note(at, task_id, what, dict(zip(STEPS[what], (rank, count), strict=False)))


def _when(note: Note) -> tuple[float, bool]:
    """By time; at the same moment a task is admitted before anything happens to it, and done after."""
    return note.at, note.what == "done"


def _nobody_keeps_dumps(problem: str) -> None:
    """The log has it all the same."""
