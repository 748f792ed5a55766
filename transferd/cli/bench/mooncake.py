"""A Mooncake pool on this machine for `transferd bench storage`, and its raw calls on the daemon's own client.

It measures two pools, which move bytes in different ways: a memcpy reaches memory that the daemon itself lends, TCP
on loopback reaches memory that another process lends. RDMA, which production uses, needs a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

from transferd.cli.bench.subject import OBJECTS, Raw, Subject
from transferd.cli.pool.local import Lender, Master
from transferd.cli.pool.master import master_executable
from transferd.config import Config, MooncakeStorageSection
from transferd.errors import ConfigError, InvariantError
from transferd.storage.base import Storage
from transferd.storage.mooncake import MooncakeStorage
from transferd.storage.mooncake.client import Batch, Buffer, PoolClient

SEGMENT = 1024**3
STAGING = "128MiB"  # room for two of its chunks, as docs/operations.md advises


@contextlib.contextmanager
def subjects(directory: Path) -> Iterator[list[Subject]]:
    """Run the pools for as long as the context lasts. Raises ConfigError if Mooncake is not installed."""
    if master_executable() is None:
        raise ConfigError("--backend", "needs pip install 'transferd[mooncake-cpu]'", "mooncake")
    with (
        Master(directory / "own.log") as own,
        Master(directory / "shared.log") as shared,
        Lender(shared, SEGMENT, directory / "lender.log"),
    ):
        yield [_subject("own memory", own, SEGMENT), _subject("another's memory by TCP", shared, 0)]


def _subject(name: str, master: Master, lent: int) -> Subject:
    clients: list[PoolClient] = []

    def set_up(section: MooncakeStorageSection) -> PoolClient:
        clients.append(PoolClient(section))
        return clients[-1]

    def storage(config: Config) -> Storage:
        return MooncakeStorage.from_config(config, set_up=set_up)

    section = {"master_server_addr": master.address, "global_segment_size": lent, "local_buffer_size": 0}
    tree = {"backend": "mooncake", "mooncake": section | {"timeout": 30.0}}
    return Subject(
        f"mooncake, {name}", tree, lambda object_bytes: _RawPool(clients[-1], object_bytes), storage, STAGING
    )


class _RawPool(Raw):
    """batch_put_from and batch_get_into, all objects in one call: the library at its best."""

    def __init__(self, client: PoolClient, object_bytes: int) -> None:
        self._client = client
        self._memory = mmap.mmap(-1, OBJECTS * object_bytes)
        self._memory.write(b"\x01" * len(self._memory))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._object_bytes = object_bytes
        if client.register(self._address, len(self._memory)) != 0:
            raise InvariantError("Mooncake refused to register the benchmark's memory")

    def write(self, number: int) -> None:
        if any(self._client.put(self._batch(number)).values()):
            raise InvariantError("a raw put failed")

    def read(self, number: int) -> None:
        if set(self._client.get(self._batch(number)).values()) != {self._object_bytes}:
            raise InvariantError("a raw get failed")

    def forget(self, number: int, names: Sequence[str]) -> None:
        """Remove the raw objects and ours: they would fill the pool, and the next run would write to fresh memory."""
        self._client.remove([*self._batch(number), *names])

    def close(self) -> None:
        self._client.unregister(self._address)

    def _batch(self, number: int) -> Batch:
        size = self._object_bytes
        return {f"raw/{number}/{i}": Buffer(self._address + i * size, size) for i in range(OBJECTS)}
