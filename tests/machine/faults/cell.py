"""One cell of the matrix: one fault, to one process, in one phase of one task; how it is run is in runner.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.machine.faults.contents import BLOCK_BYTES, RANKS
from tests.machine.faults.keeper import Message
from tests.machine.faults.world import CLIENT_TIMEOUT_S, DEADLINE_SLACK_S

FAULTS = ("kill -9", "stop", "slow")
VICTIMS = ("engine", "daemon", "mooncake_master", "segment owner")
PHASES = {  # and the kind of task that has it
    "push": "write",
    "gather": "write",
    "store": "write",
    "match": "read",
    "load": "read",
    "scatter": "read",
    "result": "read",
}
POOL = ("mooncake_master", "segment owner")

TASK_BLOCKS = 6  # three chunks
TASK_TIMEOUT_S = 8.0
DAEMON_LOST_S = 5.0
BUSY_S = 6.0  # for a machine that does other things, too, and may let a process stand still for 3 s
ANSWER_S = 60.0  # that the runner waits for a result before it gives up
RECOVERY_S = 60.0
GATE_S = 60.0
# How long a stopped process stands still: longer than the others are willing to wait for it.
HOLD_S = {
    "engine": CLIENT_TIMEOUT_S + 2.0,  # it is given up
    "daemon": DAEMON_LOST_S + 3.0,  # it is lost
    "mooncake_master": 3.0,  # past storage.mooncake.timeout: the breaker opens
    "segment owner": 5.0,  # past the transport's own limit of 3 s
}
# Slow motion: it runs a twentieth of the time, in pieces that are shorter than a task.
STILL_S, MOVING_S = 0.04, 0.002


@dataclass(frozen=True)
class Cell:
    """Which fault, to whom, when, on which backend."""

    fault: str
    victim: str
    phase: str
    backend: str

    @property
    def name(self) -> str:
        return f"{self.backend}, {self.phase}, {self.fault}, {self.victim}"

    @property
    def shared(self) -> bool:
        """The fault is in what all engines use, so others may hear of it."""
        return self.victim != "engine"

    @property
    def forgets(self) -> bool:
        """With this process the pool loses objects; a cache may, and no result may then claim them."""
        return self.fault == "kill -9" and self.victim in POOL


CELLS = [
    Cell(fault, victim, phase, backend)
    for backend, victims in (("mooncake", VICTIMS), ("file", VICTIMS[:2]))
    for victim in victims
    for fault in FAULTS
    for phase in PHASES
]


@dataclass
class Row:
    """What became of a cell. told: the engine's result. problems: empty for a green cell.

    beside: what the second engine was told meanwhile, a status or a code, and how often.
    """

    cell: Cell
    told: str = ""
    result_s: float | None = None  # from the fault to the engine's result
    served_s: float | None = None  # from the fault until everything worked again
    checked: int = 0  # keys read back
    gone: int = 0  # of those that a result had called stored, now a miss
    wrong: int = 0
    beside: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def latest_result_s(cell: Cell) -> float:
    """Seconds from the fault within which a surviving engine must have its result."""
    if cell.victim == "daemon" and cell.fault != "slow":
        return DAEMON_LOST_S + BUSY_S
    stood_still = HOLD_S["engine"] if cell.victim == "engine" and cell.fault == "stop" else 0.0
    return TASK_TIMEOUT_S + DEADLINE_SLACK_S + stood_still + BUSY_S


def ripe(phase: str) -> Callable[[list[Message]], bool]:
    """When the task stands where the cell wants it, judged by the passages of its gate so far."""
    if phase in ("push", "match"):
        return lambda _: True
    if phase == "result":
        return _complete
    return lambda seen: max(Counter(message["rank"] for message in seen).values()) >= 2  # in the second chunk


def _complete(seen: list[Message]) -> bool:
    arrived: Counter[int] = Counter()
    for message in seen:
        arrived[message["rank"]] += message["nbytes"]
    return all(arrived[rank] == TASK_BLOCKS * BLOCK_BYTES for rank in range(RANKS))
