"""SimEffects: the carrying out of a daemon's decisions, which raises by plan; and SimLog, a log that refuses lines.

The seams are those behind the coordinator: what a rank, the barrier, the server and whoever hears of tasks may raise.
The plan says how often, for each kind of instruction. Some effects raise before they have done anything, some after.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import structlog

from tests.support.named_peers import NamedPeers
from tests.support.simulation.clock import SimClock
from tests.support.simulation.faults import Dice, EffectFaults, LogFaults
from transferd.control import instructions as do
from transferd.daemon.daemon import Daemon
from transferd.observability.logs import Log, LogWriter
from transferd.tasks import TaskResult

# An instruction's name in the fault plan.
FAULTS = {
    "Start": "start",
    "StopTask": "stop_task",
    "ExpireRound": "expire_round",
    "Reply": "reply",
    "Publish": "publish",
    "WakeAt": "wake_at",
}


class EffectRaised(Exception):
    """Of a simulated effect."""


class SimEffects:
    """Makes the effects of one daemon raise.

    faults: the plan, may be replaced at any time. dice: for scripts, operations are the names of instructions.
    struck: tasks whose start raised. lost: when an answer to this connection was lost last.
    """

    def __init__(self, daemon: Daemon, rng: random.Random) -> None:
        self.faults = EffectFaults()
        self.dice = Dice(rng, "effects")
        self.struck: set[str] = set()
        self.lost: dict[bytes, float] = {}
        self._clock = daemon.clock
        assert isinstance(daemon.transport, NamedPeers)
        self._send = daemon.transport.send
        self._refusing = False
        coordinator = daemon.default.coordinator
        for kind in (do.StopTask, do.ExpireRound, do.Publish, do.WakeAt):
            coordinator._apply[kind] = self._either_side(kind.__name__, coordinator._apply[kind])
        for worker in coordinator.workers:
            worker.start = self._before("Start", worker.start, lambda job, *_: job.task.task_id)  # type: ignore[method-assign]
        barrier = coordinator.barrier
        barrier.open = self._before("Start", barrier.open, lambda task_id, *_: task_id)  # type: ignore[method-assign]
        daemon.transport.send = self._sends  # type: ignore[method-assign]
        self._deliver = coordinator.deliver
        coordinator.deliver = self._delivers

    def _raises(self, instruction: str) -> bool:
        fault = FAULTS[instruction]
        return self.dice.draw(instruction, {fault: getattr(self.faults, fault)}) is not None

    def _either_side(self, name: str, effect: Callable[[Any], None]) -> Callable[[Any], None]:
        def carried_out(instruction: Any) -> None:
            raises = self._raises(name)
            if not raises or self.dice.rng.random() < 0.5:
                effect(instruction)
            if raises:
                raise EffectRaised(name)

        return carried_out

    def _before(self, name: str, effect: Callable[..., Any], task_id: Callable[..., str]) -> Callable[..., Any]:
        def carried_out(*arguments: Any) -> Any:
            if self._raises(name):
                self.struck.add(task_id(*arguments))
                raise EffectRaised(name)
            return effect(*arguments)

        return carried_out

    def _delivers(self, client: bytes, seq: int, result: TaskResult) -> None:
        self._refusing = self._raises("Reply")
        if self._refusing:
            self.lost[client] = self._clock.monotonic()
        try:
            self._deliver(client, seq, result)
        finally:
            self._refusing = False

    def _sends(self, peer: bytes, payload: bytes) -> bool:
        if self._refusing:
            raise EffectRaised("Reply")
        return self._send(peer, payload)


class SimLog(LogWriter):
    """The end of the log, without its thread: it takes lines until it is full, or refuses them.

    Used as a context it is where everything that is logged goes. faults: the plan, may be replaced at any time.
    """

    def __init__(self, clock: SimClock, rng: random.Random) -> None:
        super().__init__(-1, limit=8192)
        self.faults = LogFaults()
        self.dice = Dice(rng, "log")
        self.offered = 0
        self._log = Log(self, clock=clock.monotonic)

    def start(self) -> None:
        """Nobody writes."""

    def put(self, line: bytes) -> None:
        self.offered += 1
        if self.dice.draw("put", {"refuse": self.faults.refuse}):
            raise OSError("the log refuses (simulated)")
        super().put(line)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        before = structlog.get_config()

        def take(_: object, method: str, event: structlog.typing.EventDict) -> str:
            self._log.take(method, event["event"], dict(event))
            raise structlog.DropEvent

        structlog.configure(processors=[take], wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET))
        try:
            yield
        finally:
            structlog.configure(**before)

    def check(self) -> None:
        """Every line is in the queue, or counted as lost."""
        assert self._lines.qsize() + self.dropped == self.offered, (self._lines.qsize(), self.dropped, self.offered)
        assert self._waiting <= 8192
