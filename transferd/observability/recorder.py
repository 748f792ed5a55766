"""The flight recorder: the last thousands of events, for the cost of a few stores each.

Every part that decides or starts something records it here under the task's engine and id. An invariant
failure carries the story of its task, `transferd explain` prints it (story.py), and a dump of all notes
explains a crash (dump_file.py).

A note marks the *beginning* of each step that may take long, so a hanging task shows where it hangs; the next note
shows when the step ended. There are two rings:

    tasks    what admitted tasks did: their steps, a cancel, an error, a wait for another task
    asides   everything else (refusals, clients that come and go, bad messages), kept apart so that a
             flood of nonsense cannot push out the history of real tasks

Details are numbers and short text only, so the garbage collector leaves them alone, and memory is
bounded. Each append and each copy of a ring is one operation under the interpreter lock, so a dump may
be taken from another thread while the event loop is stuck.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from transferd.config import DEFAULT_ENGINE
from transferd.runtime.clock import SYSTEM_CLOCK, Clock

TASKS = 8192  # roughly how many are remembered
NOTES_PER_TASK = 9
TASKS_PER_ASIDE = 8
LOOK_BACK = 8192  # notes that `last_steps` searches, newest first
LONGEST_TEXT = 200  # characters kept of a text from outside


# What a rank begins, unless the comment says otherwise, with the names of the details.
STEPS: dict[str, tuple[str, ...]] = {
    "found": ("rank", "blocks"),  # read: the lookup ended; this many keys are stored
    "load in place": ("rank", "objects"),  # read: storage's memory → device
    "load a part in place": ("rank", "objects"),  # the same, of some layers of all blocks
    "fetch": ("rank", "objects"),  # read: waits for staging, then storage → staging
    "to store": ("rank", "blocks"),  # write: the lookup ended; this many are not stored
    "not admitted": ("rank", "blocks"),  # write: storage did not choose to store this many of them
    "copy": ("rank", "blocks"),  # between device and staging, or device and host
    "put": ("rank", "objects"),  # write: staging → storage
    "stored": ("rank", "objects"),  # write: a put ended
    "arrived": ("rank", "blocks"),  # this rank's share ended
}

# Every kind of note, with the names of its details.
FIELDS: dict[str, tuple[str, ...]] = STEPS | {
    # an admitted task
    "admitted": ("kind", "blocks"),
    "from": ("client",),  # the client that pushed it
    "started": (),  # every rank is at work: looking up keys, or copying
    "done": ("status", "blocks"),
    "waits": ("tasks",),  # the number of earlier tasks that touch the same blocks
    "blocks free": ("after",),  # the last task that it waited for
    "stopping": ("reason",),
    "no client waits": ("client",),  # the last waiting client has gone
    "slack used up": (),  # ranks that have not arrived become stragglers
    "missed": ("block", "why", "level", "by", "ago_s"),  # its first block that was not there, and when that left
    "corrupt object": ("rank", "name", "reason"),
    "error": ("rank", "code", "problem"),
    "cause": ("code", "problem"),  # of its answer
    "straggling": ("ranks",),  # the task is answered, but these ranks still hold its blocks
    "straggler left": ("rank",),
    # pushes that admitted nothing
    "repeated": ("client",),  # answered from memory
    "joined": ("client",),  # one more client waits for a running task
    "busy": ("code", "client", "problem"),
    "rejected": ("code", "client", "problem"),
    "failed": ("code", "client", "problem"),
    "bad message": ("code", "client"),
    # the daemon and its clients
    "client came": ("client", "session"),
    "client left": ("client",),
    "client silent": ("client",),
    "client ended": ("client",),
    "answer lost": ("client", "seq", "session"),  # it could not be delivered; a new session begins
    "pause": ("holder",),
    "resume": ("holder",),
    "drain": ("holder",),
    "hold ended": ("hold", "holder"),  # the client that held this pause or drain has gone
    "shutdown": (),
    "generation": ("old", "new"),
    "cache withdrawn": ("problem",),
    "cache ready": (),
    "rank died": ("rank", "cause"),
    "failure": ("problem",),
}


REFUSED = frozenset({"rejected", "busy", "failed"})  # asides of pushes that were not admitted


class Note(NamedTuple):
    """One event. `at`: monotonic seconds. `task_id`: an engine's own name; "" if the event concerns no task."""

    at: float
    task_id: str
    what: str
    detail: dict[str, Any]
    engine: str = DEFAULT_ENGINE

    def plain(self) -> dict[str, Any]:
        """The detail in JSON types: a client's name, which is bytes, becomes text."""
        return {
            key: value.decode("ascii", "replace") if isinstance(value, bytes) else value
            for key, value in self.detail.items()
        }

    def __str__(self) -> str:
        detail = " ".join(f"{key}={value!r}" for key, value in self.detail.items())
        whose = "" if self.engine == DEFAULT_ENGINE else f" engine={self.engine!r}"
        return f"{self.at:.6f} {self.task_id or '-'} {self.what} {detail}".rstrip() + whose


