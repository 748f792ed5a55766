"""Stored objects of every layout, damaged in every way: not one wrong byte is delivered, and each is counted.

An engine writes blocks, somebody damages what lies in storage, the engine reads them back one by one. A
block whose object is damaged on any rank must be a miss; on that rank not a byte may reach the device; and
what is not damaged must come back whole. CORRUPTIONS says how many objects are damaged, over all layouts and
backends (CI: the default); files are damaged as often for each way to load them.
"""

from __future__ import annotations

import asyncio
import os
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog

from tests.storage.harness import skip_without_direct_io
from tests.support.blobs import get, put
from transferd import Client, ReadStorageTask, Status, WriteStorageTask
from transferd.blocks.formats import FOOTER_BYTES
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.config import Config, from_tree
from transferd.daemon.daemon import Daemon
from transferd.storage.base import STORED, Blob, Found, FrontStorage, Storage
from transferd.storage.file import FileStorage
from transferd.storage.memory import MemoryStorage
from transferd.storage.mooncake import MooncakeStorage
from transferd.storage.paths import path_of
from transferd.tiers.pinned import HostRegion
from transferd.workers.context import INLINE_CHECK_BYTES
from transferd.workers.rank import RankWorker

LAYOUTS: dict[str, dict[str, Any]] = {
    "gqa": {"kv_heads": 2, "head_dim": 16},
    "fp8 with scales": {"kv_heads": 2, "head_dim": 16, "dtype": "block_wise_fp8"},
    "mla": {"attention": "mla", "kv_lora_rank": 32, "qk_rope_head_dim": 8},
    "dsa": {"attention": "dsa", "kv_lora_rank": 128, "qk_rope_head_dim": 8, "index_head_dim": 128},
    "mtp": {"kv_heads": 1, "head_dim": 16, "mtp_layers": 1, "mtp_blocks": 40},
}
BACKENDS = ("file", "memory", "mooncake")
CORRUPTIONS = int(os.environ.get("CORRUPTIONS", "900"))
EACH = CORRUPTIONS // (len(LAYOUTS) * len(BACKENDS)) + 1
RANKS = 2
BATCH = 16  # keys written and read between two looks at the counters
SOURCE, TARGET = list(range(BATCH)), list(range(BATCH, 2 * BATCH))

Caches = list[dict[str, list[np.ndarray[Any, Any]]]]


# --- how an object can be damaged -------------------------------------------------------------------


def flip(data: bytes, _: bytes, chance: random.Random) -> bytes:
    """One bit, anywhere."""
    damaged = bytearray(data)
    damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def zero(data: bytes, _: bytes, chance: random.Random) -> bytes:
    """A range of the payload, as a hole in a file reads; at least 8 bytes, or it might have been zero before."""
    start = chance.randrange(len(data) - FOOTER_BYTES - 8)
    stop = chance.randrange(start + 8, len(data) + 1)
    return data[:start] + bytes(stop - start) + data[stop:]


def zero_all(data: bytes, _: bytes, __: random.Random) -> bytes:
    return bytes(len(data))


def duplicate(_: bytes, other: bytes, __: random.Random) -> bytes:
    """Another key's whole object under this name."""
    return other


