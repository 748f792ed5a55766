"""What the dispatcher hears (events) and what it asks for in return (instructions). Plain data, no behaviour.

The dispatcher never acts. It hears one event, changes its own state, and returns instructions; the
coordinator carries them out and reports what came of it as further events. A test, a simulation and
a replay of a recorded incident can therefore drive the same decisions with nothing around them.
"""

from __future__ import annotations

from dataclasses import dataclass

from transferd.tasks import Merged, Stop, Task, TaskResult

# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskSubmitted:
    """A client pushed a task and waits for its result under its own number `seq`."""

    client: bytes
    seq: int
    task: Task
    now: float


@dataclass(frozen=True, slots=True)
class RoundMerged:
    """The ranks' outcomes of a running task are in. `missing`: live ranks that had not arrived.

    A missing rank may still be touching the task's blocks; they stay claimed until its RankLeft.
    """

    task_id: str
    merged: Merged
    missing: tuple[int, ...]
    now: float


@dataclass(frozen=True, slots=True)
class RankLeft:
    """A rank that was missing when its round ended has let go of the task's blocks."""

    task_id: str
    rank: int
    now: float


@dataclass(frozen=True, slots=True)
class RankDied:
    """A rank will never work again. With it the group: no task can be complete any more."""

    rank: int
    cause: str
    now: float


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A client vanished. Work that nobody waits for any more is taken back."""

    client: bytes
    now: float


@dataclass(frozen=True, slots=True)
class CancelRequested:
    task_id: str
    now: float


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """The time last asked for with WakeAt has come."""

    now: float


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """Start nothing more until ResumeRequested; tasks are still admitted and wait."""

    now: float


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Start and admit again, after a pause or a drain."""

    now: float


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Admit nothing more; finish what is admitted."""

    now: float


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """Admit nothing and start nothing more, for good."""

    now: float


@dataclass(frozen=True, slots=True)
class QueueAbandoned:
    """Fail everything that is queued, each task with its result."""

    now: float


@dataclass(frozen=True, slots=True)
class GenerationBumped:
    """Tasks from now on name objects of this generation; older objects are out of reach."""

    generation: str
    now: float


Event = (
    TaskSubmitted
    | RoundMerged
    | RankLeft
    | RankDied
    | ClientGone
    | CancelRequested
    | DeadlineReached
    | PauseRequested
    | ResumeRequested
    | DrainRequested
    | ShutdownRequested
    | QueueAbandoned
    | GenerationBumped
)

# --- instructions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Open the task's round and start it on every rank. The order of Starts is the order on each rank."""

    task: Task
    generation: str
    admitted_at: float


@dataclass(frozen=True, slots=True)
class StopTask:
    """Tell every rank to end this running task early and arrive with what it has."""

    task_id: str
    reason: Stop


@dataclass(frozen=True, slots=True)
class ExpireRound:
    """The slack is used up, too: complete the round without the ranks that are missing."""

    task_id: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Deliver a terminal result to one waiter."""

    client: bytes
    seq: int
    result: TaskResult


@dataclass(frozen=True, slots=True)
class Publish:
    """An admitted task has ended; for those who follow all tasks. Once per task, however many waiters it had."""

    task: Task
    result: TaskResult


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send DeadlineReached at this monotonic time; replaces the time asked for before."""

    when: float


Instruction = Start | StopTask | ExpireRound | Reply | Publish | WakeAt
