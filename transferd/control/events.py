"""The dispatcher's input (events) and output (instructions). Plain data, no behaviour.

A test, a simulation and a replay of a recorded incident can drive the same decisions without a daemon around them.
Events and instructions are msgspec structs because every task creates half a dozen, and creating a frozen dataclass
costs several times as much.
"""

from __future__ import annotations

import msgspec

from transferd.control.byte_ranges import WindowGrid
from transferd.control.order import Claim
from transferd.tasks import ErrorInfo, Merged, Stop, Task, TaskResult


class TaskSubmitted(msgspec.Struct, frozen=True):
    """A client pushed a task and waits for its result under its own number `seq`.

    again: the client will push it again, under the same seq, so a refusal is not answered.
    """

    client: bytes
    seq: int
    task: Task
    now: float
    again: bool = False


class RoundMerged(msgspec.Struct, frozen=True):
    """A running task's round has ended. `missing`: live ranks that had not arrived.

    A missing rank may still be touching the task's blocks, which stay claimed until its RankLeft.

    settled: whether every rank, dead ones included, is done with the blocks; if not, TaskSettled follows.
    """

    task_id: str
    merged: Merged
    missing: tuple[int, ...]
    now: float
    settled: bool = True


class TaskSettled(msgspec.Struct, frozen=True):
    """The last rank of an answered task is done with its blocks."""

    task_id: str
    now: float


class BytesFree(msgspec.Struct, frozen=True):
    """A queued task need not wait any longer: other engines' tasks with bytes of its windows have ended."""

    task_id: str
    now: float


class RankLeft(msgspec.Struct, frozen=True):
    """A rank that was missing when its round ended has finished with the task's blocks."""

    task_id: str
    rank: int
    now: float


class RankFailed(msgspec.Struct, frozen=True):
    """A rank has died, and the whole engine with it: no task can complete any more."""

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
    """The time of the last WakeAt has arrived."""

    now: float


class CacheWithdrawn(msgspec.Struct, frozen=True):
    """Some rank has lost its memory: admit nothing until CacheReady, and answer with `error`.

    end: admitted tasks cannot finish: stop the running ones and fail the queued ones.
    """

    error: ErrorInfo
    end: bool
    now: float


class CacheReady(msgspec.Struct, frozen=True):
    """Every rank has its memory. Admit again, unless something else prevents it (drain, shutdown, a dead rank).

    windows: where each rank's device blocks lie, if they are windows.
    """

    now: float
    windows: tuple[WindowGrid, ...] = ()


class MappingsChanged(msgspec.Struct, frozen=True):
    """Which ranks' memory the engines have mapped now."""

    unmapped: tuple[int, ...]  # ranks whose current memory no client has attached or offered
    outdated: dict[bytes, tuple[int, ...]]  # clients that still have earlier memory mapped, and of which ranks
    now: float


class HostEmptied(msgspec.Struct, frozen=True):
    """The host pool was freed. No task is admitted or running."""

    now: float


class PauseRequested(msgspec.Struct, frozen=True):
    """Start nothing more; tasks are still admitted and wait.

    It lasts until the holder's ResumeRequested, or until ClientGone for `client`, the holder's latest connection.
    """

    now: float
    client: bytes = b""
    holder: str = ""  # a name for people
    proof: str = ""  # a secret of the holder's, so that another client cannot end a hold by its name alone


class ResumeRequested(msgspec.Struct, frozen=True):
    """End the holder's pauses and drains, or all of them if it holds none. This does not restore a cleared cache."""

    now: float
    holder: str = ""
    proof: str = ""


class DrainRequested(msgspec.Struct, frozen=True):
    """Admit nothing more; finish what is admitted. A drain ends like a pause."""

    now: float
    client: bytes = b""
    holder: str = ""
    proof: str = ""


class ShutdownRequested(msgspec.Struct, frozen=True):
    """Admit nothing and start nothing more, for good."""

    now: float


class QueueAbandoned(msgspec.Struct, frozen=True):
    """Fail everything that is queued, each task with its result."""

    now: float


class GenerationBumped(msgspec.Struct, frozen=True):
    """From now on, tasks use objects of this generation; older objects become unreachable."""

    generation: str
    now: float


Event = (
    TaskSubmitted
    | RoundMerged
    | TaskSettled
    | BytesFree
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


class Start(msgspec.Struct, frozen=True):
    """Open the task's round and start it on every rank. The order of Starts is the order on each rank."""

    task: Task
    generation: str
    admitted_at: float


class StopTask(msgspec.Struct, frozen=True):
    """Make every rank end this running task early and arrive with what it has."""

    task_id: str
    reason: Stop


class ExpireRound(msgspec.Struct, frozen=True):
    """The slack has run out: complete the round without the missing ranks."""

    task_id: str


class Reply(msgspec.Struct, frozen=True):
    """Deliver a terminal result to one waiter."""

    client: bytes
    seq: int
    result: TaskResult


class Publish(msgspec.Struct, frozen=True):
    """Report an admitted task's end to metrics, history and KV events: once, however many waiters it had."""

    task: Task
    result: TaskResult


class WakeAt(msgspec.Struct, frozen=True):
    """Send DeadlineReached at this monotonic time. Replaces the time of any earlier WakeAt."""

    when: float


class Unblock(msgspec.Struct, frozen=True):
    """Have another engine's dispatcher hear BytesFree for the task of this claim."""

    claim: Claim


class Again(msgspec.Struct, frozen=True):
    """Have this dispatcher hear an event again, after others have had their turn: there is more to do."""

    event: ClientGone


Instruction = Start | StopTask | ExpireRound | Reply | Publish | WakeAt | Unblock | Again