def mix(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """This object's footer under another one's payload, or the other way round: a torn write."""
    cut = len(data) - FOOTER_BYTES if chance.random() < 0.5 else chance.randrange(8, len(data) - 8)
    return data[:cut] + other[cut:] if chance.random() < 0.5 else other[:cut] + data[cut:]


def truncate(data: bytes, _: bytes, chance: random.Random) -> bytes:
    return data[: chance.choice((0, 1, chance.randrange(len(data)), len(data) - 1))]


def extend(data: bytes, _: bytes, chance: random.Random) -> bytes:
    return data + chance.randbytes(chance.randint(1, 200))


WAYS = (flip, flip, zero, zero_all, duplicate, mix, truncate, extend)  # and `swap`, which takes two objects


# --- where ------------------------------------------------------------------------------------------


class Tamper(ABC):
    """Reads and replaces objects behind a daemon's back. in_place: blocks load objects themselves, if they can."""

    def __init__(self, storage: Storage, *, in_place: bool = False) -> None:
        self.storage = storage
        self.in_place = in_place

    @abstractmethod
    async def read(self, name: str, nbytes: int) -> bytes: ...

    @abstractmethod
    async def replace(self, name: str, data: bytes) -> None: ...

    async def look(self, names: Sequence[str]) -> None:
        """Let the store look at these objects by itself, as it may at any moment."""

    def noticed(self, workers: Sequence[RankWorker]) -> int:
        """Damaged objects that were noticed so far, by whomever: by a load's check, its length, or a look."""
        return int(self.storage.statistics()["corrupt"])


class OnDisk(Tamper):
    """A file is changed in place, as a bad disk or a stray hand does it."""

    def __init__(self, storage: Storage, root: Path, *, in_place: bool) -> None:
        super().__init__(storage, in_place=in_place)
        self._objects = root / "objects"

    async def read(self, name: str, nbytes: int) -> bytes:
        data = (self._objects / path_of(name)).read_bytes()
        assert len(data) == nbytes
        return data

    async def replace(self, name: str, data: bytes) -> None:
        (self._objects / path_of(name)).write_bytes(data)

    async def look(self, names: Sequence[str]) -> None:
        if (looking := self.storage.index.look(names)) is not None:
            await looking


class ThroughTheBackend(Tamper):
    """A pool where objects cannot be changed: the good one is removed, the bad one put under its name."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._region = HostRegion(64 * 1024)

    def register(self) -> None:
        self.storage.register(self._region)

    def unregister(self) -> None:
        self.storage.unregister(self._region)
        self._region.close()

    async def read(self, name: str, nbytes: int) -> bytes:
        view = self._region.view[:nbytes]
        [outcome] = await get(self.storage, [Blob(name, view)])
        assert outcome.found is Found.FOUND
        return bytes(view)

    def noticed(self, workers: Sequence[RankWorker]) -> int:
        """`replace` sets objects aside itself, so these are counted where they are noticed.

        What a pool has damaged is read once more, and fails again.
        """
        each, more = divmod(sum(worker.corrupt for worker in workers), self.storage.tries)
        assert not more
        return each + int(self.storage.statistics()["wrong_length"])

    async def replace(self, name: str, data: bytes) -> None:
        await self.storage.quarantine(name)
        view = self._region.view[: max(1, len(data))]  # no pool keeps an object of no bytes
        view[: len(data)] = data
        assert await put(self.storage, [Blob(name, view)]) == [STORED]


class Shared(FrontStorage):
    """One backend for several daemons, one after the other: opened and closed by the test."""

    def __init__(self, storage: Storage, *, in_place: bool) -> None:
        super().__init__(storage)
        if not in_place:
            self.slots_at_once = None

    async def open(self) -> None:
        """It is."""

    async def close(self) -> None:
        """Later."""


# --- the campaign -----------------------------------------------------------------------------------


@dataclass
class Campaign:
    """One daemon of one layout over one backend, an engine, and a count of what was done to its objects.

    in_threads: objects are checked while a thread copies them to their blocks, as large ones are, and those that are
    loaded in place.
    """

    daemon: Daemon
    client: Client
    caches: Caches
    tamper: Tamper
    chance: random.Random
    in_threads: bool = False
    done: Counter[str] = field(default_factory=Counter)
    rounds: int = 0

    async def run(self, corruptions: int) -> None:
        while sum(self.done.values()) < corruptions:
            await self.round()

    async def round(self) -> None:
        """Write a batch, damage most of it, read all of it back."""
        self.rounds += 1
        keys = [f"round {self.rounds} key {i}" for i in range(BATCH)]
        self._fill(SOURCE, self.rounds)
        write = WriteStorageTask(task_id=f"w{self.rounds}", keys=keys, gpu_block_ids=SOURCE)
        assert (await self.client.submit(write)).status is Status.OK
        before = self._noticed()
        bad = await self._damage(keys)
        before = before if isinstance(self.tamper, OnDisk) else self._noticed()  # whose `replace` counts
        await self.tamper.look([self._name(*one) for one in sorted(bad)][::3])
        for target in TARGET:
            self._junk(target)
        results = await asyncio.gather(*(self._read(key, block) for key, block in zip(keys, TARGET, strict=True)))
        for i, (key, result) in enumerate(zip(keys, results, strict=True)):
            ranks = {rank for name, rank in bad if name == key}
            if ranks:
                assert result.status is Status.MISS, f"{key} is damaged on {ranks}: {result}"
                assert result.block_ids == []
                untouched = all(self._is_junk(rank, TARGET[i]) for rank in ranks)
                assert untouched or self.in_threads, f"bytes of a damaged {key} were delivered"
            else:
                assert result.status is Status.OK, f"{key}: {result}"
                assert self._equal(SOURCE[i], TARGET[i]), f"wrong bytes of {key}"
        await self._settled(before + len(bad))
        assert await self.client.match([key for key, _ in bad][:1]) == 0

    async def _damage(self, keys: Sequence[str]) -> set[tuple[str, int]]:
        """Returns the objects that were damaged: (key, rank)."""
        bad: set[tuple[str, int]] = set()
        victims = self.chance.sample(list(enumerate(keys)), len(keys) * 3 // 4)
        for position, key in victims:
            rank = self.chance.randrange(RANKS)
            other = keys[(position + 1) % len(keys)]
            if (key, rank) in bad:
                continue
            if self.chance.random() < 0.15 and (other, rank) not in bad:
                await self._swap(key, other, rank)
                bad |= {(key, rank), (other, rank)}
                self.done["swap"] += 2
                continue
            way = self.chance.choice(WAYS)
            data, twin = await self._object(key, rank), await self._twin(key, other, rank, bad)
            damaged = way(data, twin, self.chance)
            if damaged == data:
                continue
            await self.tamper.replace(self._name(key, rank), damaged)
            bad.add((key, rank))
            self.done[way.__name__] += 1
        return bad

    async def _twin(self, key: str, other: str, rank: int, bad: set[tuple[str, int]]) -> bytes:
        """An object that looks right and is not this one: another key's, or the same key's on another rank."""
        neighbour = (rank + 1) % RANKS
        if (key, neighbour) not in bad and self.chance.random() < 0.5:
            return await self._object(key, neighbour)
        return await self._object(other, rank) if (other, rank) not in bad else bytes(self._size)

    async def _swap(self, key: str, other: str, rank: int) -> None:
        one, two = await self._object(key, rank), await self._object(other, rank)
        await self.tamper.replace(self._name(key, rank), two)
        await self.tamper.replace(self._name(other, rank), one)

    async def _object(self, key: str, rank: int) -> bytes:
        return await self.tamper.read(self._name(key, rank), self._size)

    @property
    def _size(self) -> int:
        return self.daemon.default.objects.slot_bytes

    def _name(self, key: str, rank: int) -> str:
        objects = self.daemon.default.objects
        return objects.names(self.daemon.default.dispatcher.generation, objects.ids([key]), rank)[0]

    async def _read(self, key: str, block: int) -> Any:
        return await self.client.submit(
            ReadStorageTask(task_id=f"r{self.rounds}-{block}", keys=[key], gpu_block_ids=[block])
        )

    def _noticed(self) -> int:
        return self.tamper.noticed(self.daemon.default.coordinator.workers)

    async def _settled(self, noticed: int) -> None:
        """Bad objects are set aside in the background, after the answer."""
        for worker in self.daemon.default.coordinator.workers:
            await worker.context.background.settled()
        assert self._noticed() == noticed, "each is counted, and nothing else is"

    # --- device blocks ------------------------------------------------------------------------------

    def _blocks(self, rank: int, block: int) -> list[np.ndarray[Any, Any]]:
        return [array[block].reshape(-1).view(np.uint8) for layers in self.caches[rank].values() for array in layers]

    def _fill(self, blocks: Sequence[int], seed: int) -> None:
        values = np.random.default_rng(seed)
        for rank in range(RANKS):
            for block in blocks:
                for raw in self._blocks(rank, block):
                    raw[:] = values.integers(0, 256, raw.shape, dtype=np.uint8)

    def _junk(self, block: int) -> None:
        for rank in range(RANKS):
            for raw in self._blocks(rank, block):
                raw[:] = 0xEE

    def _is_junk(self, rank: int, block: int) -> bool:
        return all((raw == 0xEE).all() for raw in self._blocks(rank, block))

    def _equal(self, one: int, other: int) -> bool:
        return all(
            np.array_equal(left, right)
            for rank in range(RANKS)
            for left, right in zip(self._blocks(rank, one), self._blocks(rank, other), strict=True)
        )


def config_of(layout: str, path: Path) -> Config:
    cache = {"ranks": RANKS, "layers": 2, "block_size": 4, "device_blocks": 40, "host_blocks": 0}
    return from_tree(
        {
            "server": {"endpoint": f"ipc://{path}/socket"},
            "cache": cache | LAYOUTS[layout],
            "host": {"staging": "512KiB"},
            "storage": {"file": {"path": str(path / "blocks"), "capacity": "256MiB"}},
            "metrics": {"listen": ""},
        }
    )


@asynccontextmanager
async def campaign(layout: str, tamper: Tamper, path: Path, *, in_threads: bool) -> AsyncIterator[Campaign]:
    path.mkdir(parents=True, exist_ok=True)
    inline = 0 if in_threads else INLINE_CHECK_BYTES
    shared = Shared(tamper.storage, in_place=tamper.in_place)  # type: ignore[abstract] # FrontStorage has every method
    daemon = Daemon(config_of(layout, path), storage=shared, inline_check_bytes=inline)
    await daemon.open()
    try:
        async with Client(daemon.config.server.endpoints[0]) as client:
            caches = [await client.attach(rank) for rank in range(RANKS)]
            chance = random.Random(f"{layout} {tamper.storage.backend}")
            yield Campaign(daemon, client, caches, tamper, chance, in_threads or tamper.in_place)
            caches.clear()
    finally:
        await daemon.stop(lambda: 10.0)


async def every_layout(tamper: Tamper, path: Path) -> Counter[str]:
    done: Counter[str] = Counter()
    for number, layout in enumerate(LAYOUTS):
        async with campaign(layout, tamper, path / str(number), in_threads=number % 2 == 0) as one:
            await one.run(EACH)
            done += one.done
    assert set(done) == {way.__name__ for way in WAYS} | {"swap"}
    return done


@pytest.fixture(autouse=True)
def quiet() -> Any:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    yield
    structlog.reset_defaults()


def told(backend: str, done: Counter[str], capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        print(f"\n{backend}: {sum(done.values())} objects damaged, none delivered: {dict(done)}")


@pytest.mark.parametrize("how", ["through staging", "in place", "past the page cache"])
@pytest.mark.timeout(0 if CORRUPTIONS > 1000 else 300)
def test_damaged_files_are_never_delivered(tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str) -> None:
    section, direct = config_of("gqa", tmp_path).storage.file, how == "past the page cache"
    if direct:
        skip_without_direct_io(tmp_path)

    async def main() -> Counter[str]:
        storage = FileStorage(msgspec.structs.replace(section, direct_io=direct))
        await storage.open()
        try:
            tamper = OnDisk(storage, tmp_path / "blocks", in_place=how != "through staging")
            return await every_layout(tamper, tmp_path)
        finally:
            await storage.close()

    told(f"file, {how}", asyncio.run(main()), capfd)


@pytest.mark.timeout(0 if CORRUPTIONS > 1000 else 300)
def test_damaged_objects_in_memory_are_never_delivered(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told(
        "memory",
        asyncio.run(through_the_backend(MemoryStorage(config_of("gqa", tmp_path).storage.memory), tmp_path)),
        capfd,
    )


@pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")
@pytest.mark.timeout(0 if CORRUPTIONS > 1000 else 300)
def test_damaged_objects_in_a_mooncake_pool_are_never_delivered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    master = Master(tmp_path / "master.log")
    master.start()
    try:
        section = {"master_server_addr": master.address, "global_segment_size": 256 * 1024**2}
        whole = from_tree({"cache": {}, "storage": {"mooncake": section | {"local_buffer_size": "16MiB"}}})
        storage = MooncakeStorage.from_config(whole)
        told("mooncake", asyncio.run(through_the_backend(storage, tmp_path)), capfd)
    finally:
        master.stop()


async def through_the_backend(storage: Storage, path: Path) -> Counter[str]:
    await storage.open()
    tamper = ThroughTheBackend(storage)
    tamper.register()
    try:
        return await every_layout(tamper, path)
    finally:
        tamper.unregister()
        await storage.close()
