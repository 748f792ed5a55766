"""Purges and pins among stores, loads and evictions, at every pace that a seed can draw: real files, virtual time."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.simulation.faults import Latency, ThreadFaults
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.threads import SimThreads
from transferd.config import FileStorageSection
from transferd.config.size import Capacities
from transferd.errors import RequestError
from transferd.runtime.aio import every
from transferd.runtime.clock import Clock
from transferd.storage.base import Found, Item
from transferd.storage.file import FileStorage
from transferd.storage.lru import Use
from transferd.storage.queues import EngineOwner
from transferd.storage.selection import Selection

SEEDS = range(60)
NBYTES = 300
OWNERS = [EngineOwner("a", 1), EngineOwner("b", 1)]


def content(name: str) -> bytes:
    return random.Random(name).randbytes(NBYTES)


class Story:
    """One seed. steps: counts what has begun. stored_at: of each name, when its last store began, in steps."""

    def __init__(self, loop: SimLoop, directory: Path) -> None:
        self.loop = loop
        self.random = loop.stream("story")
        self.roomy = self.random.random() < 0.5
        section = FileStorageSection(path=str(directory), capacity=Capacities(NBYTES * (1000 if self.roomy else 12)))
        pace = ThreadFaults(latency=Latency(0.01, 0.2))
        threads = SimThreads(3, faults=pace, rng=loop.stream("threads"))
        self.storage = FileStorage(section, clock=Clock(monotonic=loop.time), threads=threads)
        self.directory = directory
        self.present: set[str] = set()  # as KV events would have it: what was stored, and has not left since
        self.steps = 0
        self.stored_at: dict[str, int] = {}
        self.loading: dict[int, set[str]] = {}
        self.purged = 0

    async def run(self) -> None:
        await self.storage.open()
        self.storage.tell_departures(self.present.discard)
        for owner in OWNERS:
            self.storage.keeper.claim(owner, f"{owner.engine}/f", 0.3)
        await every([self.actor() for _ in range(4)])
        await self.storage.keeper.purge(Selection())
        assert not self.present, "everything was retracted"
        report = self.storage.statistics()
        assert (report["objects"], report["bytes"], report["in_flight_bytes"], report["purging"]) == (0, 0, 0, 0)
        assert (report["pinned"], report["pinned_bytes"]) == (0, 0)
        assert not [file for file in (self.directory / "objects").rglob("*@*") if file.is_file()]
        await self.storage.close()

    async def actor(self) -> None:
        for _ in range(8):
            await asyncio.sleep(self.random.choice([0.0, 0.01, 0.1, 1.0]))
            owner = self.random.choice(OWNERS)
            first = self.random.randint(0, 6)
            names = [f"{owner.engine}/f/g/{i}/0" for i in range(first, first + self.random.randint(1, 5))]
            act = self.random.random()
            if act < 0.4:
                await self.store(owner, names)
            elif act < 0.7:
                await self.load(names)
            elif act < 0.85:
                await self.purge(owner, names)
            else:
                await self.pin(owner, names)

    async def store(self, owner: EngineOwner, names: Sequence[str]) -> None:
        self.steps += 1
        for name in names:
            self.stored_at[name] = self.steps
        use = Use(owner=owner)
        items = [Item(name, NBYTES, use, depth) for depth, name in enumerate(names)]
        slots = [memoryview(bytearray(content(name))) for name in names]
        for name in names:
            self.present.add(name)  # if it is there in the end; a departure may come before this call returns
        outcomes = await self.storage.store(items, None, slots)
        for name, outcome in zip(names, outcomes, strict=True):
            if outcome.found is Found.FAILED:
                self.present.discard(name)
            if self.storage.find([name], None) == [False]:
                self.present.discard(name)

    async def load(self, names: Sequence[str]) -> None:
        slots = [memoryview(bytearray(NBYTES)) for _ in names]
        reads, purges = self.storage._traffic.reads.has, self.purged
        own = [name for name in names if not reads(name)]  # others' loads do not show when ours begins
        call = asyncio.ensure_future(self.storage.load([Item(name, NBYTES) for name in names], None, slots))
        while not call.done() and not any(map(reads, own)):  # noqa: ASYNC110 - nobody says so
            await asyncio.sleep(1e-6)  # virtual time has to pass for what waits for a timer
        begun = {name for name in own if not call.done() and reads(name)}
        outcomes = await call
        for name, outcome, slot in zip(names, outcomes, slots, strict=True):
            if outcome.found is Found.FOUND:
                assert bytes(slot) == content(name), f"{name}: other bytes"
            elif self.roomy and name in begun:
                raise AssertionError(
                    f"{name} was being read, and is gone: {outcome} ({self.purged - purges} purges since)"
                )

    async def purge(self, owner: EngineOwner, names: Sequence[str]) -> None:
        self.purged += 1
        self.steps += 1
        began = self.steps
        selection = self.random.choice(
            [Selection(), Selection(owner=owner), Selection(names=frozenset(names)), Selection(model=owner.engine)]
        )
        every_name = [f"{one.engine}/f/g/{i}/0" for one in OWNERS for i in range(12)]
        meant = [name for name in every_name if selection.fits(name) and name.startswith(owner.engine)]
        await self.storage.keeper.purge(selection)
        for name in meant:
            if self.storage.find([name], None) == [True]:
                assert self.stored_at[name] > began, f"{name} has survived a purge"

    async def pin(self, owner: EngineOwner, names: Sequence[str]) -> None:
        keeper = self.storage.keeper
        if self.random.random() < 0.3:
            await keeper.unpin(owner, names)
            return
        there = self.storage.find(names, None)
        try:
            pinned = await keeper.pin(owner, names, self.random.choice([0.05, 1.0, 100.0]), 0.3)
        except RequestError as error:
            if error.reason != "share_exceeded":
                raise
            return
        assert [bool(hold) for hold in pinned] == there


@pytest.mark.parametrize("seed", SEEDS)
def test_no_purged_block_comes_back_no_load_is_cut_off_and_the_books_end_empty(seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="td-sim-") as directory:
        simulate(lambda loop: Story(loop, Path(directory)).run(), seed)
