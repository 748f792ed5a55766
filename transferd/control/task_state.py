"""One admitted task, as the dispatcher knows it, and the law of its states."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from transferd.control.hazards import Claim
from transferd.tasks import Lane, Stop, Task


class State(enum.StrEnum):
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
    """Changed by the dispatcher only."""

    task: Task | None  # None once it is done: its keys and token ids may be many, and alarms keep the record
    task_id: str
    lane: Lane
    content: int  # hash of what is asked; a re-push of the same id must ask the same
    generation: str
    memory_epoch: int  # which of the cache's memories its blocks are in
    admitted_at: float
    deadline: float
    nbytes: int  # counted against the lane's bytes in flight
    waiters: list[tuple[bytes, int]]  # (client, seq) to be answered; empty when all have gone
    claim: Claim | None = None  # None before the blocks are claimed and after they are released
    state: State = State.QUEUED
    stop: Stop | None = None  # why it must stop, while cancelling
    forsaken_at: float = math.inf  # while cancelling: when the ranks that still hold on are left behind
    straggling: set[int] = field(default_factory=set)  # ranks left behind, after done
