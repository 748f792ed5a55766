"""What happens in one simulated story, as data: drawn from a seed, printed for people, made smaller.

A plan says how large the world is, what the weather is in bad times, and which deeds happen when.
Every deed has a number and draws its own chance from seed and number, so leaving one out of a failing
plan changes as little as possible of the others. That is what makes `reductions` useful: whoever
looks for a small story tries each of them and keeps those that still fail (shrink.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.support.simulation.weather import Weather, draw_storm, with_bugs

BAD_TIMES_S = 3.0  # virtual seconds over which the deeds begin
BLOCKS_OF_AN_ENGINE = 16
DEEDS_OF_AN_ENGINE = 9
MAX_ENGINES = 3
FASTDEPLOY_SHARE = 0.2  # of the stories, whose blocks are several objects each
APART_SHARE = 0.4  # of the stories
BEHIND_SHARE = 0.4  # of the stories
WIDE_SHARE = 0.4

# What engines do, each as often as it stands here.
WORK = ("write", "write", "read", "read", "read", "swap_out", "swap_in", "chain")
# What else happens to a daemon and its clients.
EVENTS = ("vanish", "cut", "cut", "look", "garbage", "set_generation", "jump_wall", "stand_still", "pause", "drain")
SPARSE_READ = "read_sparse"  # drawn by itself, as the next one
SPARSE_READS = 4  # of an engine, at most
BY_HOST = "by_host"  # drawn by itself
BY_HOST_DEEDS = 3  # of an engine, at most
DIE_PAUSED = "die_paused"  # drawn by itself, so that what else a seed does is what it always did
DIE_PAUSED_SHARE = 0.25  # of the stories


@dataclass(frozen=True, slots=True)
class Deed:
    """One thing that an engine (by number) does or suffers, `at` seconds after the bad times began."""

    number: int
    at: float
    engine: int
    what: str

    def __str__(self) -> str:
        return f"{self.at:.3f} s: engine {self.engine}: {self.what} (deed {self.number})"


@dataclass(frozen=True, slots=True)
class Plan:
    """One story.

    capacity: bytes of the storage, None for no bound. apart: engines map memory with another client than pushes.
    behind: tasks are pushed before each rank has computed their blocks. wide: the extension takes their segments.
    after: how the memory goes at the end, while engines go on with what they have mapped (succession.py); "": not.
    """

    seed: int
    weather: Weather
    ranks: int
    engines: int
    lane_depth: int
    max_queued_tasks: int
    staging: str
    capacity: int | None
    key_schema: str
    apart: bool
    behind: bool
    wide: bool
    after: str
    deeds: tuple[Deed, ...]

    def __str__(self) -> str:
        world = f"{self.ranks} ranks, {self.engines} engines, lanes {self.lane_depth} deep"
        bounds = f"queue {self.max_queued_tasks}, staging {self.staging}, storage {self.capacity or 'without bound'}"
        bounds += f", objects of {self.key_schema}"
        world += ", which map memory apart" * self.apart + ", whose ranks are behind" * self.behind
        world += ", wide segments" * self.wide
        world += f", at the end a {self.after}" * bool(self.after)
        deeds = "\n".join(f"  {deed}" for deed in sorted(self.deeds, key=lambda deed: deed.at))
        return f"seed {self.seed}: {world}, {bounds}\nweather: {self.weather}\ndeeds:\n{deeds}"

    def reductions(self) -> Iterator[Plan]:
        """Smaller plans, the boldest first: fewer deeds, then fewer kinds of faults."""
        size = max(1, len(self.deeds) // 2)
        while True:
            for start in range(0, len(self.deeds), size):
                yield replace(self, deeds=self.deeds[:start] + self.deeds[start + size :])
            if size == 1:
                break
            size //= 2
        for kind in self.weather.weights():
            yield replace(self, weather=self.weather.without(kind))
        if self.capacity is not None:
            yield replace(self, capacity=None)
        if self.after:
            yield replace(self, after="")
        if self.apart:
            yield replace(self, apart=False)
        if self.behind:
            yield replace(self, behind=False)
        if self.wide:
            yield replace(self, wide=False)
        if self.key_schema != "transferd":
            yield replace(self, key_schema="transferd")


def draw_plan(seed: int) -> Plan:
    """The plan of a seed; a function of it alone."""
    chance = random.Random(f"{seed}/plan")
    weather = with_bugs(draw_storm(chance), random.Random(f"{seed}/bugs"))
    engines = chance.randint(1, MAX_ENGINES)
    deeds = [
        (chance.uniform(0, BAD_TIMES_S), engine, chance.choice(WORK))
        for engine in range(engines)
        for _ in range(DEEDS_OF_AN_ENGINE)
    ]
    # What a network loses and repeats, it loses and repeats when a connection breaks.
    events = EVENTS + ("cut",) * (6 if weather.network.lose or weather.network.duplicate else 0)
    deeds += [
        (chance.uniform(0, BAD_TIMES_S), chance.randrange(engines), chance.choice(events))
        for _ in range(chance.randint(0, 5))
    ]
    apart = random.Random(f"{seed}/plan/{DIE_PAUSED}")
    if apart.random() < DIE_PAUSED_SHARE:
        deeds += [(apart.uniform(0, BAD_TIMES_S), 0, DIE_PAUSED)]
    sparse = random.Random(f"{seed}/plan/{SPARSE_READ}")
    deeds += [
        (sparse.uniform(0, BAD_TIMES_S), engine, SPARSE_READ)
        for engine in range(engines)
        for _ in range(sparse.randint(0, SPARSE_READS))
    ]
    host = random.Random(f"{seed}/plan/{BY_HOST}")
    deeds += [
        (host.uniform(0, BAD_TIMES_S), engine, BY_HOST)
        for engine in range(engines)
        for _ in range(host.randint(0, BY_HOST_DEEDS))
    ]
    memory = random.Random(f"{seed}/memory")
    plan = Plan(
        seed=seed,
        weather=weather,
        ranks=chance.randint(1, 3),
        engines=engines,
        lane_depth=chance.randint(1, 4),
        max_queued_tasks=chance.choice((4, 64)),
        staging=chance.choice(("8KiB", "16KiB", "32KiB")),
        capacity=chance.choice((None, 40 * 256)),
        key_schema="fastdeploy" if chance.random() < FASTDEPLOY_SHARE else "transferd",
        apart=memory.random() < APART_SHARE,
        behind=random.Random(f"{seed}/behind").random() < BEHIND_SHARE,
        wide=random.Random(f"{seed}/wide").random() < WIDE_SHARE,
        after=memory.choice(("", "restart", "clear")),
        deeds=tuple(Deed(number, *deed) for number, deed in enumerate(deeds)),
    )
    if plan.key_schema == "transferd":
        return plan
    # Objects without a footer: damage cannot be told from data.
    return replace(plan, weather=plan.weather.without("storage.flip").without("storage.short"))
