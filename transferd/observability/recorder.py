"""The flight recorder: the last thousands of things that happened, at the price of a few stores each.

Every part that decides or begins something notes it here under the task it concerns. An invariant
failure tells the story of its task from these notes, `transferd explain` tells it to people
(story.py), and a dump of all notes explains a crash (dump_file.py).

What is noted is the *beginning* of each step that may take long, so that a task that hangs shows in
what; the note after it says when the step ended. There are three rings:

    steps    what every task goes through: a word, a rank and a number. Packed into one block of memory,
             24 bytes each, by C where it was built (_steps.c): in a daemon that does many small tasks, a
             note that is an object costs over a microsecond, most of it in what it does to the caches
    notes    what few tasks go through, with details: a cancel, an error, a wait for another task
    asides   everything else (refusals, clients that come and go, bad messages), apart, so that a flood
             of nonsense cannot push out the history of real tasks

A step names its task by the hash of its id; the ids of the last tasks are kept beside. Details are
numbers and short text only, so the garbage collector leaves them alone, and memory is bounded. Each
append and each copy of a ring is one operation under the interpreter lock: a dump may be taken from
another thread, also while the event loop is stuck.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from transferd.runtime.clock import SYSTEM_CLOCK, Clock

try:
    from transferd.observability import _steps
except ImportError:  # not built: the slower twin below
    _steps = None  # type: ignore[assignment]

TASKS = 8192  # whose ids are kept. Everything together is about 4 MiB when full
STEPS_PER_TASK = 8
TASKS_PER_ASIDE = 8
LONGEST_TEXT = 200  # characters of a text that came from outside

_STEP = struct.Struct("=dqHhi")  # when, hash of the task's id, which of STEPS, rank (-1: none), a number
_KEY, _KEY_OFFSET = struct.Struct("=q"), struct.calcsize("=d")  # the hash, and where in a step it lies
_CLIENT = 0x7FFFFFFF  # so much of the hash of a client's name is kept

KINDS = ("swap_out", "swap_in", "read", "write", "send", "receive")
STATUSES = ("ok", "partial", "miss", "failed", "expired", "cancelled", "rejected", "busy")


class Kind(NamedTuple):
    """How a step is told: the note's word, what it always says, and what its rank and number mean."""

    word: str
    always: Mapping[str, str] = {}
    fields: tuple[str, ...] = ()


# Every kind of step. Those of a rank begin something unless said otherwise.
STEPS: dict[str, Kind] = {
    **{f"admitted {kind}": Kind("admitted", {"kind": kind}, ("", "blocks")) for kind in KINDS},
    "from": Kind("from", fields=("", "client")),  # who pushed it
    "started": Kind("started"),  # every rank is at work: looking up keys, or copying
    "found": Kind("found", fields=("rank", "blocks")),  # read: look-up ended; so many leading keys are stored
    "fetch": Kind("fetch", fields=("rank", "objects")),  # read: waits for staging, then storage → staging
    "shares fetch": Kind("shares fetch", fields=("rank", "objects")),  # read: another task has begun it
    "to store": Kind("to store", fields=("rank", "blocks")),  # write: look-up ended; so many are not stored yet
    "copy": Kind("copy", fields=("rank", "blocks")),  # between device and staging, or device and host
    "put": Kind("put", fields=("rank", "objects")),  # write: staging → storage
    "stored": Kind("stored", fields=("rank", "objects")),  # write: a put has ended
    "arrived": Kind("arrived", fields=("rank", "blocks")),  # this rank's share has ended
    **{f"done {status}": Kind("done", {"status": status}, ("", "blocks")) for status in STATUSES},
}
_NUMBER = {what: number for number, what in enumerate(STEPS)}
_KIND = tuple(STEPS.values())

