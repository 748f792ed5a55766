"""The storage backends that the contract suite runs over, and how tests hold one."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import functools
import mmap
import os
import tempfile
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.blobs import get, put
from tests.support.deaf_proxy import DeafProxy
from tests.support.gated_storage import GatedStorage, stack
from tests.support.s3_server import SECRET, USER, S3Server, weed
from tests.support.simulation.pool import SIM_MASTER, SimPool
from tests.support.simulation.storage import SimStorage
from tests.support.simulation.threads import SimThreads
from transferd.blocks.layout import build_layout
from transferd.cli.doctor.machine import Machine
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.config import CacheSection, FileStorageSection, MooncakeStorageSection, Size
from transferd.config.sections import MemoryStorageSection, ObjectStorageSection
from transferd.config.size import Capacities
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.base import Blob, Outcome, Storage
from transferd.storage.disks import Disk, Disks
from transferd.storage.file import FileStorage
from transferd.storage.joined import JoinedStorage
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.memory import MemoryStorage
from transferd.storage.mooncake import MooncakeStorage
from transferd.storage.mooncake.client import PoolClient
from transferd.storage.object_store import ObjectStorage

MEMORY_BYTES = 32 * 1024**2


def put_stranger(path: Path, kind: str, kept: Path) -> None:
    """Put something that is no file of ours at an object's path: a "fifo", a "directory" or a "link" to `kept`."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(kept)


@functools.cache
def mooncake_master() -> Master:
    """One master for all tests of a run: it holds nothing once the client that lent the memory has closed."""
    directory = tempfile.TemporaryDirectory(prefix="transferd-master-")
    atexit.register(directory.cleanup)
    master = Master(Path(directory.name) / "master.log")
    master.start()
    atexit.register(master.stop)
    return master


def mooncake_config(master: str, **more: Any) -> MooncakeStorageSection:
    pool: dict[str, Any] = {"master_server_addr": master, "local_hostname": "127.0.0.1"}
    pool |= {"global_segment_size": Size(64 * 1024**2), "local_buffer_size": Size(0)}
    return MooncakeStorageSection(**(pool | more))


def pool_storage(section: MooncakeStorageSection, **parts: Any) -> MooncakeStorage:
    """A pool's storage as a daemon has it: with the records of a layout."""
    return MooncakeStorage(section, model="demo", layout=build_layout(CacheSection()), **parts)


class KeptClient(PoolClient):
    """A client that a close only empties: a real close takes two seconds, and the suite closes often."""

    def __init__(self, section: MooncakeStorageSection) -> None:
        super().__init__(section)
        self._memory: set[int] = set()

    def register(self, address: int, nbytes: int, rank: int = 0) -> int:
        self._memory.add(address)
        return super().register(address, nbytes, rank)

    def unregister(self, address: int, rank: int = 0) -> None:
        self._memory.discard(address)
        super().unregister(address, rank)

    def close(self) -> None:
        for address in list(self._memory):
            self.unregister(address)
        self._store.remove_all(True)

    def really_close(self) -> None:
        super().close()


@functools.cache
def kept_client() -> KeptClient:
    section = mooncake_config(mooncake_master().address, global_segment_size=Size(256 * 1024**2))
    client = KeptClient(section)
    atexit.register(client.really_close)  # before the master stops
    return client


@functools.cache
def object_server() -> S3Server:
    """One S3 server for all tests of a run."""
    directory = tempfile.TemporaryDirectory(prefix="transferd-s3-", ignore_cleanup_errors=True)
    atexit.register(directory.cleanup)
    server = S3Server(Path(directory.name))
    server.start()
    atexit.register(server.kill)
    return server


def object_config(server: S3Server | DeafProxy, prefix: str, **more: Any) -> ObjectStorageSection:
    os.environ.update(AWS_ACCESS_KEY_ID=USER, AWS_SECRET_ACCESS_KEY=SECRET)
    section: dict[str, Any] = {"endpoint": server.endpoint, "region": "us-east-1", "concurrency": 8} | more
    return ObjectStorageSection(url=f"s3://blocks/{prefix.strip('/')}", **section)


def object_storage(server: S3Server | DeafProxy, prefix: str, **more: Any) -> ObjectStorage:
    return ObjectStorage(object_config(server, prefix, **more), clock=SYSTEM_CLOCK)


def kept(_section: MooncakeStorageSection) -> PoolClient:
    return kept_client()


def file_config(path: Path, capacity: int, **more: Any) -> FileStorageSection:
    return FileStorageSection(path=str(path), capacity=Capacities(capacity), **more)


def skip_without_direct_io(path: Path) -> None:
    problem = Machine().direct_io(Machine().existing(str(path)))
    if problem:
        pytest.skip(f"the file system of the tests' directory has no direct I/O: {problem}")


def memory_config(capacity: int) -> MemoryStorageSection:
    return MemoryStorageSection(capacity=Size(capacity))


@dataclass(frozen=True)
class Backend:
    """How to make one, and what it promises beyond the contract. make: (directory, capacity) -> closed storage."""

    name: str
    make: Callable[[Path, int], Storage]
    sees_lengths: bool = True  # a put knows that what is stored has another length
    tells: bool = True  # of every object that leaves
    keeps_lru: bool = True  # evicts exactly the least recently used, so a test can say which objects are left


def _direct(path: Path, capacity: int) -> Storage:
    skip_without_direct_io(path)
    return FileStorage(file_config(path, capacity, direct_io=True), unit=1)


def _joined(_: Path, capacity: int) -> Storage:
    """As engines that share objects have it."""
    storage = SimStorage(capacity=capacity)
    storage.slots_at_once = None
    return JoinedStorage(storage, SimThreads())  # type: ignore[abstract] # mypy does not see what FrontStorage passes on


