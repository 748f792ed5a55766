"""One node of the store's world: a daemon on levels of memory, disks and a bucket, and the clients of two engines.

A node has several lives. Its media outlive them (medium.py, bucket.py).
"""

from __future__ import annotations

import os
from contextvars import copy_context
from pathlib import Path
from typing import Any

from tests.support.simulation.blocks import Blocks
from tests.support.simulation.bucket import DENIED, EXPIRED, SimBucket
from tests.support.simulation.clock import SimClock
from tests.support.simulation.faults import Latency, NetworkFaults, ThreadFaults
from tests.support.simulation.loop import PROCESS, SimLoop
from tests.support.simulation.medium import SCRUB_RATE, Medium, SimFiles, section_of
from tests.support.simulation.network import ENDPOINT, SimNetwork, SimServerTransport
from tests.support.simulation.store_judge import Judge
from tests.support.simulation.threads import SimThreads
from tests.support.simulation.world import daemon_of_engines
from transferd.client.client import Client
from transferd.client.engines import Engine
from transferd.config import LevelSection, StorageSection
from transferd.config.sections import MemoryStorageSection, ObjectStorageSection
from transferd.config.size import Size
from transferd.daemon import lookup
from transferd.runtime.aio import every
from transferd.storage.base import Storage
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.memory import MemoryStorage
from transferd.wire.credentials import Credentials

DEVICE = "tests.support.simulation.device:SimDevice"
BLOCKS = 24  # of the device of each engine
LAYOUT = {"layers": 1, "kv_heads": 1, "head_dim": 4, "block_size": 4, "device_blocks": BLOCKS, "ownership": "create"}
OBJECT = {"m": 192, "d": 128 + 4096}  # bytes that a capacity counts for each object, at most
SHAPES = ("m", "d", "md", "mdd", "mb", "mb", "mdb", "mddb", "db", "ddb", "dd", "ddd", "ddd", "ddd")
ROOMY = 1000  # objects: no object is evicted
ENGINES, EACH = ("a", "b"), 7
PACE = ThreadFaults(latency=Latency(0.001, 0.02, slow=0.03, factor=100.0))
CALM = ThreadFaults(latency=Latency(0.001, 0.02))
LATE = ThreadFaults(latency=Latency(0.05, 1.0))
MAX_AGE_S, RECHECK_S = 40.0, 30.0


class OneUser(SimServerTransport):
    """Every client is the daemon's user."""

    def credentials(self, peer: bytes) -> Credentials:
        return Credentials(0, os.geteuid(), os.getegid())


class UserNetwork(SimNetwork):
    def server(self) -> SimServerTransport:
        return OneUser(self)