# Every other kind of note, and what it says.
FIELDS: dict[str, tuple[str, ...]] = {
    # an admitted task
    "waits": ("tasks",),  # for so many that were pushed before it and touch the same blocks
    "blocks free": ("after",),  # the task that it waited for last
    "told to end": ("reason",),
    "nobody waits": ("client",),  # the last one has gone
    "slack used up": (),  # ranks that have not arrived are left behind
    "corrupt object": ("rank", "name", "reason"),
    "error": ("rank", "code", "problem"),
    "cause": ("code", "problem"),  # of its answer
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
# What is told first and last of what happened at the same moment.
_ORDER = {"admitted": -2, "from": -1, "done": 1, "cause": 2, "straggling": 3}


class StepRing(Protocol):
    """A ring of packed steps. `copy`: all of it, places that were never written as zeros."""

    def step(self, task_id: str, what: str, rank: int, number: int, /) -> None: ...
    def copy(self) -> bytes: ...


class PythonSteps:
    """The ring of _steps.c in Python, for other clocks and for where C was not built."""

    def __init__(self, capacity: int, numbers: dict[str, int], now: Callable[[], float] = time.monotonic) -> None:
        self._ring = bytearray(capacity * _STEP.size)
        self._numbers = numbers
        self._now = now
        self._next = 0

    def step(self, task_id: str, what: str, rank: int, number: int, /) -> None:
        """Raises KeyError for a word that has no number, struct.error for numbers that do not fit."""
        at = self._next
        _STEP.pack_into(self._ring, at, self._now(), hash(task_id), self._numbers[what], rank, number)
        at += _STEP.size
        self._next = at if at < len(self._ring) else 0

    def copy(self) -> bytes:
        return bytes(self._ring)


class Recorder:
    """Three bounded rings, newest last. Owned by the daemon; anyone may append.

    step(task_id, what, rank, number): what an admitted task goes through; `what` is one of STEPS. On the
        event loop only.
    on_failure: told, with one line, when something happened that must not; set by whoever keeps dumps.
    """

    def __init__(self, capacity: int = TASKS, clock: Clock = SYSTEM_CLOCK) -> None:
        """capacity: about how many tasks are remembered; all rings are sized after it."""
        self._ring: deque[_Entry] = deque(maxlen=capacity)
        self._asides: deque[_Entry] = deque(maxlen=max(1, capacity // TASKS_PER_ASIDE))
        self._ids: deque[str] = deque(maxlen=capacity)
        self._now = clock.monotonic
        self._steps: StepRing
        if _steps is not None and clock.monotonic is time.monotonic:
            self._steps = _steps.Steps(capacity * STEPS_PER_TASK, _NUMBER)
        else:
            self._steps = PythonSteps(capacity * STEPS_PER_TASK, _NUMBER, clock.monotonic)
        self.step = self._steps.step  # the C function itself: no frame in between
        self.on_failure: Callable[[str], None] = _nobody_keeps_dumps

    def admitted(self, task_id: str, what: str, blocks: int, client: bytes) -> None:
        """A task's first steps. what: "admitted" and its kind."""
        self._ids.append(task_id)
        self.step(task_id, what, -1, blocks)
        self.step(task_id, "from", -1, hash(client) & _CLIENT)

    def note(self, task_id: str, what: str, *detail: Any) -> None:
        """Of an admitted task. detail: numbers and short text, as FIELDS names them for this `what`."""
        self._ring.append((self._now(), task_id, what, detail))

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
        ring, asides, steps = list(self._ring), list(self._asides), self._steps.copy()
        clients = {hash(entry[3][0]) & _CLIENT: entry[3][0] for entry in asides if entry[2] == "client came"}
        if task_id is None:
            unpacked = _all_steps(steps, {hash(name): name for name in list(self._ids)}, clients)
        else:
            unpacked = _steps_of(steps, task_id, clients)
            ring = [entry for entry in ring if entry[1] == task_id]
            asides = [entry for entry in asides if entry[1] == task_id[:LONGEST_TEXT]]
        kept = [*unpacked, *_told(ring), *_told(asides)]
        kept.sort(key=_when)
        return kept

    def story(self, task_id: str) -> str:
        """What is still known of one task, one line a note."""
        return "\n".join(map(str, self.notes(task_id))) or "(no notes kept)"

    def __iter__(self) -> Iterator[Note]:
        return iter(self.notes())


def _told(entries: Iterable[_Entry]) -> Iterator[Note]:
    for at, task, what, detail in entries:
        yield Note(at, task, what, dict(zip(FIELDS[what], detail, strict=True)))


def _steps_of(steps: bytes, task_id: str, clients: Mapping[int, bytes]) -> Iterator[Note]:
    """Those of one task, found by searching for its hash: a tenth of a millisecond rather than tens."""
    key = _KEY.pack(hash(task_id))
    at = steps.find(key)
    while at >= 0:
        if at % _STEP.size == _KEY_OFFSET:
            yield _step(_STEP.unpack_from(steps, at - _KEY_OFFSET), task_id, clients)
        at = steps.find(key, at + 1)


def _all_steps(steps: bytes, names: Mapping[int, str], clients: Mapping[int, bytes]) -> Iterator[Note]:
    """names: task ids by their hash; a task whose id is not kept any more is named by the hash."""
    for step in _STEP.iter_unpack(steps):
        if any(step):  # else this place was never written
            yield _step(step, names.get(step[1]) or f"#{step[1] & (1 << 64) - 1:016x}", clients)


def _step(packed: tuple[Any, ...], task_id: str, clients: Mapping[int, bytes]) -> Note:
    at, _, what, rank, number = packed
    word, always, fields = _KIND[what]
    detail: dict[str, Any] = {**always, **dict(zip(fields, (rank, number), strict=False))}
    detail.pop("", None)
    if word == "from":
        detail["client"] = clients.get(number, f"#{number:08x}")
    return Note(at, task_id, word, detail)


def _when(note: Note) -> tuple[float, int]:
    return note.at, _ORDER.get(note.what, 0)


def _nobody_keeps_dumps(problem: str) -> None:
    """The log has it all the same."""
