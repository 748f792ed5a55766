"""What the dispatcher knows of one admitted task, and the legal moves between its states."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from transferd.control.hazards import Claim
from transferd.runtime.compat import StrEnum
from transferd.tasks import ErrorInfo, Lane, Stop, Task


class State(StrEnum):
    """Where an admitted task is."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    DONE = "done"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.DONE}),
    State.RUNNING: frozenset({State.CANCELLING, State.DONE}),
    State.CANCELLING: frozenset({State.DONE}),
    State.DONE: frozenset(),
}

AT_WORK = frozenset({State.RUNNING, State.CANCELLING})


@dataclass(slots=True, eq=False)
class TaskState:
    """One admitted task. Only the dispatcher changes it."""

    task: Task | None  # None once done: alarms keep the record, and keys and token ids may be large
    task_id: str
    lane: Lane
    content: int  # content_hash of the task; a repeated push must have the same
    generation: str
    memory_epoch: int  # how often the memory had been taken away at its admission
    admitted_at: float
    deadline: float
    nbytes: int  # counted against the lane's bytes in flight
    waiters: list[tuple[bytes, int]]  # (client, seq) to answer; empty when all clients are gone
    claim: Claim | None = None  # None before the blocks are claimed and after they are released
    state: State = State.QUEUED
    stop: Stop | None = None  # why it must stop, while cancelling
    withdrawn: ErrorInfo | None = None  # it must stop because its memory was taken away, and nobody has cancelled it
    forsaken_at: float = math.inf  # while cancelling: when ranks that have not arrived are left behind
    straggling: set[int] = field(default_factory=set)  # once done: the ranks left behind
