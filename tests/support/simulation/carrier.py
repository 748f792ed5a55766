"""A carrier within one process: peers are entries of a dict, writes are copies, and a test decides when they happen."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence

from transferd.errors import PeerLost
from transferd.storage.peer.carrier import PeerWrite
from transferd.tiers.base import HostMemory


class Fabric:
    """What joins MemoryCarriers: who is there, and which memory each has registered."""

    def __init__(self) -> None:
        self.registered: dict[str, dict[int, int]] = {}

    def carrier(self, address: str) -> MemoryCarrier:
        return MemoryCarrier(self, address)


class MemoryCarrier:
    """See the contract in direct/carrier.py. `gate`: writes wait for it. `broken`: writes fail. `writes`: made."""

    def __init__(self, fabric: Fabric, address: str) -> None:
        self._fabric = fabric
        self._address = address
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken = False
        self.writes = 0

    @property
    def address(self) -> str:
        return self._address

    async def open(self) -> None:
        self._fabric.registered[self._address] = {}

    def register(self, memory: HostMemory) -> None:
        self._fabric.registered[self._address][memory.address] = memory.nbytes

    def unregister(self, memory: HostMemory) -> None:
        self._fabric.registered.get(self._address, {}).pop(memory.address, None)

    async def write(self, peer: str, moves: Sequence[PeerWrite]) -> None:
        await asyncio.sleep(0)
        await self.gate.wait()
        memory = self._fabric.registered.get(peer, {})
        for move in moves:
            if self.broken or not any(
                start <= move.target and move.target + move.nbytes <= start + nbytes for start, nbytes in memory.items()
            ):
                raise PeerLost(f"{peer} has no such memory")
            ctypes.memmove(move.target, move.source, move.nbytes)
        self.writes += 1

    async def close(self) -> None:
        self._fabric.registered.pop(self._address, None)