class SlowStorage(GatedStorage):
    """A storage whose calls take a while."""

    async def _pass(self) -> None:
        await asyncio.sleep(0.005)


def _memory_above_file(path: Path, capacity: int) -> Storage:
    return stack(MemoryStorage(memory_config(max(1, capacity // 2))), FileStorage(file_config(path, capacity), unit=1))


def _three(path: Path, capacity: int) -> Storage:
    """The last one knows nothing without being asked, as a remote one."""
    slow = SlowStorage(MemoryStorage(memory_config(512 * 1024**2)), "slow", asks=True)  # type: ignore[abstract]
    return stack(
        MemoryStorage(memory_config(max(1, capacity // 4))),
        FileStorage(file_config(path, max(1, capacity // 2)), unit=1),
        slow,
    )


def _memory_above_pool(_: Path, capacity: int) -> Storage:
    pool = pool_storage(mooncake_config(SIM_MASTER), set_up=SimPool(capacity=capacity).set_up)
    return stack(MemoryStorage(memory_config(max(1, capacity // 2))), pool)


def _file_above_object(path: Path, capacity: int) -> Storage:
    return stack(FileStorage(file_config(path, capacity), unit=1), object_storage(object_server(), str(path)))


def _disks(path: Path, capacity: int) -> Storage:
    section = FileStorageSection(path=[str(path / name) for name in "ab"], capacity=Capacities.parse(-(-capacity // 2)))
    return Disks([Disk(disk, scrub_rate=0, clock=SYSTEM_CLOCK, unit=1) for disk in section.disks])


# A new backend is one line here.
BACKENDS = [
    Backend("simulated", lambda _, capacity: SimStorage(capacity=capacity), keeps_lru=False),
    Backend("joined", _joined, keeps_lru=False),
    Backend("memory", lambda _, capacity: MemoryStorage(memory_config(capacity))),
    Backend("file", lambda path, capacity: FileStorage(file_config(path, capacity), unit=1)),
    Backend("file-fsync", lambda path, capacity: FileStorage(file_config(path, capacity, fsync=True), unit=1)),
    Backend("file-direct", _direct),
    Backend("disks", _disks, keeps_lru=False),
    Backend(
        "mooncake-simulated",
        lambda _, capacity: pool_storage(mooncake_config(SIM_MASTER), set_up=SimPool(capacity=capacity).set_up),
        sees_lengths=False,
        tells=False,
        keeps_lru=False,
    ),
]
STACKS = [
    Backend("memory-file", _memory_above_file, keeps_lru=False, sees_lengths=False),
    Backend("memory-file-slow", _three, keeps_lru=False, sees_lengths=False, tells=False),
    Backend("memory-pool", _memory_above_pool, keeps_lru=False, sees_lengths=False, tells=False),
]
BACKENDS += STACKS
if weed() is not None:  # tests/storage/test_object_store.py says so when it is not
    BACKENDS.append(Backend("file-object", _file_above_object, keeps_lru=False, sees_lengths=False, tells=False))
    BACKENDS.append(
        Backend(
            "object",
            lambda path, _capacity: object_storage(object_server(), str(path)),
            sees_lengths=False,
            tells=False,
            keeps_lru=False,
        )
    )
if master_executable() is not None:  # tests/storage/mooncake says so when it is not
    BACKENDS.append(
        Backend(
            "mooncake",
            lambda _path, _capacity: pool_storage(mooncake_config(mooncake_master().address), set_up=kept),
            sees_lengths=False,
            tells=False,
            keeps_lru=False,
        )
    )


class Memory:
    """Page-aligned host memory, as staging is: what backends are given to register."""

    pinned = urgent = False

    def __init__(self, nbytes: int, rank: int = 0, process: int = 0) -> None:
        self.rank = rank
        self.lender: Hashable = (process or id(self), rank)
        self._map = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self.view = memoryview(self._map)

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        self.view.release()
        self._map.close()


@dataclass
class Harness:
    """An open storage and registered memory to move objects through."""

    storage: Storage
    memory: Memory
    _next: int = 0
    _views: list[memoryview] = field(default_factory=list)

    @property
    def levels(self) -> LevelsStorage:
        """The storage, which must have levels."""
        assert isinstance(self.storage, LevelsStorage)
        return self.storage

    def buffer(self, nbytes: int, content: bytes | None = None) -> memoryview:
        """A fresh piece of registered memory, filled with `content` or 0xAA."""
        assert self._next + nbytes <= self.memory.nbytes, "the test needs more memory than MEMORY_BYTES"
        view = self.memory.view[self._next : self._next + nbytes]
        self._next += -(-nbytes // 64) * 64
        self._views.append(view)
        view[:] = content if content is not None else b"\xaa" * nbytes
        return view

    def reuse_memory(self) -> None:
        """Hand out the memory from its start again: the calls so far have returned."""
        self._next = 0

    async def put(self, *objects: tuple[str, bytes]) -> list[Outcome]:
        return await put(self.storage, [Blob(name, self.buffer(len(data), data)) for name, data in objects])

    async def get(self, *wanted: tuple[str, int]) -> list[tuple[Outcome, bytes]]:
        blobs = [Blob(name, self.buffer(nbytes)) for name, nbytes in wanted]
        outcomes = await get(self.storage, blobs)
        return [(outcome, bytes(blob.data)) for outcome, blob in zip(outcomes, blobs, strict=True)]

    def release(self) -> None:
        for view in self._views:
            view.release()
        self.memory.close()


Open = Callable[..., Awaitable[Harness]]
