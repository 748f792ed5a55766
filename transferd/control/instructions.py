"""What events lead to: instructions, which the coordinator carries out. Plain data, no behaviour.

Instructions are msgspec structs because every task creates half a dozen, and creating a frozen dataclass costs several
times as much.
"""

from __future__ import annotations

import msgspec

from transferd.control.order import Claim
from transferd.tasks import Stop, Task, TaskResult


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
    """Call `deadline_reached` at this monotonic time. Replaces the time of any earlier WakeAt."""

    when: float


class Unblock(msgspec.Struct, frozen=True):
    """Have `bytes_free` called of another engine's dispatcher, for the task of this claim."""

    claim: Claim


class Again(msgspec.Struct, frozen=True):
    """Call `client_gone` again, after others have had their turn: there is more to do."""

    client: bytes


Instruction = Start | StopTask | ExpireRound | Reply | Publish | WakeAt | Unblock | Again
