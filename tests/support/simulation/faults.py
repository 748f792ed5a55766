"""What may go wrong in a simulation, as data; and the dice that decide when it does.

A plan is a frozen value: probabilities and latencies. Whoever runs a simulation changes plans on the
way (calm at the start, a storm, calm again to see that everything ends) by assigning another one.
All chance comes from the `random.Random` given to the dice, so a seed replays it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latency:
    """How long something takes: uniform between low and high seconds; with probability `slow`, `factor` times that."""

    low: float = 0.0
    high: float = 0.0
    slow: float = 0.0
    factor: float = 50.0

    def draw(self, rng: random.Random) -> float:
        seconds = rng.uniform(self.low, self.high)
        return seconds * self.factor if self.slow and rng.random() < self.slow else seconds


NOW = Latency()


@dataclass(frozen=True, slots=True)
class DeviceFaults:
    """Of each copy. fail: half of it is copied, then TierError. lost: so too, and the device is gone for good.

    stuck: it stands still until somebody lets it go on (SimDevice.unstick), past every deadline.
    """

    latency: Latency = NOW
    fail: float = 0.0
    lost: float = 0.0
    stuck: float = 0.0

    def of_copy(self) -> dict[str, float]:
        return {"fail": self.fail, "lost": self.lost, "stuck": self.stuck}


@dataclass(frozen=True, slots=True)
class StorageFaults:
    """unavailable: of each call, the whole of it raises. The others are of each object:

    error: it fails. spoilt: a get fails, and the object is set aside.
    full: a put fails for want of room. missing: a get does not find it though it is
    there. flip: a get delivers it with one bit wrong, and says FOUND. short: a get delivers only a part
    of it, leaves the rest of the buffer as it was, and says FOUND.
    """

    latency: Latency = NOW
    unavailable: float = 0.0
    error: float = 0.0
    full: float = 0.0
    missing: float = 0.0
    flip: float = 0.0
    short: float = 0.0
    spoilt: float = 0.0

    def of_call(self) -> dict[str, float]:
        return {"unavailable": self.unavailable}

    def of_put(self) -> dict[str, float]:
        return {"error": self.error, "full": self.full}

    def of_get(self) -> dict[str, float]:
        plan = {"error": self.error, "missing": self.missing, "flip": self.flip, "short": self.short}
        return plan | {"spoilt": self.spoilt}  # last, so that a seed's older draws stay what they were


@dataclass(frozen=True, slots=True)
class ThreadFaults:
    """refused: of each thread that is to be started, that the system refuses. latency: of each function."""

    latency: Latency = NOW
    refused: float = 0.0

    def of_start(self) -> dict[str, float]:
        return {"refused": self.refused}


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """refuse: of each message that either end sends, that it is not taken (EAGAIN: the other end does not read).

    Of a connection that breaks. lose: of each message on its way, that it and all behind it are lost. duplicate: of
    each of the last few messages that had arrived, that the client sends it again on its next connection (it cannot
    know better).
    """

    latency: Latency = NOW
    lose: float = 0.0
    duplicate: float = 0.0
    refuse: float = 0.0


@dataclass(frozen=True, slots=True)
class EffectFaults:
    """Of carrying out each instruction of that kind: that it raises. Nothing in a healthy daemon does."""

    start: float = 0.0
    stop_task: float = 0.0
    expire_round: float = 0.0
    reply: float = 0.0
    publish: float = 0.0
    wake_at: float = 0.0


@dataclass(frozen=True, slots=True)
class LogFaults:
    """refuse: of each line, that the log raises."""

    refuse: float = 0.0


SOUND = EffectFaults()
READ = LogFaults()


class Dice:
    """Decides which fault happens: first the scripted ones, in order, then by probability.

    drawn: how often each fault was drawn, by name, for an oracle that checks that each was counted.
    """

    def __init__(self, rng: random.Random | None = None, owner: str = "") -> None:
        self.rng = rng or random.Random(0)
        self.drawn: Counter[str] = Counter()
        self._owner = owner
        self._scripted: dict[str, deque[str | None]] = {}

    def script(self, operation: str, *faults: str | None) -> None:
        """The next draws for this operation are these; None means none."""
        self._scripted.setdefault(operation, deque()).extend(faults)

    def draw(self, operation: str, weights: Mapping[str, float]) -> str | None:
        """At most one fault, by name. The probabilities of a plan add up to at most 1."""
        scripted = self._scripted.get(operation)
        fault = scripted.popleft() if scripted else self._by_chance(weights)
        if fault is not None:
            self.drawn[fault] += 1
            note(f"fault: {self._owner} {operation} {fault}")
        return fault

    def _by_chance(self, weights: Mapping[str, float]) -> str | None:
        if not any(weights.values()):
            return None
        point = self.rng.random()
        for fault, weight in weights.items():
            point -= weight
            if point < 0:
                return fault
        return None


class Gate:
    """Holds what wants to pass while it is shut: a scripted stall. Open at first."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] | None = None

    def hold(self) -> None:
        if self._waiting is None:
            self._waiting = deque()

    def release(self) -> None:
        """Let everything through, in the order in which it came, and stay open."""
        waiting, self._waiting = self._waiting, None
        for future in waiting or ():
            if not future.done():
                future.set_result(None)

    @property
    def is_open(self) -> bool:
        return self._waiting is None

    @property
    def held(self) -> int:
        """How many wait."""
        return len(self._waiting or ())

    async def passed(self) -> None:
        if self._waiting is not None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future


async def take(seconds: float) -> None:
    """Let that much of the loop's time pass; nothing at all for 0."""
    if seconds > 0:
        await asyncio.sleep(seconds)


def note(text: str) -> None:
    """Into the trace, where the running loop keeps one."""
    keep = getattr(asyncio.get_running_loop(), "note", None)
    if keep is not None:
        keep(text)
