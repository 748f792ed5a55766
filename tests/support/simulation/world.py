"""SimWorld: a whole daemon, with everything it stands on simulated, on one seeded loop.

The dispatcher, barrier, coordinator, workers, staging, protocol, server and client in it are the real
ones; time, chance, network, storage, device and threads are fakes that go wrong by plan.
"""

from __future__ import annotations

import random
from typing import Any

from tests.support.simulation.blocks import Bytes
from tests.support.simulation.clock import SimClock
from tests.support.simulation.device import SimDevice
from tests.support.simulation.effects import SimEffects, SimLog
from tests.support.simulation.faults import Dice
from tests.support.simulation.loop import SimLoop
from tests.support.simulation.memory import MemoryWatch
from tests.support.simulation.network import ENDPOINT, SimNetwork
from tests.support.simulation.storage import SimStorage
from tests.support.simulation.threads import SimThreads
from tests.support.simulation.weather import CALM, Weather
from transferd.client.client import Client
from transferd.config import Config, from_tree
from transferd.daemon.daemon import Daemon
from transferd.errors import TierError
from transferd.storage.base import Storage
from transferd.tiers.base import DeviceTier


def small_config(
    ranks: int = 2, staging: str = "32KiB", *, key_schema: str = "transferd", wide: bool = False, **server: Any
) -> Config:
    """A daemon of tiny blocks: 4 segments of 32 bytes, staging for 4 blocks each way (one for every 8 KiB).

    wide: of 64 bytes. The extension copies and checks such blocks where the CPU can address them (block_memory.py).
    """
    return from_tree(
        {
            "server": {"endpoint": "ipc:///nowhere", **server},
            "cache": {
                "ranks": ranks,
                "device": "tests.support.simulation.device:SimDevice",
                "layers": 2,
                "kv_heads": 1,
                "head_dim": 8 if wide else 4,
                "block_size": 4,
                "device_blocks": 48,
                "host_blocks": 48,
            },
            "host": {"staging": staging},
            "storage": {"backend": "none", "key_schema": key_schema},  # the backend is replaced
            "metrics": {"listen": ""},
        }
    )


def daemon_of_engines(
    device: str, network: SimNetwork, threads: SimThreads, storage: Storage, clock: SimClock
) -> Daemon:
    """A daemon without [cache]: all its engines register. device: the class of their device tier."""
    tree: dict[str, Any] = {
        "server": {"endpoint": "ipc:///nowhere"},
        "engines": {"devices": [device]},
        "host": {"staging": "16KiB"},
        "storage": {"backend": "none"},  # the backend is replaced
        "metrics": {"listen": ""},
    }
    return Daemon(
        from_tree(tree),
        transport=network.server(),
        threads=threads,
        storage=storage,
        clock=clock,
        inline_check_bytes=0,
    )


class SimWorld:
    """Builds and owns everything of one simulated run: of one node, where there are several.

    node: where there are several, so that each has a chance of its own.
    """

    def __init__(
        self, loop: SimLoop, config: Config, weather: Weather = CALM, *, capacity: int | None = None, node: str = ""
    ) -> None:
        self.loop = loop
        self.node = node
        self.config = config
        self.clock = SimClock(loop)
        self.stood_still = 0.0  # seconds so far for which nothing ran
        self.watch = MemoryWatch()
        self.network = SimNetwork(rng=self._stream("network"))
        self.storage = SimStorage(capacity=capacity, rng=self._stream("storage"), watch=self.watch)
        self.storage.at_once = 0.5
        self.storage.slots_at_once = self._stream("bounces").choice((0, 2, None))
        self.build(self.storage)
        self.log = SimLog(self.clock, self._stream("log"))
        self.weather = weather

    def _stream(self, part: str) -> random.Random:
        return self.loop.stream(self.node + part)

    def build(self, storage: Storage) -> None:
        """A daemon on this storage. Called again: a successor, in calm weather."""
        # The stream keeps the name it was first given, so that a seed still means the same story.
        self.threads = SimThreads(rng=self._stream("offload"))
        self.daemon = Daemon(
            self.config,
            transport=self.network.server(),
            threads=self.threads,
            storage=storage,
            clock=self.clock,
            inline_check_bytes=0,  # as with large blocks: every checksum goes to a thread
        )
        self.devices = [
            self._own(worker.context.device, rank)
            for rank, worker in enumerate(self.daemon.default.coordinator.workers)
        ]
        self.effects = SimEffects(self.daemon, self._stream("effects"))

    def _own(self, device: DeviceTier, rank: int) -> SimDevice:
        """The registry made the device; here it gets this world's chance and watch."""
        assert isinstance(device, SimDevice)
        device.watch = self.watch
        device.dice = Dice(self._stream(f"device {rank}"), f"device {rank}")
        device.addressable = self._stream("addressable").random() < 0.5
        return device

    @property
    def weather(self) -> Weather:
        return Weather(
            self.devices[0].faults,
            self.storage.faults,
            self.threads.faults,
            self.network.faults,
            self.effects.faults,
            self.log.faults,
        )

    @weather.setter
    def weather(self, weather: Weather) -> None:
        for device in self.devices:
            device.faults = weather.device
            if not weather.device.stuck:
                device.unstick()
        self.storage.faults = weather.storage
        self.threads.faults = weather.threads
        self.network.faults = weather.network
        self.effects.faults = weather.effects
        self.log.faults = weather.log

    def client(self, name: str) -> Client:
        """A real client on the simulated network, not yet connected."""
        return Client(ENDPOINT, clock=self.clock, transport=self.network.client(name), name=name)

    async def attach(self, client: Client) -> list[Bytes]:
        """Map every rank's memory, as an engine does: it stays as it is when the daemon makes other memory.

        Raises TransferError when the memory went before it was mapped.
        """
        mapped: list[Bytes] = []
        for rank in range(self.config.geometry.ranks):
            handle = await client.device_handle(rank)
            memory = self.devices[rank].memory
            if handle["data"]["address"] != int(memory.ctypes.data):
                raise TierError(f"the memory of rank {rank} has gone")
            mapped.append(memory)
        return mapped

    def stand_still(self, seconds: float) -> None:
        """Everybody is stopped for a while, and goes on."""
        self.stood_still += seconds
        self.loop.stand_still(seconds)

    async def open(self) -> None:
        await self.daemon.open()

    async def close(self, budget: float = 20.0) -> None:
        """The daemon's own shutdown; raises what it raises, leases and copies left over included."""
        end = self.loop.time() + budget
        hanging = await self.daemon.stop(lambda: max(0.0, end - self.loop.time()))
        assert not hanging, f"the shutdown left behind: {hanging}"
