"""The dispatcher's input (events) and output (instructions). Plain data, no behaviour.

The dispatcher never acts. It takes one event, changes its own state, and returns instructions. The
coordinator carries them out and reports the outcome as further events. So a test, a simulation and a
replay of a recorded incident can drive the same decisions without anything around them.

They are msgspec structs because every task creates half a dozen, and creating a frozen dataclass costs
several times as much.
"""

from __future__ import annotations

import msgspec

from transferd.tasks import ErrorInfo, Merged, Stop, Task, TaskResult

# --- events ---------------------------------------------------------------------------------------


class TaskSubmitted(msgspec.Struct, frozen=True):
    """A client pushed a task and waits for its result under its own number `seq`."""

    client: bytes
    seq: int
    task: Task
    now: float


class RoundMerged(msgspec.Struct, frozen=True):
    """The ranks' outcomes of a running task are in. `missing`: live ranks that had not arrived.

    A missing rank may still be touching the task's blocks; they stay claimed until its RankLeft.
    """

    task_id: str
    merged: Merged
    missing: tuple[int, ...]
    now: float


class RankLeft(msgspec.Struct, frozen=True):
    """A rank that was missing when its round ended has finished with the task's blocks."""

    task_id: str
    rank: int
    now: float


class RankFailed(msgspec.Struct, frozen=True):
    """A rank will never work again. So the whole group is dead: no task can complete any more."""

    rank: int
    cause: str
    now: float


class ClientGone(msgspec.Struct, frozen=True):
    """A client vanished. Tasks that no other client waits for are cancelled; its pauses and drains end."""

    client: bytes
    now: float


class CancelRequested(msgspec.Struct, frozen=True):
    task_id: str
    now: float


class DeadlineReached(msgspec.Struct, frozen=True):
    """The time of the last WakeAt has come."""

    now: float


class CacheWithdrawn(msgspec.Struct, frozen=True):
    """Not every rank has its memory any more: admit nothing until CacheReady, and say why.

    end: admitted tasks cannot finish either: running ones must stop, queued ones fail.
    """

    error: ErrorInfo
    end: bool
    now: float


class CacheReady(msgspec.Struct, frozen=True):
    """Every rank has its memory. Admit again, unless something else prevents it (drain, shutdown, a dead rank)."""

    now: float


class MappingsChanged(msgspec.Struct, frozen=True):
    """Which memory engines have mapped now.

    unmapped: ranks whose memory no client has attached or offered since it was made. outdated: clients that
    still have earlier memory mapped, and of which ranks.
    """

    unmapped: tuple[int, ...]
    outdated: dict[bytes, tuple[int, ...]]
    now: float


class HostEmptied(msgspec.Struct, frozen=True):
    """The host pool was freed. No task is admitted or running."""

    now: float


class PauseRequested(msgspec.Struct, frozen=True):
    """Start nothing more; tasks are still admitted and wait.

    Until the holder's ResumeRequested, or ClientGone for `client`: the connection that it asked by last.
    """

    now: float
    client: bytes = b""
    holder: str = ""


class ResumeRequested(msgspec.Struct, frozen=True):
    """The holder's pauses and drains end; if it holds none, everybody's do. Brings back no memory."""

    now: float
    holder: str = ""


class DrainRequested(msgspec.Struct, frozen=True):
    """Admit nothing more; finish what is admitted. Ends as a pause does."""

    now: float
    client: bytes = b""
    holder: str = ""


class ShutdownRequested(msgspec.Struct, frozen=True):
    """Admit nothing and start nothing more, for good."""

    now: float


class QueueAbandoned(msgspec.Struct, frozen=True):
    """Fail everything that is queued, each task with its result."""

    now: float


class GenerationBumped(msgspec.Struct, frozen=True):
    """Tasks from now on name objects of this generation; older objects are out of reach."""

    generation: str
    now: float


Event = (
    TaskSubmitted
    | RoundMerged
    | RankLeft
    | RankFailed
    | ClientGone
    | CancelRequested
    | DeadlineReached
    | CacheWithdrawn
    | CacheReady
    | MappingsChanged
    | HostEmptied
    | PauseRequested
    | ResumeRequested
    | DrainRequested
    | ShutdownRequested
    | QueueAbandoned
    | GenerationBumped
)

# --- instructions ---------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """Open the task's round and start it on every rank. The order of Starts is the order on each rank."""

    task: Task
    generation: str
    admitted_at: float


class StopTask(msgspec.Struct, frozen=True):
    """Tell every rank to end this running task early and arrive with what it has."""

    task_id: str
    reason: Stop


class ExpireRound(msgspec.Struct, frozen=True):
    """The slack is used up, too: complete the round without the ranks that are missing."""

    task_id: str


class Reply(msgspec.Struct, frozen=True):
    """Deliver a terminal result to one waiter."""

    client: bytes
    seq: int
    result: TaskResult


class Publish(msgspec.Struct, frozen=True):
    """An admitted task has ended; for those who follow all tasks. Once per task, however many waiters it had."""

    task: Task
    result: TaskResult


class WakeAt(msgspec.Struct, frozen=True):
    """Send DeadlineReached at this monotonic time; replaces the time asked for before."""

    when: float


Instruction = Start | StopTask | ExpireRound | Reply | Publish | WakeAt