class Node(Judge):
    """See the module."""

    def __init__(self, loop: SimLoop, directory: Path) -> None:
        self.loop = loop
        self.clock, self.chance = SimClock(loop), loop.stream("story")
        self.network = UserNetwork(rng=loop.stream("network"), faults=NetworkFaults(Latency(0.0001, 0.001)))
        self.shape = self.chance.choice(SHAPES)
        self.bucket = SimBucket(loop.stream("bucket"), loop.time)
        self.bucket.deletes = self.deleted
        self.media = [Medium(directory / f"disk-{number}", loop.time) for number in range(self.shape.count("d"))]
        self.objects = {"m": self.chance.randint(4, 9), "d": self.chance.randint(8, 16)}  # of each place, at most
        if self.chance.random() < (0.7 if self.levels == ["file"] else 0.3):
            self.objects["d"] = ROOMY
        self.through = self.shape in ("md", "mdd") and self.chance.random() < 0.7
        self.keys = [f"{engine}{number}" for engine in ENGINES for number in range(EACH)]
        self.lives = 0
        self.crews: list[SimThreads] = []  # of this life
        self.found_at: float = 0.0  # when a store last looked for objects, at a start or as a disk returned
        self.config: StorageSection
        self.present, self.names = set(), {}
        self.free: dict[str, list[int]] = {}
        self.blocks: dict[str, Blocks] = {}
        self.clients: dict[str, Client] = {}

    def build(self) -> Storage:
        """The storage of a new life, on the media as they are."""
        capacity = {kind: count * OBJECT[kind] for kind, count in self.objects.items()}
        file = section_of(self.media, capacity["d"])
        self.config = StorageSection(
            scrub_rate=Size(SCRUB_RATE),
            memory=MemoryStorageSection(capacity=Size(capacity["m"])),
            file=file,
            object=ObjectStorageSection(url="s3://bucket/p", region="x", concurrency=4, timeout=5.0),
            level={
                "file": LevelSection(write="through" if self.through else "back", write_back_max_age=MAX_AGE_S),
                "object": LevelSection(write_back_max_age=MAX_AGE_S, recheck=RECHECK_S),
            },
        )
        made: dict[str, Storage] = {}
        if "m" in self.shape:
            memory = MemoryStorage(self.config.memory, self.clock)
            memory._threads = memory._effects._threads = self.threads("memory", 2)
            made["memory"] = memory
        self.disks: SimFiles | None = None
        if "d" in self.shape:
            self.disks = SimFiles(file, self.media, self.clock, self.threads)
            made["file"] = self.disks.storage
        if "b" in self.shape:
            made["object"] = self.bucket.storage(self.config.object, self.clock, self.threads("object", 4))
        if len(made) == 1:
            return next(iter(made.values()))
        levels = [
            StoreLevel(number, name, storage, self.config.level.get(name, LevelSection()), self.clock.monotonic)
            for number, (name, storage) in enumerate(made.items())
        ]
        return LevelsStorage(levels, self.clock, self.threads("levels", 2))

    def threads(self, what: str, size: int) -> SimThreads:
        made = SimThreads(size, faults=PACE, rng=self.loop.stream(f"{what} {self.lives}"))
        self.crews.append(made)
        return made

    async def begin(self) -> None:
        """A daemon in a process of its own, which can be killed, and two engines."""
        if self.bucket.fault in (DENIED, EXPIRED):  # a daemon does not start without rights
            self.bucket.fail("")
        if self.media and all(medium.unwell for medium in self.media):  # nor without any disk
            self.media[0].come_back("same")
        for medium in self.media:  # a unit waits for its mounts (RequiresMountsFor=): no life knows of an earlier one's
            if medium.away or medium.hangs:
                medium.come_back("same")
        self.unlisted = [medium for medium in self.media if medium.unwell]
        self.found_at = self.loop.time()
        self.gone = 0, self.found_at
        self.came = set[str]().union(*(self.where(name) for name in self.levels if name != "memory"))
        self.crews.clear()
        self.storage = self.build()
        self.present.clear()
        self.storage.index.tell_departures(self.present.discard)
        self.process = f"daemon {self.lives}"
        self.context = copy_context()
        self.context.run(PROCESS.set, self.process)
        await self.context.run(self.loop.create_task, self._open())
        await every([self._engine(name) for name in ENGINES])

    async def _open(self) -> None:
        threads = self.threads("offload", 4)
        self.daemon = daemon_of_engines(DEVICE, self.network, threads, self.storage, self.clock)
        await self.daemon.open()

    async def _engine(self, name: str) -> None:
        link = f"{name}-{self.lives}"
        client = Client(
            ENDPOINT, clock=self.clock, transport=self.network.client(link), name=link, engine=name, await_ready=False
        )
        self.clients[name] = client
        await client.connect()
        await client.register(Engine(ranks=1, model="m", layout=LAYOUT))
        await client.device_handle(0)
        await client.wait_ready(5)
        hosted = self.daemon.engines.get(name)
        assert hosted is not None
        devices: list[Any] = [worker.context.device for worker in hosted.workers]
        count = BLOCKS
        self.blocks[name] = Blocks.of(hosted.layout.device, [device.memory for device in devices], range(count))
        self.free[name] = list(range(count))
        keys = [key for key in self.keys if key[0] == name]
        [[names]] = [names async for names in lookup._names(hosted, keys, at_once=True)]
        self.names.update(zip(keys, names, strict=True))

    async def end(self, *, clean: bool) -> None:
        """The daemon stops, or is killed; its clients go with it."""
        self.lives += 1
        if clean:
            limit = self.loop.time() + 60.0
            for client in self.clients.values():
                await client.close()
            stop = self.daemon.stop(lambda: max(0.0, limit - self.loop.time()))
            await self.context.run(self.loop.create_task, stop)
        else:
            self.network.crash()
        if not clean or any(one.hangs for one in self.media):
            self.loop.kill(self.process)
        if not clean:
            self.storage.abandon()
            for client in self.clients.values():
                await client.close()
