"""Memory that simulated engines make themselves and offer, and the device tier that maps it.

A handle names the memory by a number, as a name in /dev/shm or a descriptor does. Its engine may take the memory away
at any time: then no copy may touch it any more, and the device is lost for whoever has mapped it.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from tests.support.simulation.device import SimDevice
from tests.support.simulation.faults import DeviceFaults, Dice
from tests.support.simulation.memory import MemoryWatch, SimMemory
from transferd.blocks.copyplan import CopyPlan
from transferd.errors import DeviceLost, TierError
from transferd.tiers.base import DeviceHandle, HostMemory
from transferd.tiers.extents import Extent, Extents
from transferd.tiers.owner import as_data, this_process

_numbers = itertools.count(1)
_memories: dict[int, OfferedMemory] = {}


class OfferedMemory(SimMemory):
    """One rank's memory, as its engine made it. Use it in a `with`: afterwards no handle leads to it.

    gone: its engine has unmapped or truncated it. addressable, faults, watch, chance: of the device that maps it.
    """

    def __init__(
        self, nbytes: int, *, addressable: bool, faults: DeviceFaults, watch: MemoryWatch, chance: random.Random
    ) -> None:
        super().__init__(nbytes)
        self.number = next(_numbers)
        self.gone = False
        self.addressable = addressable
        self.faults = faults
        self.watch = watch
        self.chance = chance
        _memories[self.number] = self

    @property
    def handle(self) -> DeviceHandle:
        return DeviceHandle("simulated", {"memory": self.number, "owner": as_data(this_process())})

    def drop(self) -> None:
        """Its engine has ended: nobody finds it any more. Whoever has mapped it keeps the bytes."""
        _memories.pop(self.number, None)


class OfferingDevice(SimDevice):
    """SimDevice that maps OfferedMemory. `engines.devices = ["tests.support.simulation.offered:OfferingDevice"]`."""

    attaches = True

    async def attach(self, handle: DeviceHandle) -> None:
        memory = _memories.get(handle.data.get("memory", 0))
        if memory is None or memory.gone:
            raise TierError("the engine's memory cannot be mapped: it is not there (simulated)")
        if memory.nbytes != self._layout.device.extent:
            raise TierError(f"the engine's memory has {memory.nbytes} bytes (simulated)")
        self._memory = memory
        self.lost = False
        self.watch, self.faults = memory.watch, memory.faults
        self.addressable = memory.addressable
        self.dice = Dice(memory.chance, f"device {self.rank}")

    def extents(self) -> Extents:
        memory = self._opened
        assert isinstance(memory, OfferedMemory)
        return Extents([Extent(("simulated", memory.number), 0, memory.nbytes)])

    async def _copy(self, operation: str, plan: CopyPlan, host: HostMemory) -> None:
        self._check_there()
        await super()._copy(operation, plan, host)
        self._check_there()

    def _check_there(self) -> None:
        if getattr(self._memory, "gone", False):
            raise DeviceLost(f"the memory of rank {self.rank} is gone (simulated)")

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {"kind": "offered"}
