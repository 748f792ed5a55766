"""The RDMA device that a rank's objects pass, as FastDeploy's transfer processes choose it.

Of a list of devices, rank N uses number N modulo the list's length. The library gives a client one list and chooses
from it for each transfer. So with `segment_per_rank` each device that a rank uses has a client of its own, made when
the first such rank is served: its memory is registered there, and its objects move there, at the same time as others'.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from transferd.config import MooncakeStorageSection
from transferd.storage.mooncake.client import Batch, Buffer, PoolClient


def connect(section: MooncakeStorageSection) -> PoolClient:
    """Join the pool. Raises StorageUnavailable, or ConfigError if retrying cannot help."""
    several = section.segment_per_rank and "," in section.rdma_devices
    return DeviceClients(section) if several else PoolClient(section)


class DeviceClients(PoolClient):
    """The client of the first device, which also answers what moves no bytes, and the clients of further ones."""

    def __init__(self, section: MooncakeStorageSection) -> None:
        names = [name.strip() for name in section.rdma_devices.split(",")]
        self._sections = [msgspec.structs.replace(section, rdma_devices=name) for name in names]
        super().__init__(self._sections[0])
        self._clients: dict[int, PoolClient] = {0: self}  # by the device's place in the list

    def register(self, address: int, nbytes: int, rank: int = 0) -> int:
        return PoolClient.register(self._client_of(rank), address, nbytes)

    def unregister(self, address: int, rank: int = 0) -> None:
        PoolClient.unregister(self._client_of(rank), address)

    def put(self, batch: Batch, *, alone: bool = False) -> dict[str, int]:
        return self._moved(batch, lambda client, part: PoolClient.put(client, part, alone=alone))

    def replace(self, batch: Batch) -> dict[str, int]:
        return self._moved(batch, PoolClient.replace)

    def get(self, batch: Batch) -> dict[str, int]:
        return self._moved(batch, PoolClient.get)

    def lend(self, nbytes: int, rank: int = 0) -> int:
        return PoolClient.lend(self._client_of(rank), nbytes)

    def close(self) -> None:
        for client in list(self._clients.values())[::-1]:
            PoolClient.close(client)

    def _client_of(self, rank: int) -> PoolClient:
        place = rank % len(self._sections)
        if place not in self._clients:
            # It lends nothing yet: that takes seconds, in which a set-up would hold the interpreter lock.
            made = PoolClient(msgspec.structs.replace(self._sections[place], global_segment_size=0))
            if self._sections[place].global_segment_size:
                made.prefer_own()
                self.own |= made.own
            self._clients[place] = made
        return self._clients[place]

    def _moved(self, batch: Batch, move: Callable[[PoolClient, Batch], dict[str, int]]) -> dict[str, int]:
        """`move` for each device's objects, at the same time."""
        parts: dict[int, dict[str, Buffer]] = {}
        for key, buffer in batch.items():
            parts.setdefault(buffer.rank % len(self._sections), {})[key] = buffer
        if len(parts) == 1:
            return move(self._clients[next(iter(parts))], batch)
        with ThreadPoolExecutor(len(parts)) as threads:
            answers = threads.map(lambda place: move(self._clients[place], parts[place]), parts)
            return {key: code for some in answers for key, code in some.items()}
