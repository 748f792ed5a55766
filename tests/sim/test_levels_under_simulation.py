"""Engines over two levels of storage that are slow, dead, full and lying: no wrong byte, and everything comes back.

As in test_shared_loads_under_simulation.py, whose engines these are. Both levels have all faults at once; the lower one
is dead for a while, and in half of the seeds it is a remote one, which knows nothing without being asked. In calm
weather afterwards, what is stored is read back whole.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.sim.test_engines_under_simulation import DEVICE
from tests.sim.test_shared_loads_under_simulation import Crowd
from tests.support.simulation.faults import Latency, StorageFaults, ThreadFaults
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.memory import MemoryWatch
from tests.support.simulation.storage import SimStorage
from tests.support.simulation.threads import SimThreads
from tests.support.simulation.world import daemon_of_engines
from transferd.config import LevelSection
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.lru import Use

SEEDS = min(int(os.environ.get("SEEDS", "8")), 2000)
ROUNDS = 8
CALM = StorageFaults(Latency(0.001, 0.01))
STORM = StorageFaults(Latency(0.005, 0.03, slow=0.05), 0.05, error=0.05, full=0.05, missing=0.05, flip=0.05, short=0.05)
DEAD = StorageFaults(Latency(0.005, 0.03), 1.0)


class KnowingStorage(SimStorage):
    """It says without I/O what it has."""

    def find(self, names: Sequence[str], use: Use | None) -> list[bool] | None:
        return [name in self.objects for name in names]


class AskedStorage(SimStorage):
    """It has to be asked."""

    def find(self, names: Sequence[str], use: Use | None) -> list[bool] | None:
        return None


class Levels(Crowd):
    """One seed."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__(loop)
        remote = loop.seed % 2 == 0
        self.top = KnowingStorage(rng=loop.stream("top"), watch=MemoryWatch())
        self.storage = (AskedStorage if remote else KnowingStorage)(rng=loop.stream("storage"), watch=MemoryWatch())
        self.storage.slots_at_once = 2
        threads = SimThreads(rng=loop.stream("offload"), faults=ThreadFaults(latency=Latency(0.0, 0.002)))
        now = self.clock.monotonic
        levels = [
            StoreLevel(0, "top", self.top, LevelSection(), now),
            StoreLevel(1, "bottom", self.storage, LevelSection(promote=1, write_back_max_age=5.0), now),
        ]
        self.stack = LevelsStorage(levels, self.clock, SimThreads(rng=loop.stream("copies")))
        self.daemon = daemon_of_engines(DEVICE, self.network, threads, self.stack, self.clock)

    async def run(self) -> Counter[str]:
        await self.daemon.open()
        clients = [await self.come(number) for number in range(3)]
        await self.round(clients[:1], "fill", reads=False)
        for number in range(ROUNDS):
            self.top.faults, self.storage.faults = STORM, DEAD if number in (3, 4) else STORM
            if number % 3 == 0:
                self.top.objects.clear()  # as if they had been evicted: the lower level must do
            await self.round(clients, f"{number}", reads=number % 4 != 3)
        self.top.faults = self.storage.faults = CALM
        await self.copied()
        await self.round(clients[:1], "fill-0-again", reads=False)
        await self.round(clients, "calm", reads=True)
        await self.copied()
        rows = self.daemon.stats()["storage"]["levels"]
        self.seen += Counter({key: sum(row[key] for row in rows) for key in ("copied", "promoted", "lost")})
        for client in clients:
            await client.unregister()
        for client in self.clients:
            await client.close()
        await self.daemon.engines.settled()
        assert self.daemon.stats()["staging"]["used"] == 0
        assert not self.stack.unsaved
        assert rows[1]["pending_bytes"] == 0
        assert await self.daemon.stop(lambda: 10.0) == []
        for one in (self.top, self.storage):
            assert one.watch.conflicts == []
            assert len(one.watch) == 0
            self.seen["corrupt"] += one.counts["quarantined"]
        assert self.stack._promotions.buffers.taken == 0
        return self.seen

    async def copied(self) -> None:
        """In calm weather everything that waits is copied, or has been given up."""
        for _ in range(40):
            await asyncio.sleep(0.5)
            if not self.stack.unsaved:
                return
        raise AssertionError(f"never copied: {self.stack.unsaved}")


@pytest.mark.parametrize("part", range(2))
def test_levels_that_are_slow_dead_full_and_lying_deliver_no_wrong_byte(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SEEDS, 2):
        try:
            seen += simulate(lambda loop: Levels(loop).run(), seed)
        except BaseException:
            print(f"seed {seed}")
            raise
    assert {"ok", "partial", "copied", "promoted", "corrupt"} <= set(+seen), f"too little has happened: {seen}"
