"""Weather: all fault plans of a simulated world at one time, and how a seed draws one.

A storm is drawn the way swarm testing does it: each kind of fault is absent with probability one half,
else it has a weight of its own. A storm with everything in it hides faults behind each other (nothing
that needs a full storage *and* fast copies ever happens in it); half of the kinds at a time reaches
combinations that no fixed plan does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from tests.support.simulation.faults import (
    READ,
    SOUND,
    DeviceFaults,
    EffectFaults,
    Latency,
    LogFaults,
    NetworkFaults,
    StorageFaults,
    ThreadFaults,
)


@dataclass(frozen=True, slots=True)
class Weather:
    """All fault plans at one time. A kind of fault is named `part.field`, such as `storage.flip`."""

    device: DeviceFaults
    storage: StorageFaults
    threads: ThreadFaults
    network: NetworkFaults
    effects: EffectFaults = SOUND
    log: LogFaults = READ

    def weights(self) -> dict[str, float]:
        """The probability of each kind of fault that can happen; `part.slow` stands for slow I/O of a part."""
        return {kind: weight for kind, weight in self._all() if weight}

    def without(self, kind: str) -> Weather:
        """The same weather with one kind of fault left out."""
        part, _, name = kind.partition(".")
        plan = getattr(self, part)
        if name == "slow":
            return replace(self, **{part: replace(plan, latency=replace(plan.latency, slow=0.0))})
        return replace(self, **{part: replace(plan, **{name: 0.0})})

    def __str__(self) -> str:
        return ", ".join(f"{kind} {weight:.3g}" for kind, weight in self.weights().items()) or "calm"

    def _all(self) -> Iterator[tuple[str, float]]:
        for part in fields(self):
            plan = getattr(self, part.name)
            for field in fields(plan):
                if field.name == "latency":
                    yield f"{part.name}.slow", plan.latency.slow
                else:
                    yield f"{part.name}.{field.name}", getattr(plan, field.name)


_PACE = Latency(0.001, 0.01)
CALM = Weather(DeviceFaults(_PACE), StorageFaults(_PACE), ThreadFaults(_PACE), NetworkFaults(Latency(0.0001, 0.001)))
_GUSTS = Latency(0.001, 0.05, slow=0.05, factor=60.0)  # a slow copy outlives a deadline and its slack
STORM = Weather(
    DeviceFaults(_GUSTS, fail=0.03),
    StorageFaults(_GUSTS, unavailable=0.02, error=0.03, full=0.03, missing=0.03, flip=0.03),
    ThreadFaults(_GUSTS),
    NetworkFaults(Latency(0.0001, 0.01)),
)

# What a seed may draw, and the weight that each kind has in the middle.
_MIDDLE = {
    "device.slow": 0.05,
    "device.fail": 0.03,
    "device.stuck": 0.01,
    "storage.slow": 0.05,
    "storage.unavailable": 0.03,
    "storage.error": 0.03,
    "storage.full": 0.03,
    "storage.missing": 0.03,
    "storage.flip": 0.03,
    "storage.short": 0.03,
    "threads.slow": 0.05,
    "network.lose": 0.3,
    "network.duplicate": 0.3,
    "threads.refused": 0.5,  # of threads that are started in a storm: a daemon that is up starts none
}
_DEATH = 0.005  # `device.lost`: rarer than the rest, because a dead rank ends most of what a story could tell
_DEADLY = 0.15  # of all storms
# Effects that raise are bugs of ours, so few storms have them; a log that refuses is any host's.
_EFFECTS = {
    "start": 0.05,
    "stop_task": 0.3,
    "expire_round": 0.5,
    "reply": 0.05,
    "publish": 0.1,
    "wake_at": 0.05,
}
_BUGGY = 0.2  # of all storms
_FULL_LOG = 0.2
_BAD_MEDIUM = 0.3  # that have objects which can never be read again
_FULL_PIPES = 0.2  # storms in which sends are refused, as when a peer does not read


def with_bugs(weather: Weather, chance: random.Random) -> Weather:
    """The same storm, perhaps with effects that raise, a log that refuses lines and a network that refuses sends."""
    buggy, full = chance.random() < _BUGGY, chance.random() < _FULL_LOG
    drawn = {kind: middle * chance.uniform(0.3, 2.0) for kind, middle in _EFFECTS.items() if chance.random() < 0.5}
    log = LogFaults(refuse=chance.uniform(0.1, 1.0)) if full else READ
    # Drawn last, so that a seed's older draws stay what they were.
    refuse = chance.uniform(0.01, 0.4) if chance.random() < _FULL_PIPES else 0.0
    spoilt = chance.uniform(0.01, 0.1) if chance.random() < _BAD_MEDIUM else 0.0
    return replace(
        weather,
        effects=EffectFaults(**drawn) if buggy else SOUND,
        log=log,
        network=replace(weather.network, refuse=refuse),
        storage=replace(weather.storage, spoilt=spoilt),
    )


def draw_storm(chance: random.Random) -> Weather:
    """A storm of the dice's choice."""
    drawn = {kind: middle * chance.uniform(0.3, 3.0) for kind, middle in _MIDDLE.items() if chance.random() < 0.5}
    if chance.random() < _DEADLY:
        drawn["device.lost"] = _DEATH * chance.uniform(0.3, 3.0)

    def latency(part: str, low: float, high: float) -> Latency:
        return Latency(
            low, high * chance.choice((0.2, 1.0, 1.0, 4.0)), slow=drawn.pop(f"{part}.slow", 0.0), factor=60.0
        )

    latencies = {
        "device": latency("device", 0.001, 0.05),
        "storage": latency("storage", 0.001, 0.05),
        "threads": latency("threads", 0.001, 0.05),
        "network": latency("network", 0.0001, 0.01),
    }
    plans: dict[str, dict[str, float]] = {part: {} for part in latencies}
    for kind, weight in drawn.items():
        part, _, name = kind.partition(".")
        plans[part][name] = weight
    return Weather(
        DeviceFaults(latencies["device"], **plans["device"]),
        StorageFaults(latencies["storage"], **plans["storage"]),
        ThreadFaults(latencies["threads"], **plans["threads"]),
        NetworkFaults(latencies["network"], **plans["network"]),
    )