# A note as it is recorded: at, engine, task_id, what, and its details. A plain tuple costs half as much as a Note.
_Entry = tuple[Any, ...]


class Recorder:
    """Two bounded rings, newest last. The daemon owns the recorder; every part may append.

    All engines share the rings. Task ids are an engine's own, so each engine appends through a recorder of its own
    (`of`).

    on_failure: called with one line when an invariant breaks; the dump thread sets that of the daemon's recorder.
    """

    def __init__(self, capacity: int = TASKS, clock: Clock = SYSTEM_CLOCK) -> None:
        """capacity: roughly how many tasks to remember; it sizes all rings."""
        self._tasks: deque[_Entry] = deque(maxlen=capacity * NOTES_PER_TASK)
        self._asides: deque[_Entry] = deque(maxlen=max(1, capacity // TASKS_PER_ASIDE))
        self._now = clock.monotonic
        self.on_failure: Callable[[str], None] = lambda _: None  # the failure is also logged
        self._daemons = self
        self.engine = DEFAULT_ENGINE

    def of(self, engine: str) -> Recorder:
        """The recorder of this engine, on the same rings."""
        own = copy.copy(self)
        own.engine = engine
        return own

    def admitted(self, task_id: str, kind: str, blocks: int, client: bytes) -> None:
        """Record a task's first notes."""
        now = self._now()
        self._tasks.append((now, self.engine, task_id, "admitted", kind, blocks))
        self._tasks.append((now, self.engine, task_id, "from", client))

    def step(self, task_id: str, what: str, rank: int, number: int) -> None:
        """Record a rank's step. what: see STEPS."""
        self._tasks.append((self._now(), self.engine, task_id, what, rank, number))

    def note(self, task_id: str, what: str, *detail: Any) -> None:
        """Record an event of an admitted task. detail: numbers and short text, in the order of FIELDS[what]."""
        self._tasks.append((self._now(), self.engine, task_id, what) + detail)  # noqa: RUF005 - twice as fast

    def aside(self, task_id: str, what: str, *detail: Any) -> None:
        """Record any other event. task_id: "" or that of a task that is not admitted. detail: as for `note`."""
        self._asides.append((self._now(), self.engine, task_id[:LONGEST_TEXT], what, *detail))

    def failure(self, task_id: str, problem: str) -> None:
        """Record that an invariant of this package broke, and call `on_failure`."""
        problem = problem.partition("\n")[0][:LONGEST_TEXT]
        self.aside(task_id, "failure", problem)
        self._daemons.on_failure(problem)

    def notes(self, task_id: str | None = None, *, of_any: bool = False) -> list[Note]:
        """All notes kept, or those of one task of this engine or `of_any`, oldest first. Safe from any thread."""
        tasks, asides = list(self._tasks), list(self._asides)
        if task_id is not None:
            short = task_id[:LONGEST_TEXT]
            tasks = [entry for entry in tasks if entry[2] == task_id and (of_any or entry[1] == self.engine)]
            asides = [entry for entry in asides if entry[2] == short and (of_any or entry[1] == self.engine)]
        return sorted(map(_note, tasks + asides), key=lambda note: note.at)

    def last_steps(self, tasks: set[tuple[str, str]]) -> dict[tuple[str, str], dict[int, str]]:
        """{(engine, task): {rank: its newest step}} for these tasks, from the newest LOOK_BACK notes."""
        found: dict[tuple[str, str], dict[int, str]] = {}
        if tasks:
            for _, engine, task_id, what, *detail in islice(reversed(self._tasks.copy()), LOOK_BACK):
                if what in STEPS and (engine, task_id) in tasks:
                    found.setdefault((engine, task_id), {}).setdefault(detail[0], what)
        return found

    def refusals(self, most: int) -> list[tuple[float, str, str, str, str, str]]:
        """The newest pushes that were not admitted: (when, engine, task_id, status, code, problem), newest first."""
        refused = (entry for entry in reversed(self._asides.copy()) if entry[3] in REFUSED)
        return [(*entry[:5], entry[6]) for entry in islice(refused, most)]

    def story(self, task_id: str) -> str:
        """The notes kept of one task, one per line."""
        return "\n".join(map(str, self.notes(task_id))) or "(no notes kept)"


def _note(entry: _Entry) -> Note:
    at, engine, task_id, what, *detail = entry
    return Note(at, task_id, what, dict(zip(FIELDS[what], detail, strict=True)), engine)
